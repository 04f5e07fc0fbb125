import subprocess
import sys

import pytest

from moe_lab.problem.contract import ARGUMENTS, CASES, VARIANTS, Case, Variant
from moe_lab.problem.errors import ContractError


def test_the_contest_cases_are_142_rows_per_expert():
    assert [(c.num_experts, c.hidden, c.intermediate, c.num_tokens) for c in CASES.values()] == [
        (16, 2048, 8192, 2272),
        (32, 7168, 2048, 4544),
        (64, 7168, 2048, 9088),
    ]
    assert all(case.num_tokens == 142 * case.num_experts for case in CASES.values())
    assert [case.iterations for case in CASES.values()] == [30, 20, 20]


def test_a_case_that_does_not_exist_is_named():
    with pytest.raises(KeyError, match="got case 4, expected 1 to 3"):
        CASES[4]


def test_ten_arguments_end_with_out():
    assert len(ARGUMENTS) == 10
    assert ARGUMENTS[-1].name == "out"
    assert {argument.name: argument.index_space for argument in ARGUMENTS}["routed_expert_weights"] == "raw"


@pytest.mark.parametrize(("field", "value"), [("num_experts", 0), ("hidden", -1), ("num_tokens", -5), ("hidden", 2.0)])
def test_sizes_out_of_range_are_refused_with_the_value(field, value):
    sizes = {"num_experts": 4, "hidden": 128, "intermediate": 128, "num_tokens": 10} | {field: value}
    with pytest.raises(ContractError, match=f"got {field}={value}"):
        Case("bad", **sizes)


def test_an_unknown_reading_is_refused():
    with pytest.raises(ContractError, match="got padding_rule='floor', expected one of 'ceil', 'plus_one'"):
        Variant(padding_rule="floor")


def test_every_variant_differs_from_the_judge_profile():
    assert all(variant != Variant() for variant in VARIANTS.values())
    assert len(set(VARIANTS.values())) == len(VARIANTS)


def test_importing_the_package_is_light():
    heavy = ["torch", "tilelang", "tvm", "matplotlib", "pandas", "IPython", "scipy", "numpy", "typer"]
    modules = "moe_lab, moe_lab.problem.contract, moe_lab.problem.layout"
    code = f"import sys, {modules}; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
