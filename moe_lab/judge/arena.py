"""Memory that the judge and the worker share: the ten arguments of a call, each between two guard bands.

The judge writes the inputs, the worker maps the same bytes and calls the submission on them, and afterwards the judge
itself looks at every byte: what changed outside ``out`` was edited, whatever the worker says about it.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lab.contract import ARGUMENTS, BLOCK_TOKEN
from moe_lab.errors import BackendError

_PAGE = 4096
_GUARD_SEED = 20261129


@dataclass(frozen=True)
class Region:
    """One argument inside the arena.

    Attributes:
        name: argument.
        start: byte offset.
        shape: of the tensor.
        dtype: torch dtype name.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def view(buffer: torch.Tensor, region: Region) -> torch.Tensor:
    """The tensor of one region as a view of the arena's bytes, a (size,) uint8 tensor on any device."""
    part = buffer[region.start : region.start + region.size_bytes]
    return part.view(getattr(torch, region.dtype)).view(region.shape)


def map_file(path: str | os.PathLike[str]) -> tuple[mmap.mmap, torch.Tensor]:
    """Map a whole file; the tensor is a (size,) uint8 view of it."""
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return memory, torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(frozen=True)
class Edit:
    """Bytes that changed although nobody may write there.

    Attributes:
        where: an argument's name, "before out", "after out" or "beside <argument>".
        first: index of the first changed element of an argument, or byte distance from ``out``.
        count: changed bytes.
    """

    where: str
    first: int
    count: int


class Arena:
    """The judge's side of the shared memory, for calls of one set of shapes.

    Args:
        tensors: the ten arguments by name; only shapes and dtypes matter here.
        folder: private folder; the arena's file is created in it.
        name: file name.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], folder: Path, name: str) -> None:
        # A kernel that runs one block too far must land in the guard, not in another argument.
        out = tensors["out"]
        wide = -(-BLOCK_TOKEN * out.shape[1] * out.element_size() // _PAGE) * _PAGE
        self.regions: list[Region] = []
        position = _PAGE
        for argument in ARGUMENTS:
            tensor = tensors[argument.name]
            if argument.name == "out":
                position += wide
            dtype = str(tensor.dtype).removeprefix("torch.")
            region = Region(argument.name, position, tuple(tensor.shape), dtype)
            self.regions.append(region)
            position += -(-region.size_bytes // _PAGE) * _PAGE + _PAGE
        self.size_bytes = position + wide
        self.path = folder / name
        with self.path.open("wb") as file:
            file.truncate(self.size_bytes)
        self._memory, self._buffer = map_file(self.path)
        guard = np.random.default_rng(_GUARD_SEED).integers(1, 255, self.size_bytes, dtype=np.uint8)
        self._buffer.numpy()[:] = guard
        self._expected = guard
        self.out = view(self._buffer, self.regions[-1])

    def describe(self) -> dict[str, Any]:
        """What the worker needs to map the same tensors."""
        return {
            "path": str(self.path),
            "regions": [[region.name, region.start, list(region.shape), region.dtype] for region in self.regions],
        }

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put the arguments of the next call in place and remember what must not change."""
        for region in self.regions:
            view(self._buffer, region).copy_(tensors[region.name])
            span = slice(region.start, region.start + region.size_bytes)
            self._expected[span] = self._buffer.numpy()[span]

    def edits(self) -> list[Edit]:
        """Everything outside ``out`` that differs from what :meth:`write` left there."""
        changed = np.flatnonzero(self._buffer.numpy() != self._expected)
        out = self.regions[-1]
        changed = changed[(changed < out.start) | (changed >= out.start + out.size_bytes)]
        found: list[Edit] = []
        for region in self.regions[:-1]:
            inside = changed[(changed >= region.start) & (changed < region.start + region.size_bytes)]
            if inside.size:
                itemsize = getattr(torch, region.dtype).itemsize
                found.append(Edit(region.name, int(inside[0] - region.start) // itemsize, int(inside.size)))
                changed = np.setdiff1d(changed, inside, assume_unique=True)
        before = changed[changed < out.start]
        after = changed[changed >= out.start + out.size_bytes]
        if before.size:
            found.append(Edit("before out", int(out.start - before[-1]), int(before.size)))
        if after.size:
            found.append(Edit("after out", int(after[0]) - out.start - out.size_bytes + 1, int(after.size)))
        return found


def private_folder(size_bytes: int) -> Path:
    """A new folder that only this user can enter, in memory if there is room.

    Args:
        size_bytes: what will be written to it.

    Raises:
        BackendError: if no file system has that much room.
    """
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        # Twice the need: shared memory that runs full ends in a bus error, not in an exception.
        if base.is_dir() and os.access(base, os.W_OK) and shutil.disk_usage(base).free > 2 * size_bytes:
            return Path(tempfile.mkdtemp(prefix="moe_lab_judge_", dir=base))
    raise BackendError(
        f"got no file system with {2 * size_bytes / 2**30:.1f} GiB free, expected /dev/shm or {tempfile.gettempdir()} "
        "to hold the arguments of a call; free some space or set TMPDIR"
    )
