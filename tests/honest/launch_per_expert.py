# One launch for each expert that has rows, on slices; the host reads the sizes.
import tilelang
import tilelang.language as T
import torch


@tilelang.jit
def ffn(H, I):
    M = T.dynamic("M")
    R = T.dynamic("R")

    @T.prim_func
    def main(
        x: T.Tensor((M, H), "float16"), g: T.Tensor((I, H), "float16"), u: T.Tensor((I, H), "float16"),
        d: T.Tensor((H, I), "float16"), w: T.Tensor((R,), "float32"), mid: T.Tensor((M, I), "float16"),
        out: T.Tensor((M, H), "float16"),
    ):
        with T.Kernel(T.ceildiv(I, 128), T.ceildiv(M, 128), threads=256) as (bx, by):
            xs = T.alloc_shared((128, 64), "float16")
            gs = T.alloc_shared((128, 64), "float16")
            us = T.alloc_shared((128, 64), "float16")
            ga = T.alloc_fragment((128, 128), "float32")
            ua = T.alloc_fragment((128, 128), "float32")
            T.clear(ga)
            T.clear(ua)
            for k in T.serial(T.ceildiv(H, 64)):
                T.copy(x[by * 128, k * 64], xs)
                T.copy(g[bx * 128, k * 64], gs)
                T.copy(u[bx * 128, k * 64], us)
                T.gemm(xs, gs, ga, transpose_B=True)
                T.gemm(xs, us, ua, transpose_B=True)
            for i, j in T.Parallel(128, 128):
                ua[i, j] *= ga[i, j] / (1.0 + T.exp(-ga[i, j]))
            T.copy(ua, mid[by * 128, bx * 128])

        with T.Kernel(T.ceildiv(H, 128), T.ceildiv(M, 128), threads=256) as (bx, by):
            ms = T.alloc_shared((128, 64), "float16")
            ds = T.alloc_shared((128, 64), "float16")
            os = T.alloc_shared((128, 128), "float16")
            acc = T.alloc_fragment((128, 128), "float32")
            T.clear(acc)
            for k in T.serial(T.ceildiv(I, 64)):
                T.copy(mid[by * 128, k * 64], ms)
                T.copy(d[bx * 128, k * 64], ds)
                T.gemm(ms, ds, acc, transpose_B=True)
            for i, j in T.Parallel(128, 128):
                if by * 128 + i < R:
                    acc[i, j] = acc[i, j] * w[by * 128 + i]
                else:
                    acc[i, j] = 0
            T.copy(acc, os)
            T.copy(os, out[by * 128, bx * 128])

    return main


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    H, I = out.shape[1], gate_w.shape[1]
    kernel = ffn(H, I)
    mid = torch.empty((out.shape[0], I), dtype=out.dtype, device=out.device)
    raw, padded = group_offsets.tolist(), group_padded_offsets.tolist()
    for e, rows in enumerate(group_sizes.tolist()):
        if rows > 0:
            start, end = padded[e], padded[e] + (rows + 127) // 128 * 128
            kernel(
                stacked_expert_tokens[start:end], gate_w[e], up_w[e], down_w[e],
                routed_expert_weights[raw[e] : raw[e] + rows], mid[start:end], out[start:end],
            )
