# Two builders with passes of their own, two prim_funcs, two launches from run_kernel; works for fp16 route weights too.
import torch
import tilelang
from tilelang import jit
from tilelang import language as tl

tiles = {"rows": 128, "columns": 128, "depth": 64}
stage_one_kernels = {}
stage_two_kernels = {}
buffers = {}


@jit(pass_configs={"tl.disable_warp_specialized": True, "tl.enable_fast_math": True})
def build_gate_up(H, I, E, P, blocks, rows=128, columns=128, depth=64):
    def steps(extent, tile):
        return -(-extent // tile)

    loops = steps(H, depth)

    @tl.prim_func
    def gate_up(
        x: tl.Tensor((P, H), tl.float16),
        wg: tl.Tensor((E, I, H), tl.float16),
        wu: tl.Tensor((E, I, H), tl.float16),
        n: tl.Tensor((E,), tl.int32),
        start: tl.Tensor((E + 1,), tl.int32),
        owner: tl.Tensor((blocks,), tl.int32),
        y: tl.Tensor((P, I), tl.float16),
    ):
        with tl.Kernel(blocks, steps(I, columns), threads=256) as (block, column):
            xs = tl.alloc_shared((rows, depth), tl.float16)
            ws = tl.alloc_shared((columns, depth), tl.float16)
            g = tl.alloc_fragment((rows, columns), tl.float32)
            u = tl.alloc_fragment((rows, columns), tl.float32)
            e = owner[block]
            live = tl.min(rows, n[e] - (block * rows - start[e]))
            tl.clear(g)
            tl.clear(u)
            for step in tl.serial(loops):
                tl.copy(x[block * rows, step * depth], xs)
                tl.copy(wg[e, column * columns, step * depth], ws)
                tl.gemm(xs, ws, g, transpose_B=True)
                tl.sync_threads()
                tl.copy(wu[e, column * columns, step * depth], ws)
                tl.gemm(xs, ws, u, transpose_B=True)
                tl.sync_threads()
            for i, j in tl.Parallel(rows, columns):
                if i < live:
                    y[block * rows + i, column * columns + j] = u[i, j] * g[i, j] / (1.0 + tl.exp(-g[i, j]))

    return gate_up


@jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def build_down(H, I, E, P, N, blocks, weight_dtype):
    @tl.prim_func
    def down(
        y: tl.Tensor((P, I), tl.float16),
        wd: tl.Tensor((E, H, I), tl.float16),
        r: tl.Tensor((N,), weight_dtype),
        n: tl.Tensor((E,), tl.int32),
        raw: tl.Tensor((E + 1,), tl.int32),
        start: tl.Tensor((E + 1,), tl.int32),
        owner: tl.Tensor((blocks,), tl.int32),
        out: tl.Tensor((P, H), tl.float16),
    ):
        with tl.Kernel(blocks, tl.ceildiv(H, 128), threads=256) as (block, column):
            ys = tl.alloc_shared((128, 64), tl.float16)
            ws = tl.alloc_shared((128, 64), tl.float16)
            acc = tl.alloc_fragment((128, 128), tl.float32)
            e = owner[block]
            first = block * 128 - start[e]
            live = tl.max(0, tl.min(128, n[e] - first))
            tl.clear(acc)
            tl.copy(y[block * 128, 0], ys)
            tl.copy(wd[e, column * 128, 0], ws)
            for step in tl.serial(tl.ceildiv(I, 64) - 1):
                tl.gemm(ys, ws, acc, transpose_B=True)
                tl.sync_threads()
                tl.copy(y[block * 128, (step + 1) * 64], ys)
                tl.copy(wd[e, column * 128, (step + 1) * 64], ws)
            tl.gemm(ys, ws, acc, transpose_B=True)
            for i, j in tl.Parallel(128, 128):
                if i < live:
                    out[block * 128 + i, column * 128 + j] = acc[i, j] * r[raw[e] + first + i]
                else:
                    out[block * 128 + i, column * 128 + j] = 0

    return down


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    (P, H), (E, I, _) = stacked_expert_tokens.shape, gate_w.shape
    N, blocks = routed_expert_weights.shape[0], group_idx_for_bx.shape[0]
    weight_dtype = tl.float32 if routed_expert_weights.dtype == torch.float32 else tl.float16
    one, two = (H, I, E, P, blocks), (H, I, E, P, N, blocks, str(weight_dtype))
    if one not in stage_one_kernels:
        stage_one_kernels[one] = build_gate_up(*one, **tiles)
    if two not in stage_two_kernels:
        stage_two_kernels[two] = build_down(H, I, E, P, N, blocks, weight_dtype)
    if (P, I) not in buffers:
        buffers[P, I] = torch.empty((P, I), dtype=torch.float16, device=stacked_expert_tokens.device)
    y = buffers[P, I]
    stage_one_kernels[one](stacked_expert_tokens, gate_w, up_w, group_sizes, group_padded_offsets, group_idx_for_bx, y)
    stage_two_kernels[two](
        y, down_w, routed_expert_weights, group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out
    )
