// Where this rank's tokens go: per rank and per expert a running number, and the counts that ranks exchange.
#include "ncclep/tokens.cuh"

using namespace ncclep;

// One token per thread. Shared memory: 8 + 8 × (warps per block) × (bins) bytes, bins = ranks × most_experts + ranks.
extern "C" __global__ void route_layout(const TokenArgs a) {
    await_previous();
    const i64 expert_bins = a.ranks * a.most_experts, bins = expert_bins + a.ranks;
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    u32* chosen = reinterpret_cast<u32*>(word + 1);  // [warps][bins]: lanes whose token is in the bin
    u32* before = chosen + warps_per_block() * bins;  // [warps][bins]: tokens of earlier warps and blocks in it
    const u64 epoch = a.layout_state->epoch;
    for (i64 i = threadIdx.x; i < warps_per_block() * bins; i += blockDim.x) chosen[i] = 0;
    __syncthreads();

    const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    u32* mine = chosen + warp_id() * bins;
    const u32 lane_bit = 1u << lane_id();
    if (token < a.tokens)
        for (i64 choice = token * a.top_k; choice < (token + 1) * a.top_k; ++choice) {
            const int named = a.topk_idx[choice], expert = expert_of(a, choice);
            if (expert < 0) {
                if (named != -1) raise_fault(a.fault, kExpertOutOfRange, a.rank, (u64)named);
                continue;
            }
            const i64 rank = a.rank_of_expert[expert];
            or_shared(mine + rank * a.most_experts + a.local_of_expert[expert], lane_bit);
            or_shared(mine + expert_bins + rank, lane_bit);
        }
    __syncthreads();
    for (i64 bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        u32 running = 0;
        for (i64 warp = 0; warp < warps_per_block(); ++warp) {
            before[warp * bins + bin] = running;
            running += count_bits(chosen[warp * bins + bin]);
        }
        a.block_counts[blockIdx.x * bins + bin] = (int)running;
    }

    const bool last = last_block(a.layout_state, word);
    if (threadIdx.x == 0) {
        if (last)
            store_release(&a.layout_state->released, epoch + 1);
        else
            wait_for(&a.layout_state->released, epoch + 1, (int)a.rank, waiting_of(a));
    }
    __syncthreads();
    for (i64 bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        int earlier = 0, total = 0;
        const i64 blocks = last ? gridDim.x : blockIdx.x;
        for (i64 block = 0; block < blocks; ++block) {
            const int count = a.block_counts[block * bins + bin];
            total += count;
            if (block < blockIdx.x) earlier += count;
        }
        for (i64 warp = 0; warp < warps_per_block(); ++warp) before[warp * bins + bin] += earlier;
        if (last) a.own_counts[bin] = total;
    }
    __syncthreads();

    if (token < a.tokens) {
        const u32 lower = lane_bit - 1;
        const u32* base = before + warp_id() * bins;
        for (i64 choice = token * a.top_k; choice < (token + 1) * a.top_k; ++choice) {
            const int expert = expert_of(a, choice);
            a.goes_to[choice] = kNowhere;
            if (expert < 0) continue;
            const i64 rank = a.rank_of_expert[expert], bin = rank * a.most_experts + a.local_of_expert[expert];
            const int within = (int)base[bin] + count_bits(mine[bin] & lower);
            a.within[choice] = within;
            a.goes_to[choice] = destination(rank, place_word(a, a.local_of_expert[expert], within));
        }
        for (i64 rank = 0; rank < a.ranks; ++rank) {
            const i64 bin = expert_bins + rank;
            a.slot_of[token * a.ranks + rank] =
                mine[bin] & lane_bit ? (int)base[bin] + count_bits(mine[bin] & lower) : -1;
        }
    }
    if (!last) return;
    if (!a.low_latency) {
        push_counts(a, epoch, threadIdx.x, blockDim.x);
        bool came = true;
        for (int i = threadIdx.x; i < a.ranks * header_words(a) && came; i += blockDim.x)
            await_count(a, i / header_words(a), i % header_words(a), epoch, came);
    }
    __syncthreads();
    if (threadIdx.x == 0) a.layout_state->epoch = epoch + 1;
}
NCCLEP_EXPORT(route_layout)
