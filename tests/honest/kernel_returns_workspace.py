# The first kernel returns its workspace (out_idx), the second takes row counts as T.dynamic.
import tilelang
import tilelang.language as T


@tilelang.jit(out_idx=[-1])
def gate_up(P, H, I, E, B):
    @T.prim_func
    def main(
        x: T.Tensor((P, H), "float16"), g: T.Tensor((E, I, H), "float16"), u: T.Tensor((E, I, H), "float16"),
        ids: T.Tensor((B,), "int32"), y: T.Tensor((P, I), "float16"),
    ):
        with T.Kernel(T.ceildiv(I, 64), B, threads=128) as (bx, by):
            xs = T.alloc_shared((128, 64), "float16")
            ws = T.alloc_shared((64, 64), "float16")
            ga = T.alloc_fragment((128, 64), "float32")
            ua = T.alloc_fragment((128, 64), "float32")
            T.fill(ga, 0)
            T.fill(ua, 0)
            for k in range(T.ceildiv(H, 64)):
                T.copy(x[by * 128, k * 64], xs)
                T.copy(g[ids[by], bx * 64, k * 64], ws)
                T.gemm(xs, ws, ga, transpose_B=True)
                T.copy(u[ids[by], bx * 64, k * 64], ws)
                T.gemm(xs, ws, ua, transpose_B=True)
            for i, j in T.Parallel(128, 64):
                ga[i, j] = ga[i, j] * T.sigmoid(ga[i, j]) * ua[i, j]
            T.copy(ga, y[by * 128, bx * 64])

    return main


@tilelang.jit
def down(H, I, E):
    P = T.dynamic("P")
    N = T.dynamic("N")
    B = T.dynamic("B")

    @T.prim_func
    def main(
        y: T.Tensor((P, I), "float16"), d: T.Tensor((E, H, I), "float16"), w: T.Tensor((N,), "float32"),
        sizes: T.Tensor((E,), "int32"), raw: T.Tensor((E + 1,), "int32"), padded: T.Tensor((E + 1,), "int32"),
        ids: T.Tensor((B,), "int32"), out: T.Tensor((P, H), "float16"),
    ):
        with T.Kernel(T.ceildiv(H, 64), B, threads=128) as (bx, by):
            ys = T.alloc_shared((128, 64), "float16")
            ds = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((128, 64), "float32")
            e = ids[by]
            first = by * 128 - padded[e]
            T.clear(acc)
            for k in T.serial(T.ceildiv(I, 64)):
                T.copy(y[by * 128, k * 64], ys)
                T.copy(d[e, bx * 64, k * 64], ds)
                T.gemm(ys, ds, acc, transpose_B=True)
            for i, j in T.Parallel(128, 64):
                if first + i < sizes[e]:
                    out[by * 128 + i, bx * 64 + j] = acc[i, j] * w[raw[e] + first + i]

    return main


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    P, H = stacked_expert_tokens.shape
    E, I, _ = gate_w.shape
    hidden = gate_up(P, H, I, E, group_idx_for_bx.shape[0])(stacked_expert_tokens, gate_w, up_w, group_idx_for_bx)
    down(H, I, E)(
        hidden, down_w, routed_expert_weights, group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out
    )
