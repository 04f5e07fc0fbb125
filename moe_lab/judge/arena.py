"""Memory for the ten arguments of a call, each between two guard bands, that the judge and the worker share.

Afterwards the judge itself looks at every byte: what changed outside ``out`` was edited, whatever the worker says. On a
CPU both map one file without a name. A GPU's memory belongs to the worker, and the judge maps it (CUDA's inter-process
memory); where a driver cannot do that, the worker copies it to and from the file around each call.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_lab.problem.contract import ARGUMENTS, BLOCK_TOKEN

if TYPE_CHECKING:  # the worker makes no inputs
    from moe_lab.problem.inputs import Inputs

_PAGE = 4096
_GUARD_SEED = 20261129
#: Bytes that are compared at a time: a comparison takes as much memory again.
_STRIDE = 1 << 26
#: A shared storage as torch describes it to another process: where it holds bytes.
_HANDLE_BYTES = (1, 4, 6)


@dataclass(frozen=True)
class Edit:
    """Bytes that changed although nobody may write there."""

    where: str  # an argument's name, "before out", "after out" or "between <argument> and <argument>"
    first: int  # index of the first changed element of an argument, or bytes between the nearest one and ``out``
    count: int  # changed bytes

    @property
    def is_input(self) -> bool:
        """Whether an argument was edited, as opposed to a guard band."""
        return not self.where.startswith(("before", "after", "between"))

    def __str__(self) -> str:
        """One clause."""
        if not self.is_input:
            return f"wrote {self.count} bytes {self.where}, the nearest {self.first} bytes away"
        return f"edited its input {self.where} ({self.count} bytes, first at element {self.first})"


class Arena:
    """The judge's side of the memory of one set of shapes, those of ``inputs``.

    A sparse one writes and looks at the weights of experts with rows alone: the rest of its file is never touched, so
    it reads as zeros and costs no memory.
    """

    def __init__(self, inputs: "Inputs", *, sparse: bool = False) -> None:
        self._experts = [expert for expert, size in enumerate(inputs.layout.sizes) if size] if sparse else None
        # A kernel that runs one block too far must land in the guard, not in another argument.
        block = BLOCK_TOKEN * inputs.out.shape[1] * inputs.out.element_size()
        self._places: dict[str, tuple[int, tuple[int, ...], str]] = {}  # first byte, shape and dtype
        spans, end, last = [], 0, "the start"
        for argument, tensor in zip(ARGUMENTS, inputs.args, strict=True):
            is_out = argument.name == "out"
            start = _PAGE * math.ceil((end + (block if is_out else 1)) / _PAGE)
            spans.append(("before out" if is_out else f"between {last} and {argument.name}", end, start))
            self._places[argument.name] = start, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            end, last = start + tensor.nbytes, argument.name
        size_bytes = _PAGE * math.ceil((end + block) / _PAGE)
        generator = torch.Generator().manual_seed(_GUARD_SEED)
        # Never a zero: that is what a kernel writes into padding.
        self._guards = [
            (where, first, torch.randint(1, 255, (stop - first,), dtype=torch.uint8, generator=generator))
            for where, first, stop in (*spans, ("after out", end, size_bytes))
        ]
        self._file = os.memfd_create("arena")
        os.ftruncate(self._file, size_bytes)
        path, places = f"/proc/{os.getpid()}/fd/{self._file}", list(self._places.values())
        #: What the worker needs to see the same tensors.
        self.shared: dict[str, Any] = {"path": path, "size_bytes": size_bytes, "places": places}
        # (size_bytes,), the judge's mapping.
        self.buffer = torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
        self._written: list[tuple[str, int, torch.Tensor]] = []

    def attach(self, handle: list[Any] | None) -> None:
        """Use memory of the worker instead of the file, as :func:`share` gave it there; None leaves the file."""
        if handle:
            torch.cuda.init()
            values = [bytes.fromhex(value) if index in _HANDLE_BYTES else value for index, value in enumerate(handle)]
            storage = torch.UntypedStorage._new_shared_cuda(*values)
            self.buffer = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)

    def write(self, inputs: "Inputs") -> None:
        """Put the arguments of the next call in place; they must not be written to before :meth:`read`."""
        self._written = []
        for name, (start, _, _) in self._places.items():
            whole: torch.Tensor = getattr(inputs, name)
            # Only weights have three dimensions: one slab for each expert.
            by_expert = self._experts is not None and whole.dim() == 3
            for index in self._experts or () if by_expert else (0,):
                flat = (whole[index] if by_expert else whole).contiguous().view(-1).view(torch.uint8)
                self._written.append((name, start + index * flat.numel(), flat))
        self._written += self._guards
        for _, start, data in self._written:
            self.buffer[start : start + data.numel()].copy_(data)
        if self.buffer.is_cuda:
            torch.cuda.synchronize()

    def read(self) -> tuple[torch.Tensor, list[Edit]]:
        """A copy of ``out`` where the tensor was that was written, and everything else that has changed."""
        out, edits = torch.empty(0), []
        for where, start, data in self._written:
            now = self.buffer[start : start + data.numel()]
            place, shape, name = self._places.get(where, (start, (), "uint8"))
            dtype: torch.dtype = getattr(torch, name)
            if where == "out":
                out = now.to(data.device, copy=True).view(dtype).view(shape)
            elif changed := _changed(now, data):
                first, last, count = changed
                first = data.numel() - 1 - last if where == "before out" else (start - place + first) // dtype.itemsize
                edits.append(Edit(where, first, count))
        return out, edits

    def close(self) -> None:
        """Let go of the memory and of the tensors that were written."""
        os.close(self._file)
        self._written, self.buffer = [], torch.empty(0, dtype=torch.uint8)


def tensors_in(buffer: torch.Tensor, places: Iterable[tuple[int, tuple[int, ...], str]]) -> Iterator[torch.Tensor]:
    """The arguments as views of an arena's bytes, a (size_bytes,) uint8 tensor on any device."""
    for start, shape, name in places:
        dtype: torch.dtype = getattr(torch, name)
        yield buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def share(buffer: torch.Tensor) -> list[Any] | None:
    """What another process needs to map a GPU's memory, as JSON; None where the driver cannot share it."""
    try:
        handle = buffer.untyped_storage()._share_cuda_()
    except RuntimeError:
        return None
    return [value.hex() if index in _HANDLE_BYTES else value for index, value in enumerate(handle)]


def _changed(now: torch.Tensor, before: torch.Tensor) -> tuple[int, int, int] | None:
    """First and last byte that differ, and how many do."""
    first, last, count = -1, -1, 0
    for number, (mine, theirs) in enumerate(zip(now.split(_STRIDE), before.split(_STRIDE), strict=True)):
        mine = mine.to(theirs.device)
        if not torch.equal(mine, theirs):
            where = torch.nonzero(mine != theirs).flatten() + number * _STRIDE
            first, last = first if count else int(where[0]), int(where[-1])
            count += where.numel()
    return (first, last, count) if count else None
