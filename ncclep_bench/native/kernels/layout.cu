// Where this rank's tokens go: per rank and per expert a running number, and the counts that ranks exchange.
#include "ncclep/tokens.cuh"

using namespace ncclep;

constexpr int kChoicesAtOnce = 4, kBlocksAtOnce = 8;  // loads of a thread before it needs the first

// What the earlier blocks have counted in a bin, once they have; false in `came` when one does not.
__device__ static int counted_before(const TokenArgs& a, u64 epoch, i64 bins, i64 bin, bool& came) {
    const u64* words = a.block_counts + bin;
    u32 count = 0;
    for (i64 base = 0; base < blockIdx.x; base += kBlocksAtOnce) {
        u64 held[kBlocksAtOnce];
#pragma unroll
        for (int i = 0; i < kBlocksAtOnce; ++i)
            held[i] = base + i < blockIdx.x ? load_word(words + (base + i) * bins) : dated(epoch, 0);
#pragma unroll
        for (int i = 0; i < kBlocksAtOnce; ++i)
            count += is_of(held[i], epoch)
                         ? (u32)held[i]
                         : await_dated(words + (base + i) * bins, epoch, (int)a.rank, waiting_of(a), came);
    }
    return (int)count;
}

// One token per thread. Shared memory, bins = ranks × most_experts + ranks: 8 × (warps per block) × bins + 4 × threads ×
// top_k bytes.
extern "C" __global__ void route_layout(const TokenArgs a) {
    await_previous();
    const i64 expert_bins = a.ranks * a.most_experts, bins = expert_bins + a.ranks;
    u32* chosen = reinterpret_cast<u32*>(shared_bytes());  // [warps][bins]: lanes whose token is there
    u32* before = chosen + warps_per_block() * bins;       // [warps][bins]: tokens of earlier warps and blocks there
    int* bin_of = reinterpret_cast<int*>(before + warps_per_block() * bins) + threadIdx.x;  // [top_k][threads]
    const bool last = blockIdx.x == gridDim.x - 1;
    const u64 epoch = a.layout_state->epoch;
    for (i64 i = threadIdx.x; i < warps_per_block() * bins; i += blockDim.x) chosen[i] = 0;
    __syncthreads();

    const i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    u32* mine = chosen + warp_id() * bins;
    const u32 lane_bit = 1u << lane_id();
    for (i64 base = 0; base < (token < a.tokens ? a.top_k : 0); base += kChoicesAtOnce) {
        int named[kChoicesAtOnce], rank[kChoicesAtOnce], local[kChoicesAtOnce];  // rank: below 0 where nobody has it
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i)
            named[i] = base + i < a.top_k ? a.topk_idx[token * a.top_k + base + i] : -1;
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i) {
            const bool known = named[i] >= 0 && named[i] < a.num_experts;
            rank[i] = known ? a.rank_of_expert[named[i]] : -1;
            local[i] = known ? a.local_of_expert[named[i]] : 0;
        }
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i) {
            if (base + i >= a.top_k) break;
            const int bin = rank[i] < 0 ? -1 : rank[i] * (int)a.most_experts + local[i];
            bin_of[(base + i) * blockDim.x] = bin;
            if (bin >= 0) {
                or_shared(mine + bin, lane_bit);
                or_shared(mine + expert_bins + rank[i], lane_bit);
            } else if (named[i] != -1) {
                raise_fault(a.fault, kExpertOutOfRange, a.rank, (u64)named[i]);
            }
        }
    }
    __syncthreads();
    for (i64 bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        u32 running = 0;
        for (i64 warp = 0; warp < warps_per_block(); ++warp) {
            before[warp * bins + bin] = running;
            running += count_bits(chosen[warp * bins + bin]);
        }
        if (last)
            a.own_counts[bin] = (int)running;
        else
            store_word(a.block_counts + blockIdx.x * bins + bin, dated(epoch, running));
    }
    bool came = true;
    if (blockIdx.x > 0)
        for (i64 bin = threadIdx.x; bin < bins; bin += blockDim.x) {
            const int earlier = counted_before(a, epoch, bins, bin, came);
            for (i64 warp = 0; warp < warps_per_block(); ++warp) before[warp * bins + bin] += earlier;
            if (last) a.own_counts[bin] += earlier;
        }
    __syncthreads();

    if (token < a.tokens) {
        const u32 lower = lane_bit - 1;
        const u32* base = before + warp_id() * bins;
        for (i64 number = 0; number < a.top_k; ++number) {
            const i64 choice = token * a.top_k + number;
            const int bin = bin_of[number * blockDim.x], rank = bin / (int)a.most_experts;
            a.goes_to[choice] = kNowhere;
            if (bin < 0) continue;
            const int within = (int)base[bin] + count_bits(mine[bin] & lower);
            a.within[choice] = within;
            a.goes_to[choice] = destination(rank, place_word(a, bin % (int)a.most_experts, within));
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
        for (int i = threadIdx.x; i < a.ranks * header_words(a) && came; i += blockDim.x)
            await_count(a, i / header_words(a), i % header_words(a), epoch, came);
    }
    __syncthreads();
    if (threadIdx.x == 0) a.layout_state->epoch = epoch + 1;
}
NCCLEP_EXPORT(route_layout)
