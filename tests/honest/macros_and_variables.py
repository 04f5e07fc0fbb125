# Macros, a variable, nested builders, a conditional scale, a positional num_stages, sizes read with len.
import tilelang
import tilelang.language as T
import torch

M = 128
N1, K1 = 64, 32
N2, K2 = 128, 32
CACHE = {}


@tilelang.jit
def _stage_one(p, h, i_, e_, blocks):
    @T.macro
    def activate(g: T.FragmentBuffer, u: T.FragmentBuffer):
        for r, c in T.Parallel(M, N1):
            g[r, c] = u[r, c] * g[r, c] * T.sigmoid(g[r, c])

    def nested():
        @T.prim_func
        def main(
            x: T.Tensor[(p, h), "float16"],
            gw: T.Tensor[(e_, i_, h), "float16"],
            uw: T.Tensor[(e_, i_, h), "float16"],
            cnt: T.Tensor[(e_,), "int32"],
            po: T.Tensor[(e_ + 1,), "int32"],
            who: T.Tensor[(blocks,), "int32"],
            act: T.Tensor[(p, i_), "float16"],
        ):
            with T.Kernel(blocks, T.ceildiv(i_, N1), threads=256) as (bx, by):
                xs = T.alloc_shared([M, K1], "float16")
                ws = T.alloc_shared([N1, K1], "float16")
                ga = T.alloc_fragment([M, N1], "float")
                ua = T.alloc_fragment([M, N1], "float")
                live = T.alloc_var("int32")
                live = cnt[who[bx]] - (bx * M - po[who[bx]])
                T.fill(ga, 0)
                T.fill(ua, 0)
                for ko in T.serial(T.ceildiv(h, K1)):
                    T.copy(x[bx * M, ko * K1], xs)
                    T.copy(gw[who[bx], by * N1, ko * K1], ws)
                    T.gemm(xs, ws, ga, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()
                    T.copy(uw[who[bx], by * N1, ko * K1], ws)
                    T.gemm(xs, ws, ua, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.sync_threads()
                activate(ga, ua)
                for r, c in T.Parallel(M, N1):
                    if r < live:
                        act[bx * M + r, by * N1 + c] = T.cast(ga[r, c], "float16")

        return main

    return nested()


@tilelang.jit
def _stage_two(p, n, h, i_, e_, blocks):
    @T.prim_func
    def main(
        act: T.Tensor((p, i_), "float16"),
        dw: T.Tensor((e_, h, i_), "float16"),
        rw: T.Tensor((n,), "float32"),
        cnt: T.Tensor((e_,), "int32"),
        ro: T.Tensor((e_ + 1,), "int32"),
        po: T.Tensor((e_ + 1,), "int32"),
        who: T.Tensor((blocks,), "int32"),
        y: T.Tensor((p, h), "float16"),
    ):
        with T.Kernel(T.ceildiv(h, N2), blocks, threads=256) as (by, bx):
            hs = T.alloc_shared([M, K2], "float16")
            ws = T.alloc_shared([N2, K2], "float16")
            acc = T.alloc_fragment([M, N2], "float")
            scale = T.alloc_fragment([M], "float")
            eid = who[bx]
            start = bx * M - po[eid]
            for r in T.Parallel(M):
                scale[r] = T.if_then_else(start + r < cnt[eid], rw[T.min(ro[eid] + start + r, n - 1)], 0.0)
            T.clear(acc)
            for ko in T.Pipelined(0, T.ceildiv(i_, K2), 1):
                T.copy(act[bx * M, ko * K2], hs)
                T.copy(dw[eid, by * N2, ko * K2], ws)
                T.gemm(hs, ws, acc, transpose_B=True)
            for r, c in T.Parallel(M, N2):
                if start + r < cnt[eid]:
                    y[bx * M + r, by * N2 + c] = acc[r, c] * scale[r]

    return main


def _fetch(key):
    p, n, h, i_, e_, blocks, device = key
    if CACHE.get(key) is None:
        make = lambda: torch.zeros((p, i_), dtype=torch.half, device=device)
        CACHE[key] = (_stage_one(p, h, i_, e_, blocks), _stage_two(p, n, h, i_, e_, blocks), make())
    return CACHE[key]


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    p, h = out.shape[-2], out.shape[-1]
    key = (p, len(routed_expert_weights), h, gate_w.shape[1], len(group_sizes), len(group_idx_for_bx), out.device)
    one, two, act = _fetch(key)
    one(stacked_expert_tokens, gate_w, up_w, group_sizes, group_padded_offsets, group_idx_for_bx, act)
    two(act, down_w, routed_expert_weights, group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out)
