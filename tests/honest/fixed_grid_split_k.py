# A fixed grid that loops over its tiles, a product split over K that is added up with atomics, a pass that casts.
import tilelang
import tilelang.language as T
import torch

PROGRAMS = 6
SPLITS = 2


@tilelang.jit
def build(P, N, H, I, E, B):
    @T.prim_func
    def moe(
        x: T.Tensor((P, H), "float16"), g: T.Tensor((E, I, H), "float16"), u: T.Tensor((E, I, H), "float16"),
        d: T.Tensor((E, H, I), "float16"), w: T.Tensor((N,), "float32"), sizes: T.Tensor((E,), "int32"),
        raw: T.Tensor((E + 1,), "int32"), padded: T.Tensor((E + 1,), "int32"), ids: T.Tensor((B,), "int32"),
        mid: T.Tensor((P, I), "float16"), total: T.Tensor((P, H), "float32"), out: T.Tensor((P, H), "float16"),
    ):
        with T.Kernel(PROGRAMS, threads=256) as start:
            xs = T.alloc_shared((128, 64), "float16")
            gs = T.alloc_shared((128, 64), "float16")
            us = T.alloc_shared((128, 64), "float16")
            ga = T.alloc_fragment((128, 128), "float32")
            ua = T.alloc_fragment((128, 128), "float32")
            columns = T.ceildiv(I, 128)
            for turn in T.serial(T.ceildiv(B * columns - start, PROGRAMS)):
                tile = start + turn * PROGRAMS
                row = tile // columns * 128
                column = tile % columns * 128
                T.clear(ga)
                T.clear(ua)
                for k in T.serial(T.ceildiv(H, 64)):
                    T.copy(x[row, k * 64], xs)
                    T.copy(g[ids[row // 128], column, k * 64], gs)
                    T.copy(u[ids[row // 128], column, k * 64], us)
                    T.gemm(xs, gs, ga, transpose_B=True)
                    T.gemm(xs, us, ua, transpose_B=True)
                for i, j in T.Parallel(128, 128):
                    mid[row + i, column + j] = ga[i, j] / (1.0 + T.exp(-ga[i, j])) * ua[i, j]

        with T.Kernel(T.ceildiv(H, 128), B, SPLITS, threads=256) as (bx, by, bz):
            ms = T.alloc_shared((128, 64), "float16")
            ds = T.alloc_shared((128, 64), "float16")
            acc = T.alloc_fragment((128, 128), "float32")
            steps = T.ceildiv(T.ceildiv(I, 64), SPLITS)
            T.clear(acc)
            for k in T.serial(T.min(steps, T.ceildiv(I, 64) - bz * steps)):
                T.copy(mid[by * 128, (bz * steps + k) * 64], ms)
                T.copy(d[ids[by], bx * 128, (bz * steps + k) * 64], ds)
                T.gemm(ms, ds, acc, transpose_B=True)
            for i, j in T.Parallel(128, 128):
                T.atomic_add(total[by * 128 + i, bx * 128 + j], acc[i, j])

        with T.Kernel(B, threads=128) as by:
            e = ids[by]
            first = by * 128 - padded[e]
            for r in T.serial(128):
                for j in T.Parallel(H):
                    if first + r < sizes[e]:
                        out[by * 128 + r, j] = total[by * 128 + r, j] * w[raw[e] + first + r]
                    else:
                        out[by * 128 + r, j] = 0

    return moe


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    P, H = out.shape
    E, I, _ = gate_w.shape
    kernel = build(P, routed_expert_weights.shape[0], H, I, E, group_idx_for_bx.shape[0])
    mid = torch.empty((P, I), dtype=torch.float16, device=out.device)
    total = torch.zeros((P, H), dtype=torch.float32, device=out.device)
    kernel(
        stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
        group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, mid, total, out,
    )
