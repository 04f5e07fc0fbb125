"""C500 step 10: the layout of the shared tiles can be chosen. An option for the C500 only, off by default.

Stage 1 computes ``silu(x @ gate_w.T) * (x @ up_w.T)`` into a workspace, stage 2 multiplies it by ``down_w`` and the
route weight. Tokens are grouped by expert and every group starts at a multiple of 128 rows, so a block of 128 padded
rows belongs to one expert, which ``group_idx_for_bx`` names.

Padding rows of ``out`` are written as 0, so the result does not depend on what ``out`` held before.
"""

import tilelang
import tilelang.language as T
import torch

# Rows of a block. The contract fixes it: group_idx_for_bx has one entry per 128 padded rows.
BLOCK_M = 128
# Stage 1: columns of the hidden activation that one block computes, and how much of H one step of the K loop takes.
STAGE1_BLOCK_N = 128
STAGE1_BLOCK_K = 64
STAGE1_THREADS = 256
# Blocks are issued in panels of this many, down the token blocks first: the blocks of one expert read the same weight
# tiles, and those are what L2 has to keep.
STAGE1_PANEL = 4
# Stage 2: columns of out that one block computes, and how much of I one step of the K loop takes.
STAGE2_BLOCK_N = 128
STAGE2_BLOCK_K = 64
STAGE2_THREADS = 256
STAGE2_PANEL = 4
PANEL_ORDER = "column"
# fp16 values that one lane copies at once: 8 are 16 bytes, the widest load there is.
WEIGHT_COPY_WIDTH = 8
# Values that stay side by side in a shared tile while the groups of a row change places from row to row, so that the
# lanes of a wave read from different banks. 0 leaves the layout to TileLang. A wave of the C500 multiplies 16 rows of 4
# values, and others saw 4 (with WEIGHT_COPY_WIDTH = 4) gain 2 to 4% there. Cards of other makers read 8 values at once
# and refuse it or compute nonsense.
SWIZZLE_VECTOR = 0
# Others saw cases 2 and 3 get 9 to 11% faster with True, and wrong answers more often: without the guards a tile that
# sticks out of a tensor is read and written beyond its end. H, I and P must then be multiples of the tiles, the block
# map must be exact, and nothing tells you when they are not.
DISABLE_MEMORY_GUARDS = False
# Copies in flight in stage 2: 1 means none ahead of the multiplication. The contest voids a score from 2 on.
NUM_STAGES = 1
# exp(x) = exp2(x * log2(e)), and exp2 is one instruction.
LOG2_E = 1.44269504

KERNELS = {}
WORKSPACES = {}


def _swizzle(row, column, num_columns):
    """Where (row, column) of a shared tile lies: the groups of a row change places by an exclusive or with the row."""
    num_groups = num_columns // SWIZZLE_VECTOR
    group = T.bitwise_xor(column // SWIZZLE_VECTOR, row % min(16, num_groups))
    return row, group * SWIZZLE_VECTOR + column % SWIZZLE_VECTOR


@tilelang.jit(pass_configs={
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: DISABLE_MEMORY_GUARDS,
})
def _moe_forward_kernel(hidden, intermediate, num_experts, total_padded_tokens, total_valid_tokens, num_blocks_m):
    """Build both launches for one set of sizes: H, I, E, P padded rows, N raw rows, blocks of 128 rows."""

    def stage1_layout(row, column):
        return _swizzle(row, column, STAGE1_BLOCK_K)

    def stage2_layout(row, column):
        return _swizzle(row, column, STAGE2_BLOCK_K)

    @T.prim_func
    def moe_forward(
        stacked_expert_tokens: T.Tensor((total_padded_tokens, hidden), "float16"),
        gate_w: T.Tensor((num_experts, intermediate, hidden), "float16"),
        up_w: T.Tensor((num_experts, intermediate, hidden), "float16"),
        down_w: T.Tensor((num_experts, hidden, intermediate), "float16"),
        routed_expert_weights: T.Tensor((total_valid_tokens,), "float32"),
        group_sizes: T.Tensor((num_experts,), "int32"),
        group_offsets: T.Tensor((num_experts + 1,), "int32"),
        group_padded_offsets: T.Tensor((num_experts + 1,), "int32"),
        group_idx_for_bx: T.Tensor((num_blocks_m,), "int32"),
        up_logits: T.Tensor((total_padded_tokens, intermediate), "float16"),
        out: T.Tensor((total_padded_tokens, hidden), "float16"),
    ):
        # Stage 1: up_logits = silu(x @ gate_w.T) * (x @ up_w.T)
        with T.Kernel(num_blocks_m, T.ceildiv(intermediate, STAGE1_BLOCK_N), threads=STAGE1_THREADS) as (bx, by):
            # In registers every value of the token tile was kept by each wave that multiplies with it; here once.
            tokens_shared = T.alloc_shared((BLOCK_M, STAGE1_BLOCK_K), "float16")
            # First the gate weights, then the up weights: half the shared memory, so two blocks fit on a processor.
            weight_shared = T.alloc_shared((STAGE1_BLOCK_N, STAGE1_BLOCK_K), "float16")
            # Where the up weights wait until the shared tile is free: 16 registers of a thread, no shared memory.
            up_fragment = T.alloc_fragment((STAGE1_BLOCK_N, STAGE1_BLOCK_K), "float16")
            gate_acc = T.alloc_fragment((BLOCK_M, STAGE1_BLOCK_N), "float32")
            up_acc = T.alloc_fragment((BLOCK_M, STAGE1_BLOCK_N), "float32")
            if SWIZZLE_VECTOR > 0:
                T.annotate_layout({
                    tokens_shared: T.Layout((BLOCK_M, STAGE1_BLOCK_K), stage1_layout),
                    weight_shared: T.Layout((STAGE1_BLOCK_N, STAGE1_BLOCK_K), stage1_layout),
                })
            T.use_swizzle(STAGE1_PANEL, order=PANEL_ORDER)

            expert = group_idx_for_bx[bx]
            # TileLang guards an index that it cannot bound, here around every load of a weight tile. A promise that
            # does not hold is a read from anywhere; the contract's block map keeps it.
            T.assume(expert >= 0)
            T.assume(expert < num_experts)
            block_start = bx * BLOCK_M
            rows_before = block_start - group_padded_offsets[expert]
            actual_rows = T.max(0, T.min(BLOCK_M, group_sizes[expert] - rows_before))

            # With the padding rule ceil((n + 1) / 128) every full group ends in such a block, an empty expert is one.
            if actual_rows > 0:
                T.clear(gate_acc)
                T.clear(up_acc)
                # A plain loop: a tile that is written twice in one step cannot be pipelined.
                for k in T.serial(T.ceildiv(hidden, STAGE1_BLOCK_K)):
                    T.copy(
                        gate_w[expert, by * STAGE1_BLOCK_N, k * STAGE1_BLOCK_K], weight_shared,
                        coalesced_width=WEIGHT_COPY_WIDTH,
                    )
                    T.copy(stacked_expert_tokens[block_start, k * STAGE1_BLOCK_K], tokens_shared)
                    # Ordinary loads, issued early: a load stalls its thread when the value is used, not before.
                    T.copy(
                        up_w[expert, by * STAGE1_BLOCK_N, k * STAGE1_BLOCK_K], up_fragment,
                        coalesced_width=WEIGHT_COPY_WIDTH,
                    )
                    T.sync_threads()
                    T.gemm(tokens_shared, weight_shared, gate_acc, transpose_B=True)
                    # No thread may overwrite the tile while another still multiplies with it.
                    T.sync_threads()
                    T.copy(up_fragment, weight_shared)
                    T.sync_threads()
                    T.gemm(tokens_shared, weight_shared, up_acc, transpose_B=True)
                    T.sync_threads()

                for i, j in T.Parallel(BLOCK_M, STAGE1_BLOCK_N):
                    gate_acc[i, j] = gate_acc[i, j] * (1.0 / (1.0 + T.exp2(-gate_acc[i, j] * LOG2_E)))
                    up_acc[i, j] = up_acc[i, j] * gate_acc[i, j]
                # Padding rows hold garbage (their tokens are arbitrary), so only valid rows leave the block.
                for i, j in T.Parallel(BLOCK_M, STAGE1_BLOCK_N):
                    if i < actual_rows:
                        up_logits[block_start + i, by * STAGE1_BLOCK_N + j] = up_acc[i, j]

        # Stage 2: out = (up_logits @ down_w.T) * route weight
        with T.Kernel(num_blocks_m, T.ceildiv(hidden, STAGE2_BLOCK_N), threads=STAGE2_THREADS) as (bx, by):
            logits_shared = T.alloc_shared((BLOCK_M, STAGE2_BLOCK_K), "float16")
            down_shared = T.alloc_shared((STAGE2_BLOCK_N, STAGE2_BLOCK_K), "float16")
            out_acc = T.alloc_fragment((BLOCK_M, STAGE2_BLOCK_N), "float32")
            if SWIZZLE_VECTOR > 0:
                T.annotate_layout({
                    logits_shared: T.Layout((BLOCK_M, STAGE2_BLOCK_K), stage2_layout),
                    down_shared: T.Layout((STAGE2_BLOCK_N, STAGE2_BLOCK_K), stage2_layout),
                })
            T.use_swizzle(STAGE2_PANEL, order=PANEL_ORDER)

            expert = group_idx_for_bx[bx]
            T.assume(expert >= 0)
            T.assume(expert < num_experts)
            block_start = bx * BLOCK_M
            rows_before = block_start - group_padded_offsets[expert]
            actual_rows = T.max(0, T.min(BLOCK_M, group_sizes[expert] - rows_before))
            # Two index spaces: out has padded rows, the route weights have raw rows.
            raw_start = group_offsets[expert] + rows_before

            T.clear(out_acc)
            if actual_rows > 0:
                for k in T.Pipelined(T.ceildiv(intermediate, STAGE2_BLOCK_K), num_stages=NUM_STAGES):
                    T.copy(up_logits[block_start, k * STAGE2_BLOCK_K], logits_shared)
                    T.copy(
                        down_w[expert, by * STAGE2_BLOCK_N, k * STAGE2_BLOCK_K], down_shared,
                        coalesced_width=WEIGHT_COPY_WIDTH,
                    )
                    T.gemm(logits_shared, down_shared, out_acc, transpose_B=True)

            # A choice, not a product with 0: padding rows of the accumulator hold garbage, and 0 times NaN is NaN.
            for i, j in T.Parallel(BLOCK_M, STAGE2_BLOCK_N):
                out[block_start + i, by * STAGE2_BLOCK_N + j] = T.if_then_else(
                    i < actual_rows, out_acc[i, j] * routed_expert_weights[raw_start + i], 0.0
                )

    return moe_forward


def _get_kernel(hidden, intermediate, num_experts, total_padded_tokens, total_valid_tokens, num_blocks_m):
    """The compiled kernel of these sizes; compiling takes seconds, so each set is compiled once."""
    key = (hidden, intermediate, num_experts, total_padded_tokens, total_valid_tokens, num_blocks_m)
    if key not in KERNELS:
        KERNELS[key] = _moe_forward_kernel(
            hidden, intermediate, num_experts, total_padded_tokens, total_valid_tokens, num_blocks_m
        )
    return KERNELS[key]


def _get_workspace(device, rows, intermediate, dtype):
    """The (P, I) buffer between the stages; the judge passes none, so each size is allocated once."""
    key = (device.index, rows, intermediate, dtype)
    if key not in WORKSPACES:
        WORKSPACES[key] = torch.empty((rows, intermediate), dtype=dtype, device=device)
    return WORKSPACES[key]


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    """Write the fused expert result into out; every other argument is only read."""
    total_padded_tokens, hidden = stacked_expert_tokens.shape
    num_experts, intermediate = gate_w.shape[0], gate_w.shape[1]
    kernel = _get_kernel(
        hidden, intermediate, num_experts,
        total_padded_tokens, routed_expert_weights.shape[0], group_idx_for_bx.shape[0],
    )
    up_logits = _get_workspace(out.device, total_padded_tokens, intermediate, out.dtype)
    kernel(
        stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
        group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, up_logits, out,
    )
