// Where this rank's tokens go: per rank and per expert a running number, and the counts that ranks exchange.
#include "ncclep/tokens.cuh"

using namespace ncclep;

constexpr int kChoicesAtOnce = 4, kBlocksAtOnce = 16;  // loads of a thread before it needs the first

// What the earlier blocks have counted in a bin, once they have; false in `came` when one does not. Blocks begin in the
// order of their numbers, so these have begun.
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

// A block's tokens are as many as its threads, and its threads take their choices in turn, so that memory is read and
// written in order. Shared memory, bins = ranks × most_experts + ranks: 8 × (warps per block) × bins + 4 × threads × top_k
// bytes.
extern "C" __global__ void route_layout(const TokenArgs a) {
    await_previous();
    const int most = (int)a.most_experts, top_k = (int)a.top_k, threads = (int)blockDim.x;
    const int expert_bins = (int)a.ranks * most, bins = expert_bins + (int)a.ranks;
    u32* chosen = reinterpret_cast<u32*>(shared_bytes());  // [warps][bins]: which of 32 tokens are there
    u32* before = chosen + warps_per_block() * bins;       // [warps][bins]: tokens of earlier warps and blocks there
    int* bin_of = reinterpret_cast<int*>(before + warps_per_block() * bins);  // [threads × top_k], -1: masked
    const bool last = blockIdx.x == gridDim.x - 1;
    const u64 epoch = a.layout_state->epoch;
    for (int i = threadIdx.x; i < warps_per_block() * bins; i += threads) chosen[i] = 0;
    __syncthreads();

    const i64 first_token = (i64)blockIdx.x * threads, first_choice = first_token * top_k;
    const i64 left = a.tokens - first_token;
    const int choices = (int)(left < threads ? left : threads) * top_k;
    for (int base = threadIdx.x; base < choices; base += kChoicesAtOnce * threads) {
        int named[kChoicesAtOnce], rank[kChoicesAtOnce], local[kChoicesAtOnce];
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i) {
            const int choice = base + i * threads;
            named[i] = choice < choices ? a.topk_idx[first_choice + choice] : -1;
        }
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i) {
            const bool known = named[i] >= 0 && named[i] < a.num_experts;
            rank[i] = known ? a.rank_of_expert[named[i]] : -1;
            local[i] = known ? a.local_of_expert[named[i]] : 0;
        }
#pragma unroll
        for (int i = 0; i < kChoicesAtOnce; ++i) {
            const int choice = base + i * threads, token = choice / top_k;
            if (choice >= choices) break;
            const int bin = bin_of[choice] = rank[i] < 0 ? -1 : rank[i] * most + local[i];
            if (bin >= 0) {
                or_shared(chosen + token / 32 * bins + bin, 1u << token % 32);
                or_shared(chosen + token / 32 * bins + expert_bins + rank[i], 1u << token % 32);
            } else if (named[i] != -1) {
                raise_fault(a.fault, kExpertOutOfRange, a.rank, (u64)named[i]);
            }
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += threads) {
        u32 running = 0;
        for (int warp = 0; warp < warps_per_block(); ++warp) {
            before[warp * bins + bin] = running;
            running += count_bits(chosen[warp * bins + bin]);
        }
        if (last)
            a.own_counts[bin] = (int)running;
        else
            store_word(a.block_counts + (i64)blockIdx.x * bins + bin, dated(epoch, running));
    }
    bool came = true;
    if (blockIdx.x > 0)
        for (int bin = threadIdx.x; bin < bins; bin += threads) {
            const int earlier = counted_before(a, epoch, bins, bin, came);
            for (int warp = 0; warp < warps_per_block(); ++warp) before[warp * bins + bin] += earlier;
            if (last) a.own_counts[bin] += earlier;
        }
    __syncthreads();

    const auto number_of = [&](int token, int bin) {
        const int at = token / 32 * bins + bin;
        return (int)before[at] + count_bits(chosen[at] & ((1u << token % 32) - 1));
    };
    for (int choice = threadIdx.x; choice < choices; choice += threads) {
        const int bin = bin_of[choice];
        const int within = bin < 0 ? 0 : number_of(choice / top_k, bin);
        a.within[first_choice + choice] = within;
        a.goes_to[first_choice + choice] =
            bin < 0 ? kNowhere : destination(bin / most, place_word(a, bin % most, within));
    }
    for (int i = threadIdx.x; i < choices / top_k * a.ranks; i += threads) {
        const int token = i / (int)a.ranks, bin = expert_bins + i % (int)a.ranks;
        const bool there = chosen[token / 32 * bins + bin] >> token % 32 & 1;
        a.slot_of[first_token * a.ranks + i] = there ? number_of(token, bin) : -1;
    }
    if (!last) return;
    if (!a.low_latency) {
        push_counts(a, epoch, threadIdx.x, threads);
        for (int i = threadIdx.x; i < a.ranks * header_words(a) && came; i += threads)
            await_count(a, i / header_words(a), i % header_words(a), epoch, came);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        a.layout_state->tokens = a.tokens;
        a.layout_state->epoch = epoch + 1;
    }
}
NCCLEP_EXPORT(route_layout)
