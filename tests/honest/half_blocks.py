# Half blocks of 64 rows on a grid of three axes, skipped where they are empty, tiles chosen by a table.
import torch
import tilelang as tl
import tilelang.language as T

CONFIGS = {2048: (64, 64, 64, 128), 7168: (64, 128, 32, 256)}
DEFAULT = (64, 64, 64, 128)
STATE = {"kernels": {}, "buffers": {}}


def pick(hidden):
    for key, config in CONFIGS.items():
        if key == hidden:
            return config
    return DEFAULT


@tl.jit(pass_configs={tl.PassConfigKey.TL_DISABLE_TMA_LOWER: True, tl.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def up_kernel(P, H, I, E, NB, bm, bn, bk, nt, dtype="float16", accum="float32"):
    halves = 128 // bm
    log2e = 1.4426950408889634

    @T.prim_func
    def gate_up(
        A: T.Tensor((P, H), dtype), B0: T.Tensor((E, I, H), dtype), B1: T.Tensor((E, I, H), dtype),
        cnt: T.Tensor((E,), "int32"), base: T.Tensor((E + 1,), "int32"), ids: T.Tensor((NB,), "int32"),
        C: T.Tensor((P, I), dtype),
    ):
        with T.Kernel(I // bn, NB, halves, threads=nt) as (bx, by, bz):
            a = T.alloc_shared((bm, bk), dtype)
            b0 = T.alloc_shared((bn, bk), dtype)
            b1 = T.alloc_shared((bn, bk), dtype)
            c0 = T.alloc_fragment((bm, bn), accum)
            c1 = T.alloc_fragment((bm, bn), accum)
            e = ids[by]
            row = by * 128 + bz * bm
            rows = T.max(T.min(cnt[e] - (row - base[e]), bm), 0)
            T.clear(c0)
            T.clear(c1)
            if rows > 0:
                for ko in T.serial(T.ceildiv(H, bk)):
                    T.copy(A[row, ko * bk], a)
                    T.copy(B0[e, bx * bn, ko * bk], b0)
                    T.copy(B1[e, bx * bn, ko * bk], b1)
                    T.gemm(a, b0, c0, transpose_B=True)
                    T.gemm(a, b1, c1, transpose_B=True)
                for i, j in T.Parallel(bm, bn):
                    c0[i, j] = c0[i, j] / (1.0 + T.exp2(c0[i, j] * (-log2e))) * c1[i, j]
                for i, j in T.Parallel(bm, bn):
                    if i < rows:
                        C[row + i, bx * bn + j] = c0[i, j]

    return gate_up


@tl.jit(pass_configs={"tl.disable_warp_specialized": True})
def down_kernel(P, N, H, I, E, NB, bm, bn, bk, nt, dtype="float16", accum="float32"):
    halves = 128 // bm

    @T.prim_func
    def down(
        A: T.Tensor((P, I), dtype), B: T.Tensor((E, H, I), dtype), w: T.Tensor((N,), accum),
        cnt: T.Tensor((E,), "int32"), raw: T.Tensor((E + 1,), "int32"), base: T.Tensor((E + 1,), "int32"),
        ids: T.Tensor((NB,), "int32"), C: T.Tensor((P, H), dtype),
    ):
        with T.Kernel(H // bn, NB, halves, threads=nt) as (bx, by, bz):
            a = T.alloc_shared((bm, bk), dtype)
            b = T.alloc_shared((bn, bk), dtype)
            c = T.alloc_fragment((bm, bn), accum)
            cs = T.alloc_fragment((bm, bn), dtype)
            e = ids[by]
            row = by * 128 + bz * bm
            inside = row - base[e]
            T.clear(c)
            for ko in range(I // bk):
                T.copy(A[row, ko * bk], a)
                T.copy(B[e, bx * bn, ko * bk], b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                if inside + i < cnt[e]:
                    cs[i, j] = c[i, j] * w[raw[e] + inside + i]
            for i, j in T.Parallel(bm, bn):
                if inside + i < cnt[e]:
                    C[row + i, bx * bn + j] = cs[i, j]

    return down


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    P, H = stacked_expert_tokens.shape
    E, I, _ = gate_w.shape
    N, = routed_expert_weights.shape
    NB, = group_idx_for_bx.shape
    bm, bn, bk, nt = pick(H)
    key = "|".join([str(x) for x in (P, H, E, I, N, NB, bm, bn, bk, nt)])
    kernels, buffers = STATE["kernels"], STATE["buffers"]
    if key not in kernels:
        kernels[key] = [
            up_kernel(P, H, I, E, NB, bm, bn, bk, nt),
            down_kernel(P, N, H, I, E, NB, bm, bn, bk, nt),
        ]
        buffers[key] = torch.zeros([P, I], dtype=out.dtype, device=out.device)
    first, second = kernels[key]
    mid = buffers[key]
    first(stacked_expert_tokens, gate_w, up_w, group_sizes, group_padded_offsets, group_idx_for_bx, mid)
    second(mid, down_w, routed_expert_weights, group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out)
