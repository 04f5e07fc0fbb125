"""What devices can do: limits and roofs from ``data/devices.csv`` and ``data/device_figures.csv``. A figure is a range
with a source, of one of three kinds: "specification" (a vendor's paper, or read off the device), "measured" (reached on
that device by a plain large matmul or copy: a roof) and "observed" (on a slice of a card, or by one kernel: no roof).
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator

from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import DataError
from moe_lab.problem.tables import Finite, load

Quantity = Literal[
    "processors", "lanes", "shared_per_block_bytes", "shared_per_processor_bytes", "shared_reserved_per_block_bytes",
    "registers_per_processor", "registers_per_thread", "threads_per_processor", "threads_per_block", "l2_bytes",
    "memory_gb", "clock_mhz", "peak_fp16_tflops", "bandwidth_gbps",
]  # fmt: skip
Basis = Literal["specification", "measured", "observed"]


@dataclass(frozen=True)
class Figure:
    """One number of one device, from ``low`` to ``high`` where sources disagree; the unit is in the quantity's name."""

    device: str
    quantity: Quantity
    basis: Basis
    low: Finite
    high: Finite
    source: str
    note: str | None

    def __post_init__(self) -> None:
        """Refuse an upside-down or negative range."""
        if not 0 <= self.low <= self.high:
            raise ValueError(f"got {self.quantity} from {self.low} to {self.high}, expected 0 <= low <= high")


@dataclass(frozen=True)
class Roof:
    """The two ceilings of a device."""

    title: str  # what to write on the line
    peak_tflops: float  # dense fp16 arithmetic, above 0
    bandwidth_tbps: float  # device memory, above 0
    basis: Basis  # where the two come from

    @property
    def ridge(self) -> float:
        """FLOP per byte at which arithmetic takes over from memory.

        >>> Roof("made up", 600, 4, "specification").ridge
        150.0
        """
        return self.peak_tflops / self.bandwidth_tbps


@dataclass(frozen=True)
class _Row:
    name: str
    title: str
    vendor: str
    target: Literal["cuda", "hip", "maca", "c"]
    architecture: str
    kind: Literal["gpu", "cpu"]
    names: Annotated[tuple[str, ...], BeforeValidator(lambda text: text.split("|"))]


class _Limit:
    """A hard limit of a device, read like an attribute: where sources disagree, the smaller number is safe."""

    def __init__(self, instead: "int | _Limit | None" = None) -> None:
        self.instead = instead  # where no source says

    def __set_name__(self, owner: type, name: str) -> None:
        self.quantity: Quantity = name  # type: ignore[assignment]

    def __get__(self, device: "Device", owner: type) -> int:
        if figure := device.figure(self.quantity):
            return int(figure.low)
        if self.instead is not None:
            return self.instead.__get__(device, owner) if isinstance(self.instead, _Limit) else self.instead
        raise DataError(
            f"got no {self.quantity} for {device.title}, expected one in device_figures.csv, usually because a "
            f"{device.kind} has no such limit"
        )


@dataclass(frozen=True)
class Device(_Row):
    """One row of ``data/devices.csv`` and every figure known of it."""

    figures: tuple[Figure, ...]

    processors = _Limit()  # streaming multiprocessors, compute units, APs, or the cores of a CPU
    lanes = _Limit()  # threads of a wave (warp): 32 or 64
    shared_per_block_bytes = _Limit()
    shared_per_processor_bytes = _Limit()
    shared_reserved_per_block_bytes = _Limit(0)  # what the driver keeps for itself of each resident block
    registers_per_processor = _Limit()  # of 32 bits
    registers_per_thread = _Limit()  # a thread that needs more spills
    threads_per_processor = _Limit()  # resident ones
    threads_per_block = _Limit(threads_per_processor)
    l2_bytes = _Limit()  # second-level cache

    def figure(self, quantity: Quantity, basis: Basis = "specification") -> Figure | None:
        """One figure, None if no source gives it."""
        return next((item for item in self.figures if (item.quantity, item.basis) == (quantity, basis)), None)

    def roof(self, basis: Basis = "specification") -> Roof:
        """The ceilings; of a range the upper end, because a bound must not be beaten.

        Raises DataError if there is no such pair of figures, as for a card that nobody measured whole.
        """
        peak, bandwidth = self.figure("peak_fp16_tflops", basis), self.figure("bandwidth_gbps", basis)
        if basis == "observed" or peak is None or bandwidth is None:
            have = [name for name in ("specification", "measured") if self.figure("peak_fp16_tflops", name)]
            raise DataError(
                f"got basis {basis!r} for {self.title}, expected {' or '.join(have)}, because what else is known of it "
                "is no roof (see the notes in device_figures.csv)"
            )
        return Roof(f"{self.title}, {basis}", peak.high, bandwidth.high / 1000, basis)


@functools.cache
def devices() -> dict[str, Device]:
    """Every device by its key, in the file's order; raises DataError for a row that does not fit or is given twice."""
    rows = load(data_dir() / "devices.csv", _Row, key=("name",))
    figures = load(data_dir() / "device_figures.csv", Figure, key=("device", "quantity", "basis"))
    if unknown := {figure.device for figure in figures} - {row.name for row in rows}:
        raise DataError(f"device_figures.csv: got {', '.join(sorted(unknown))}, expected keys of devices.csv")
    own = {row.name: tuple(figure for figure in figures if figure.device == row.name) for row in rows}
    return {row.name: Device(**vars(row), figures=own[row.name]) for row in rows}


def device(name: str, kind: Literal["gpu", "cpu"] | None = None) -> Device:
    """One device by any of its names (see :func:`reported_as`); of any kind by default.

    Raises DataError for a name that is none of them, or of another kind.
    """
    found = reported_as(name)
    if found and kind in (None, found.kind):
        return found
    keys = ", ".join(item.name for item in devices().values() if kind in (None, item.kind))
    if found:
        raise DataError(f"got device {name!r}, a {found.kind.upper()}, expected a {str(kind).upper()}: {keys}")
    raise DataError(
        f"got device {name!r}, expected one of {keys}, usually because data/devices.csv has no row for "
        "it yet: add one, and its figures to data/device_figures.csv"
    )


def reported_as(text: str) -> Device | None:
    """The device with this key or title, or whose driver reports itself like this, in any case; None if there is none.

    >>> reported_as("NVIDIA H200").name, reported_as("NVIDIA H200 NVL")
    ('h200', None)
    """
    wanted = text.strip().casefold()
    named = ((item, name) for item in devices().values() for name in (item.name, item.title, *item.names))
    return next((item for item, name in named if name.casefold() == wanted), None)
