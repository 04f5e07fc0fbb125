import itertools

import pytest

from moe_lab.machine.devices import Roof, device
from moe_lab.model.roofline import attainable_tflops, bound, work
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import ContractError
from moe_lab.problem.layout import GroupedLayout


def brute_force(case, sizes):
    """Count by doing: one multiply and one add for every term of every dot product, two bytes for every number."""
    flops = [0, 0]
    weights = [set(), set()]
    activations = [set(), set()]
    for expert, size in enumerate(sizes):
        for row in range(size):
            for i, h in itertools.product(range(case.intermediate), range(case.hidden)):
                flops[0] += 2 * 2
                weights[0] |= {("gate", expert, i, h), ("up", expert, i, h)}
                activations[0] |= {("x", expert, row, h), ("hidden, written", expert, row, i)}
                flops[1] += 2
                weights[1].add(("down", expert, h, i))
                activations[1] |= {("hidden, read", expert, row, i), ("out", expert, row, h)}
    return flops, [2 * len(part) for part in weights], [2 * len(part) for part in activations]


@pytest.mark.parametrize("sizes", [(3, 0, 2), (1, 1, 1), (0, 0, 4)])
def test_flops_and_bytes_agree_with_a_brute_force_count(sizes):
    case = Case("tiny", 3, 5, 4, sum(sizes))
    flops, weights, activations = brute_force(case, sizes)
    counted = work(case, sizes)
    for stage, got in enumerate((counted.stage1, counted.stage2)):
        assert (got.flops, got.weight_bytes, got.activation_bytes) == (flops[stage], weights[stage], activations[stage])
    assert counted.whole.flops == sum(flops)
    assert counted.whole.bytes == sum(weights) + sum(activations)


def test_padding_is_beside_the_work_and_never_part_of_it():
    case = CASES[1]
    sizes = (142,) * 16
    done = work(case, sizes)
    padded = GroupedLayout(sizes).num_padded_rows
    assert done.whole.padded_flops == 6 * case.hidden * case.intermediate * padded
    assert done.whole.flops == 6 * case.hidden * case.intermediate * case.num_tokens
    assert done.whole.padded_flops / done.whole.flops == pytest.approx(256 / 142)


@pytest.mark.parametrize(("number", "time_ms"), [(1, 0.396), (2, 0.694), (3, 1.389)])
def test_the_bounds_of_an_h200(number, time_ms):
    roof = device("h200").roof("measured")
    assert (roof.peak_tflops, roof.bandwidth_tbps) == (784, 4.31)
    got = bound(work(CASES[number]).whole, roof)
    assert got.time_ms == pytest.approx(time_ms, rel=0.01)
    assert got.side == "memory"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_bounds_of_a_c500_follow_from_its_row(number):
    case, roof = CASES[number], device("c500").roof()
    got = bound(work(case).whole, roof)
    matrix = case.hidden * case.intermediate
    assert got.arithmetic_ms == pytest.approx(6 * matrix * case.num_tokens / 280e12 * 1e3)
    moved = 6 * matrix * case.num_experts + 4 * case.num_tokens * (case.hidden + case.intermediate)
    assert got.memory_ms == pytest.approx(moved / 1.843e12 * 1e3)
    assert got.side == "memory"


def test_a_second_pass_over_the_weights_costs_their_bytes_again():
    once, twice = work(CASES[3]).whole, work(CASES[3], weight_passes=2).whole
    assert twice.bytes - once.bytes == once.weight_bytes
    roof = device("h200").roof("measured")
    assert bound(twice, roof).time_ms / bound(once, roof).time_ms == pytest.approx(1.944, abs=0.01)


def test_enough_rows_turn_a_case_to_the_arithmetic_side():
    many = Case("many rows", 16, 2048, 8192, 20_000)
    assert bound(work(many).whole, Roof("x", 706, 4.3, "measured")).side == "arithmetic"


def test_experts_without_rows_read_no_weight():
    case = CASES[1]
    sizes = (case.num_tokens, *(0,) * 15)
    assert work(case, sizes).whole.weight_bytes == work(case).whole.weight_bytes / 16


def test_the_roofline_bends_at_the_ridge():
    roof = Roof("x", 100, 2, "specification")
    assert roof.ridge == 50
    assert [attainable_tflops(i, roof) for i in (0, 25, 50, 1000)] == [0, 50, 100, 100]


@pytest.mark.parametrize(("sizes", "passes"), [((1, 2), 1.0), ((5, 0, 1), 1.0), (None, 0.5)])
def test_what_does_not_fit_is_refused(sizes, passes):
    with pytest.raises(ContractError, match="expected"):
        work(Case("tiny", 3, 5, 4, 5), sizes, weight_passes=passes)
