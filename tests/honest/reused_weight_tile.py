# Operands in shared memory, one weight tile for gate and up, a serial K loop with barriers, padding rows written.
import tilelang
import tilelang.language as T
import torch

BLOCK_K = 64
THREADS = 256
KERNELS = {}
WORKSPACES = {}


@tilelang.jit(pass_configs={tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True})
def _moe_forward_kernel(hidden, intermediate, num_experts, padded_rows, raw_rows, num_blocks):
    @T.prim_func
    def moe_forward(
        tokens: T.Tensor((padded_rows, hidden), T.float16),
        gate_w: T.Tensor((num_experts, intermediate, hidden), T.float16),
        up_w: T.Tensor((num_experts, intermediate, hidden), T.float16),
        down_w: T.Tensor((num_experts, hidden, intermediate), T.float16),
        route_weights: T.Tensor((raw_rows,), T.float32),
        group_sizes: T.Tensor((num_experts,), T.int32),
        group_offsets: T.Tensor((num_experts + 1,), T.int32),
        group_padded_offsets: T.Tensor((num_experts + 1,), T.int32),
        block_map: T.Tensor((num_blocks,), T.int32),
        workspace: T.Tensor((padded_rows, intermediate), T.float16),
        out: T.Tensor((padded_rows, hidden), T.float16),
    ):
        with T.Kernel(num_blocks, T.ceildiv(intermediate, 128), threads=THREADS) as (bx, by):
            token_tile = T.alloc_shared((128, BLOCK_K), T.float16)
            weight_tile = T.alloc_shared((128, BLOCK_K), T.float16)
            gate = T.alloc_fragment((128, 128), T.float32)
            up = T.alloc_fragment((128, 128), T.float32)
            expert = block_map[bx]
            rows = T.max(0, T.min(128, group_sizes[expert] - (bx * 128 - group_padded_offsets[expert])))
            T.clear(gate)
            T.clear(up)
            for k in range(T.ceildiv(hidden, BLOCK_K)):
                T.copy(tokens[bx * 128, k * BLOCK_K], token_tile)
                T.copy(gate_w[expert, by * 128, k * BLOCK_K], weight_tile)
                T.gemm(token_tile, weight_tile, gate, transpose_B=True)
                T.sync_threads()
                T.copy(up_w[expert, by * 128, k * BLOCK_K], weight_tile)
                T.gemm(token_tile, weight_tile, up, transpose_B=True)
                T.sync_threads()
            for i, j in T.Parallel(128, 128):
                if i < rows:
                    workspace[bx * 128 + i, by * 128 + j] = (
                        up[i, j] * gate[i, j] / (1.0 + T.exp2(-gate[i, j] * 1.44269504))
                    )

        with T.Kernel(num_blocks, T.ceildiv(hidden, 128), threads=THREADS) as (bx, by):
            hidden_tile = T.alloc_shared((128, BLOCK_K), T.float16)
            down_tile = T.alloc_shared((128, BLOCK_K), T.float16)
            total = T.alloc_fragment((128, 128), T.float32)
            expert = block_map[bx]
            before = bx * 128 - group_padded_offsets[expert]
            rows = T.max(0, T.min(128, group_sizes[expert] - before))
            T.clear(total)
            for k in T.serial(T.ceildiv(intermediate, BLOCK_K)):
                T.copy(workspace[bx * 128, k * BLOCK_K], hidden_tile)
                T.copy(down_w[expert, by * 128, k * BLOCK_K], down_tile)
                T.gemm(hidden_tile, down_tile, total, transpose_B=True)
                T.sync_threads()
            for i, j in T.Parallel(128, 128):
                if i < rows:
                    out[bx * 128 + i, by * 128 + j] = total[i, j] * route_weights[group_offsets[expert] + before + i]
                else:
                    out[bx * 128 + i, by * 128 + j] = 0

    return moe_forward


def _get_kernel(key):
    if key not in KERNELS:
        KERNELS[key] = _moe_forward_kernel(*key)
    return KERNELS[key]


def _get_workspace(like, intermediate):
    key = (like.device.index, like.shape[0], intermediate, like.dtype)
    if key not in WORKSPACES:
        WORKSPACES[key] = torch.empty((like.shape[0], intermediate), dtype=like.dtype, device=like.device)
    return WORKSPACES[key]


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    num_experts, intermediate, hidden = gate_w.shape
    kernel = _get_kernel((
        hidden, intermediate, num_experts,
        stacked_expert_tokens.shape[0], routed_expert_weights.shape[0], group_idx_for_bx.shape[0],
    ))
    kernel(
        stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights, group_sizes, group_offsets,
        group_padded_offsets, group_idx_for_bx, _get_workspace(stacked_expert_tokens, intermediate), out,
    )
