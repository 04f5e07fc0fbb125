import sys

import pytest

from moe_lab.contract import CASES, Case
from moe_lab.errors import BackendError
from moe_lab.lowering import Lowering, lower, lower_many
from moe_lab.steps import step
from moe_lab.submission import Submission

SMALL = Case("small", 4, 256, 384, 300)


def test_many_in_one_child_each_with_its_answer_or_its_error() -> None:
    baseline = step("s0")
    half = baseline.with_literals(STAGE1_BLOCK_K=64)
    two_stages = baseline.with_literals(NUM_STAGES=2)
    up_tile = '(STAGE1_BLOCK_N, STAGE1_BLOCK_K), "float16"'
    static = Submission(
        baseline.source.replace(
            f"up_shared = T.alloc_shared({up_tile})", f'up_shared = T.alloc_shared({up_tile}, "shared")'
        )
    )
    assert static != baseline
    vendor = baseline.source
    for old, new in (
        (
            "import torch\n",
            "import torch\nfrom tilelang.maca.intrinsics import make_mma_swizzle_layout, mma_store_index_map\n",
        ),
        ("T.clear(gate_acc)", "T.annotate_layout({gate_shared: make_mma_swizzle_layout(gate_shared, 4)})"),
        ("TL_DISABLE_WARP_SPECIALIZED: True", 'TL_VENDOR_ONLY: True, "of.a_vendor": 1'),
    ):
        assert old in vendor
        vendor = vendor.replace(old, new)
    broken = Submission(baseline.source.replace("T.clear(out_acc)", "T.no_such_name(out_acc)"), "broken.py")
    deadly = Submission("import os\n\ndef run_kernel(*args):\n    os._exit(7)\n", "deadly.py")
    idle = Submission("def run_kernel(*args):\n    pass\n", "idle.py")
    results = lower_many(
        [
            Lowering(baseline, SMALL, "sm_80", num_padded_rows=640),
            Lowering(half, SMALL, "gfx90a"),
            Lowering(two_stages, SMALL, "sm_80"),
            Lowering(static, SMALL, "sm_80"),
            Lowering(Submission(vendor), SMALL, "gfx90a"),
            Lowering(broken, SMALL),
            Lowering(deadly, SMALL),
            Lowering(idle, SMALL),
        ]
    )
    first, second, third, fourth, vendors, broken_error, deadly_error, idle_error = results
    assert [kernel.shared_bytes for kernel in first] == [65536, 32768]
    assert [kernel.grid for kernel in first] == [(5, 3, 1), (5, 2, 1)]
    assert [kernel.threads for kernel in first] == [256, 256]
    # Two 128x128 fp32 accumulators over 256 threads are 512 bytes a thread, and the token fragment comes on top.
    assert first[0].local_bytes >= 512
    assert "moe_forward_kernel" in first[0].source
    assert [kernel.shared_bytes for kernel in second] == [32768, 32768]
    # What the C500's compiler was reported to refuse: every buffer twice.
    assert third[0].shared_bytes == 131072
    assert fourth[0].shared_bytes == 65536
    assert vendors != first
    assert [kernel.shared_bytes for kernel in vendors] == [65536, 32768]
    assert "broken.py for sm_80" in str(broken_error)
    assert "no_such_name" in str(broken_error)
    assert "deadly.py: TileLang ended its process" in str(deadly_error)
    assert "launches no kernel" in str(idle_error)
    assert all("\n" not in str(error) for error in (broken_error, deadly_error, idle_error))


def test_host_code_is_told_whether_a_gpu_is_meant() -> None:
    # The persistent steps keep a plain form for a machine with no GPU.
    by_hand, plain = lower_many([Lowering(step("h6"), SMALL, "sm_90a"), Lowering(step("h6"), SMALL, "cpu")])
    assert not isinstance(by_hand, BackendError), str(by_hand)
    assert not isinstance(plain, BackendError), str(plain)
    assert [(kernel.name, kernel.threads) for kernel in by_hand] == [("moe_forward_kernel", 384)]
    assert [kernel.name for kernel in plain] == ["plain_forward_kernel"]
    # Two buffers in stage 1 and two products in stage 2, whatever the number of heights.
    assert by_hand[0].source.count("ptx_stmatrix_m8n8_x4_trans(") == 4


def test_what_cannot_be_lowered_says_so() -> None:
    with pytest.raises(BackendError, match="got target 'sm_1', expected one of sm_80"):
        lower(step("s0"), CASES[1], "sm_1")
    with pytest.raises(BackendError, match="got 100 padded rows, expected a multiple of 128"):
        Lowering(step("s0"), SMALL, num_padded_rows=100)
    with pytest.raises(BackendError, match="no/such/python"):
        lower_many([Lowering(step("s0"), SMALL)], python="no/such/python")
    with pytest.raises(BackendError, match="cannot lower"):
        # An interpreter that has no TileLang.
        lower_many([Lowering(step("s0"), SMALL)], python=_bare_interpreter())


def _bare_interpreter() -> str:
    return getattr(sys, "_base_executable", sys.executable)
