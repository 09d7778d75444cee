// What the kernels that move tokens share: their arguments, and who received how much.
#pragma once

#include "ncclep/stage.cuh"

namespace ncclep {

constexpr int kMostRanks = 32;  // one lane per rank
constexpr int kInFlight = 7;    // 16-byte loads of a lane before the first store; 4 × 7 × 32 of them are 7168 16-bit elements

// Fields are 64 bits wide each; the host packs them by name in this order. `*_at`: offset in every rank's heap.
struct TokenArgs {
    u64 heaps[32];
    i64 rank;
    i64 ranks;
    i64 low_latency;   // fixed slots, counts travel with the rows; else counts were exchanged by route_layout
    i64 tokens;        // of this rank
    i64 top_k;
    i64 num_experts;
    i64 local_experts;
    i64 most_experts;  // of any rank
    i64 slots;         // most tokens of any rank
    i64 alignment;     // of an expert's block of rows
    i64 row_vecs;
    i64 scale_words;
    i64 pieces;         // that dispatch cuts a row into, one warp and at most one flag each
    i64 return_pieces;  // that combine cuts a row into
    i64 push_warps;    // of each block, the first ones
    i64 take_warps;    // of each block, the last ones
    i64 staged;        // combine: rows lie as dispatch_expert arranged them
    i64 weigh;         // combine: rows are unweighted, their owner applies the weights
    i64 push_share;    // combine_bulk: so many of each kShares rows are pushed, their owner fetches the others
    i64 push_batch;    // combine_bulk: pieces that a warp sends together
    i64 take_slots;    // combine_bulk: pieces on their way to a warp that adds up
    const int* topk_idx;
    const float* topk_weights;
    const int* rank_of_expert;
    const int* local_of_expert;
    u64* block_counts;  // [blocks][bins], dated
    int* own_counts;    // [bins]
    int* slot_of;       // [tokens][ranks], -1: no row goes there
    int* within;        // [tokens][top_k], among this rank's rows for that expert
    u64* goes_to;       // [tokens][top_k], destination of a choice
    const Vec* rows;
    const u32* scales;  // bits of float32
    Vec* out_rows;
    u32* out_scales;
    float* out_weights;
    i64* expert_counts;
    i64* source_counts;
    int* received;          // [ranks], rows of each source in the last dispatch
    int* arrived_at;        // [ranks][slots][top_k], row of each choice
    float* arrived_weight;  // likewise
    const Vec* returning;
    Vec* combined;
    i64 counts_at;          // u64 [2][ranks][most_experts + ranks]
    i64 ready_flags_at;
    i64 done_flags_at;
    i64 header_flags_at;
    i64 return_headers_at;
    i64 flat_rows_at;
    i64 flat_scales_at;
    i64 flat_weights_at;
    i64 flat_idx_at;
    i64 stage_rows_at;      // [2][ranks][slots] rows, see stage.cuh; so are the scales, and flags of each piece
    i64 stage_scales_at;
    i64 stage_records_at;   // u64 [2][ranks][slots][2][top_k], dated: weight; expert and place among its rows
    i64 stage_flags_at;
    i64 return_rows_at;
    i64 return_flags_at;
    i64 return_done_flags_at;
    i64 returning_at;       // combine_bulk: where `returning` is
    State* layout_state;
    State* dispatch_state;
    State* combine_state;
    Fault* fault;
    u64 deadline_ns;
};

__device__ inline Waiting waiting_of(const TokenArgs& a) { return Waiting{a.fault, a.deadline_ns}; }

__device__ inline int header_words(const TokenArgs& a) { return (int)(a.most_experts + a.ranks); }

// What `source` announced to rank `rank` in `epoch`: rows per local expert there, then rows to each rank. Each word has
// the epoch in its upper half, so it needs no flag.
__device__ inline u64* counts_of(const TokenArgs& a, i64 rank, i64 source, u64 epoch) {
    return at<u64>(a.heaps, rank, a.counts_at) + ((epoch & 1) * a.ranks + source) * header_words(a);
}

// A count that has been there before this launch.
__device__ inline int known_count(const TokenArgs& a, i64 source, i64 word, u64 epoch) {
    return (int)(u32)load_word(counts_of(a, a.rank, source, epoch) + word);
}

// A count that may be on its way; 0, and false in `came`, when it does not come.
__device__ inline int await_count(const TokenArgs& a, i64 source, i64 word, u64 epoch, bool& came) {
    return (int)await_dated(counts_of(a, a.rank, source, epoch) + word, epoch, (int)source, waiting_of(a), came);
}

// The epoch whose counts are valid during a dispatch.
__device__ inline u64 count_epoch(const TokenArgs& a, u64 dispatch_epoch) {
    return a.low_latency ? dispatch_epoch : a.layout_state->epoch - 1;
}

// Sends this rank's counts to everybody, itself included; `number` of `threads` that share the work.
__device__ inline void push_counts(const TokenArgs& a, u64 epoch, int number, int threads) {
    const int words = header_words(a), most = (int)a.most_experts, bins = (int)a.ranks * most;
    for (int i = number; i < a.ranks * words; i += threads) {
        const int target = i / words, word = i % words;
        const int count = a.own_counts[word < most ? target * most + word : bins + word - most];
        store_word(counts_of(a, target, a.rank, epoch) + word, dated(epoch, (u32)count));
    }
}

__device__ inline void signal_all(const TokenArgs& a, i64 flags_at, u64 epoch) {
    signal_ranks(a.heaps, a.rank, a.ranks, flags_at, epoch);
}

__device__ inline bool await_all(const TokenArgs& a, i64 flags_at, u64 epoch, u64* word) {
    return await_ranks(a.heaps, a.rank, a.ranks, flags_at, epoch, waiting_of(a), word);
}

// A launch that a graph has kept must be for as many tokens as the routing that it finds. For one warp to look.
__device__ inline void check_tokens(const TokenArgs& a) {
    if (blockIdx.x != gridDim.x - 1 || threadIdx.x != blockDim.x - 1) return;
    const u64 tokens = a.layout_state->tokens;
    if (tokens != (u64)a.tokens) give_up(a.fault, kOtherTokens, a.rank, tokens);
}

// This rank's tokens that both the launch and the routing have: where they differ, the others' places are of an older one.
__device__ inline int tokens_of(const TokenArgs& a) {
    const i64 routed = (i64)a.layout_state->tokens;
    return (int)(routed < a.tokens ? routed : a.tokens);
}

// The expert of a choice, or -1 where it is masked or names none.
template <typename Args>
__device__ inline int expert_of(const Args& a, i64 choice) {
    const int expert = a.topk_idx[choice];
    return expert >= 0 && expert < a.num_experts ? expert : -1;
}

// Weight that this rank applies to the row it gets back from `rank`; the same on all lanes.
__device__ inline float weight_at(const TokenArgs& a, i64 token, int rank) {
    float weight = 0.0f;
    if (lane_id() < a.top_k) {
        const int expert = expert_of(a, token * a.top_k + lane_id());
        if (expert >= 0 && a.rank_of_expert[expert] == rank) weight = a.topk_weights[token * a.top_k + lane_id()];
    }
    for (int mask = 16; mask > 0; mask /= 2) weight += __shfl_xor_sync(kAllLanes, weight, mask);
    return weight;
}

// The weight of each lane's rank; 1 where rows are weighted already.
__device__ inline float weight_of_lane(const TokenArgs& a, i64 token) {
    float weight = 1.0f;
    if (a.weigh)
        for (int rank = 0; rank < a.ranks; ++rank) {
            const float there = weight_at(a, token, rank);
            if (lane_id() == rank) weight = there;
        }
    return weight;
}

constexpr u32 kNotThere = 0xffffffffu;  // in place of the next, where a choice is another rank's

// Where a row goes at its rank, in one word: the local expert, and the place among its source's rows for it.
__device__ inline u32 place_word(const TokenArgs& a, int local, int within) { return (u32)(local * a.slots + within); }

// The rank of a choice, above that word; kNowhere where it is masked.
__device__ inline u64 destination(i64 rank, u32 place) { return (u64)rank << 32 | place; }
constexpr u64 kNowhere = ~0ull;

// Row number in the half of the return stage that belongs to expert rank `from`.
__device__ inline i64 return_row(const TokenArgs& a, u64 epoch, i64 from, i64 slot) {
    return ((epoch & 1) * a.ranks + from) * a.slots + slot;
}

// One piece of a row: its first vector and one past its last.
struct Piece {
    int first, end;
};

__device__ inline Piece piece_of(i64 vecs, int pieces, int piece) {
    const int length = ((int)vecs + pieces - 1) / pieces, end = (piece + 1) * length;
    return Piece{piece * length, end < vecs ? end : (int)vecs};
}

// Copies a piece of a row to several rows, read once. `decide()` says which, when the first loads are under way, and also
// where the piece is empty; `target(i)`: start of the i-th of them. The same on all lanes. `from`: Lying or Coming, `to`:
// Kept or Sent.
template <int kLoads, typename Source, typename From, typename To, typename Decide, typename Target>
__device__ inline void copy_piece(Source* source, Piece piece, From& from, To& to, const Decide& decide,
                                  const Target& target) {
    u32 wanted = 0;
    int base = piece.first;
    do {
        const int first = base + lane_id();
        Vec held[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            if (first + 32 * i < piece.end) held[i] = from.load(source + first + 32 * i);
        if (base == piece.first) wanted = decide();
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            if (first + 32 * i < piece.end) from.settle(source + first + 32 * i, held[i]);
        for (u32 left = wanted; left; left &= left - 1) {
            Vec* row = target(first_bit(left));
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                if (first + 32 * i < piece.end) to.put(row + first + 32 * i, held[i]);
        }
        base += 32 * kLoads;
    } while (base < piece.end);
}

// The same by ordinary loads and stores.
template <typename Decide, typename Target>
__device__ inline void copy_piece(const Vec* source, Piece piece, const Decide& decide, const Target& target) {
    Lying from;
    Kept to;
    copy_piece<kInFlight>(source, piece, from, to, decide, target);
}

}  // namespace ncclep
