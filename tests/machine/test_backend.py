import json
import os
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_lab.machine import backend, cpu
from moe_lab.problem.errors import BackendError, UnsupportedOnCPUError
from moe_lab.problem.submission import Submission

ON_CPU = backend.detect().kind == "cpu"
cpu_only = pytest.mark.skipif(not ON_CPU, reason="TileLang's names keep their own meaning where there is a GPU")


def load(folder: Path, text: str) -> types.SimpleNamespace:
    """Execute a file with TileLang kernels, after the names got their CPU meaning."""
    backend.prepare()
    header = "import tilelang\nimport tilelang.language as T\n\n"
    return types.SimpleNamespace(**Submission(header + textwrap.dedent(text)).execute(folder))


def product_of(run: Callable[..., None], a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel makes of A and a B, and what it should."""
    b = torch.randn(48, 80, generator=torch.Generator().manual_seed(5)).half()
    c = torch.full((len(a), 48), float("nan"), dtype=torch.float16)
    run(a, b, c)
    return c.float(), a.float() @ b.float().T


# The same product in the styles that people write; each gets A (64, 80), B (48, 80) and fills C (64, 48).
STYLES = {
    "names through T, ragged tiles": """
        @tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
        def build():
            @T.prim_func
            def product(
                A: T.Tensor((64, 80), "float16"), B: T.Tensor((48, 80), "float16"), C: T.Tensor((64, 48), "float16"),
            ):
                with T.Kernel(T.ceildiv(64, 32), T.ceildiv(48, 32), threads=128) as (bx, by):
                    a = T.alloc_fragment((32, 32), "float16")
                    b = T.alloc_shared((32, 32), "float16")
                    c = T.alloc_fragment((32, 32), "float32")
                    T.use_swizzle(10)
                    T.clear(c)
                    for k in T.Pipelined(T.ceildiv(80, 32), num_stages=1):
                        T.copy(A[bx * 32, k * 32], a)
                        T.copy(B[by * 32, k * 32], b)
                        T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(c, C[bx * 32, by * 32])

            return product

        run = build()
        """,
    "imported names, text keys, explicit loops": """
        from tilelang import jit
        from tilelang import language as T
        from tilelang.language import Parallel, Pipelined, alloc_fragment, alloc_shared, copy, gemm

        @jit(
            out_idx=None, target="cuda",
            pass_configs={"tl.disable_warp_specialized": True, "tl.enable_fast_math": True},
        )
        def build():
            @T.prim_func
            def product(
                A: T.Buffer((64, 80), "float16"), B: T.Buffer((48, 80), "float16"), C: T.Buffer((64, 48), "float16"),
            ):
                with T.Kernel(4, 3, threads=(64, 2)) as (bx, by):
                    a = alloc_shared([16, 16], "float16")
                    b = alloc_shared([16, 16], "float16", "shared")
                    c = alloc_fragment([16, 16], "float32")
                    T.fill(c, 0)
                    for k in Pipelined(0, 5, num_stages=3, order=[0, 1, 2], stage=[0, 0, 1]):
                        for i, j in Parallel(16, 16, coalesced_width=8):
                            a[i, j] = A[bx * 16 + i, k * 16 + j]
                        copy(B[by * 16 : by * 16 + 16, k * 16 : k * 16 + 16], b, coalesced_width=4)
                        gemm(a, b, c, False, True, T.GemmWarpPolicy.Square, False, 1)
                    for i, j in Parallel(16, 16):
                        C[bx * 16 + i, by * 16 + j] = T.cast(c[i, j], "float16")

            return product

        run = build()
        """,
    "a vendor's build: its module, its keys, its hints": """
        from tilelang.maca.intrinsics import TensorCoreIntrinEmitter, make_mma_swizzle_layout
        from tilelang.maca.intrinsics.layout.mma_layout import make_mma_swizzle_layout as again

        @tilelang.jit(
            target="maca", execution_backend="cython", vendor_option=3,
            pass_configs={
                tilelang.PassConfigKey.TL_VENDOR_ONLY: True,
                "tl.of_a_vendor": 1,
                "tl.disable_safe_memory_legalize": True,
            },
        )
        def build():
            @T.prim_func
            def product(
                A: T.Tensor((64, 80), "float16"), B: T.Tensor((48, 80), "float16"), C: T.Tensor((64, 48), "float16"),
            ):
                with T.Kernel(1, 1, threads=256) as (bx, by):
                    a = T.alloc_shared((64, 16), "float16")
                    b = T.alloc_shared((48, 16), "float16")
                    c = T.alloc_fragment((64, 48), "float32")
                    T.annotate_layout({a: make_mma_swizzle_layout(a, True, 4), b: again(b)})
                    T.use_swizzle(3, order="column")
                    T.assume(bx < 1)
                    for k in T.serial(5):
                        T.copy(A[0, k * 16], a)
                        T.sync_threads()
                        T.copy(B[0, k * 16], b, coalesced_width=4)
                        T.gemm(a, b, c, transpose_B=True, clear_accum=k == 0, k_pack=2)
                        T.sync_threads()
                    T.copy(c, C)

            return product

        run = build()
        """,
    "compiled by hand, tokens of any number": """
        rows = T.dynamic("rows")

        @T.prim_func
        def product(
            A: T.Tensor((rows, 80), "float16"),
            B: T.Tensor((48, 80), "float16"),
            C: T.Tensor((rows, 48), "float16"),
        ):
            with T.Kernel(T.ceildiv(rows, 32), threads=128) as bx:
                a = T.alloc_shared((32, 80), "float16")
                b = T.alloc_shared((80, 48), "float16")
                c = T.alloc_fragment((32, 48), "float32")
                T.copy(A[bx * 32, 0], a)
                for i, j in T.Parallel(48, 80):
                    b[j, i] = B[i, j]
                T.gemm(a, b, c, clear_accum=True)
                for i, j in T.Parallel(32, 48):
                    if bx * 32 + i < rows:
                        C[bx * 32 + i, j] = c[i, j]

        run = tilelang.compile(product, target="cuda")
        """,
    "a trip count known at run time, a tile fetched one step ahead": """
        from tilelang.maca.intrinsics import make_mma_swizzle_layout

        @tilelang.jit(pass_configs={"tl.enable_lower_ldgstg_predicated": True, "tl.disable_vectorize_256": True})
        def build(dtype):
            shape = (1, 64, 80)

            @T.prim_func
            def product(
                A: T.Tensor(shape, dtype),
                B: T.Tensor((1, 48, 80), dtype),
                rows: T.Tensor((1,), T.int32),
                C: T.Tensor((64, 48), dtype),
            ):
                with T.Kernel(1, threads=64) as bx:
                    a = T.alloc_shared((64, 16), dtype=dtype)
                    b = T.alloc_shared((48, 16), dtype=dtype)
                    ahead = T.alloc_fragment((48, 16), dtype=dtype)
                    c = T.alloc_fragment((64, 48), dtype=T.float32)
                    T.annotate_layout({a: make_mma_swizzle_layout(a, vecSize=4)})
                    expert = rows[bx] - 64
                    active = T.max(0, T.min(64, rows[bx]))
                    steps = T.if_then_else(active > 0, T.ceildiv(80, 16), 0)
                    T.clear(c)
                    T.copy(B[expert, 0:48, 0:16], b)
                    for k in range(steps):
                        T.copy(A[expert, 0:64, k * 16 : (k + 1) * 16], a)
                        if k + 1 < steps:
                            T.copy(B[expert, 0:48, (k + 1) * 16 : (k + 2) * 16], ahead, coalesced_width=8)
                        T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.Square, k_pack=2)
                        T.sync_threads()
                        T.copy(ahead, b, coalesced_width=4)
                    for i, j in T.Parallel(64, 48):
                        if i < active:
                            C[i, j] = c[i, j] * 1.0
                        else:
                            C[i, j] = 0

            return product

        kernel = build("float16")

        def run(a, b, c):
            import torch
            kernel(a[None], b[None], torch.tensor([64], dtype=torch.int32), c)
        """,
    "outputs returned": """
        @tilelang.jit(out_idx=[-1])
        def build():
            @T.prim_func
            def product(
                A: T.Tensor((64, 80), "float16"), B: T.Tensor((48, 80), "float16"), C: T.Tensor((64, 48), "float32"),
            ):
                with T.Kernel(1, threads=128) as bx:
                    a = T.alloc_shared((80, 64), "float16")
                    b = T.alloc_shared((48, 80), "float16")
                    c = T.alloc_fragment((64, 48), "float32")
                    T.clear(c)
                    for i, k in T.grid(64, 80):
                        a[k, i] = A[i, k]
                    T.copy(B, b)
                    T.gemm(a[0:48, :], b[:, 0:48], c, transpose_A=True, transpose_B=True)
                    T.gemm(a[48:80, :], b[:, 48:80], c, transpose_A=True, transpose_B=True)
                    T.copy(c, C)

            return product

        kernel = build()

        def run(a, b, c):
            c.copy_(kernel(a, b))
        """,
}


@cpu_only
@pytest.mark.filterwarnings("ignore::moe_lab.machine.cpu.CPUMeaningWarning")
@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_kernel_gives_the_product(style: str, tmp_path: Path) -> None:
    run = load(tmp_path, STYLES[style]).run
    # Tokens of any number, where the kernel takes them.
    for rows in (64, 1, 33, 100) if "any number" in style else (64,):
        got, expected = product_of(run, torch.randn(rows, 80).half())
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    if "ragged" in style:
        a = torch.randn(64, 80).half()
        a[7, 3] = float("nan")  # stays in its row
        got, _ = product_of(run, a)
        assert got.isnan().all(1).nonzero().tolist() == got.isnan().any(1).nonzero().tolist() == [[7]]


@cpu_only
def test_what_was_dropped_is_said_once(tmp_path: Path) -> None:
    cpu._say.cache_clear()  # an earlier test may have heard it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            load(tmp_path, STYLES["a vendor's build: its module, its keys, its hints"])
    said = [str(entry.message) for entry in caught if issubclass(entry.category, cpu.CPUMeaningWarning)]
    for part in ("k_pack", "TL_VENDOR_ONLY", "tl.of_a_vendor", "vendor_option"):
        assert sum(part in message for message in said) == 1, (part, said)


# Element-wise names: what TileLang writes, and what torch says.
ELEMENTWISE = {
    "T.exp(x)": torch.exp,
    "T.__exp(x)": torch.exp,
    "T.exp2(x)": torch.exp2,
    "T.exp10(x)": lambda x: 10**x,
    "T.log2(x)": torch.log2,
    "T.sqrt(x)": torch.sqrt,
    "T.rsqrt(x)": torch.rsqrt,
    "T.sigmoid(x)": torch.sigmoid,
    "T.tanh(x)": torch.tanh,
    "T.erf(x)": torch.erf,
    "T.abs(x - 1.0)": lambda x: (x - 1).abs(),
    "T.floor(x * 3.0)": lambda x: (x * 3).floor(),
    "T.max(T.min(x, 0.9), 0.3)": lambda x: x.clamp(0.3, 0.9),
    "T.clamp(x, 0.3, 0.9)": lambda x: x.clamp(0.3, 0.9),
    "T.pow(x, 3.0)": lambda x: x**3,
    "T.if_then_else(x > 1.0, x, 0.0)": lambda x: torch.where(x > 1, x, 0),
    "T.Select(x > 1.0, x, 0.0)": lambda x: torch.where(x > 1, x, 0),
    'T.cast(T.cast(x, "float16"), "float32")': lambda x: x.half().float(),
    "T.fma(x, x, 1.0)": lambda x: x * x + 1,
    "T.fast_rcp(x)": lambda x: 1 / x,
    'T.ieee_fdiv(x, 3.0, "rn")': lambda x: x / 3,
    'T.if_then_else(T.isnan(x), 1.0, T.infinity("float32"))': lambda x: torch.full_like(x, float("inf")),
    "T.__ldg(A[i]) * 2.0": lambda x: 2 * x,
}


@cpu_only
def test_elementwise_names(tmp_path: Path) -> None:
    loop = """
            for i in T.Parallel(32):
                x = a[i]
                B[{row}, i] = {expression}"""
    text = f"""
@tilelang.jit
def build():
    @T.prim_func
    def elementwise(A: T.Tensor((32,), "float32"), B: T.Tensor(({len(ELEMENTWISE)}, 32), "float32")):
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_fragment((32,), "float32")
            T.copy(A, a)
{"".join(loop.format(row=row, expression=expression) for row, expression in enumerate(ELEMENTWISE))}

    return elementwise
"""
    x, got = torch.linspace(0.1, 2.0, 32), torch.zeros(len(ELEMENTWISE), 32)
    load(tmp_path, text).build()(x, got)
    for row, (expression, truth) in zip(got, ELEMENTWISE.items(), strict=True):
        torch.testing.assert_close(row, truth(x), rtol=1e-5, atol=1e-6, msg=lambda text, e=expression: f"{e}: {text}")


@cpu_only
def test_loops_reductions_variables_and_regions(tmp_path: Path) -> None:
    text = """
        @tilelang.jit
        def build():
            @T.prim_func
            def mixture(A: T.Tensor((8, 16), "float32"), B: T.Tensor((12, 16), "float32")):
                with T.Kernel(1, threads=64) as bx:
                    a = T.alloc_shared((8, 16), "float32")
                    rows = T.alloc_fragment((8,), "float32")
                    columns = T.alloc_fragment((16,), "float32")
                    count = T.alloc_var("int32", 0)
                    total = T.alloc_local((1,), "float32")
                    T.copy(A, a)
                    T.fill(B, 0.0)
                    T.reduce_sum(a, rows, dim=1)
                    for i in T.Parallel(8):
                        B[0, i] = rows[i]
                    T.reduce_max(a, columns, dim=0)
                    T.copy(columns, B[1, 0:16])
                    T.reduce_absmax(a, columns, dim=0, clear=True)
                    T.copy(columns, B[2, 0:16])
                    T.copy(a[2:5, 0:16], B[3:6, 0:16])
                    for i in T.unroll(2):
                        for j in T.vectorized(16):
                            B[6 + i, j] = a[i, j] * 2.0
                    for j in T.Serial(0, 16, 4):
                        B[8, j] = 1.0
                    total[0] = 0.0
                    for i, j in T.Parallel(8, 16):
                        T.atomic_add(total[0], a[i, j])
                    B[9, 0] = total[0]
                    while count < 5:
                        count = count + 2
                    B[10, 0] = count
                    for tile in T.Persistent([4], 1, bx):
                        B[11, tile] = B[11, tile] + 1.0

            return mixture
        """
    a = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    got = torch.full((12, 16), float("nan"))
    load(tmp_path, text).build()(a, got)
    expected = torch.zeros(12, 16)
    expected[0, :8] = a.sum(1)
    expected[1], expected[2] = a.amax(0), a.abs().amax(0)
    expected[3:6], expected[6:8] = a[2:5], 2 * a[:2]
    expected[8, ::4] = 1
    expected[9, 0], expected[10, 0] = a.sum(), 6
    expected[11, :4] = 1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


REFUSED = {
    "T.ptx_mma(1)": ("T.ptx_mma", "T.gemm"),
    "T.wgmma_gemm(1)": ("T.wgmma_gemm", "T.gemm"),
    "T.TensorCoreIntrinEmitter(1)": ("T.TensorCoreIntrinEmitter", "T.gemm"),
    "T.tvm_mfma(1)": ("T.tvm_mfma", "T.gemm"),
    "T.tma_copy(1)": ("T.tma_copy", "T.copy"),
    "T.async_copy(1)": ("T.async_copy", "T.copy"),
    "T.mbarrier_wait_parity(1)": ("T.mbarrier_wait_parity", "T.sync_threads"),
    "T.alloc_barrier(128)": ("T.alloc_barrier", "T.sync_threads"),
    "T.ws(0)": ("T.ws", "T.Pipelined"),
    'T.call_extern("int32", "f")': ("T.call_extern", "TileLang's own operators"),
    'T.import_source("x")': ("T.import_source", "TileLang's own operators"),
    "T.get_thread_binding(0)": ("T.get_thread_binding", "T.Parallel"),
    "T.shfl_xor(1, 2)": ("T.shfl_xor", "T.Parallel"),
    "T.alloc_sharedd((1,))": ("T.alloc_sharedd", "did you mean T.alloc_shared?"),
    "T.maca_only_thing(1)": ("T.maca_only_thing", "does not have"),
    "Emitter(1)": ("tilelang.maca.intrinsics.TensorCoreIntrinEmitter", "T.gemm"),
    # What only the C backend cannot do.
    "for i in T.serial(4): T.loop_break()": ("kernel kernel: got T.loop_break", "no meaning on a CPU"),
    'T.Kernel(1, prelude="int x;")': ("T.Kernel(prelude=...)", "TileLang's own operators"),
}


@cpu_only
@pytest.mark.parametrize("expression", REFUSED)
def test_names_without_a_cpu_meaning_are_refused_when_used(expression: str, tmp_path: Path) -> None:
    # Importing is no use yet: a file may pick its kernel by device.
    text = f"""
from tilelang.language import mbarrier_arrive, tma_load
from tilelang.maca.intrinsics import TensorCoreIntrinEmitter as Emitter

@tilelang.jit
def build():
    @T.prim_func
    def kernel(A: T.Tensor((1,), "float32")):
        with T.Kernel(1) as bx:
            {expression}

    return kernel
"""
    with pytest.raises(UnsupportedOnCPUError) as caught:
        load(tmp_path, text).build()
    assert all(part in str(caught.value) for part in REFUSED[expression]), str(caught.value)
    assert "\n" not in str(caught.value)


@cpu_only
def test_compiled_kernels_are_kept_for_the_next_process(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    cxx = tmp_path / "cxx"
    cxx.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo "$@" >> {log};; esac\nexec {cpu.compiler()} "$@"\n')
    cxx.chmod(0o755)
    script = tmp_path / "run.py"
    environment = {**os.environ, "CXX": str(cxx), "TILELANG_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "user")

    def compiled(factor: float) -> int:
        log.write_text("")
        script.write_text(
            textwrap.dedent(f"""
            from moe_lab.machine import backend
            backend.prepare()
            import tilelang, tilelang.language as T, torch

            @tilelang.jit
            def build():
                @T.prim_func
                def kernel(A: T.Tensor((8,), "float32")):
                    with T.Kernel(1) as bx:
                        for i in T.Parallel(8):
                            A[i] = A[i] * {factor}
                return kernel

            a = torch.ones(8)
            build()(a)
            assert a.eq({factor}).all()
            """)
        )
        subprocess.run([sys.executable, str(script)], check=True, env=environment)
        return len(log.read_text().splitlines())

    assert compiled(2.0) == 1
    (header,) = (tmp_path / "user/moe_lab/headers").glob("*/common.h")
    assert f"-O3 -march=native -include {header} -DMOE_LAB_KEY=0x" in log.read_text()
    assert "fast-math" not in log.read_text()
    assert compiled(2.0) == 0
    assert compiled(3.0) == 1


@cpu_only
def test_the_cache_key_follows_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("one 1.0", "one 2.0"):
        cxx = tmp_path / "cxx"
        cxx.write_text(f"#!/bin/sh\necho {version}\n")
        cxx.chmod(0o755)
        monkeypatch.setenv("CXX", str(cxx))
        keys.append(cpu.compile_flags())
    assert keys[0] != keys[1]


def test_no_compiler_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"^got no C\+\+ compiler, expected .* `apt-get install g\+\+`"):
        cpu.compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match="no-such-compiler"):
        cpu.compiler()
    if ON_CPU:
        (check,) = [check for check in backend.doctor() if check.name == "C++ compiler"]
        assert not check.ok
        assert check.required
        assert check.remedy


def test_a_cache_folder_that_cannot_be_written_is_said_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file" / "cache"
    blocked.parent.write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(blocked))
    with pytest.warns(UserWarning, match="a file/cache cannot be written"):
        backend.usable_cache_dir()
    replaced = Path(os.environ["TILELANG_CACHE_DIR"])
    assert replaced.is_dir()
    replaced.rmdir()


def test_versions_name_what_a_verdict_depends_on() -> None:
    found = backend.versions()
    assert {"moe_lab", "python", "torch", "tilelang", "apache-tvm-ffi"} <= set(found)
    assert found["torch"] == torch.__version__
    assert json.loads(json.dumps(found)) == found


def test_doctor_finds_this_machine_in_order() -> None:
    checks = {check.name: check for check in backend.doctor()}
    assert checks["a kernel compiles and runs"].ok
    assert all(check.ok for check in checks.values() if check.required)
    assert not any(check.remedy for check in checks.values() if check.ok)
    assert backend.detect().name in checks["device"].found


@pytest.mark.gpu
def test_doctor_finds_a_gpu_and_compiles_for_it() -> None:
    checks = {check.name: check for check in backend.doctor()}
    assert [check for check in checks.values() if check.required and not check.ok] == []
    assert checks["device"].found in (f"{kind}: {backend.detect().name}" for kind in ("cuda", "maca"))
    assert checks["a kernel compiles and runs"].ok


def test_doctor_knows_pairs_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tilelang": "0.1.10", "apache-tvm-ffi": "0.1.12"}
    monkeypatch.setattr(backend, "installed", installed.get)
    checks = {check.name: check for check in backend._tilelang_checks()}
    assert not checks["apache-tvm-ffi"].ok
    assert "0.1.11" in checks["apache-tvm-ffi"].remedy
    installed["apache-tvm-ffi"] = "0.1.10"
    assert all(check.ok for check in backend._tilelang_checks())


def test_doctor_checks_the_environment_of_a_metax_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(environment: dict[str, str]) -> dict[str, backend.Check]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)
            return {check.name: check for check in backend._maca_checks()}

    found = checks({"MACA_PATH": "/maca", "PATH": "/bin:/maca/bin/"})
    assert found["$MACA_PATH"].ok
    assert "/maca/mxgpu_llvm/bin" in found["$PATH"].found
    assert "lacks /maca/bin," not in found["$PATH"].found
    assert not found["$LD_LIBRARY_PATH"].ok
    shell = backend.maca_exports().replace("$HOME/tilelang", "/src/tilelang").replace("/opt/maca", "/maca") + "\nenv -0"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, env={"PATH": os.defpath})
    exported = dict(line.split("=", 1) for line in done.stdout.strip("\0").split("\0"))
    assert [check for check in checks(exported).values() if not check.ok] == []
    assert set(found) == {"$MACA_PATH", "$TILELANG_CACHE_DIR", "$LD_LIBRARY_PATH", "$PATH", "$PYTHONPATH"}


def test_the_readme_shows_the_exports_of_a_metax_machine() -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    assert f"```bash\n{backend.maca_exports()}\n```" in readme.read_text(encoding="utf-8")


# --- what a GPU's library does in fp32, and arguments ----------------------------------------------------------------

UNARY = ("exp", "exp2", "sigmoid", "tanh", "sqrt", "rsqrt", "log", "log2", "erf", "floor", "ceil", "sin", "cos")


@cpu_only
@pytest.mark.parametrize("name", [*UNARY, "pow"])
def test_a_function_of_fp16_is_computed_in_fp32_and_rounded_once(name: str, tmp_path: Path) -> None:
    call = "T.pow(x[i], 2)" if name == "pow" else f"T.{name}(x[i])"
    module = load(tmp_path, f"""
        @tilelang.jit
        def build(N):
            @T.prim_func
            def kernel(a: T.Tensor((N,), "float16"), c: T.Tensor((N,), "float16")):
                with T.Kernel(1, threads=128):
                    x = T.alloc_fragment((N,), "float16")
                    T.copy(a, x)
                    for i in T.Parallel(N):
                        x[i] = {call}
                    T.copy(x, c)

            return kernel
    """)  # fmt: skip
    a = torch.rand(50, generator=torch.Generator().manual_seed(1)).half() + 0.3
    module.build(50)(a, c := torch.empty_like(a))
    wanted = a.float() ** 2 if name == "pow" else getattr(torch, name)(a.float())
    torch.testing.assert_close(c, wanted.half(), rtol=1e-3, atol=2e-4)


@cpu_only
@pytest.mark.parametrize("kind", ["sum", "max", "min", "abssum", "absmax"])
@pytest.mark.parametrize(("given", "out"), [("float16", "float32"), ("int32", "float32"), ("float32", "float16")])
def test_a_reduction_may_change_the_type(kind: str, given: str, out: str, tmp_path: Path) -> None:
    module = load(tmp_path, f"""
        @tilelang.jit
        def build(M, N):
            @T.prim_func
            def kernel(a: T.Tensor((M, N), "{given}"), c: T.Tensor((M,), "{out}")):
                with T.Kernel(1, threads=128):
                    x = T.alloc_fragment((M, N), "{given}")
                    total = T.alloc_fragment((M,), "{out}")
                    T.copy(a, x)
                    T.reduce_{kind}(x, total, dim=1)
                    T.copy(total, c)

            return kernel
    """)  # fmt: skip
    a = (10 * torch.randn(9, 14, generator=torch.Generator().manual_seed(2))).to(getattr(torch, given))
    module.build(9, 14)(a, c := torch.empty(9, dtype=getattr(torch, out)))
    x = a.float().abs() if kind.startswith("abs") else a.float()
    wanted = x.sum(1) if kind.endswith("sum") else x.amax(1) if kind.endswith("max") else x.amin(1)
    torch.testing.assert_close(c.float(), wanted, rtol=1e-3, atol=1e-3)


@cpu_only
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "T.copy(a, x, coalesced_widht=4)",
            "T.copy.. got an unexpected .*'coalesced_widht'; did you mean coalesced_width",
        ),
        ("T.gemm(a, a, x, transposeB=True)", "T.gemm.. .*'transposeB'; did you mean transpose_B"),
        ("T.copy(a)", "T.copy.. missing a required argument: 'dst'"),
        ("T.use_swizzle(4, ordre='row')", "T.use_swizzle.. .*did you mean order"),
        ("T.gemm(x, x, total, transpose_B=True, k_pack=2, wg_wait=1)", None),
        ("T.gemm(x, x, total, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)", None),
        ("T.copy(a, x, coalesced_width=4)", None),
    ],
)
def test_arguments_are_those_that_tilelang_takes(call: str, said: str | None, tmp_path: Path) -> None:
    module = load(tmp_path, f"""
        @tilelang.jit
        def build(N):
            @T.prim_func
            def kernel(a: T.Tensor((N, N), "float16")):
                with T.Kernel(1, threads=128):
                    x = T.alloc_fragment((N, N), "float16")
                    total = T.alloc_fragment((N, N), "float32")
                    T.clear(x)
                    T.clear(total)
                    {call}

            return kernel
    """)  # fmt: skip
    if said is None:
        module.build(16)
        return
    with pytest.raises(TypeError, match=said):
        module.build(16)
