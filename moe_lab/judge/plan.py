"""Which calls the judge makes: structural cases, values, poisons, and what changes from one call to the next.

Sizes are small, so that TileLang's CPU kernels finish in seconds, and a case only permutes its group sizes, so that a
kernel specialised on shapes is compiled once for all its calls. On a GPU, whose compilers are slow, cases of one H and
I have one E, so that a kernel specialised on the weights alone is compiled once for all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from moe_lab.judge.process import Limits
from moe_lab.problem.contract import BLOCK_TOKEN, CASES, JUDGE_PROFILE, Case, Variant
from moe_lab.problem.inputs import Inputs, TokenPoison, Values, draw_inputs, group_sizes, make_inputs

#: What a call changes compared with the call before it, at the same addresses.
Change = Literal[
    "everything", "weights", "gate_w", "up_w", "down_w", "one token", "route weights", "routing", "nothing"
]
#: What the valid rows of ``out`` hold when the kernel is called; its padding rows are zero, as the judge leaves them.
OutFill = Literal["zeros", "nan", "noise", "previous"]
#: What memory from torch.empty holds.
Garbage = Literal["untouched", "zeros", "nan", "noise", "large"]


#: Timed calls of a contest case.
_ROUNDS = 25
#: A file may hold several kernels, and a GPU's compiler takes 5 to 20 s for each.
_GPU_FIRST_CALL_S = 180.0
#: Group sizes of the calls that look for state, and of the variants: one expert empty, one an exact multiple of 128,
#: which is what the padding rules disagree on, and partly filled blocks.
STATE_SIZES = (128, 0, 129, 5, 20)


@dataclass(frozen=True)
class Call:
    """One call of ``run_kernel``.

    Attributes:
        sizes: rows of each expert.
        change: what differs from the call before.
        values: kind of values of what is redrawn.
        out_fill: see :data:`OutFill`.
        token_poison: padding rows of the tokens.
        slot: which of the two sets of addresses.
        seed: of what is redrawn.
    """

    sizes: tuple[int, ...]
    seed: int
    change: Change = "everything"
    values: Values = "normal"
    out_fill: OutFill = "zeros"
    token_poison: TokenPoison = "nan"
    slot: int = 0


@dataclass(frozen=True)
class Group:
    """Calls that share their shapes, in the order they are made.

    Attributes:
        name: for the report.
        hidden, intermediate: H, I.
        calls: at least one; the first changes everything.
        garbage: see :data:`Garbage`.
        variant: reading of the contract.
        sparse: weights of experts without rows are zeros in memory that is never touched, which makes the contest's
            full H, I and E affordable on a CPU.
        on_device: tokens and weights are drawn on the device; the contest's are gigabytes.
        timed_rounds: timed calls beside the baseline once every call was right; 0 for none.
    """

    name: str
    hidden: int
    intermediate: int
    calls: tuple[Call, ...]
    garbage: Garbage = "noise"
    variant: Variant = JUDGE_PROFILE
    sparse: bool = False
    on_device: bool = False
    timed_rounds: int = 0

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
        used = sum(size > 0 for size in self.calls[0].sizes)
        return self._bytes(used if self.sparse else len(self.calls[0].sizes))

    def _bytes(self, experts: int) -> int:
        # Rows: every group rounded up, one more block for the other padding rule, one more on each side as a guard.
        sizes = self.calls[0].sizes
        rows = sum(-(-size // BLOCK_TOKEN) + 1 for size in sizes) * BLOCK_TOKEN + 2 * BLOCK_TOKEN
        slots = len({call.slot for call in self.calls})
        return slots * (2 * (3 * experts * self.hidden * self.intermediate + 2 * rows * self.hidden) + (1 << 20))


@dataclass(frozen=True)
class Plan:
    """Everything one run does.

    Attributes:
        groups: structural cases of the verdict.
        limits: of the worker.
        sandboxed: whether the static rules and the run-time sandbox apply; only tests of the other defences say no.
        stop_at_first: end at the first wrong call.
        variants: whether the open questions are run too.
        fit: whether the kernels are lowered for the C500's limits.
    """

    groups: tuple[Group, ...]
    limits: Limits = field(default_factory=Limits)
    sandboxed: bool = True
    stop_at_first: bool = False
    variants: bool = True
    fit: bool = True


def default_plan(seed: int, device: str) -> Plan:
    """The plan of a normal run.

    Args:
        seed: decides values, order and number of calls.
        device: "cpu" calls the contest's H, I and E with one block of rows; a GPU calls the whole contest cases.
    """
    rng = random.Random(seed)
    on_cpu = device == "cpu"
    # Nothing races on a CPU; on a GPU a race may show in one call of many.
    state = state_group(rng, repeats=3 if on_cpu else 20)
    structural = (*structural_groups(rng), contest_rows_group(rng)) if on_cpu else structural_groups(rng)
    return Plan(
        groups=(*structural, state, *contest_groups(rng, full=not on_cpu)),
        limits=Limits() if on_cpu else Limits(first_call_s=_GPU_FIRST_CALL_S),
    )


def structural_groups(rng: random.Random) -> tuple[Group, ...]:
    """The cases that differ in shape, in random order after the first."""
    most = rng.randint(1300, CASES[1].num_tokens)
    groups = [
        _group(
            rng, "sizes 0, 1, 127, 128, 129", 512, 256,
            [(0, 129, 1, 40, 128, 127), (127, 40, 129, 128, 1, 0), (1, 128, 0, 127, 40, 129)],
            values=["normal", "mixed", "large"], garbage="nan",
        ),
        _group(
            rng, "exact multiples of 128", 256, 512, [(128, 256, 128), (256, 128, 128)],
            values=["normal", "tiny"], garbage="noise",
        ),
        # Eleven blocks of one expert and more, up to all rows of the contest's case 1; its average is two.
        _group(
            rng, "one expert takes all", 256, 256, [(0, 0, most, 0, 0), (most, 0, 0, 0, 0), (0, 0, 0, 0, most)],
            values=["mixed", "normal", "tiny"], garbage="large",
        ),
        _group(
            rng, "one token in all", 256, 256, [(0, 0, 1, 0, 0), (0, 0, 0, 0, 1), (1, 0, 0, 0, 0)],
            values=["normal", "tiny", "large"], garbage="nan",
        ),
    ]  # fmt: skip
    first, rest = groups[0], groups[1:]
    rng.shuffle(rest)
    return (first, *rest)


def contest_rows_group(rng: random.Random) -> Group:
    """All rows and experts of the contest's largest case in narrow matrices, which a CPU can afford.

    More blocks than a C500 has processors, so that a file that counts on fewer blocks or experts shows.
    """
    case = CASES[max(CASES)]
    sizes = group_sizes("multinomial", case.num_experts, case.num_tokens, rng.getrandbits(31))
    return _group(rng, "142 rows an expert", 256, 256, [sizes], values=["normal"], garbage="noise")


def state_group(rng: random.Random, hidden: int = 256, intermediate: int = 256, repeats: int = 3) -> Group:
    """Many calls with one set of shapes: what a file remembers between calls shows here.

    Each kind of change comes at least once, most arguments staying as they were, so that a cache that looks at only
    part of its input is caught (:func:`call_inputs`); the same input comes ``repeats`` times at least. The number of
    calls exceeds the contest's warm-up and is not known beforehand.
    """
    changes: list[Change] = [
        "everything", "weights", "gate_w", "up_w", "down_w", "one token", "route weights", "routing", "nothing",
    ]  # fmt: skip
    order = changes + changes[-1:] * (repeats - 1)
    rng.shuffle(order)
    order += rng.choices(changes, k=rng.randint(6, 30))
    fills: list[OutFill] = ["zeros", "nan", "noise", "previous"]
    # Only these calls draw new padding rows, three of them at least: each kind comes.
    kinds: list[TokenPoison] = ["nan", "large", "zeros"]
    rng.shuffle(kinds)
    poisons = itertools.cycle(kinds)
    calls = [Call(STATE_SIZES, rng.getrandbits(31), token_poison=next(poisons))]
    for change in order:
        sizes = list(calls[-1].sizes)
        if change in ("routing", "everything"):
            while tuple(sizes) == calls[-1].sizes:
                rng.shuffle(sizes)
        # Other addresses now and then, but mostly the old ones with new bytes.
        slot = rng.choice([0, 0, 1]) if change == "everything" else calls[-1].slot
        calls.append(
            Call(
                tuple(sizes),
                rng.getrandbits(31),
                change,
                out_fill=rng.choice(fills),
                token_poison=next(poisons) if change in ("routing", "everything") else calls[-1].token_poison,
                slot=slot,
            )
        )
    return Group("many calls, one shape", hidden, intermediate, tuple(calls), garbage="noise")


def contest_groups(rng: random.Random, *, full: bool = False) -> tuple[Group, ...]:
    """The contest's three cases, so that a kernel chosen by shape is judged in the branch that counts.

    Args:
        rng: draws sizes and seeds.
        full: all N rows, drawn on the device; otherwise one block of rows, for a CPU.
    """
    groups = []
    # What torch.empty holds differs from case to case, as it may in a contest.
    garbage: tuple[Garbage, ...] = ("zeros", "noise", "untouched")
    for number, case in enumerate(CASES.values()):
        if full:
            sizes = [group_sizes("multinomial", case.num_experts, case.num_tokens, rng.getrandbits(31))]
            sizes.append(tuple(rng.sample(sizes[0], len(sizes[0]))))
        else:
            expert, rows = rng.randrange(1, case.num_experts), rng.randint(2, 40)
            sizes = [tuple(rows if index == expert else 0 for index in range(case.num_experts))] * 2
        first, second = sizes
        calls = (
            Call(first, rng.getrandbits(31), out_fill="noise"),
            Call(second, rng.getrandbits(31), out_fill="zeros", token_poison="zeros"),
        )
        name = case.name if full else f"{case.name}, one block"
        groups.append(
            Group(
                name,
                case.hidden,
                case.intermediate,
                calls,
                garbage=garbage[number],
                sparse=not full,
                on_device=full,
                timed_rounds=_ROUNDS if full else 0,
            )
        )
    return tuple(groups)


def call_inputs(group: Group, call: Call, before: Inputs | None, device: str = "cpu") -> Inputs:
    """The ten tensors of a call.

    A change of one argument swaps two parts of it and leaves the rest: a cache that looks at a few elements, at a sum
    or at the extremes does not see it.

    Args:
        group: shapes and variant.
        call: what changes.
        before: inputs of the call before; None for the first.
        device: of the tensors of a group that is drawn on the device; others stay on the CPU.
    """
    if before is not None and call.change == "nothing":
        return before
    if before is not None and call.change in ("gate_w", "up_w", "down_w"):
        # Two rows of one expert, one that has tokens.
        expert = max(range(len(call.sizes)), key=lambda index: call.sizes[index])
        weights = getattr(before, call.change).clone()
        first, second = random.Random(call.seed).sample(range(weights.shape[1]), 2)
        weights[expert, [first, second]] = weights[expert, [second, first]]
        return replace(before, **{call.change: weights})
    if before is not None and call.change == "route weights":
        return replace(before, routed_expert_weights=_extremes_swapped(before.routed_expert_weights))
    if before is not None and call.change == "one token":
        tokens = before.stacked_expert_tokens.clone()
        row = before.valid_rows[call.seed % before.layout.num_rows]
        tokens[row] = _extremes_swapped(tokens[row])
        return replace(before, stacked_expert_tokens=tokens)
    fresh = _fresh_inputs(group, call, device if group.on_device else "cpu")
    if before is None or call.change == "everything":
        return fresh
    if call.change == "weights":
        return replace(before, gate_w=fresh.gate_w, up_w=fresh.up_w, down_w=fresh.down_w)
    # Routing: the same raw rows in the same order, cut into groups elsewhere.
    tokens = fresh.stacked_expert_tokens.clone()
    tokens[fresh.valid_rows] = before.stacked_expert_tokens[before.valid_rows]
    return replace(
        fresh, stacked_expert_tokens=tokens, gate_w=before.gate_w, up_w=before.up_w, down_w=before.down_w,
        routed_expert_weights=before.routed_expert_weights,
    )  # fmt: skip


def _extremes_swapped(values: torch.Tensor) -> torch.Tensor:
    """A copy in which the largest and the smallest number have changed places."""
    swapped = values.clone()
    most, least = values.argmax(), values.argmin()
    swapped[most], swapped[least] = values[least], values[most]
    return swapped


def _fresh_inputs(group: Group, call: Call, device: str) -> Inputs:
    case = replace(group.case, num_tokens=sum(call.sizes))
    if not (group.sparse or group.on_device):
        return make_inputs(
            case, call.sizes, variant=group.variant, values=call.values, token_poison=call.token_poison, seed=call.seed
        )
    # Nothing of a group of this size is a variant: out is filled for each call.
    return draw_inputs(
        case, call.sizes, values=call.values, token_poison=call.token_poison, seed=call.seed, device=device,
        idle_weights=not group.sparse,
    )  # fmt: skip


def fill_out(inputs: Inputs, call: Call, previous: torch.Tensor | None) -> torch.Tensor:
    """What ``out`` holds when the call starts, (P, H) fp16.

    Args:
        inputs: of the call; a variant other than the judge profile says itself what ``out`` holds.
        call: the fill of the valid rows.
        previous: answer of the call before, if there was one.
    """
    if inputs.variant.out_fill != "zeros":
        return inputs.out
    out = torch.zeros_like(inputs.out)
    rows = inputs.valid_rows
    generator = torch.Generator(device=out.device).manual_seed(call.seed)
    if call.out_fill == "nan":
        out[rows] = float("nan")
    elif call.out_fill == "noise" or (call.out_fill == "previous" and previous is None):
        out[rows] = torch.randn(len(rows), out.shape[1], generator=generator, device=out.device).half()
    elif call.out_fill == "previous" and previous is not None:
        out[rows] = previous.to(out.dtype)
    return out


def _group(
    rng: random.Random, name: str, hidden: int, intermediate: int, sizes: Sequence[tuple[int, ...]],
    *, values: Sequence[Values], garbage: Garbage,
) -> Group:  # fmt: skip
    fills: list[OutFill] = ["zeros", "noise", "nan"]
    # The last of several calls finds the zeros of a contest, so that a file which looks for poison shows.
    last = len(sizes) - 1
    calls = [
        Call(
            size,
            rng.getrandbits(31),
            values=kind,
            out_fill=fills[index % len(fills)],
            token_poison="zeros" if index == last > 0 else "nan",
            slot=index % 2,
        )
        for index, (size, kind) in enumerate(zip(sizes, values, strict=True))
    ]
    return Group(name, hidden, intermediate, tuple(calls), garbage)
