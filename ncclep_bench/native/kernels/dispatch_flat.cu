// Dispatch straight into the peers' outputs: layouts flat (ht) and rank_major (ll).
#include "ncclep/tokens.cuh"

using namespace ncclep;

// Rows, scales, weights and local ids of one token to each rank of `wanted`; `row` is each lane's row at its rank.
__device__ static void push_token(const TokenArgs& a, i64 token, u32 wanted, i64 row) {
    copy_piece(a.rows + token * a.row_vecs, Piece{0, (int)a.row_vecs}, [&] { return wanted; }, [&](int rank) {
        return at<Vec>(a.heaps, rank, a.flat_rows_at) + __shfl_sync(kAllLanes, row, rank) * a.row_vecs;
    });
    const bool chooses = lane_id() < a.top_k;
    const int expert = chooses ? expert_of(a, token * a.top_k + lane_id()) : -1;
    const int rank_of = expert < 0 ? -1 : a.rank_of_expert[expert];
    const int local = expert < 0 ? -1 : a.local_of_expert[expert];
    const float weight = expert < 0 ? 0.0f : a.topk_weights[token * a.top_k + lane_id()];
    for (u32 left = wanted; left; left &= left - 1) {
        const int rank = first_bit(left);
        const i64 target = __shfl_sync(kAllLanes, row, rank);
        if (chooses) {
            at<float>(a.heaps, rank, a.flat_weights_at)[target * a.top_k + lane_id()] = rank_of == rank ? weight : 0.0f;
            at<int>(a.heaps, rank, a.flat_idx_at)[target * a.top_k + lane_id()] = rank_of == rank ? local : -1;
        }
        for (i64 i = lane_id(); i < a.scale_words; i += 32)
            at<u32>(a.heaps, rank, a.flat_scales_at)[target * a.scale_words + i] = a.scales[token * a.scale_words + i];
    }
}

// Shared memory: 8 + 8 × ranks bytes.
extern "C" __global__ void __launch_bounds__(512, 1) dispatch_flat(const TokenArgs a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    i64* first_row = reinterpret_cast<i64*>(word + 1);
    const u64 epoch = *epoch_of_block(a.dispatch_state), counts = count_epoch(a, epoch);
    check_tokens(a);
    if (blockIdx.x == 0) {
        // Whoever read the last outputs came earlier in this stream, so they may be overwritten.
        signal_all(a, a.ready_flags_at, epoch);
        if (a.low_latency) push_counts(a, counts, threadIdx.x, blockDim.x);
    }
    if (threadIdx.x < a.ranks) {
        i64 first = a.low_latency ? a.rank * a.slots : 0;
        if (!a.low_latency)
            for (i64 source = 0; source < a.rank; ++source)
                first += known_count(a, source, a.most_experts + threadIdx.x, counts);
        first_row[threadIdx.x] = first;
    }
    u64 pushed = 0;
    if (await_all(a, a.ready_flags_at, epoch, word)) {
        const i64 warps = (i64)gridDim.x * warps_per_block();
        const i64 tokens = tokens_of(a);
        for (i64 token = (i64)warp_id() * gridDim.x + blockIdx.x; token < tokens; token += warps) {
            const int slot = lane_id() < a.ranks ? a.slot_of[token * a.ranks + lane_id()] : -1;
            const u32 wanted = __ballot_sync(kAllLanes, slot >= 0);
            push_token(a, token, wanted, slot < 0 ? 0 : first_row[lane_id()] + slot);
            pushed += count_bits(wanted & ~(1u << a.rank));
        }
    }
    if (pushed && lane_id() == 0) fetch_add(&a.dispatch_state->rows_pushed, pushed);
    exchange_done(a.heaps, a.rank, a.ranks, a.done_flags_at, epoch, waiting_of(a), word);
    if (blockIdx.x == gridDim.x - 1) {
        bool came = true;
        for (i64 expert = threadIdx.x; expert < a.local_experts; expert += blockDim.x) {
            i64 total = 0;
            for (i64 source = 0; source < a.ranks; ++source) total += await_count(a, source, expert, counts, came);
            a.expert_counts[expert] = total;
        }
        for (i64 source = threadIdx.x; source < a.ranks; source += blockDim.x)
            a.source_counts[source] = a.received[source] =
                await_count(a, source, a.most_experts + a.rank, counts, came);
    }
    leave(a.dispatch_state, epoch);
}
NCCLEP_EXPORT(dispatch_flat)
