"""Kernels of readers: what cannot compile, what cheats and what never ends is one sentence, at the reader's line."""

from __future__ import annotations

import math

import pytest
import torch

from moe_lab.lesson import kernels
from moe_lab.lesson.exercises import EXERCISES, check
from moe_lab.problem.errors import ExerciseError

KERNELS = [exercise for exercise in EXERCISES.values() if exercise.kind == "kernel"]


def _wrong(key: str, answer: object) -> ExerciseError:
    with pytest.raises(ExerciseError) as caught:
        check(key, answer)
    return caught.value


def _copy(body: str) -> str:
    exercise = EXERCISES["copy_tiles"]
    return exercise.gap.replace("...", body)


def test_every_probe_tells_its_arguments_apart_and_poisons_the_destination() -> None:
    for exercise in KERNELS:
        for probe in exercise.probes:
            names, expected = kernels._arguments(exercise, probe, reference=True)
            *_, target = (names[name] for name in exercise.arguments)
            assert target.shape == expected.shape
            assert not torch.equal(target, expected)
            again = kernels._arguments(exercise, probe)[0]
            assert all(torch.equal(names[n].nan_to_num(), again[n].nan_to_num()) for n in exercise.arguments)


def test_a_misspelt_name_is_said_at_its_line() -> None:
    error = _wrong("copy_tiles", _copy("T.copy(source[bm * block_m, bn * block_n], tiles)"))
    assert "at `T.copy(source[bm * block_m, bn * block_n], tiles)`: NameError: name 'tiles' is not defined" in str(
        error
    )


def test_what_tilelang_cannot_compile_is_one_sentence() -> None:
    error = _wrong("tile_gemm", EXERCISES["tile_gemm"].gap.replace("...", "T.gemm(a_tile, sums, sums)"))
    assert "\n" not in str(error)
    assert error.mistake is None


def test_torch_a_constant_and_a_square_solution_are_no_kernel() -> None:
    assert "expected a function below @tilelang.jit" in str(_wrong("copy_tiles", lambda M, N: None))
    source = "def copy_tiles(M, N):\n    return lambda source, target: target.copy_(source)\n"
    assert "expected the kernel that it builds" in str(_wrong("copy_tiles", source))
    constant = _copy("T.fill(tile, 1.0)\n            T.copy(tile, target[bm * block_m, bn * block_n])")
    assert _wrong("copy_tiles", constant).mistake is None
    square = _copy(
        "for i, j in T.Parallel(block_m, block_n):\n"
        "                if bm * block_m + i < N and bn * block_n + j < M:\n"
        "                    target[bm * block_m + i, bn * block_n + j] = source[bm * block_m + i, bn * block_n + j]"
    )
    assert "places are wrong" in str(_wrong("copy_tiles", square))


def test_a_kernel_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_TIMEOUT_S", 8.0)
    endless = "import time\n" + _copy("T.clear(tile)").replace(
        "@tilelang.jit", "while True:\n    time.sleep(1)\n@tilelang.jit"
    )
    assert "the kernel does not end: no answer in 8 s" in str(_wrong("copy_tiles", endless))


def test_places_are_counted_and_the_first_is_shown() -> None:
    got, expected = torch.zeros(3, 4), torch.zeros(3, 4)
    got[1, 2:] = torch.tensor([1.0, math.nan])
    assert kernels.where_wrong(got, expected) == (
        "2 of 12 places are wrong (rows 1 to 1, columns 2 to 3); at [1, 2] got 1, expected 0"
    )
    assert kernels.same(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0001]))
    assert not kernels.same(torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]))
