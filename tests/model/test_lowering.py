import sys
import tempfile
from pathlib import Path

import pytest

from moe_lab.model.lowering import Lowering, LoweringError, lower_many
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import BackendError
from moe_lab.problem.submission import Submission
from moe_lab.steps import step

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
            Lowering(baseline, SMALL, "sm_80"),
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
    assert [kernel.grid for kernel in first] == [(4, 3, 1), (4, 2, 1)]
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
    assert str(broken_error).startswith("broken.py for sm_80: ")
    assert "no_such_name" in str(broken_error)
    assert str(deadly_error) == "deadly.py for sm_80: the compiler's process ended: exit code 7"
    assert "launches no kernel" in str(idle_error)
    assert all("\n" not in str(error) for error in (broken_error, deadly_error, idle_error))


#: One kernel whose tiles come and go; LINE uses something that not every target has.
KERNEL = """
import tilelang
import tilelang.language as T


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def build(num_experts, hidden, intermediate, rows):
    @T.prim_func
    def main(
        tokens: T.Tensor((rows, hidden), "float16"),
        weights: T.Tensor((num_experts, intermediate, hidden), "float16"),
        out: T.Tensor((rows, hidden), "float16"),
    ):
        with T.Kernel(rows // 128, threads=128) as bx:
            a = T.alloc_shared((128, 64), "float16")
            b = T.alloc_shared((128, 64), "float16")
            sums = T.alloc_fragment((128, 128), "float32")
            T.clear(sums)
            T.copy(tokens[bx * 128, 0], a)
            T.copy(weights[0, 0, 0], b)
            LINE
            T.gemm(a, b, sums, transpose_B=True)
            T.copy(a, out[bx * 128, 0])

    return main


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,
               group_padded_offsets, group_idx_for_bx, out):
    num_experts, intermediate, hidden = gate_w.shape
    build(num_experts, hidden, intermediate, out.shape[0])(stacked_expert_tokens, gate_w, out)
"""
BARRIER = "bar = T.alloc_barrier([1])"
HOPPER_ONLY = {
    "load": (f"{BARRIER}; T.tma_copy(weights[0, 0:128, 0:64], b, barrier=bar[0])", "copies by the Tensor Memory"),
    "store": ("T.tma_copy(b, out[bx * 128 : bx * 128 + 128, 0:64])", "copies by the Tensor Memory"),
    "preferred": (
        'T.copy(weights[0, 0:128, 0:64], b, prefer_instruction="tma")', "copies by the Tensor Memory",
    ),
    "added": ("T.atomic_add(out[bx * 128 : bx * 128 + 128, 0:64], b, use_tma=True)", "atomic additions by the Tensor"),
    "cluster": ("T.copy_cluster(a, b, dst_block=1)", "copies between the blocks of a cluster"),
    "product": ("T.wgmma_gemm(a, b, sums, transpose_B=True)", "matrix products of a warpgroup (WGMMA)"),
    "barrier": (f"{BARRIER}; T.barrier_arrive(bar[0]); T.barrier_wait(bar[0], 0)", "barriers of T.alloc_barrier"),
    "launch": ("T.pdl_sync()", "programmatic dependent launches (PDL)"),
}  # fmt: skip


def with_line(name: str, line: str) -> Submission:
    return Submission(KERNEL.replace("LINE", line.replace("; ", "\n            ")), f"{name}.py")


def test_what_only_a_hopper_has_is_said_in_words() -> None:
    files = [with_line(name, line) for name, (line, _) in HOPPER_ONLY.items()]
    answers = lower_many([Lowering(item, SMALL, target) for target in ("sm_80", "sm_90a") for item in files])
    for item, (_, words), answer, other in zip(
        files, HOPPER_ONLY.values(), answers[: len(files)], answers[len(files) :], strict=True
    ):
        assert isinstance(answer, LoweringError), item.name
        assert str(answer).startswith(f"{item.name} uses {words}"), str(answer)
        assert str(answer).endswith(", which TileLang does not have for sm_80")
        # All that the compiler said is kept, about the file and not about its copy.
        assert answer.said in answer.message
        assert "/moe_lab_" not in answer.message
        assert not isinstance(other, LoweringError), str(other)


def test_other_devices_lack_other_things() -> None:
    registers = with_line("registers", "T.set_max_nreg(232, 1)")
    blackwell = with_line(
        "blackwell",
        f"{BARRIER}; there = T.alloc_tmem((128, 128), 'float32'); "
        "T.tcgen05_gemm(a, b, there, transpose_B=True, mbar=bar[0])",
    )
    asked = [Lowering(registers, SMALL, "gfx90a"), Lowering(blackwell, SMALL, "sm_90a")]
    assert [str(answer) for answer in lower_many(asked)] == [
        "registers.py uses the operation set_max_nreg, which TileLang does not have for gfx90a",
        "blackwell.py uses Blackwell's matrix products (tcgen05), which TileLang does not have for sm_90a",
    ]


def test_a_target_that_has_it_refuses_for_another_reason() -> None:
    said = "InternalError: T.wgmma_gemm() requires Hopper WGMMA lowering, but constraints were not satisfied."
    assert LoweringError("a.py", "sm_80", said).feature == "matrix products of a warpgroup (WGMMA)"
    other = LoweringError("a.py", "sm_90a", said)
    assert (other.feature, str(other)) == (None, f"a.py for sm_90a: {said}")


def test_children_that_are_killed_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = Submission("import os\nos.kill(os.getpid(), 9)\n", "killed.py")
    (error,) = lower_many([Lowering(killed, SMALL)])
    assert str(error) == "killed.py for sm_80: the compiler's process ended: signal 9 (Killed)"
    assert list(tmp_path.iterdir()) == []
    endless = Submission(f"open({str(tmp_path / 'begun')!r}, 'w')\nwhile True:\n    pass\n", "endless.py")
    with pytest.raises(BackendError, match="got no answer in 8 s for 1 lowerings"):
        lower_many([Lowering(endless, SMALL)], timeout_s=8)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


def test_a_home_that_cannot_be_written_to_hides_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/1")
    (kernels,) = lower_many([Lowering(step("s0"), SMALL)])
    assert not isinstance(kernels, LoweringError), str(kernels)
    assert [kernel.shared_bytes for kernel in kernels] == [65536, 32768]


def test_an_error_without_a_text_is_named() -> None:
    silent = Submission(
        "class Silent(Exception):\n    def __str__(self):\n        raise self\n\ndef run_kernel(*args):\n"
        "    raise Silent\n", "silent.py",
    )  # fmt: skip
    half = Submission("def run_kernel(*args):\n    raise ValueError('\\ud800\\nsecond line')\n", "half.py")
    without, broken = lower_many([Lowering(silent, SMALL), Lowering(half, SMALL)])
    assert str(without) == "silent.py for sm_80: Silent"
    assert isinstance(broken, LoweringError)
    assert str(broken) == "half.py for sm_80: ValueError: ?"
    assert broken.message == "ValueError: ?\nsecond line"


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
        Lowering(step("s0"), CASES[1], "sm_1")
    with pytest.raises(BackendError, match="no/such/python"):
        lower_many([Lowering(step("s0"), SMALL)], python="no/such/python")
    with pytest.raises(BackendError, match="cannot lower"):
        # An interpreter that has no TileLang.
        lower_many([Lowering(step("s0"), SMALL)], python=_bare_interpreter())


def _bare_interpreter() -> str:
    return getattr(sys, "_base_executable", sys.executable)
