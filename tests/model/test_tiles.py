import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lab.machine.devices import device
from moe_lab.model.lowering import Lowering, lower_many
from moe_lab.model.tiles import as_dict, fit, resources
from moe_lab.problem.contract import CASES, Case
from moe_lab.problem.errors import ContractError, DataError, SubmissionError
from moe_lab.problem.submission import Submission
from moe_lab.steps import STEPS, step

SMALL = Case("small", 4, 1024, 1024, 568)

#: Stage 1 N, K, threads; stage 2 N, K, threads; stages. Each line is two tile shapes.
SHAPES = [
    (128, 128, 256, 128, 128, 256, 1), (128, 128, 256, 128, 128, 256, 2), (64, 128, 128, 256, 64, 256, 1),
    (64, 64, 128, 128, 64, 128, 2), (32, 64, 128, 64, 32, 128, 3), (128, 32, 256, 32, 128, 128, 3),
    (256, 32, 256, 256, 32, 256, 2), (64, 32, 256, 64, 256, 256, 2), (32, 32, 128, 32, 32, 128, 4),
    (128, 64, 512, 128, 32, 512, 1), (64, 256, 256, 32, 256, 256, 1), (32, 128, 128, 64, 128, 256, 0),
    (128, 64, 256, 64, 64, 256, 3), (256, 64, 512, 256, 128, 512, 1), (64, 512, 128, 32, 512, 128, 1),
    (128, 256, 256, 128, 256, 256, 1), (32, 256, 256, 256, 256, 256, 1), (64, 128, 256, 128, 64, 256, 4),
    (128, 32, 128, 64, 32, 256, 2), (32, 1024, 128, 64, 1024, 128, 2),
]  # fmt: skip


def baseline(n1, k1, t1, n2, k2, t2, stages):
    return step("s0").with_literals(
        STAGE1_BLOCK_N=n1, STAGE1_BLOCK_K=k1, STAGE1_THREADS=t1, STAGE2_BLOCK_N=n2, STAGE2_BLOCK_K=k2,
        STAGE2_THREADS=t2, NUM_STAGES=stages,
    )  # fmt: skip


FORM = """
import tilelang
import tilelang.language as T

BM, BN, BK = 128, 128, 64


@tilelang.jit(pass_configs={configs})
def build(rows, width):
    @T.prim_func
    def kernel(x: T.Tensor((rows, width), "float16"), w: T.Tensor((4, width, width), "float16"),
               v: T.Tensor((4, width, width), "float16"), r: T.Tensor((568,), "float32"),
               s: T.Tensor((4,), "int32"), y: T.Tensor((rows, width), "float16")):
        with T.Kernel(rows // BM, width // BN, threads=256) as (bx, by):
            a = T.alloc_shared((BM, BK), "float16")
            b = T.alloc_shared((BN, BK), "float16")
            a2 = T.alloc_shared((BM, BK), "float16")
            b2 = T.alloc_shared((BN, BK), "float16")
            c = T.alloc_shared((BM, BN), "{epilogue}")
            q = T.alloc_shared((5,), "int32")
            acc = T.alloc_fragment((BM, BN), "float32")
            T.clear(acc)
{body}
    return kernel


def run_kernel(x, gate_w, up_w, down_w, weights, sizes, offsets, padded, blocks, out):
    build(x.shape[0], x.shape[1])(x, gate_w, up_w, weights, sizes, out)
"""


def loop(stages, a="a", b="b", weight="w"):
    kind = "T.serial(width // BK)" if stages is None else f"T.Pipelined(width // BK, num_stages={stages})"
    return f"""
for k in {kind}:
    T.copy(x[bx * BM, k * BK], {a})
    T.copy({weight}[0, by * BN, k * BK], {b})
    T.gemm({a}, {b}, acc, transpose_B=True)
"""


def inside(head, body):
    return head + "\n" + "\n".join("    " + line for line in body.strip().splitlines()) + "\n"


STORE = "T.copy(acc, y[bx * BM, by * BN])\n"
THROUGH_SHARED = "T.copy(acc, c)\nT.copy(c, y[bx * BM, by * BN])\n"
TWO = loop(2) + loop(2, "a2", "b2", "v")
STRAIGHT = """
T.copy(x[bx * BM, 0], a)
T.copy(w[0, by * BN, 0], b)
T.copy(x[bx * BM, BK], a2)
T.gemm(a, b, acc, transpose_B=True)
T.copy(w[0, by * BN, BK], b2)
T.gemm(a2, b2, acc, transpose_B=True)
"""

#: Structures that decide copies and lifetimes, and the shared memory that TileLang 0.1.15 gives each.
FORMS = {
    "serial loop, result through shared": loop(None) + THROUGH_SHARED,
    "pipeline, result through shared": loop(3) + THROUGH_SHARED,
    "two pipelines after one another": TWO + STORE,
    "two pipelines inside a loop": inside("for again in T.serial(2):", TWO) + STORE,
    "everything under a condition": inside("if s[0] > 0:", loop(2) + THROUGH_SHARED),
    "condition inside condition": inside("if s[0] > 0:", inside("if s[1] > 0:", TWO)) + STORE,
    "else branch": inside("if s[0] > 0:", loop(2)) + inside("else:", loop(2, "a2", "b2", "v")) + STORE,
    "condition around a copy": loop(2).replace("    T.copy(w", "    if s[0] > 0:\n        T.copy(w") + STORE,
    "lifetimes that overlap in part": STRAIGHT + STORE,
    "small odd buffer kept to the end": (
        "T.copy(s[0:4], q[0:4])\n" + loop(1)
        + "for i, j in T.Parallel(BM, BN):\n    acc[i, j] = acc[i, j] * q[j % 4]\n" + STORE
    ),
    "elementwise copy": (
        "for k in T.Pipelined(width // BK, num_stages=2):\n"
        "    for i, j in T.Parallel(BM, BK):\n        a[i, j] = x[bx * BM + i, k * BK + j]\n"
        "    T.copy(w[0, by * BN, k * BK], b)\n    T.gemm(a, b, acc, transpose_B=True)\n" + STORE
    ),
    "masked elementwise copy": (
        "for k in T.Pipelined(width // BK, num_stages=2):\n"
        "    for i, j in T.Parallel(BM, BK):\n"
        "        a[i, j] = T.if_then_else(i < s[0], x[bx * BM + i, k * BK + j], T.float16(0))\n"
        "    T.copy(w[0, by * BN, k * BK], b)\n    T.gemm(a, b, acc, transpose_B=True)\n" + STORE
    ),
    "a layout hint keeps nothing alive": "T.annotate_layout({c: tilelang.layout.make_swizzled_layout(c)})\n" + loop(2)
    + THROUGH_SHARED,
}  # fmt: skip


def form(body, epilogue="float16", configs="{}"):
    indented = "\n".join(" " * 12 + line for line in body.strip().splitlines())
    return Submission(FORM.replace("{configs}", configs).replace("{epilogue}", epilogue).replace("{body}", indented))


#: Shared memory, threads and bytes a thread of each launch, as lowered before: lowering takes a second a launch.
RECORDED = Path(__file__).with_name("lowered_sm80.csv")
COLUMNS = ["tilelang", "source_hash", "launch", "shared_bytes", "threads", "local_bytes", "blocks"]


def lowered(submissions, target="sm_80", case=SMALL):
    answers = lower_many([Lowering(item, case, target) for item in submissions])
    for answer in answers:
        assert isinstance(answer, list), answer
    return answers


def figures(kernels):
    return [(k.shared_bytes, k.threads, k.local_bytes, k.grid[0] * k.grid[1]) for k in kernels]


def lowered_figures(submissions):
    """What sm_80 lowering gives, from the record or else lowered now; MOE_LAB_RECORD=1 writes the record again."""
    version = importlib.metadata.version("tilelang")
    known = {}
    if RECORDED.exists() and not os.environ.get("MOE_LAB_RECORD"):
        with RECORDED.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["tilelang"] == version:
                    known.setdefault(row["source_hash"], []).append(tuple(int(row[name]) for name in COLUMNS[3:]))
    missing = [item for item in submissions if item.source_hash not in known]
    fresh = {item.source_hash: figures(kernels) for item, kernels in zip(missing, lowered(missing), strict=True)}
    if fresh and os.environ.get("MOE_LAB_RECORD"):
        old = RECORDED.read_text().splitlines()[1:] if RECORDED.exists() else []
        kept = [line for line in old if line.split(",")[1] not in fresh]
        new = [
            ",".join(map(str, (version, key, number, *row)))
            for key, rows in fresh.items() for number, row in enumerate(rows, start=1)
        ]  # fmt: skip
        RECORDED.write_text("\n".join([",".join(COLUMNS), *kept, *new]) + "\n")
    return [(known | fresh)[item.source_hash] for item in submissions]


def shared_of(submission, case=SMALL):
    found = resources(submission, case)
    assert found.unknown == ()
    return [kernel.shared_bytes for kernel in found.kernels]


def test_the_baseline_fills_the_shared_memory_of_a_c500_and_two_stages_overflow_it():
    one = resources(step("s0"), CASES[1])
    assert [kernel.shared_bytes for kernel in one.kernels] == [65536, 32768]
    assert fit(one, device("c500")).fits is True
    two = resources(step("s0").with_literals(NUM_STAGES=2), CASES[1])
    assert [kernel.shared_bytes for kernel in two.kernels] == [131072, 65536]
    refused = fit(two, device("c500"))
    assert refused.fits is False
    assert refused.kernels[0].reasons == (
        "stage 1 needs 131072 bytes of shared memory, a block of the MetaX C500 has 65536",
    )
    assert fit(two, device("h200")).fits is True


def test_shared_memory_equals_what_tilelang_lowers_for_forty_tile_shapes():
    assert 2 * len(SHAPES) >= 40
    submissions = [baseline(*shape) for shape in SHAPES]
    for shape, submission, real in zip(SHAPES, submissions, lowered_figures(submissions), strict=True):
        found = resources(submission, SMALL).kernels
        assert [(k.shared_bytes, k.threads, k.blocks) for k in found] == [(r[0], r[1], r[3]) for r in real], shape
        # Fragments are a lower bound of what a thread really keeps.
        assert all(mine.fragment_registers * 4 <= row[2] for mine, row in zip(found, real, strict=True)), shape


def test_shared_memory_equals_what_tilelang_lowers_for_other_structures():
    submissions = {name: form(body) for name, body in FORMS.items()}
    submissions["fp32 through shared"] = form(loop(2) + THROUGH_SHARED, "float32")
    submissions["no reuse"] = form(loop(2) + THROUGH_SHARED, configs='{"tl.disable_shared_memory_reuse": True}')
    for name, real in zip(submissions, lowered_figures(list(submissions.values())), strict=True):
        assert shared_of(submissions[name]) == [real[0][0]], name


def test_the_record_is_what_tilelang_lowers_today():
    submissions = [baseline(*SHAPES[5]), form(FORMS["pipeline, result through shared"])]
    assert [figures(kernels) for kernels in lowered(submissions)] == lowered_figures(submissions)


def test_every_step_of_the_c500_branch_is_predicted_as_lowered():
    steps = [entry for entry in STEPS.values() if entry.branch in ("base", "c500")]
    submissions = [entry.submission() for entry in steps]
    for entry, submission, real in zip(steps, submissions, lowered_figures(submissions), strict=True):
        assert shared_of(submission) == [row[0] for row in real], entry.name
        assert fit(resources(submission, CASES[3]), device("c500")).fits is True, entry.name


def test_sixty_four_lanes_are_inferred_on_the_stand_in():
    # gfx90a is not a C500: it shares the 64 lanes and the 64 KiB.
    (kernels,) = lowered([step("s0")], "gfx90a")
    found = fit(resources(step("s0"), SMALL), device("c500"))
    assert [k.shared_bytes for k in kernels] == [part.kernel.shared_bytes for part in found.kernels]
    assert [k.threads // 64 for k in kernels] == [part.waves_of_threads for part in found.kernels] == [4, 4]


def test_registers_waves_and_rounds_of_the_baseline():
    first, second = fit(resources(step("s0"), CASES[1]), device("c500")).kernels
    # Two 128 x 128 fp32 accumulators over 256 threads, and the 128 x 128 fp16 token tile.
    assert (first.kernel.accumulator_registers, first.kernel.fragment_registers) == (128, 160)
    assert (first.waves_of_threads, first.blocks_per_processor, first.limited_by) == (4, 1, "shared memory")
    assert (second.blocks_per_processor, second.limited_by) == (2, "shared memory")
    assert first.grid_waves == pytest.approx(32 * 64 / 104)
    assert first.wave_efficiency == pytest.approx(32 * 64 / 104 / 20)
    assert second.grid_waves == pytest.approx(32 * 16 / (2 * 104))


def test_reads_and_arithmetic_follow_the_routing():
    equal = resources(step("s0"), CASES[1])
    assert equal.weight_passes() == {"gate_w": 2, "up_w": 2, "down_w": 2}
    assert equal.work_ratio == pytest.approx(256 / 142)
    alone = resources(step("s0"), CASES[1], (2272, *(0,) * 15))
    assert alone.weight_passes()["gate_w"] == 18
    assert alone.work_ratio == pytest.approx(18 * 128 / 2272)
    narrow = resources(step("s0").with_literals(STAGE1_BLOCK_N=64), CASES[1])
    assert narrow.weight_passes() == equal.weight_passes()
    assert (
        narrow.kernels[0].reads_bytes["stacked_expert_tokens"]
        == 2 * equal.kernels[0].reads_bytes["stacked_expert_tokens"]
    )


def test_too_many_registers_and_threads_do_not_fit():
    wide = resources(baseline(256, 32, 128, 128, 128, 1024, 1), CASES[1])
    found = fit(wide, device("c500"))
    assert "stage 1 keeps at least 528 registers per thread in fragments" in found.kernels[0].reasons[0]
    crowd = fit(resources(baseline(128, 128, 2112, 128, 128, 40, 1), CASES[1]), device("c500"))
    assert any("2112 threads per block" in reason for reason in crowd.kernels[0].reasons)
    assert any("no multiple of" in reason for reason in crowd.kernels[1].reasons)


STRANGER = """
import math

import torch
import tilelang
from tilelang import language as TL

TILES = {2048: (64, 32), 1024: (128, 64)}
DEFAULT = (32, 32)
_cache = {}


def pick(hidden, *, wide=False):
    bn, bk = TILES.get(hidden, DEFAULT)
    while bk * 2 <= 64 and not wide:
        bk *= 2
    return dict(bn=bn, bk=bk, threads=[128, 256][int(math.log2(bn)) >= 7])


def make(rows, hidden, inter, bn=64, bk=64, threads=128, dtype="float16"):
    stages = 2 if hidden > 1000 else 1

    @TL.macro
    def step_of(tokens, weight, a, b, acc, bx, by, k):
        TL.copy(tokens[bx * 128, k * bk], a)
        TL.copy(weight[0, by * bn, k * bk], b)
        TL.gemm(a, b, acc, transpose_B=True)

    @TL.prim_func
    def main(tokens: TL.Tensor((rows, hidden), dtype), gate: TL.Tensor((4, inter, hidden), dtype),
             out: TL.Tensor((rows, hidden), dtype)):
        with TL.Kernel(TL.ceildiv(rows, 128), TL.ceildiv(inter, bn), threads=threads) as (bx, by):
            a = TL.alloc_shared([128, bk], dtype)
            b = TL.alloc_shared([bn, bk], dtype)
            acc = TL.alloc_fragment([128, bn], "float32")
            TL.clear(acc)
            for k in TL.Pipelined(hidden // bk, num_stages=stages):
                step_of(tokens, gate, a, b, acc, bx, by, k)
            TL.copy(acc, out[bx * 128, by * bn])

    return main


build = tilelang.jit(make)


@tilelang.jit
def builder(rows, hidden, inter, **config):
    return make(rows, hidden, inter, **config)


def run_kernel(tokens, gate, up, down, weights, sizes, offsets, padded, blocks, out):
    rows, hidden = tokens.shape
    key = f"{rows}-{hidden}"
    kernel = _cache.get(key)
    if kernel is None:
        kernel = builder(rows, hidden, gate.size(1), **pick(hidden))
        _cache[key] = kernel
    if tokens.device.index == 0:
        note = 1
    kernel(tokens, gate, out)
"""


def test_a_strangers_file_is_followed_through_helpers_defaults_and_macros():
    found = resources(Submission(STRANGER), SMALL)
    (kernel,) = found.kernels
    assert found.unknown == ()
    assert kernel.grid == (8, 8)
    assert kernel.threads == 256
    assert kernel.shared_bytes == 2 * (128 * 64 + 128 * 64) * 2
    assert {item.name: item.copies for item in kernel.shared} == {"a": 2, "b": 2}
    other = resources(Submission(STRANGER), CASES[1]).kernels[0]
    assert (other.threads, other.shared_bytes) == (128, 2 * (128 * 64 + 64 * 64) * 2)


def test_fragments_that_are_never_alive_at_once_do_not_add_up():
    # Of the two ways of a condition only the larger counts, on top of the accumulator that outlives both.
    ways = """
if s[0] > 0:
    first = T.alloc_fragment((128, 256), "float32")
    T.clear(first)
else:
    second = T.alloc_fragment((128, 128), "float32")
    T.clear(second)
"""
    found = resources(form(ways + loop(1) + STORE), SMALL).kernels[0]
    assert found.fragment_registers == (128 * 256 + 128 * 128) // 256
    assert found.accumulator_registers == 128 * 128 // 256
    both = resources(form("first = T.alloc_fragment((128, 128), 'float32')\nT.clear(first)\n" + loop(1) + STORE
                          + "T.copy(first, y[bx * BM, by * BN])\n"), SMALL).kernels[0]  # fmt: skip
    assert both.fragment_registers == 2 * 128 * 128 // 256


def test_a_persistent_grid_with_warps_of_its_own_is_read_as_far_as_it_can_be():
    persistent = """
tx = T.get_thread_binding()
todo = T.alloc_var("int32", init=1)
if tx >= 128:
    while todo == 1:
        T.copy(x[bx * BM, 0], a)
        todo = 0
else:
    while todo == 1:
        T.gemm(a, b, acc, transpose_B=True)
        todo = 0
"""
    source = form(persistent).source.replace("T.Kernel(rows // BM, width // BN,", "T.ClusterKernel(132, 1,")
    source = source.replace("threads=256", "cluster_dims=2, threads=384")
    (kernel,) = resources(Submission(source), SMALL).kernels
    assert (kernel.grid, kernel.threads, kernel.shared_bytes) == ((132, 1), 384, 2 * 128 * 64 * 2)
    assert kernel.reads_bytes["stacked_expert_tokens"] is None
    assert any("`while todo[0] == 1` ends at run time" in text for text in kernel.unknown)


def test_host_code_may_read_the_group_sizes_but_no_values():
    source = step("s0").source.replace(
        "    kernel = _get_kernel(\n        hidden,",
        "    kernel = _get_kernel(\n        hidden if int(group_sizes.max().item()) == 142 else 0,",
    )
    assert source != step("s0").source
    assert resources(Submission(source), CASES[1]).kernels == resources(step("s0"), CASES[1]).kernels
    values = Submission(source.replace("group_sizes.max()", "gate_w.max()"), "values.py")
    with pytest.raises(SubmissionError, match=r"^values.py cannot be followed: RuntimeError: .* on meta tensors$"):
        resources(values, CASES[1])


def test_what_cannot_be_evaluated_is_named_with_its_expression():
    # How often a block goes round is read from device memory.
    found = resources(form(loop(1).replace("width // BK", "s[0]") + STORE), SMALL)
    assert found.kernels[0].shared_bytes == 32768
    assert "the operations of stage 1: `s[0]` is known at run time only" in found.unknown
    assert found.work_ratio is None
    assert fit(found, device("c500")).fits is True


def test_sizes_are_read_in_every_way_that_tensors_offer():
    ways = {
        "= stacked_expert_tokens.shape\n": "= len(out), out.size(dim=-1)\n",
        "gate_w.shape[0], gate_w.shape[1]": "len(group_sizes), up_w.size(1)",
        "routed_expert_weights.shape[0]": "routed_expert_weights.numel()",
        "group_idx_for_bx.shape[0]": "group_idx_for_bx.nelement()",
        '"float32"': '"float"',
    }
    source = step("s0").source
    for old, new in ways.items():
        assert old in source
        source = source.replace(old, new)
    found, same = resources(Submission(source), CASES[1]), resources(step("s0"), CASES[1])
    assert found.kernels == same.kernels
    with pytest.raises(SubmissionError, match="IndexError: Dimension out of range"):
        resources(Submission(step("s0").source.replace("gate_w.shape[1]", "gate_w.size(7)")), CASES[1])


@pytest.mark.parametrize("value", ["0", "-64", "9" * 4000, "0x" + "f" * 5000, "2**31"])
def test_a_tile_that_cannot_be_is_refused_or_never_fits(value):
    for name in ("STAGE1_BLOCK_N", "STAGE1_BLOCK_K", "STAGE1_THREADS"):
        source = step("s0").source.replace(f"{name} = {step('s0').values[name]}", f"{name} = {value}")
        try:
            found = resources(Submission(source), CASES[1])
        except SubmissionError:
            continue
        assert fit(found, device("c500")).fits is not True, name
        found.weight_passes()
        assert json.dumps(as_dict(found, [fit(found, device("c500"))]), allow_nan=False)


@pytest.mark.parametrize(("name", "shared"), [("names_from_imports", [32768, 24576]), ("half_blocks", [24576, 16384])])
def test_kernels_kept_under_keys_of_text_are_found(name, shared):
    found = resources(Submission.from_file(Path(__file__).parents[1] / "honest" / f"{name}.py"), CASES[1])
    assert [kernel.shared_bytes for kernel in found.kernels] == shared
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (loop(2) + loop(3) + STORE, "a is multiplied by the pipeline of one loop and used in another"),
        ("m = T.alloc_fragment((BM,), 'float32')\n" + loop(1) + "T.reduce_max(acc, m, dim=1)\n" + STORE, "T.reduce"),
        (
            loop(2).replace("=2)", "=2, order=[0, 1, 2], stage=[0, 0, 1])") + STORE,
            "the pipeline over k with an explicit order is not modelled",
        ),
    ],
)
def test_what_is_not_modelled_is_said_instead_of_guessed(body, reason):
    found = resources(form(body), SMALL)
    assert found.kernels[0].shared_bytes is None
    assert any(reason in text for text in found.unknown)


def test_a_file_that_launches_nothing_is_told_so():
    with pytest.raises(SubmissionError, match=r"got no T\.Kernel in what idle.py calls from run_kernel"):
        resources(Submission("def run_kernel(*a):\n    return None\n", "idle.py"), SMALL)


def test_sizes_and_devices_that_do_not_fit_the_question():
    with pytest.raises(ContractError, match="expected 16 sizes"):
        resources(step("s0"), CASES[1], (1, 2))
    with pytest.raises(DataError, match=r"^got Laptop CPU .*, expected a GPU, because"):
        fit(resources(step("s0"), CASES[1]), device("laptop"))


def run_fit(*args):
    return subprocess.run(
        [sys.executable, "-m", "moe_lab", "fit", *args], capture_output=True, text=True, timeout=120
    )  # fmt: skip


def test_the_command_says_fits_or_why_not(tmp_path):
    fits = run_fit(str(STEPS["s0_baseline"].path))
    assert fits.returncode == 0, fits.stderr
    assert fits.stdout.startswith("s0_baseline.py, case 1, balanced, MetaX C500: fits\nFits the MetaX C500.")
    assert "elsewhere: h200 fits" in fits.stdout
    # The limit that the explorer and the rule block-threads name too: none is published for a block.
    assert re.search(r"threads +│ 256 of 2048 per processor +│ 256 of 2048 per processor", fits.stdout)
    path = step("s0").with_literals(NUM_STAGES=2).save(tmp_path / "two.py")
    refused = run_fit(str(path), "--case", "3", "--json")
    assert refused.returncode == 1
    answer = json.loads(refused.stdout)
    assert answer["devices"][0]["fits"] is False
    assert answer["kernels"][0]["shared_bytes"] == 131072
    assert "131072 bytes" in answer["devices"][0]["kernels"][0]["reasons"][0]


def test_the_command_refuses_an_unknown_device_in_one_sentence():
    done = run_fit(str(STEPS["s0_baseline"].path), "--device", "C5000")
    assert done.returncode == 2
    assert done.stderr.startswith("moe-lab: got device 'C5000', expected one of c500")
    assert "laptop" not in done.stderr
