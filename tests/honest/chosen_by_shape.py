# Tiles and kernels chosen by the sizes, empty blocks skipped with T.if_then_else, checks with a clear message.
import math

import tilelang
import tilelang.language as T
import torch

# name: (columns of a stage-1 block, K of a step, threads)
CHOICES = {"wide": (128, 64, 256), "narrow": (64, 32, 128)}
LOG2E = 1.44269504
_kernels, _spaces = {}, {}


def _choose(hidden, intermediate):
    """Wide tiles need both sizes to divide; the rest is narrow."""
    assert hidden > 0 and intermediate > 0, f"got {hidden} x {intermediate}, expected sizes above 0"
    return "wide" if math.gcd(hidden, intermediate) % 128 == 0 else "narrow"


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def _stage1(H, I, E, P, NB, columns, depth, threads):
    @T.prim_func
    def stage1(
        x: T.Tensor((P, H), "float16"),
        gate_w: T.Tensor((E, I, H), "float16"),
        up_w: T.Tensor((E, I, H), "float16"),
        group_sizes: T.Tensor((E,), "int32"),
        padded: T.Tensor((E + 1,), "int32"),
        block_map: T.Tensor((NB,), "int32"),
        act: T.Tensor((P, I), "float16"),
    ):
        with T.Kernel(NB, T.ceildiv(I, columns), threads=threads) as (bx, by):
            x_s = T.alloc_shared((128, depth), "float16")
            g_s = T.alloc_shared((columns, depth), "float16")
            u_s = T.alloc_shared((columns, depth), "float16")
            g = T.alloc_fragment((128, columns), "float32")
            u = T.alloc_fragment((128, columns), "float32")
            e = block_map[bx]
            rows = T.max(0, T.min(128, group_sizes[e] - (bx * 128 - padded[e])))
            steps = T.if_then_else(rows > 0, T.ceildiv(H, depth), 0)
            T.clear(g)
            T.clear(u)
            for k in range(steps):
                T.copy(x[bx * 128, k * depth], x_s)
                T.copy(gate_w[e, by * columns, k * depth], g_s)
                T.copy(up_w[e, by * columns, k * depth], u_s)
                T.gemm(x_s, g_s, g, transpose_B=True)
                T.gemm(x_s, u_s, u, transpose_B=True)
                T.sync_threads()
            for i, j in T.Parallel(128, columns):
                if i < rows:
                    act[bx * 128 + i, by * columns + j] = u[i, j] * (g[i, j] / (1.0 + T.exp2(-g[i, j] * LOG2E)))

    return stage1


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def _stage2(H, I, E, P, N, NB, columns, depth, threads):
    @T.prim_func
    def stage2(
        act: T.Tensor((P, I), "float16"),
        down_w: T.Tensor((E, H, I), "float16"),
        weights: T.Tensor((N,), "float32"),
        group_sizes: T.Tensor((E,), "int32"),
        raw: T.Tensor((E + 1,), "int32"),
        padded: T.Tensor((E + 1,), "int32"),
        block_map: T.Tensor((NB,), "int32"),
        out: T.Tensor((P, H), "float16"),
    ):
        with T.Kernel(NB, T.ceildiv(H, columns), threads=threads) as (bx, by):
            a_s = T.alloc_shared((128, depth), "float16")
            w_s = T.alloc_shared((columns, depth), "float16")
            acc = T.alloc_fragment((128, columns), "float32")
            e = block_map[bx]
            before = bx * 128 - padded[e]
            rows = T.max(0, T.min(128, group_sizes[e] - before))
            steps = T.if_then_else(rows > 0, T.ceildiv(I, depth), 0)
            T.clear(acc)
            for k in range(steps):
                T.copy(act[bx * 128, k * depth], a_s)
                T.copy(down_w[e, by * columns, k * depth], w_s)
                T.gemm(a_s, w_s, acc, transpose_B=True)
                T.sync_threads()
            for i, j in T.Parallel(128, columns):
                if i < rows:
                    out[bx * 128 + i, by * columns + j] = acc[i, j] * weights[raw[e] + before + i]
                else:
                    out[bx * 128 + i, by * columns + j] = 0.0

    return stage2


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    P, H = stacked_expert_tokens.shape
    E, I = gate_w.size(0), gate_w.size(1)
    if down_w.shape != (E, H, I):
        raise ValueError(f"got down_w {tuple(down_w.shape)}, expected {(E, H, I)}")
    N, NB = routed_expert_weights.shape[0], group_idx_for_bx.shape[0]
    name = _choose(H, I)
    key = (name, H, I, E, P, N, NB)
    if key not in _kernels:
        one = _stage1(H, I, E, P, NB, *CHOICES[name])
        two = _stage2(H, I, E, P, N, NB, *CHOICES["wide" if H % 128 == 0 and I % 64 == 0 else "narrow"])
        _kernels[key] = [one, two]
    first, second = _kernels[key]
    act = _spaces.setdefault((P, I, out.device), torch.empty((P, I), dtype=out.dtype, device=out.device))
    first(stacked_expert_tokens, gate_w, up_w, group_sizes, group_padded_offsets, group_idx_for_bx, act)
    second(
        act, down_w, routed_expert_weights, group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out
    )
