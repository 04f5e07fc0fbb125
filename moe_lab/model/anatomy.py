"""What a submission launches: the parts that reading its source gives.

:func:`moe_lab.model.interpreter.launches` fills them in, :mod:`moe_lab.model.tiles` counts what they cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Unknown:
    """A value that reading cannot give.

    Attributes:
        reason: why, naming the expression.
    """

    reason: str


@dataclass(frozen=True)
class Tensor:
    """A tensor in device memory: an argument, or one that host code made.

    Attributes:
        name: argument name, or where it was made.
        shape: extents; an entry may be unknown.
        dtype: such as "float16".
    """

    name: str
    shape: tuple[Any, ...]
    dtype: str


@dataclass(eq=False)
class Buffer:
    """One ``T.alloc_*``.

    Attributes:
        name: variable it is bound to.
        scope: "shared", "shared.dyn", "fragment" or "local" (an array of each thread).
        shape: extents; an entry may be unknown.
        dtype: such as "float16".
        line: where.
    """

    name: str
    scope: str
    shape: tuple[Any, ...]
    dtype: str
    line: int

    @property
    def size_bytes(self) -> int | Unknown:
        """Bytes of one copy of it."""
        bits = dtype_bits(self.dtype)
        if isinstance(bits, Unknown):
            return bits
        elements = product(self.shape)
        return elements if isinstance(elements, Unknown) else -(-elements * bits // 8)


@dataclass(eq=False)
class Region:
    """A part of a buffer or tensor, as in ``gate_w[e, n, k]``: where from, and how much if the slices say."""

    base: Buffer | Tensor
    elements: int | Unknown


@dataclass
class Op:
    """One statement inside a launch.

    Attributes:
        line: where.
        kind: "alloc", "copy", "gemm", "reduce" or "other".
        reads, writes: buffers and tensors, each once.
        moved: elements read from each tensor in device memory, by its name.
        flops: operations of a gemm.
        pure_copy: whether it only moves data from device memory into shared memory.
        allocates: the buffer that an "alloc" makes; it touches nothing.
    """

    line: int
    kind: str
    reads: list[Buffer | Tensor] = field(default_factory=list)
    writes: list[Buffer | Tensor] = field(default_factory=list)
    moved: dict[str, int | Unknown] = field(default_factory=dict)
    flops: int | Unknown = 0
    pure_copy: bool = False
    allocates: Buffer | None = None

    @property
    def buffers(self) -> list[Buffer]:
        """Every buffer it touches."""
        return [item for item in (*self.reads, *self.writes) if isinstance(item, Buffer)]


@dataclass
class Loop:
    """A loop inside a launch.

    Attributes:
        line: where.
        trips: how often its body runs.
        num_stages: of ``T.Pipelined``; None for any other loop.
        unmodelled: why its pipeline cannot be predicted, such as an explicit order; empty as a rule.
        body: what it repeats.
    """

    line: int
    trips: int | Unknown
    num_stages: int | Unknown | None
    unmodelled: str
    body: list[Node]


@dataclass
class Branch:
    """An ``if`` that only the device can decide."""

    line: int
    body: list[Node]
    orelse: list[Node]


Node = Op | Loop | Branch


@dataclass
class Launch:
    """One ``with T.Kernel(...)``.

    Attributes:
        line: where.
        grid: blocks along each axis.
        threads: threads of a block, as written.
        pass_configs: of its ``@tilelang.jit``, by the last part of each name, in lower case.
        buffers: in the order of their allocation.
        body: what one block does.
    """

    line: int
    grid: tuple[int | Unknown, ...]
    threads: int | Unknown
    pass_configs: dict[str, Any]
    buffers: list[Buffer] = field(default_factory=list)
    body: list[Node] = field(default_factory=list)


def walk(nodes: Sequence[Node]) -> Iterator[Op]:
    """Every statement, those of loops and branches included."""
    for node in nodes:
        if isinstance(node, Op):
            yield node
        else:
            yield from walk(node.body)
            if isinstance(node, Branch):
                yield from walk(node.orelse)


#: A product of sizes beyond this is no count of anything on a device.
_PRODUCT_BITS = 256


def product(values: Sequence[Any]) -> int | Unknown:
    """Product of integers; unknown if one of them is.

    >>> product((2, 3))
    6
    """
    total = 1
    for value in values:
        if isinstance(value, Unknown):
            return value
        if not isinstance(value, int):
            return Unknown(f"{value!r} is no integer")
        total *= value
        if total.bit_length() > _PRODUCT_BITS:
            return Unknown("a product of sizes is too large")
    return total


def dtype_bits(dtype: str) -> int | Unknown:
    """Bits of one element.

    >>> dtype_bits("bfloat16"), dtype_bits("float8_e4m3")
    (16, 8)
    """
    if dtype == "bool":
        return 8
    # What TileLang calls them without a number.
    if dtype in ("float", "double", "int", "uint"):
        return 64 if dtype == "double" else 32
    match = re.match(r"(?:b?float|u?int|e\dm\d\w*?_float)(\d+)", dtype)
    return int(match[1]) if match else Unknown(f"the width of dtype {dtype!r} is not known")
