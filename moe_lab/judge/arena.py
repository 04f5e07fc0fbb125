"""Memory for the ten arguments of a call, each between two guard bands, that the judge fills and looks through.

On a CPU both processes map one file. A GPU's memory belongs to the worker, and its bytes pass through a small window.
The judge writes the inputs, the worker calls the submission on them, and afterwards the judge itself looks at every
byte: what changed outside ``out`` was edited, whatever the worker says about it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_lab.problem.contract import ARGUMENTS, BLOCK_TOKEN
from moe_lab.problem.errors import BackendError

#: Not the name that earlier versions gave folders without a lock.
_PREFIX = "moe_lab_held_"
_PAGE = 4096
_GUARD_SEED = 20261129
#: The arguments that have one slab for each expert.
_WEIGHTS = ("gate_w", "up_w", "down_w")


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
        return math.prod(self.shape) * self.itemsize

    @property
    def stop(self) -> int:
        """Byte offset after the last element."""
        return self.start + self.size_bytes

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


def view(buffer: torch.Tensor, region: Region) -> torch.Tensor:
    """The tensor of one region as a view of the arena's bytes, a (size,) uint8 tensor on any device."""
    return buffer[region.start : region.stop].view(getattr(torch, region.dtype)).view(region.shape)


def map_file(path: str | os.PathLike[str]) -> torch.Tensor:
    """Map a whole file; the tensor is a (size,) uint8 view of it and keeps the mapping alive."""
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


@dataclass(frozen=True)
class Edit:
    """Bytes that changed although nobody may write there.

    Attributes:
        where: an argument's name, "before out", "after out" or "beside <argument>".
        first: index of the first changed element of an argument, or bytes between the nearest one and ``out``.
        count: changed bytes.
    """

    where: str
    first: int
    count: int

    @property
    def is_input(self) -> bool:
        """Whether an argument was edited, as opposed to a guard band."""
        return not self.where.startswith(("before", "after", "beside"))

    def __str__(self) -> str:
        """One clause."""
        if not self.is_input:
            return f"wrote {self.count} bytes {self.where}, the nearest {self.first} bytes away"
        return f"edited its input {self.where} ({self.count} bytes, first at element {self.first})"


def _lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Region], list[tuple[str, int, int]], int]:
    """Where each argument lies, the guard bands around them (name, start, size), and the size of it all."""
    out = tensors["out"]
    # A kernel that runs one block too far must land in the guard, not in another argument.
    block = _pages(BLOCK_TOKEN * out.shape[1] * out.element_size())
    regions: list[Region] = []
    guards: list[tuple[str, int, int]] = []
    position = 0
    for argument in ARGUMENTS:
        tensor = tensors[argument.name]
        wide = argument.name == "out"
        guard = block if wide else _PAGE
        guards.append((f"before {argument.name}" if wide else f"beside {argument.name}", position, guard))
        region = Region(
            argument.name, position + guard, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )  # fmt: skip
        regions.append(region)
        position = region.start + _pages(region.size_bytes)
        tail = block if wide else position - region.stop
        if wide:
            position = region.stop + tail
        if tail:
            guards.append((f"after {argument.name}" if wide else f"beside {argument.name}", region.stop, tail))
    return regions, guards, _pages(position)


def _guard_patterns(guards: Iterable[tuple[str, int, int]]) -> list[torch.Tensor]:
    """What each guard band holds, never a zero."""
    generator = torch.Generator().manual_seed(_GUARD_SEED)
    return [torch.randint(1, 255, (size,), dtype=torch.uint8, generator=generator) for _, _, size in guards]


class MappedArena:
    """The judge's side of a file that both processes map, for calls of one set of shapes.

    Args:
        tensors: the ten arguments by name; only shapes and dtypes matter here.
        path: the file to create.
        experts: the experts whose weights are written and looked at; None for all. The other slabs of the sparse
            file are never touched, so they read as zeros and cost no memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path, experts: Iterable[int] | None = None) -> None:
        self._experts = None if experts is None else tuple(experts)
        self._regions, self._guards, self.size_bytes = _lay_out(tensors)
        self.path = path
        with path.open("wb") as file:
            file.truncate(self.size_bytes)
        self._buffer = map_file(path)
        self._expected: dict[int, torch.Tensor] = {}
        for (_, start, size), pattern in zip(self._guards, _guard_patterns(self._guards), strict=True):
            self._buffer[start : start + size] = pattern
            self._expected[start] = pattern
        self.out = view(self._buffer, self._regions[-1])

    def describe(self) -> dict[str, Any]:
        """What the worker needs to map the same tensors."""
        return {"path": str(self.path), "size_bytes": self.size_bytes, "regions": _described(self._regions)}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the arguments of the next call in place and remember what must not change."""
        for region in self._regions:
            tensor = tensors[region.name]
            for index, piece in self._pieces(region):
                source = tensor if index is None else tensor[index]
                view(self._buffer, piece).copy_(source)
                if region.name != "out":
                    self._expected[piece.start] = self._buffer[piece.start : piece.stop].clone()

    def read(self) -> tuple[torch.Tensor, list[Edit]]:
        """A copy of ``out``, and everything outside it that differs from what :meth:`write` left there."""
        return self.out.clone(), self.edits()

    def edits(self) -> list[Edit]:
        """Everything outside ``out`` that differs from what :meth:`write` left there."""
        found = []
        for region in self._regions[:-1]:
            for index, piece in self._pieces(region):
                changed = self._changed(piece.start, piece.size_bytes)
                if changed.numel():
                    first = int(changed[0]) // region.itemsize + (index or 0) * math.prod(piece.shape)
                    found.append(Edit(region.name, first, changed.numel()))
        for where, start, size in self._guards:
            changed = self._changed(start, size)
            if changed.numel():
                found.append(_guard_edit(where, size, int(changed[0]), int(changed[-1]), changed.numel()))
        return found

    def close(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _changed(self, start: int, size: int) -> torch.Tensor:
        now, expected = self._buffer[start : start + size], self._expected[start]
        if torch.equal(now, expected):
            return torch.empty(0, dtype=torch.int64)
        return torch.nonzero(now != expected).flatten()

    def _pieces(self, region: Region) -> list[tuple[int | None, Region]]:
        if self._experts is None or region.name not in _WEIGHTS:
            return [(None, region)]
        slab = Region(region.name, region.start, region.shape[1:], region.dtype)
        return [
            (expert, Region(region.name, region.start + expert * slab.size_bytes, slab.shape, slab.dtype))
            for expert in self._experts
        ]


class WindowArena:
    """The judge's side of memory that only the worker has, such as a GPU's, for calls of one set of shapes.

    The bytes pass through a small window that both processes map, one part after the other. What must not change is
    compared with the judge's own tensors on the device where they are, so nothing is kept twice.

    Args:
        tensors: the ten arguments by name; only shapes and dtypes matter here.
        window: (size,) uint8, the judge's mapping.
        move: has the worker copy the window's first bytes to ("put") or from ("get") its memory; called with the
            direction, the byte offset there and the number of bytes.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], window: torch.Tensor, move: Callable[[str, int, int], None]
    ) -> None:
        self._regions, self._guards, self.size_bytes = _lay_out(tensors)
        self._patterns = _guard_patterns(self._guards)
        self._window = window
        self._move = move
        self._parts: list[_Part] = []

    def describe(self) -> dict[str, Any]:
        """What the worker needs to make the same tensors."""
        return {"path": None, "size_bytes": self.size_bytes, "regions": _described(self._regions)}

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the arguments of the next call in place; they must not be written to before :meth:`read`."""
        guards = zip(self._guards, self._patterns, strict=True)
        self._parts = [_Part(where, start, pattern, None) for (where, start, _), pattern in guards]
        for region in self._regions:
            flat = tensors[region.name].contiguous().view(-1).view(torch.uint8)
            self._parts.append(_Part(region.name, region.start, flat, region))
        for offset, size in self._steps():
            for part, mine, theirs in self._overlaps(offset, size):
                self._window[theirs].copy_(part.data[mine])
            self._move("put", offset, size)

    def read(self) -> tuple[torch.Tensor, list[Edit]]:
        """``out`` on the device of the tensor that was written, and everything outside it that has changed."""
        held = self._parts[-1]
        out = torch.empty_like(held.data)
        changed: dict[int, tuple[int, int, int]] = {}
        for offset, size in self._steps():
            self._move("get", offset, size)
            for part, mine, theirs in self._overlaps(offset, size):
                now = self._window[theirs].to(part.data.device)
                if part is held:
                    out[mine] = now
                elif not torch.equal(now, part.data[mine]):
                    where = torch.nonzero(now != part.data[mine]).flatten() + mine.start
                    first, _, count = changed.get(part.start, (int(where[0]), 0, 0))
                    changed[part.start] = (first, int(where[-1]), count + where.numel())
        edits = []
        for part in sorted(self._parts, key=lambda part: part.region is None):
            if part.start in changed:
                first, last, count = changed[part.start]
                if part.region:
                    edits.append(Edit(part.where, first // part.region.itemsize, count))
                else:
                    edits.append(_guard_edit(part.where, part.data.numel(), first, last, count))
        region = self._regions[-1]
        return out.view(getattr(torch, region.dtype)).view(region.shape), edits

    def close(self) -> None:
        """Let go of the tensors that were written."""
        self._parts = []

    def _steps(self) -> Iterator[tuple[int, int]]:
        room = self._window.numel()
        for offset in range(0, self.size_bytes, room):
            yield offset, min(room, self.size_bytes - offset)

    def _overlaps(self, offset: int, size: int) -> Iterator[tuple[_Part, slice, slice]]:
        """Parts inside a window of the arena, with their own bytes and those of the window."""
        for part in self._parts:
            start, stop = max(offset, part.start), min(offset + size, part.start + part.data.numel())
            if start < stop:
                yield part, slice(start - part.start, stop - part.start), slice(start - offset, stop - offset)


Arena = MappedArena | WindowArena


@dataclass(frozen=True)
class _Part:
    """Bytes of an arena that belong together: an argument, or a guard band, which has no region."""

    where: str
    start: int
    data: torch.Tensor
    region: Region | None


def _described(regions: Iterable[Region]) -> list[list[Any]]:
    return [[region.name, region.start, list(region.shape), region.dtype] for region in regions]


def _guard_edit(where: str, size: int, first: int, last: int, count: int) -> Edit:
    return Edit(where, size - 1 - last if where.startswith("before") else first, count)


def pin(buffer: torch.Tensor) -> bool:
    """Ask a GPU's driver to copy to and from a mapping without a detour; whether it does. It copies in any case.

    Args:
        buffer: (size,) uint8 on the CPU; must be given to :func:`unpin` before its mapping goes.
    """
    try:
        if int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0:
            return True
        # The driver's refusal stays behind as the error of whatever is launched next.
        torch.zeros(1, device="cuda")
    except (AttributeError, RuntimeError):
        pass
    return False


def unpin(buffer: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


@contextlib.contextmanager
def private_folder(size_bytes: int) -> Iterator[Path]:
    """A new folder that only this user can enter, in memory if there is room; removed at the end.

    Folders of processes that were killed before they could clean up are removed on the way.

    Args:
        size_bytes: what will be written to it.

    Raises:
        BackendError: if no file system has that much room.
    """
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if base.is_dir():
            _remove_orphans(base)
        # Twice the need: shared memory that runs full ends in a bus error, not in an exception.
        if base.is_dir() and os.access(base, os.W_OK) and shutil.disk_usage(base).free > 2 * size_bytes:
            break
    else:
        raise BackendError(
            f"got no file system with {2 * size_bytes / 2**30:.1f} GiB free, expected /dev/shm or "
            f"{tempfile.gettempdir()} to hold the arguments of a call; free some space or set TMPDIR"
        )
    folder, lock = _locked_folder(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder, and the open file that holds a lock on it as long as this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=base))
        # Another process may come between the folder and the lock, and remove it; then here is another one.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            # A file system without locks also shows nobody a free one, so nobody removes the folder there.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_orphans(base: Path) -> None:
    """Remove this user's folders that no process holds a lock on.

    A lock says it of every process that sees the folder, those of another container too, where a process id does not.
    """
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(lock)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
