# A file by somebody who never saw the template: other names everywhere, fragment operands, warp policies, k_pack.
import tilelang as tlang
import tilelang.language as tile
import torch as th

TM, TN, TK, WAVES = 128, 128, 64, 4
_compiled = {}
_scratch = {}


@tlang.jit(
    out_idx=None,
    pass_configs={
        tlang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
        tlang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    },
)
def moe_op(d_model, d_ff, n_exp, n_rows, n_pairs, n_tiles, n_stages=1):
    half, single = tile.float16, tile.float32
    x_ty = (n_rows, d_model)
    threads = 64 * WAVES

    @tile.prim_func
    def op(
        X: tile.Tensor(x_ty, half),
        W1: tile.Tensor((n_exp, d_ff, d_model), half),
        W3: tile.Tensor((n_exp, d_ff, d_model), half),
        W2: tile.Tensor((n_exp, d_model, d_ff), half),
        P: tile.Tensor((n_pairs,), single),
        cnt: tile.Tensor((n_exp,), tile.int32),
        off: tile.Tensor((n_exp + 1,), tile.int32),
        poff: tile.Tensor((n_exp + 1,), tile.int32),
        tid: tile.Tensor((n_tiles,), tile.int32),
        Z: tile.Tensor((n_rows, d_ff), half),
        Y: tile.Tensor(x_ty, half),
    ):
        with tile.Kernel(n_tiles, tile.ceildiv(d_ff, TN), threads=threads) as (ti, tj):
            xf = tile.alloc_fragment((TM, TK), half)
            w1s = tile.alloc_shared((TN, TK), half)
            w3s = tile.alloc_shared((TN, TK), half)
            c1 = tile.alloc_fragment((TM, TN), single)
            c3 = tile.alloc_fragment((TM, TN), single)
            tile.use_swizzle(panel_size=8)
            ex = tid[ti]
            left = cnt[ex] - (ti * TM - poff[ex])
            tile.fill(c1, 0.0)
            tile.fill(c3, 0.0)
            for kk in tile.Pipelined(tile.ceildiv(d_model, TK), num_stages=n_stages):
                tile.copy(X[ti * TM : (ti + 1) * TM, kk * TK : (kk + 1) * TK], xf)
                tile.copy(W1[ex, tj * TN : (tj + 1) * TN, kk * TK : (kk + 1) * TK], w1s)
                tile.copy(W3[ex, tj * TN : (tj + 1) * TN, kk * TK : (kk + 1) * TK], w3s)
                tile.gemm(xf, w1s, c1, transpose_B=True, policy=tile.GemmWarpPolicy.FullRow)
                tile.gemm(xf, w3s, c3, transpose_B=True, policy=tile.GemmWarpPolicy.FullRow)
            for a, b in tile.Parallel(TM, TN):
                c1[a, b] = c1[a, b] * tile.sigmoid(c1[a, b])
            for a, b in tile.Parallel(TM, TN):
                if a < left:
                    Z[ti * TM + a, tj * TN + b] = c1[a, b] * c3[a, b]

        with tile.Kernel(n_tiles, tile.ceildiv(d_model, TN), threads=threads) as (ti, tj):
            zf = tile.alloc_fragment((TM, TK), half)
            w2s = tile.alloc_shared((TN, TK), half)
            c2 = tile.alloc_fragment((TM, TN), single)
            tile.use_swizzle(panel_size=8)
            ex = tid[ti]
            shift = ti * TM - poff[ex]
            left = cnt[ex] - shift
            tile.clear(c2)
            for kk in tile.Pipelined(0, tile.ceildiv(d_ff, TK), n_stages):
                tile.copy(Z[ti * TM : (ti + 1) * TM, kk * TK : (kk + 1) * TK], zf)
                tile.copy(W2[ex, tj * TN : (tj + 1) * TN, kk * TK : (kk + 1) * TK], w2s)
                tile.gemm(zf, w2s, c2, transpose_B=True, policy=tile.GemmWarpPolicy.FullRow)
            for a, b in tile.Parallel(TM, TN):
                if a < left:
                    Y[ti * TM + a, tj * TN + b] = c2[a, b] * P[off[ex] + shift + a]
                else:
                    Y[ti * TM + a, tj * TN + b] = tile.cast(0.0, half)

    return op


def _program(shape_key):
    program = _compiled.get(shape_key)
    if program is None:
        program = moe_op(*shape_key, n_stages=1)
        _compiled[shape_key] = program
    return program


def _space_for(rows, columns, reference):
    where = (rows, columns, reference.device.type, reference.device.index)
    space = _scratch.get(where)
    if space is None:
        space = th.empty([rows, columns], dtype=reference.dtype, device=reference.device)
        _scratch[where] = space
    return space


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    operands = [stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
                group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx]
    rows, d_model = stacked_expert_tokens.shape
    n_exp, d_ff = gate_w.shape[:2]
    shape_key = (d_model, d_ff, n_exp, rows, routed_expert_weights.shape[0], group_idx_for_bx.shape[0])
    _program(shape_key)(*operands, _space_for(rows, d_ff, stacked_expert_tokens), out)
