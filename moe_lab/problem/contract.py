"""The contract: what ``run_kernel`` is given, what it must write, and what its sources leave open; torch is not needed.

Shapes: E experts, H hidden, I intermediate, N raw (valid) rows, P padded rows. ``data/README.md`` names the sources.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from moe_lab.problem.errors import ContractError, DataError

PaddingRule = Literal["ceil", "plus_one"]
#: What the judge holds a file to: every rule, ruling and C500 limit of the contest, or those that any card needs.
Profile = Literal["contest", "open"]

#: Rows of one token block: every group starts at a multiple of it.
BLOCK_TOKEN = 128
#: Absolute and relative tolerance read off a judge message (facts: contestants' logs; the statement gives none).
JUDGE_TOLERANCE = 0.05
#: The name and the ten parameters that a submission must have, in order.
ENTRY_POINT = "run_kernel"


def data_dir() -> Path:
    """The folder ``data/`` of this checkout; raises DataError if the package was installed without one."""
    path = Path(__file__).resolve().parents[2] / "data"
    if not path.is_dir():
        why = "usually because moe_lab was installed without -e: run `pip install -e .` inside the clone"
        raise DataError(f"got no folder {path}, expected the data/ folder of the checkout, {why}")
    return path


@dataclass(frozen=True)
class Argument:
    """One argument of ``run_kernel``: its shape over E, H, I, N and P, and its dtype under the judge profile."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    index_space: Literal["padded", "raw", "expert", "block"]
    meaning: str


ARGUMENTS: tuple[Argument, ...] = (
    Argument("stacked_expert_tokens", ("P", "H"), "float16", "padded", "token rows, grouped by expert and padded"),
    Argument("gate_w", ("E", "I", "H"), "float16", "expert", "gate projection of each expert"),
    Argument("up_w", ("E", "I", "H"), "float16", "expert", "up projection of each expert"),
    Argument("down_w", ("E", "H", "I"), "float16", "expert", "down projection of each expert"),
    Argument("routed_expert_weights", ("N",), "float32", "raw", "route weight of each valid row"),
    Argument("group_sizes", ("E",), "int32", "expert", "valid rows of each expert"),
    Argument("group_offsets", ("E+1",), "int32", "expert", "first raw row of each expert"),
    Argument("group_padded_offsets", ("E+1",), "int32", "expert", "first padded row of each expert"),
    Argument("group_idx_for_bx", ("P/128",), "int32", "block", "expert of each block of 128 padded rows"),
    Argument("out", ("P", "H"), "float16", "padded", "result, written in place; padding rows end as 0"),
)


@dataclass(frozen=True)
class Case:
    """One problem size."""

    name: str  # "case 1" to "case 3" for the contest's, anything for a small one
    num_experts: int  # E
    hidden: int  # H
    intermediate: int  # I
    num_tokens: int  # N, raw rows after routing (tokens times top-k), may be 0
    warmup: int = 5  # calls of the contest before it times
    iterations: int = 20  # calls that it times
    source: str = ""  # who says so

    def __post_init__(self) -> None:
        """Refuse sizes that no kernel could be given."""
        for field, least in (("num_experts", 1), ("hidden", 1), ("intermediate", 1), ("num_tokens", 0)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                found = f"case {self.name!r}: got {field}={value!r}"
                raise ContractError(f"{found}, expected an integer of at least {least}")

    def extents(self, num_padded_rows: int) -> dict[str, int]:
        """What each symbol of :data:`ARGUMENTS` stands for, given P."""
        return {
            "E": self.num_experts, "E+1": self.num_experts + 1, "H": self.hidden, "I": self.intermediate,
            "N": self.num_tokens, "P": num_padded_rows, "P/128": num_padded_rows // BLOCK_TOKEN,
        }  # fmt: skip


class _Cases(Mapping[int, Case]):
    @functools.cached_property
    def _read(self) -> dict[int, Case]:
        from moe_lab.problem.tables import load

        return dict(enumerate(load(data_dir() / "cases.csv", Case), start=1))

    def __getitem__(self, number: int) -> Case:
        if number not in self._read:
            raise KeyError(f"got case {number!r}, expected 1 to {len(self)}")
        return self._read[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


#: The contest's cases, ``CASES[1]`` to ``CASES[3]``; ``data/cases.csv`` is read when one is first asked for.
CASES: Mapping[int, Case] = _Cases()


@dataclass(frozen=True)
class Variant:
    """One reading of the open questions of the contract. The defaults are the judge profile."""

    #: Blocks of a group of n rows: ceil(n/128), or ceil((n+1)/128), one more for an exact multiple or an empty expert.
    padding_rule: PaddingRule = "ceil"
    offsets_length: Literal["E+1", "E"] = "E+1"  # of both offset arrays; "E" leaves the last one, the total, out
    route_weight_dtype: Literal["float32", "float16"] = "float32"  # what accepted files take; what the page says
    #: "exact" has P/128 entries; "surplus" has ceil(N/128) + E, the last ones naming the last expert.
    block_map: Literal["exact", "surplus"] = "exact"
    storage: Literal["padded", "compact"] = "padded"  # P rows of tokens and out, or the N valid rows only
    out_fill: Literal["zeros", "nan", "stale"] = "zeros"  # what out holds before the call; "stale" is an older answer
    workspace_fill: Literal["untouched", "garbage"] = "untouched"  # of fresh memory; garbage is NaN bit patterns

    def __post_init__(self) -> None:
        """Refuse a value that is none of the known readings."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, allowed = getattr(self, field.name), get_args(hints[field.name])
            if value not in allowed:
                raise ContractError(f"got {field.name}={value!r}, expected one of {', '.join(map(repr, allowed))}")


JUDGE_PROFILE = Variant()
#: Every variant that the local judge reports on beside its verdict, by name.
VARIANTS: dict[str, Variant] = {
    "padding rule ceil((n+1)/128)": Variant(padding_rule="plus_one"),
    "offsets of length E": Variant(offsets_length="E"),
    "route weights in fp16": Variant(route_weight_dtype="float16"),
    "surplus block map": Variant(block_map="surplus"),
    "compact storage": Variant(storage="compact"),
    "out arrives as NaN": Variant(out_fill="nan"),
    "out holds an older answer": Variant(out_fill="stale"),
    "workspace arrives as garbage": Variant(workspace_fill="garbage"),
}
