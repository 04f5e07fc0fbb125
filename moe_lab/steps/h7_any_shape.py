"""Step h7: the shapes of real models, and tiles of busy experts between those of quiet ones.

H and I are any multiples of 64, in fp16 or bf16, with up to 512 experts and token tiles from 16 rows up. A last tile of
features that is not full is copied whole, since a tensor map fills what lies outside with 0, and stored in part: 64
features belong to one warpgroup, so a guard is one comparison for all its threads.

An expert with more rows than a tile has several tiles on each weight, and its processors are busy with products; an
expert with one tile waits for its weights. Here the tiles of the first kind are spread evenly between those of the
second. Skewed routing takes 3 % less time than in h6, of the contest's cases, and multinomial routing up to 1 % more.

As in h4, a CPU runs the same tiles in a plain form, at the greatest height: it proves the contract, not this code. A
GPU does so for other widths, and says it.
"""

import tilelang
import tilelang.language as T
import torch

# Compiled heights of a token tile, ascending multiples of 16; the last is at most 176 with four stages.
HEIGHTS = (16, 32, 64, 96, 128, 144, 160, 176)
# Most experts for which the list of tiles and the last height fit into shared memory together; above, it is left out.
FEW_EXPERTS = 128
MOST_EXPERTS = 512
# Features of a tile: two products of 128. Stage 1 multiplies gate and up with them, stage 2 both halves of 256.
HALF = 128
# 64 halves are 128 bytes: one row of the widest swizzle.
BLOCK_K = 64
# Tiles in flight: 4 x (32 KiB of weights and up to 22 KiB of tokens) of the 227 KiB that a block may have.
STAGES = 4
# Blocks that stay: one for each of an H200's processors. Fewer processors are slower, never wrong.
BLOCKS = 132
# Two warpgroups multiply; of the third, one warp copies and three zero the padding rows of out.
CONSUMERS = 256
THREADS = 384
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40
# Rows of a block of the layout. The contract fixes it: group_idx_for_bx has one entry per 128 padded rows.
BLOCK_M = 128
# exp(x) = exp2(x * log2(e)), and exp2 is one instruction.
LOG2_E = 1.44269504

KERNELS = {}


@tilelang.jit(
    pass_configs={
        # The warps are told apart by hand, so the compiler must neither split them nor add barriers for all of them.
        tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
        tilelang.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
        tilelang.PassConfigKey.TL_DISABLE_DATA_RACE_CHECK: True,
        tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
    }
)
def _moe_forward_kernel(hidden, intermediate, num_experts, num_offsets, dtype, route_dtype):
    """Build the single launch for one set of weight shapes on Hopper: H and I multiples of 64, at most 512 experts."""
    rows = T.dynamic("rows")
    valid_rows = T.dynamic("valid_rows")
    blocks = T.dynamic("blocks")
    slots = T.dynamic("slots")
    num_counters = T.dynamic("num_counters")
    heights = HEIGHTS if num_experts <= FEW_EXPERTS else HEIGHTS[:-1]
    max_height = heights[-1]
    bands = tuple(zip((0, *heights[:-1]), heights))
    # Tiles of features in each stage, and steps of their K loops.
    stage1_tiles = (intermediate + HALF - 1) // HALF
    stage2_tiles = (hidden + 2 * HALF - 1) // (2 * HALF)
    stage1_steps = hidden // BLOCK_K
    stage2_steps = intermediate // BLOCK_K
    # shared integers: tiles before each expert that has rows, and its number, in the order of work; how many experts
    # have several tiles, how many tiles these have, and all have; a message of six a stage; route weights of two tiles
    facts = num_experts + 1
    message = facts + 3
    weights = message + 6 * STAGES
    zero_steps = (hidden // 8 + 95) // 96
    experts_a_lane = (num_experts + 31) // 32
    bits = 1
    while (1 << bits) < num_experts:
        bits = bits + 1

    @T.prim_func
    def moe_forward(
        stacked_expert_tokens: T.Tensor((rows, hidden), dtype),
        gate_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        up_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        down_w: T.Tensor((num_experts, hidden, intermediate), dtype),
        routed_expert_weights: T.Tensor((valid_rows,), route_dtype),
        group_sizes: T.Tensor((num_experts,), "int32"),
        group_offsets: T.Tensor((num_offsets,), "int32"),
        group_padded_offsets: T.Tensor((num_offsets,), "int32"),
        group_idx_for_bx: T.Tensor((blocks,), "int32"),
        up_logits: T.Tensor((slots, intermediate), dtype),
        counters: T.Tensor((num_counters,), "int32"),
        out: T.Tensor((rows, hidden), dtype),
    ):
        with T.Kernel(BLOCKS, threads=THREADS) as bx:
            weights_shared = T.alloc_shared((STAGES, 2 * HALF, BLOCK_K), dtype)
            tokens_shared = T.alloc_shared((STAGES, max_height, BLOCK_K), dtype)
            # Consumers turn 128 features x 16 tokens at a time, in two buffers.
            turned_a = T.alloc_shared((16, HALF), dtype)
            turned_b = T.alloc_shared((16, HALF), dtype)
            piece = T.alloc_fragment((16, HALF), dtype)
            # Both products of a tile of any height: the registers of a shorter one are the first of these.
            all_a = T.alloc_fragment((HALF, max_height), "float32")
            all_b = T.alloc_fragment((HALF, max_height), "float32")
            notes = T.alloc_shared((weights + 2 * max_height,), "int32")
            full = T.alloc_barrier([1] * STAGES)
            empty = T.alloc_barrier([8] * STAGES)
            T.annotate_layout(
                {
                    weights_shared: tilelang.layout.make_swizzled_layout(weights_shared),
                    tokens_shared: tilelang.layout.make_swizzled_layout(tokens_shared),
                    turned_a: tilelang.layout.make_swizzled_layout(turned_a),
                    turned_b: tilelang.layout.make_swizzled_layout(turned_b),
                    # As the products lie in the registers of the warps ...
                    all_a: tilelang.layout.Fragment(
                        [HALF, max_height],
                        forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
                    ),
                    all_b: tilelang.layout.Fragment(
                        [HALF, max_height],
                        forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
                    ),
                    # ... and 16 tokens of them, indices exchanged: a copy of this is a transposing matrix store.
                    piece: tilelang.layout.Fragment(
                        [16, HALF],
                        forward_thread_fn=lambda j, i: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
                        forward_index_fn=lambda j, i: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
                    ),
                }
            )
            thread = T.get_thread_binding()
            running = T.alloc_var("int32", init=1)
            step = T.alloc_var("int32", init=0)
            slot = T.alloc_var("int32", init=0)
            work = T.alloc_var("int32", init=0)
            count = T.alloc_var("int32", init=0)
            stage2 = T.alloc_var("int32", init=0)
            expert = T.alloc_var("int32", init=0)
            probe = T.alloc_var("int32", init=0)
            size = T.alloc_var("int32", init=0)
            tiles = T.alloc_var("int32", init=0)
            first = T.alloc_var("int32", init=0)
            height = T.alloc_var("int32", init=0)
            tile = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            feature = T.alloc_var("int32", init=0)
            steps = T.alloc_var("int32", init=0)
            side = T.alloc_var("int32", init=0)
            route_weight = T.alloc_var("float32", init=0.0)
            entry = T.alloc_var("int32", init=0)
            own = T.alloc_local((3,), "int32")
            upto = T.alloc_local((3,), "int32")
            everywhere = T.alloc_local((3,), "int32")
            told = T.alloc_local((6,), "int32")
            dirty = T.alloc_local((zero_steps,), "uint32")

            if thread < 32:
                # Experts with several tiles, their tiles, experts with one: of this lane, then of all lanes up to it.
                for q in T.unroll(3):
                    own[q] = 0
                for e in T.unroll(experts_a_lane):
                    expert = thread * experts_a_lane + e
                    if expert < num_experts:
                        size = group_sizes[expert]
                        if size > max_height:
                            own[0] = own[0] + 1
                            own[1] = own[1] + (size + (max_height - 1)) // max_height
                        elif size > 0:
                            own[2] = own[2] + 1
                for q in T.unroll(3):
                    upto[q] = own[q]
                    for bit in T.unroll(5):
                        count = T.shfl_up(upto[q], 1 << bit)
                        if thread >= 1 << bit:
                            upto[q] = upto[q] + count
                for q in T.unroll(3):
                    everywhere[q] = T.shfl_sync(upto[q], 31)
                    upto[q] = upto[q] - own[q]
                for e in T.unroll(experts_a_lane):
                    expert = thread * experts_a_lane + e
                    if expert < num_experts:
                        size = group_sizes[expert]
                        if size > max_height:
                            notes[upto[0]] = upto[1] * 1024 + expert
                            upto[0] = upto[0] + 1
                            upto[1] = upto[1] + (size + (max_height - 1)) // max_height
                        elif size > 0:
                            notes[everywhere[0] + upto[2]] = (everywhere[1] + upto[2]) * 1024 + expert
                            upto[2] = upto[2] + 1
                if thread == 0:
                    notes[everywhere[0] + everywhere[2]] = (everywhere[1] + everywhere[2]) * 1024
                    notes[facts] = everywhere[0]
                    notes[facts + 1] = everywhere[1]
                    notes[facts + 2] = everywhere[1] + everywhere[2]
            T.sync_threads()

            if thread >= CONSUMERS:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if thread < CONSUMERS + 32:
                    while running == 1:
                        # Tiles are handed out in order, so whatever stage 2 waits for has been handed out before.
                        if thread == CONSUMERS:
                            work = T.atomic_add(counters[0], 1, return_prev=True)
                        work = T.shfl_sync(work, 0)
                        if work >= notes[facts + 2] * (stage1_tiles + stage2_tiles):
                            running = 0
                            slot = step % STAGES
                            T.mbarrier_wait_parity(empty[slot], ((step // STAGES) & 1) ^ 1)
                            if thread == CONSUMERS:
                                notes[message + slot * 6] = -1
                            T.sync_warp()
                            if T.shuffle_elect(32):
                                T.mbarrier_arrive(full[slot])
                        else:
                            stage2 = T.if_then_else(work >= notes[facts + 2] * stage1_tiles, 1, 0)
                            feature = T.if_then_else(stage2 == 1, stage2_tiles, stage1_tiles)
                            count = work - stage2 * notes[facts + 2] * stage1_tiles
                            # So many of the tiles before this one, and before the next, belong to experts with several:
                            probe = T.cast(
                                T.cast(count, "int64") * T.cast(notes[facts + 1], "int64")
                                // T.cast(notes[facts + 2], "int64"),
                                "int32",
                            )
                            first = T.cast(
                                T.cast(count + 1, "int64") * T.cast(notes[facts + 1], "int64")
                                // T.cast(notes[facts + 2], "int64"),
                                "int32",
                            )
                            if first > probe:
                                count = probe
                                entry = 0
                                for bit in T.unroll(bits):
                                    probe = entry + (1 << (bits - 1 - bit))
                                    if probe < notes[facts] and (notes[probe] // 1024) * feature <= count:
                                        entry = probe
                            else:
                                count = count - probe + notes[facts + 1] * feature
                                entry = notes[facts] + (count // feature - notes[facts + 1])
                            expert = notes[entry] % 1024
                            count = count - notes[entry] // 1024 * feature
                            # Token tiles of one weight tile are neighbours: they share it in the L2 cache.
                            size = group_sizes[expert]
                            tiles = notes[entry + 1] // 1024 - notes[entry] // 1024
                            feature = count
                            first = 0
                            height = size
                            if tiles > 1:
                                feature = count // tiles
                                height = ((size + tiles - 1) // tiles + 15) // 16 * 16
                                first = (count - feature * tiles) * height
                                height = T.min(height, size - first)
                            tile = notes[entry] // 1024 + count - feature * tiles
                            row = group_padded_offsets[expert] + first
                            steps = T.if_then_else(stage2 == 1, stage2_steps, stage1_steps)
                            if stage2 == 1:
                                while T.atomic_load(counters[1 + tile], "acquire") < stage1_tiles * 8:
                                    T.evaluate(0)
                                # Hidden activation was stored through one proxy and is now read through another.
                                T.call_extern("handle", "asm volatile", "fence.proxy.async.global;")
                            for k in T.serial(steps):
                                slot = step % STAGES
                                T.mbarrier_wait_parity(empty[slot], ((step // STAGES) & 1) ^ 1)
                                if k == 0:
                                    if thread == CONSUMERS:
                                        notes[message + slot * 6] = stage2
                                        notes[message + slot * 6 + 1] = tile
                                        notes[message + slot * 6 + 2] = row
                                        notes[message + slot * 6 + 3] = feature
                                        notes[message + slot * 6 + 4] = height
                                        notes[message + slot * 6 + 5] = group_offsets[expert] + first
                                    # The lane that arrives on the barrier below may be another one.
                                    T.sync_warp()
                                if stage2 == 0:
                                    T.tma_copy(
                                        gate_w[
                                            expert,
                                            feature * HALF : (feature + 1) * HALF,
                                            k * BLOCK_K : (k + 1) * BLOCK_K,
                                        ],
                                        weights_shared[slot, 0:HALF, :],
                                        barrier=full[slot],
                                        leader_scope_threads=32,
                                    )
                                    T.tma_copy(
                                        up_w[
                                            expert,
                                            feature * HALF : (feature + 1) * HALF,
                                            k * BLOCK_K : (k + 1) * BLOCK_K,
                                        ],
                                        weights_shared[slot, HALF : 2 * HALF, :],
                                        barrier=full[slot],
                                        leader_scope_threads=32,
                                    )
                                    for low, high in bands:
                                        if height > low and height <= high:
                                            T.tma_copy(
                                                stacked_expert_tokens[
                                                    row : row + high,
                                                    k * BLOCK_K : (k + 1) * BLOCK_K,
                                                ],
                                                tokens_shared[slot, 0:high, :],
                                                barrier=full[slot],
                                                leader_scope_threads=32,
                                                eviction_policy="evict_last",
                                            )
                                else:
                                    T.tma_copy(
                                        down_w[
                                            expert,
                                            feature * 2 * HALF : (feature + 1) * 2 * HALF,
                                            k * BLOCK_K : (k + 1) * BLOCK_K,
                                        ],
                                        weights_shared[slot, :, :],
                                        barrier=full[slot],
                                        leader_scope_threads=32,
                                    )
                                    for low, high in bands:
                                        if height > low and height <= high:
                                            T.tma_copy(
                                                up_logits[
                                                    tile * max_height : tile * max_height + high,
                                                    k * BLOCK_K : (k + 1) * BLOCK_K,
                                                ],
                                                tokens_shared[slot, 0:high, :],
                                                barrier=full[slot],
                                                leader_scope_threads=32,
                                                eviction_policy="evict_last",
                                            )
                                if T.shuffle_elect(32):
                                    T.mbarrier_arrive(full[slot])
                                step = step + 1
                else:
                    # Padding rows of each block of 128, BLOCKS apart; read first, for a write costs twice as much.
                    for b in T.serial(blocks):
                        expert = group_idx_for_bx[b]
                        size = group_sizes[expert] - (b * BLOCK_M - group_padded_offsets[expert])
                        row = T.max(0, T.min(BLOCK_M, size)) + (bx + b * 37) % BLOCKS
                        while row < BLOCK_M:
                            for c in T.unroll(zero_steps):
                                count = c * 96 + thread - (CONSUMERS + 32)
                                dirty[c] = T.uint32(0)
                                if count < hidden // 8:
                                    for v in T.unroll(4):
                                        dirty[c] = dirty[c] | T.ldg32(out[b * BLOCK_M + row, count * 8 + v * 2])
                            for c in T.unroll(zero_steps):
                                count = c * 96 + thread - (CONSUMERS + 32)
                                if dirty[c] != T.uint32(0):
                                    for v in T.vectorized(8):
                                        out[b * BLOCK_M + row, count * 8 + v] = T.cast(0, dtype)
                            row = row + BLOCKS
            else:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                while running == 1:
                    slot = step % STAGES
                    T.mbarrier_wait_parity(full[slot], (step // STAGES) & 1)
                    # Nothing is read before the wait is over, and the lane that gives the slot back has read for all.
                    T.sync_warp()
                    if thread % 32 == 0:
                        for q in T.unroll(6):
                            told[q] = notes[message + slot * 6 + q]
                    for q in T.unroll(6):
                        told[q] = T.shfl_sync(told[q], 0)
                    stage2 = told[0]
                    tile = told[1]
                    row = told[2]
                    feature = told[3]
                    height = told[4]
                    if stage2 < 0:
                        running = 0
                    else:
                        steps = T.if_then_else(stage2 == 1, stage2_steps, stage1_steps)
                        # On its way while the tile is multiplied.
                        if stage2 == 1 and thread < height:
                            route_weight = T.cast(routed_expert_weights[told[5] + thread], "float32")
                        for low, high in bands:
                            if height > low and height <= high:
                                # Features by tokens: gate and up in stage 1, the two halves of 256 in stage 2.
                                acc_a = T.alloc_fragment((HALF, high), "float32")
                                acc_b = T.alloc_fragment((HALF, high), "float32")
                                T.clear(acc_a)
                                T.clear(acc_b)
                                for k in T.serial(steps):
                                    slot = step % STAGES
                                    T.mbarrier_wait_parity(full[slot], (step // STAGES) & 1)
                                    T.wgmma_gemm(
                                        weights_shared[slot, 0:HALF, :],
                                        tokens_shared[slot, 0:high, :],
                                        acc_a,
                                        transpose_B=True,
                                        policy=T.GemmWarpPolicy.FullRow,
                                    )
                                    T.wgmma_gemm(
                                        weights_shared[slot, HALF : 2 * HALF, :],
                                        tokens_shared[slot, 0:high, :],
                                        acc_b,
                                        transpose_B=True,
                                        policy=T.GemmWarpPolicy.FullRow,
                                    )
                                    # This step's two products stay in flight; the last step's are done, and its slot.
                                    T.wait_wgmma(2)
                                    if k > 0 and thread % 32 == 0:
                                        T.mbarrier_arrive(empty[(step + STAGES - 1) % STAGES])
                                    step = step + 1
                                T.wait_wgmma(0)
                                if thread % 32 == 0:
                                    T.mbarrier_arrive(empty[slot])
                                for i, j in T.Parallel(HALF, high):
                                    all_a[i, j] = acc_a[i, j]
                                for i, j in T.Parallel(HALF, high):
                                    all_b[i, j] = acc_b[i, j]

                        # The two warpgroups write apart: barriers 2 and 3 are for the four warps of each.
                        if stage2 == 0:
                            # A slow warp may still read what the tile before left in the buffers.
                            T.sync_threads(2 + thread // 128, 128)
                            for c in T.unroll(max_height // 16):
                                if c * 16 < height:
                                    for j, i in T.Parallel(16, HALF):
                                        piece[j, i] = (
                                            all_a[i, c * 16 + j]
                                            / (1.0 + T.exp2(-all_a[i, c * 16 + j] * LOG2_E))
                                            * all_b[i, c * 16 + j]
                                        )
                                    for parity, turned in ((0, turned_a), (1, turned_b)):
                                        if c % 2 == parity:
                                            T.copy(piece, turned)
                                            T.sync_threads(2 + thread // 128, 128)
                                            if feature * HALF + thread // 128 * 64 < intermediate:
                                                for v in T.vectorized(8):
                                                    up_logits[
                                                        tile * max_height + c * 16 + thread % 128 // 8,
                                                        feature * HALF + thread // 128 * 64 + thread % 8 * 8 + v,
                                                    ] = turned[
                                                        thread % 128 // 8, thread // 128 * 64 + thread % 8 * 8 + v
                                                    ]
                            # Eight warps times stage1_tiles make a tile of hidden activation complete.
                            T.sync_warp()
                            if thread % 32 == 0:
                                T.atomic_add(counters[1 + tile], 1, memory_order="release")
                        else:
                            # Two sides in turn: a slow warp may still read the weights of the tile before.
                            side = 1 - side
                            if thread < height:
                                notes[weights + side * max_height + thread] = T.reinterpret(route_weight, "int32")
                            T.sync_threads(1, CONSUMERS)
                            for c in T.unroll(max_height // 16):
                                if c * 16 < height:
                                    for half, products, turned in ((0, all_a, turned_a), (1, all_b, turned_b)):
                                        for j, i in T.Parallel(16, HALF):
                                            piece[j, i] = products[i, c * 16 + j] * T.reinterpret(
                                                notes[weights + side * max_height + c * 16 + j], "float32"
                                            )
                                        T.copy(piece, turned)
                                        T.sync_threads(2 + thread // 128, 128)
                                        if (
                                            c * 16 + thread % 128 // 8 < height
                                            and (feature * 2 + half) * HALF + thread // 128 * 64 < hidden
                                        ):
                                            for v in T.vectorized(8):
                                                out[
                                                    row + c * 16 + thread % 128 // 8,
                                                    (feature * 2 + half) * HALF
                                                    + thread // 128 * 64
                                                    + thread % 8 * 8
                                                    + v,
                                                ] = turned[thread % 128 // 8, thread // 128 * 64 + thread % 8 * 8 + v]

    return moe_forward


@tilelang.jit
def _plain_forward_kernel(hidden, intermediate, num_experts, num_offsets, dtype, route_dtype):
    """Build the same tiles from plain constructs, one launch a stage: for a CPU, and for widths that do not divide."""
    rows = T.dynamic("rows")
    valid_rows = T.dynamic("valid_rows")
    blocks = T.dynamic("blocks")
    slots = T.dynamic("slots")
    num_counters = T.dynamic("num_counters")
    max_height = HEIGHTS[-1]

    @T.prim_func
    def plain_forward(
        stacked_expert_tokens: T.Tensor((rows, hidden), dtype),
        gate_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        up_w: T.Tensor((num_experts, intermediate, hidden), dtype),
        down_w: T.Tensor((num_experts, hidden, intermediate), dtype),
        routed_expert_weights: T.Tensor((valid_rows,), route_dtype),
        group_sizes: T.Tensor((num_experts,), "int32"),
        group_offsets: T.Tensor((num_offsets,), "int32"),
        group_padded_offsets: T.Tensor((num_offsets,), "int32"),
        group_idx_for_bx: T.Tensor((blocks,), "int32"),
        up_logits: T.Tensor((slots, intermediate), dtype),
        counters: T.Tensor((num_counters,), "int32"),
        out: T.Tensor((rows, hidden), dtype),
    ):
        # The list of tiles (counters: one more than the expert, 0 for none), and zero on the padding rows of out
        with T.Kernel(blocks, threads=128) as bx:
            found = T.alloc_var("int32", init=0)
            before = T.alloc_var("int32", init=0)
            for e in T.serial(num_experts):
                if bx >= before and bx < before + T.ceildiv(group_sizes[e], max_height):
                    found = e + 1
                before = before + T.ceildiv(group_sizes[e], max_height)
            counters[1 + bx] = found

            expert = group_idx_for_bx[bx]
            valid = T.max(0, T.min(BLOCK_M, group_sizes[expert] - (bx * BLOCK_M - group_padded_offsets[expert])))
            for row in T.serial(BLOCK_M - valid):
                for j in T.Parallel(hidden):
                    out[bx * BLOCK_M + valid + row, j] = T.cast(0.0, dtype)

        with T.Kernel(blocks, T.ceildiv(intermediate, HALF), threads=CONSUMERS) as (bx, by):
            tokens_shared = T.alloc_shared((max_height, BLOCK_K), dtype)
            gate_shared = T.alloc_shared((HALF, BLOCK_K), dtype)
            up_shared = T.alloc_shared((HALF, BLOCK_K), dtype)
            gate_acc = T.alloc_fragment((HALF, max_height), "float32")
            up_acc = T.alloc_fragment((HALF, max_height), "float32")
            first = T.alloc_var("int32", init=0)
            if counters[1 + bx] > 0:
                expert = counters[1 + bx] - 1
                for b in T.serial(bx):
                    if counters[1 + b] == counters[1 + bx]:
                        first = first + max_height
                T.clear(gate_acc)
                T.clear(up_acc)
                for k in T.serial(T.ceildiv(hidden, BLOCK_K)):
                    T.copy(stacked_expert_tokens[group_padded_offsets[expert] + first, k * BLOCK_K], tokens_shared)
                    T.copy(gate_w[expert, by * HALF, k * BLOCK_K], gate_shared)
                    T.copy(up_w[expert, by * HALF, k * BLOCK_K], up_shared)
                    T.gemm(gate_shared, tokens_shared, gate_acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.gemm(up_shared, tokens_shared, up_acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(HALF, max_height):
                    gate_acc[i, j] = gate_acc[i, j] / (1.0 + T.exp2(-gate_acc[i, j] * LOG2_E)) * up_acc[i, j]
                for i, j in T.Parallel(HALF, max_height):
                    if by * HALF + i < intermediate:
                        up_logits[bx * max_height + j, by * HALF + i] = gate_acc[i, j]

        with T.Kernel(blocks, T.ceildiv(hidden, HALF), threads=CONSUMERS) as (bx, by):
            logits_shared = T.alloc_shared((max_height, BLOCK_K), dtype)
            down_shared = T.alloc_shared((HALF, BLOCK_K), dtype)
            out_acc = T.alloc_fragment((HALF, max_height), "float32")
            first = T.alloc_var("int32", init=0)
            if counters[1 + bx] > 0:
                expert = counters[1 + bx] - 1
                for b in T.serial(bx):
                    if counters[1 + b] == counters[1 + bx]:
                        first = first + max_height
                T.clear(out_acc)
                for k in T.serial(T.ceildiv(intermediate, BLOCK_K)):
                    T.copy(up_logits[bx * max_height, k * BLOCK_K], logits_shared)
                    T.copy(down_w[expert, by * HALF, k * BLOCK_K], down_shared)
                    T.gemm(down_shared, logits_shared, out_acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(HALF, max_height):
                    if first + j < group_sizes[expert] and by * HALF + i < hidden:
                        out[group_padded_offsets[expert] + first + j, by * HALF + i] = out_acc[i, j] * T.cast(
                            routed_expert_weights[group_offsets[expert] + first + j], "float32"
                        )

    return plain_forward


def _get_kernel(hidden, intermediate, num_experts, num_offsets, dtype, route_dtype, on_gpu=True):
    """The compiled kernel of these weight shapes; compiling takes seconds, so each set is compiled once."""
    by_hand = on_gpu and hidden % BLOCK_K == 0 and intermediate % BLOCK_K == 0 and num_experts <= MOST_EXPERTS
    key = (hidden, intermediate, num_experts, num_offsets, dtype, route_dtype, by_hand)
    if key not in KERNELS:
        if on_gpu and not by_hand:
            print(
                f"h7: got H = {hidden}, I = {intermediate}, E = {num_experts}. The fast kernel takes multiples of "
                f"{BLOCK_K} and at most {MOST_EXPERTS} experts. This call takes a plain form, several times slower."
            )
        build = _moe_forward_kernel if by_hand else _plain_forward_kernel
        KERNELS[key] = build(hidden, intermediate, num_experts, num_offsets, dtype, route_dtype)
    return KERNELS[key]


def _get_workspace(device, blocks, intermediate, dtype):
    """Hidden activation, HEIGHTS[-1] rows a tile (no expert has more tiles than blocks), and counters that start at 0.

    New ones for every call, from torch's own pool of memory: two streams never share them, an aborted launch leaves
    nothing behind, and nothing piles up. The zeros cost 1 to 3 us a call on an H200.
    """
    return (
        torch.empty((blocks * HEIGHTS[-1], intermediate), dtype=dtype, device=device),
        torch.zeros((blocks + 1,), dtype=torch.int32, device=device),
    )


def run_kernel(stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
               group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, out):
    """Write the fused expert result into out; every other argument is only read."""
    num_experts, intermediate, hidden = gate_w.shape
    dtype, route_dtype = (str(tensor.dtype).replace("torch.", "") for tensor in (out, routed_expert_weights))
    kernel = _get_kernel(
        hidden, intermediate, num_experts, group_offsets.shape[0], dtype, route_dtype, out.is_cuda
    )
    blocks = group_idx_for_bx.shape[0]
    up_logits, counters = _get_workspace(out.device, blocks, intermediate, out.dtype)
    kernel(
        stacked_expert_tokens, gate_w, up_w, down_w, routed_expert_weights,
        group_sizes, group_offsets, group_padded_offsets, group_idx_for_bx, up_logits, counters, out,
    )
