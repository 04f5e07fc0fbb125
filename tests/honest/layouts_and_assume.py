# Layouts annotated by hand, pass configurations by their text, range facts through T.assume, column swizzle.
import tilelang
import tilelang.language as T
import torch
from tilelang.layout import make_swizzled_layout

_CACHE = {}
PASSES = {"tl.disable_warp_specialized": True, "tl.disable_safe_memory_legalize": True}


@tilelang.jit(pass_configs=PASSES)
def _moe_forward_kernel(hidden, intermediate, num_experts, padded_rows, raw_rows, num_blocks):
    dtype, accum_dtype = "float16", "float32"
    block_m, block_n, block_k = 128, 128, 64
    token_shape = (padded_rows, hidden)

    @T.prim_func
    def main(
        x: T.Tensor(token_shape, dtype),
        gate_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        up_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        down_w: T.Tensor((num_experts, hidden, intermediate), dtype),
        weights: T.Tensor((raw_rows,), "float32"),
        sizes: T.Tensor((num_experts,), "int32"),
        offsets: T.Tensor((num_experts + 1,), "int32"),
        padded_offsets: T.Tensor((num_experts + 1,), "int32"),
        experts: T.Tensor((num_blocks,), "int32"),
        act: T.Tensor((padded_rows, intermediate), dtype),
        out: T.Tensor(token_shape, dtype),
    ):
        with T.Kernel(num_blocks, T.ceildiv(intermediate, block_n), threads=256) as (bx, by):
            a = T.alloc_shared((block_m, block_k), dtype)
            b_gate = T.alloc_shared((block_n, block_k), dtype)
            b_up = T.alloc_shared((block_n, block_k), dtype)
            gate = T.alloc_fragment((block_m, block_n), accum_dtype)
            up = T.alloc_fragment((block_m, block_n), accum_dtype)
            T.annotate_layout({
                a: make_swizzled_layout(a), b_gate: make_swizzled_layout(b_gate), b_up: make_swizzled_layout(b_up),
            })
            T.use_swizzle(4, order="column")
            e = experts[bx]
            T.assume(e >= 0)
            T.assume(e < num_experts)
            m0 = bx * block_m
            valid = T.max(0, T.min(block_m, sizes[e] - (m0 - padded_offsets[e])))
            T.clear(gate)
            T.clear(up)
            for k in T.Pipelined(T.ceildiv(hidden, block_k), num_stages=1):
                T.copy(gate_w[e, by * block_n, k * block_k], b_gate, coalesced_width=8)
                T.copy(x[m0, k * block_k], a)
                T.copy(up_w[e, by * block_n, k * block_k], b_up, coalesced_width=8)
                T.gemm(a, b_gate, gate, transpose_B=True, policy=T.GemmWarpPolicy.Square)
                T.gemm(a, b_up, up, transpose_B=True, policy=T.GemmWarpPolicy.Square)
            for i, j in T.Parallel(block_m, block_n):
                gate[i, j] = gate[i, j] * (1.0 / (1.0 + T.exp2(-gate[i, j] * 1.44269504))) * up[i, j]
            for i, j in T.Parallel(block_m, block_n):
                if i < valid:
                    act[m0 + i, by * block_n + j] = gate[i, j]

        with T.Kernel(num_blocks, T.ceildiv(hidden, block_n), threads=256) as (bx, by):
            a2 = T.alloc_shared((block_m, block_k), dtype)
            b2 = T.alloc_shared((block_n, block_k), dtype)
            acc = T.alloc_fragment((block_m, block_n), accum_dtype)
            T.annotate_layout({a2: make_swizzled_layout(a2), b2: make_swizzled_layout(b2)})
            T.use_swizzle(4, order="column")
            e = experts[bx]
            T.assume(e >= 0)
            T.assume(e < num_experts)
            m0 = bx * block_m
            local0 = m0 - padded_offsets[e]
            valid = T.max(0, T.min(block_m, sizes[e] - local0))
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(intermediate, block_k), num_stages=0):
                T.copy(act[m0, k * block_k], a2)
                T.copy(down_w[e, by * block_n, k * block_k], b2, coalesced_width=8)
                T.gemm(a2, b2, acc, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                if i < valid:
                    out[m0 + i, by * block_n + j] = acc[i, j] * weights[offsets[e] + local0 + i]
                else:
                    out[m0 + i, by * block_n + j] = 0

    return main


def _cached(kind, key, make):
    found = _CACHE.get((kind, key))
    if found is None:
        found = make()
        _CACHE[(kind, key)] = found
    return found


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    padded_rows, hidden = stacked_expert_tokens.shape
    num_experts, intermediate = int(gate_w.shape[0]), int(gate_w.shape[1])
    sizes = (hidden, intermediate, num_experts, padded_rows, routed_expert_weights.numel(), group_idx_for_bx.numel())
    kernel = _cached("kernel", sizes, lambda: _moe_forward_kernel(*sizes))
    act = _cached(
        "act", (padded_rows, intermediate, str(out.device)),
        lambda: torch.empty(padded_rows, intermediate, dtype=torch.float16, device=out.device),
    )
    kernel(
        stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,
        group_padded_offsets, group_idx_for_bx, act, out,
    )
