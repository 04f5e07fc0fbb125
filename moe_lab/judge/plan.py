"""Which calls the judge makes. Sizes are small, so that TileLang's CPU kernels finish in seconds.

A case only permutes its group sizes, and cases of one H and I have one E: what is specialised on them compiles once.
"""

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from moe_lab.judge.process import Limits
from moe_lab.problem.contract import BLOCK_TOKEN, CASES, JUDGE_PROFILE, VARIANTS, Case, Variant
from moe_lab.problem.inputs import Inputs, TokenPoison, Values, draw_inputs, group_sizes, make_inputs

#: What a call changes compared with the call before it, at the same addresses.
Change = Literal[
    "everything", "weights", "gate_w", "up_w", "down_w", "one token", "route weights", "routing", "nothing"
]
#: What the valid rows of ``out`` hold when the kernel is called; its padding rows are zero, as the judge leaves them.
OutFill = Literal["zeros", "nan", "noise", "previous"]
#: What memory from torch.empty holds.
Garbage = Literal["untouched", "zeros", "nan", "noise", "large"]

WEIGHTS = ("gate_w", "up_w", "down_w")  # of an expert
_ROUNDS = 25  # timed calls of a contest case
_GPU_FIRST_CALL_S = 180.0  # a file may hold several kernels, and a GPU's compiler takes 5 to 20 s for each
#: Group sizes of the calls that look for state, and of the variants: one expert empty, one an exact multiple of 128,
#: which is what the padding rules disagree on, and partly filled blocks.
_STATE_SIZES = (128, 0, 129, 5, 20)
_OTHER_SHAPES = ((192, 320), (136, 200))  # H and I that the contest does not use, to say how far a file reaches


@dataclass(frozen=True)
class Call:
    """One call of ``run_kernel``."""

    sizes: tuple[int, ...]  # rows of each expert
    seed: int  # of what is redrawn
    change: Change = "everything"
    values: Values = "normal"  # of what is redrawn
    out_fill: OutFill = "zeros"
    token_poison: TokenPoison = "nan"  # in the padding rows of the tokens
    slot: int = 0  # which of the two sets of addresses


@dataclass(frozen=True)
class Group:
    """Calls that share their shapes, in the order they are made; the first changes everything.

    A sparse group has zeros, in memory that is never touched, as weights of experts without rows, which makes the
    contest's full H, I and E affordable on a CPU. What is drawn on the device are tokens and weights: the contest's
    are gigabytes.
    """

    name: str
    hidden: int
    intermediate: int
    calls: tuple[Call, ...]
    garbage: Garbage = "noise"
    variant: Variant = JUDGE_PROFILE
    sparse: bool = False
    on_device: bool = False
    timed_rounds: int = 0  # timed calls beside the baseline once every call was right

    @property
    def case(self) -> Case:
        """Sizes of the first call."""
        sizes = self.calls[0].sizes
        return Case(self.name, len(sizes), self.hidden, self.intermediate, sum(sizes))

    @property
    def mapped_bytes(self) -> int:
        """Address space of both sets of arguments, an upper bound."""
        return self._bytes(len(self.calls[0].sizes))

    @property
    def size_bytes(self) -> int:
        """Memory of both sets of arguments, an upper bound."""
        return self._bytes(sum(size > 0 for size in self.calls[0].sizes)) if self.sparse else self.mapped_bytes

    def _bytes(self, experts: int) -> int:
        # Rows: every group rounded up, one more block for the other padding rule, one more on each side as a guard.
        blocks = 2 + sum(-(-size // BLOCK_TOKEN) + 1 for size in self.calls[0].sizes)
        elements = 3 * experts * self.hidden * self.intermediate + 2 * blocks * BLOCK_TOKEN * self.hidden
        return len({call.slot for call in self.calls}) * (2 * elements + (1 << 20))


@dataclass(frozen=True)
class Plan:
    """Everything one run does."""

    groups: tuple[Group, ...]  # structural cases of the verdict
    limits: Limits = field(default_factory=Limits)
    sandboxed: bool = True  # static rules and run-time sandbox apply; only tests of the other defences say no
    stop_at_first: bool = False  # end at the first wrong call
    variants: bool = True  # run the open questions too
    fit: bool = True  # lower the kernels for the C500's limits


def default_plan(seed: int, device: str) -> Plan:
    """The plan of a normal run; the seed decides values, order and number of calls.

    On "cpu" the contest's H, I and E are called with one block of rows, on a GPU the whole contest cases.
    """
    rng, on_cpu = random.Random(seed), device == "cpu"
    # Nothing races on a CPU; on a GPU a race may show in one call of many.
    state = state_group(rng, repeats=3 if on_cpu else 20)
    structural = (*structural_groups(rng), contest_rows_group(rng)) if on_cpu else structural_groups(rng)
    groups = (*structural, state, *contest_groups(rng, full=not on_cpu))
    return Plan(groups, Limits() if on_cpu else Limits(first_call_s=_GPU_FIRST_CALL_S))


def structural_groups(rng: random.Random) -> tuple[Group, ...]:
    """The cases that differ in shape, in random order after the first."""
    # Eleven blocks of one expert and more, up to all rows of the contest's case 1; its average is two.
    most = rng.randint(1300, CASES[1].num_tokens)
    edges: dict[tuple[int, ...], Values] = {
        (0, 129, 1, 40, 128, 127): "normal", (127, 40, 129, 128, 1, 0): "mixed", (1, 128, 0, 127, 40, 129): "large",
    }  # fmt: skip
    first, *rest = (
        _structural(rng, "sizes 0, 1, 127, 128, 129", 512, 256, "nan", edges),
        _structural(
            rng, "exact multiples of 128", 256, 512, "noise", {(128, 256, 128): "normal", (256, 128, 128): "tiny"}
        ),
        _structural(
            rng, "one expert takes all", 256, 256, "large",
            {(0, 0, most, 0, 0): "mixed", (most, 0, 0, 0, 0): "normal", (0, 0, 0, 0, most): "tiny"},
        ),
        _structural(
            rng, "one token in all", 256, 256, "nan",
            {(0, 0, 1, 0, 0): "normal", (0, 0, 0, 0, 1): "tiny", (1, 0, 0, 0, 0): "large"},
        ),
    )  # fmt: skip
    rng.shuffle(rest)
    return (first, *rest)


def contest_rows_group(rng: random.Random) -> Group:
    """All rows and experts of the contest's largest case in narrow matrices, which a CPU can afford.

    More blocks than a C500 has processors, so that a file that counts on fewer blocks or experts shows.
    """
    case = CASES[max(CASES)]
    sizes = group_sizes("multinomial", case.num_experts, case.num_tokens, rng.getrandbits(31))
    return _structural(rng, "142 rows per expert", 256, 256, "noise", {sizes: "normal"})


def _structural(
    rng: random.Random, name: str, hidden: int, intermediate: int, garbage: Garbage,
    values: dict[tuple[int, ...], Values],
) -> Group:  # fmt: skip
    """One call for each group sizes; the last of several finds a contest's zeros, so that looking for poison shows."""
    fills: tuple[OutFill, ...] = ("zeros", "noise", "nan")
    calls = []
    for index, (sizes, kind) in enumerate(values.items()):
        poison: TokenPoison = "zeros" if 0 < index == len(values) - 1 else "nan"
        calls.append(Call(sizes, rng.getrandbits(31), "everything", kind, fills[index], poison, index % 2))
    return Group(name, hidden, intermediate, tuple(calls), garbage)


def state_group(rng: random.Random, hidden: int = 256, intermediate: int = 256, repeats: int = 3) -> Group:
    """Many calls with one set of shapes: what a file remembers between calls shows here.

    Each kind of change comes at least once, most arguments staying as they were, so that a cache that looks at only
    part of its input is caught; the same input comes ``repeats`` times at least. The number of calls exceeds the
    contest's warm-up and is not known beforehand.
    """
    changes: list[Change] = list(get_args(Change))
    order = changes + changes[-1:] * (repeats - 1)
    rng.shuffle(order)
    order += rng.choices(changes, k=rng.randint(6, 30))
    # Only the first call and these draw new padding rows, three of them at least: each kind comes.
    kinds: list[TokenPoison] = ["nan", "large", "zeros"]
    rng.shuffle(kinds)
    poisons = itertools.cycle(kinds)
    calls = [Call(_STATE_SIZES, rng.getrandbits(31), token_poison=next(poisons))]
    for change in order:
        last = calls[-1]
        sizes, poison = list(last.sizes), last.token_poison
        if change in ("routing", "everything"):
            poison = next(poisons)
            while tuple(sizes) == last.sizes:
                rng.shuffle(sizes)
        # Other addresses now and then, but mostly the old ones with new bytes.
        slot = rng.choice([0, 0, 1]) if change == "everything" else last.slot
        seed, fill = rng.getrandbits(31), rng.choice(get_args(OutFill))
        calls.append(Call(tuple(sizes), seed, change, out_fill=fill, token_poison=poison, slot=slot))
    return Group("many calls, one shape", hidden, intermediate, tuple(calls))


def contest_groups(rng: random.Random, *, full: bool = False) -> tuple[Group, ...]:
    """The contest's three cases, so that a kernel chosen by shape is judged in the branch that counts.

    ``full`` is all N rows, drawn on the device; otherwise one block of rows, for a CPU.
    """
    groups = []
    # What torch.empty holds differs from case to case, as it may in a contest.
    garbage: tuple[Garbage, ...] = ("zeros", "noise", "untouched")
    for case, held in zip(CASES.values(), garbage, strict=True):
        if full:
            first = group_sizes("multinomial", case.num_experts, case.num_tokens, rng.getrandbits(31))
            second = tuple(rng.sample(first, len(first)))
        else:
            expert, rows = rng.randrange(1, case.num_experts), rng.randint(2, 40)
            first = second = tuple(rows if index == expert else 0 for index in range(case.num_experts))
        seeds = rng.getrandbits(31), rng.getrandbits(31)
        calls = (Call(first, seeds[0], out_fill="noise"), Call(second, seeds[1], token_poison="zeros"))
        name, sizes = case.name if full else f"{case.name}, one block", (case.hidden, case.intermediate)
        rounds = _ROUNDS if full else 0
        groups.append(Group(name, *sizes, calls, held, sparse=not full, on_device=full, timed_rounds=rounds))
    return tuple(groups)


def variant_groups(seed: int) -> tuple[Group, ...]:
    """One group for each open question of the contract and each shape it does not use, named for it."""
    rng = random.Random(seed)

    def group(name: str, hidden: int, intermediate: int, garbage: Garbage, variant: Variant = JUDGE_PROFILE) -> Group:
        return Group(name, hidden, intermediate, (Call(_STATE_SIZES, rng.getrandbits(31)),), garbage, variant)

    open_questions = [
        group(name, 256, 256, "nan" if variant.workspace_fill == "garbage" else "untouched", variant)
        for name, variant in VARIANTS.items()
    ]
    return (*open_questions, *(group(f"hidden {h} by intermediate {i}", h, i, "noise") for h, i in _OTHER_SHAPES))


def call_inputs(group: Group, call: Call, before: Inputs | None, device: str = "cpu") -> Inputs:
    """The ten tensors of a call, from those of the call before if there is one.

    A change of one argument swaps two parts of it and leaves the rest: a cache that looks at a few elements, at a sum
    or at the extremes does not see it. The device is that of a group drawn there; others stay on the CPU.
    """
    if before is not None and call.change == "nothing":
        return before
    if before is None or call.change in ("everything", "weights", "routing"):
        fresh = _fresh_inputs(group, call, device)
        if before is None or call.change == "everything":
            return fresh
        if call.change == "weights":
            return replace(before, **{name: getattr(fresh, name) for name in WEIGHTS})
        # The same raw rows in the same order, cut into groups elsewhere.
        fresh.stacked_expert_tokens[fresh.valid_rows] = before.stacked_expert_tokens[before.valid_rows]
        return replace(fresh, **{name: getattr(before, name) for name in (*WEIGHTS, "routed_expert_weights")})
    rows = before.layout.num_rows
    name, part = {
        "one token": ("stacked_expert_tokens", int(before.valid_rows[call.seed % rows])),
        "route weights": ("routed_expert_weights", slice(rows)),
    }.get(call.change, (call.change, max(range(len(call.sizes)), key=call.sizes.__getitem__)))
    changed = getattr(before, name).clone()
    view = changed[part]
    if view.dim() == 1:
        first, second = int(view.argmax()), int(view.argmin())
    else:
        first, second = random.Random(call.seed).sample(range(len(view)), 2)
    view[[first, second]] = view[[second, first]]
    return replace(before, **{name: changed})


def _fresh_inputs(group: Group, call: Call, device: str) -> Inputs:
    case = replace(group.case, num_tokens=sum(call.sizes))
    drawn: dict[str, Any] = {"values": call.values, "token_poison": call.token_poison, "seed": call.seed}
    if group.sparse or group.on_device:
        # Nothing of a group of this size is a variant: out is filled for each call.
        place = device if group.on_device else "cpu"
        return draw_inputs(case, call.sizes, device=place, idle_weights=not group.sparse, **drawn)
    return make_inputs(case, call.sizes, variant=group.variant, **drawn)


def fill_out(inputs: Inputs, call: Call, previous: torch.Tensor | None) -> torch.Tensor:
    """What ``out`` holds when the call starts, (P, H) fp16; ``previous`` is the answer of the call before, (N, H).

    A variant other than the judge profile says itself what it is.
    """
    if inputs.variant.out_fill != "zeros":
        return inputs.out
    out, rows = torch.zeros_like(inputs.out), inputs.valid_rows
    if call.out_fill == "nan":
        out[rows] = float("nan")
    elif call.out_fill == "previous" and previous is not None:
        out[rows] = previous.to(out.dtype)
    elif call.out_fill != "zeros":
        generator = torch.Generator(device=out.device).manual_seed(call.seed)
        out[rows] = torch.randn(len(rows), out.shape[1], generator=generator, device=out.device).half()
    return out
