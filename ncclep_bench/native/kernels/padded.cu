// The traditional way around a library's all-to-all: rows packed into equal blocks, laid out on arrival, summed at home.
//
// Padded rows lie as [ranks][most_experts][capacity]: by rank they go to or come from, then by expert there.
#include "ncclep/sums.cuh"
#include "ncclep/tokens.cuh"

using namespace ncclep;

// Fields are 64 bits wide each; the host packs them by name in this order.
struct PaddedArgs {
    i64 ranks;
    i64 tokens;
    i64 top_k;
    i64 num_experts;
    i64 local_experts;
    i64 most_experts;
    i64 capacity;  // rows from one rank to one expert that there is room for
    i64 row_vecs;
    const int* topk_idx;
    const float* topk_weights;
    const int* rank_of_expert;
    const int* local_of_expert;
    const int* within;          // [tokens][top_k], as route_layout left it
    const u64* counts;          // likewise
    const State* layout_state;  // likewise
    i64* expert_counts;
    const Vec* from;
    Vec* to;
};

// Padded row of this lane's choice of a token, -1 where there is none.
__device__ static i64 padded_row(const PaddedArgs& a, i64 token) {
    if (lane_id() >= a.top_k) return -1;
    const i64 choice = token * a.top_k + lane_id();
    const int expert = expert_of(a, choice);
    if (expert < 0 || a.within[choice] >= a.capacity) return -1;
    return (a.rank_of_expert[expert] * a.most_experts + a.local_of_expert[expert]) * a.capacity + a.within[choice];
}

// Tokens into padded rows, one for each choice. No shared memory.
extern "C" __global__ void __launch_bounds__(512, 1) pad_tokens(const PaddedArgs a) {
    await_previous();
    const i64 warps = (i64)gridDim.x * warps_per_block();
    for (i64 token = (i64)warp_id() * gridDim.x + blockIdx.x; token < a.tokens; token += warps) {
        const i64 row = padded_row(a, token);
        const u32 wanted = __ballot_sync(kAllLanes, row >= 0);
        copy_piece(a.from + token * a.row_vecs, Piece{0, (int)a.row_vecs}, [&] { return wanted; },
                   [&](int lane) { return a.to + __shfl_sync(kAllLanes, row, lane) * a.row_vecs; });
    }
}
NCCLEP_EXPORT(pad_tokens)

// Received padded rows into expert-major ones, or those back. Shared memory: 12 × local_experts × ranks bytes.
template <bool kBack>
__device__ inline void arrange(const PaddedArgs& a) {
    await_previous();
    const int ranks = (int)a.ranks, places = (int)a.local_experts * ranks;  // by expert, then by source
    i64* first = reinterpret_cast<i64*>(shared_bytes());
    int* count = reinterpret_cast<int*>(first + places);
    const u64* counts = a.counts + ((a.layout_state->epoch - 1) & 1) * ranks * (a.most_experts + ranks);
    for (int place = threadIdx.x; place < places; place += blockDim.x)
        count[place] = (int)(u32)load_word(counts + place % ranks * (a.most_experts + ranks) + place / ranks);
    __syncthreads();
    for (int place = threadIdx.x; place < places; place += blockDim.x) {
        i64 earlier = 0;
        for (int other = 0; other < place; ++other) earlier += count[other];
        first[place] = earlier;
    }
    __syncthreads();
    if (!kBack && blockIdx.x == 0)
        for (int expert = threadIdx.x; expert < a.local_experts; expert += blockDim.x) {
            const int last = (expert + 1) * ranks - 1;
            a.expert_counts[expert] = first[last] + count[last] - first[expert * ranks];
        }
    const i64 warps = (i64)gridDim.x * warps_per_block();
    for (i64 item = (i64)warp_id() * gridDim.x + blockIdx.x; item < places * a.capacity; item += warps) {
        const int place = (int)(item / a.capacity);
        const i64 i = item % a.capacity;
        if (i >= count[place]) continue;
        const i64 padded = (place % ranks * a.most_experts + place / ranks) * a.capacity + i, row = first[place] + i;
        Vec* to = a.to + (kBack ? padded : row) * a.row_vecs;
        copy_piece(a.from + (kBack ? row : padded) * a.row_vecs, Piece{0, (int)a.row_vecs}, [] { return 1u; },
                   [&](int) { return to; });
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) unpad_rows(const PaddedArgs a) { arrange<false>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) pad_rows(const PaddedArgs a) { arrange<true>(a); }
NCCLEP_EXPORT(unpad_rows)
NCCLEP_EXPORT(pad_rows)

// The weighted sum of a token's padded rows. No shared memory.
template <typename Element>
__device__ inline void sum_padded(const PaddedArgs& a) {
    await_previous();
    const i64 warps = (i64)gridDim.x * warps_per_block();
    for (i64 token = (i64)warp_id() * gridDim.x + blockIdx.x; token < a.tokens; token += warps) {
        const i64 row = padded_row(a, token);
        const float weight = row < 0 ? 0.0f : a.topk_weights[token * a.top_k + lane_id()];
        const u32 terms = __ballot_sync(kAllLanes, row >= 0);
        for (int base = 0; base < a.row_vecs; base += 32 * kAtOnce) {
            float sums[kAtOnce][Element::kPerVec] = {};
            add_rows<Element>(
                terms, [&](int lane) { return a.from + __shfl_sync(kAllLanes, row, lane) * a.row_vecs; },
                [&](int lane) { return __shfl_sync(kAllLanes, weight, lane); }, base + lane_id(), (int)a.row_vecs,
                sums);
            store_sums<Element>(a.to + token * a.row_vecs, base + lane_id(), (int)a.row_vecs, sums);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) sum_padded_float32(const PaddedArgs a) { sum_padded<Float32>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) sum_padded_float16(const PaddedArgs a) { sum_padded<Float16>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) sum_padded_bfloat16(const PaddedArgs a) {
    sum_padded<BFloat16>(a);
}
NCCLEP_EXPORT(sum_padded_float32)
NCCLEP_EXPORT(sum_padded_float16)
NCCLEP_EXPORT(sum_padded_bfloat16)
