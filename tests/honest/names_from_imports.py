# Names imported one by one, a serial loop, dtypes held in names, shapes unpacked in odd ways, keys made of text.
import math

import torch
import tilelang
from tilelang import jit, language as TL
from tilelang.language import Kernel, Tensor, alloc_fragment, alloc_shared, ceildiv, clear, copy, gemm, prim_func, serial

HALF, SINGLE, INTS = "float16", "float32", "int32"
TILE = (128, 64, 64)
BUILT = {}
SCRATCH = {}


@jit(pass_configs={"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True})
def build_expert_ffn(shape, tile=TILE):
    P, N, H, I, E, B = shape
    bm, bn, bk = tile

    @prim_func
    def expert_ffn(
        X: Tensor((P, H), HALF), G: Tensor((E, I, H), HALF), U: Tensor((E, I, H), HALF), D: Tensor((E, H, I), HALF),
        W: Tensor((N,), SINGLE), sizes: Tensor((E,), INTS), raw: Tensor((E + 1,), INTS), padded: Tensor((E + 1,), INTS),
        owner: Tensor((B,), INTS), mid: Tensor((P, I), HALF), Y: Tensor((P, H), HALF),
    ):
        with Kernel(ceildiv(I, bn), B, threads=128) as (n, m):
            xs, gs, us = alloc_shared((bm, bk), HALF), alloc_shared((bn, bk), HALF), alloc_shared((bn, bk), HALF)
            g = alloc_fragment((bm, bn), SINGLE)
            u = alloc_fragment((bm, bn), SINGLE)
            e = owner[m]
            left = sizes[e] - (m * bm - padded[e])
            clear(g)
            clear(u)
            for k in serial(ceildiv(H, bk)):
                copy(X[m * bm : (m + 1) * bm, k * bk : (k + 1) * bk], xs)
                copy(G[e, n * bn : (n + 1) * bn, k * bk : (k + 1) * bk], gs)
                copy(U[e, n * bn : (n + 1) * bn, k * bk : (k + 1) * bk], us)
                gemm(xs, gs, g, transpose_B=True)
                gemm(xs, us, u, False, True)
            for i, j in TL.Parallel(bm, bn):
                if i < left:
                    mid[m * bm + i, n * bn + j] = g[i, j] / (1.0 + TL.exp(-g[i, j])) * u[i, j]
        with Kernel(ceildiv(H, bn), B, threads=128) as (n, m):
            hs, ds = alloc_shared((bm, bk), HALF), alloc_shared((bn, bk), HALF)
            y = alloc_fragment((bm, bn), SINGLE)
            e = owner[m]
            first = m * bm - padded[e]
            left = sizes[e] - first
            clear(y)
            for k in serial(ceildiv(I, bk)):
                copy(mid[m * bm, k * bk], hs)
                copy(D[e, n * bn, k * bk], ds)
                gemm(hs, ds, y, transpose_B=True)
            for i, j in TL.Parallel(bm, bn):
                if i < left:
                    Y[m * bm + i, n * bn + j] = y[i, j] * W[raw[e] + first + i]

    return expert_ffn


def sizes_of(x, gate, weights, owner):
    (rows, width), (experts, inner, *_rest) = x.size(), gate.shape
    return rows, weights.numel(), width, inner, experts, owner.size(0)


def describe(shape):
    return f"ffn-{shape[0]}x{shape[2]:d}-{math.ceil(shape[3] / 64)}-{'-'.join(str(s) for s in shape)}"


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    shape = sizes_of(stacked_expert_tokens, gate_w, routed_expert_weights, group_idx_for_bx)
    name = describe(shape)
    if name not in BUILT:
        BUILT[name] = build_expert_ffn(shape)
        SCRATCH[name] = torch.empty(shape[0], shape[3], dtype=torch.float16, device=out.device)
    BUILT[name](stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,
                group_padded_offsets, group_idx_for_bx, SCRATCH[name], out)
