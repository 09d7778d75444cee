// Dispatch into blocks per expert: a row crosses once, into a stage, and is expanded on arrival; one launch.
//
// Stages alternate between two halves. A rank ends launch n + 1 only when every peer has begun it, that is, ended launch
// n; so in launch n + 2 nobody reads the half that launch n used.
#include "ncclep/tokens.cuh"

using namespace ncclep;

// Row number in the half of the stage that belongs to `source`.
__device__ static i64 stage_row(const TokenArgs& a, u64 epoch, i64 source, i64 slot) {
    return ((epoch & 1) * a.ranks + source) * a.slots + slot;
}

// Loads under way of a lane: a piece of mode ll is no longer, and the fewer registers, the more warps.
template <bool kLow>
constexpr int kLoads = kLow ? 2 : kInFlight;

// One piece of a token into the stages of the other ranks that want it; returns these. kLow: mode ll.
template <bool kLow, typename To>
__device__ static u32 push_piece(const TokenArgs& a, u64 epoch, int token, int piece, To to) {
    i64 row = 0;
    u32 wanted = 0;
    const auto decide = [&] {
        const int slot = lane_id() < a.ranks ? a.slot_of[token * a.ranks + lane_id()] : -1;
        row = stage_row(a, epoch, a.rank, slot < 0 ? 0 : slot);
        return wanted = __ballot_sync(kAllLanes, slot >= 0 && lane_id() != a.rank);
    };
    Lying from;
    copy_piece<kLoads<kLow>>(
        a.rows + token * a.row_vecs, piece_of(a.row_vecs, (int)a.pieces, piece), from, to, decide, [&](int rank) {
            return at<Vec>(a.heaps, rank, a.stage_rows_at) + __shfl_sync(kAllLanes, row, rank) * a.row_vecs;
        });
    if (piece == 0 && wanted) {
        const bool chooses = lane_id() < a.top_k;
        const i64 choice = token * a.top_k + lane_id();
        const u64 goes_to = chooses ? a.goes_to[choice] : kNowhere;
        for (u32 left = wanted; left; left &= left - 1) {
            const int rank = first_bit(left);
            const i64 target = __shfl_sync(kAllLanes, row, rank);
            if (chooses) {
                u64* record = at<u64>(a.heaps, rank, a.stage_records_at) + target * 2 * a.top_k + lane_id();
                const bool here = goes_to >> 32 == (u64)rank;
                store_word(record, dated(epoch, here ? float_to_bits(a.topk_weights[choice]) : 0));
                store_word(record + a.top_k, dated(epoch, here ? (u32)goes_to : kNotThere));
            }
            for (i64 i = lane_id(); i < a.scale_words; i += 32)
                to.put(at<u32>(a.heaps, rank, a.stage_scales_at) + target * a.scale_words + i,
                       a.scales[token * a.scale_words + i]);
        }
    }
    if (to.needs_flag() && wanted >> lane_id() & 1)
        store_release(at<u64>(a.heaps, lane_id(), a.stage_flags_at) + row * a.pieces + piece, epoch + 1);
    return wanted;
}

// Where arrivals go, in shared memory.
struct Places {
    int* first;   // [ranks][local_experts], first row of each in this rank's output
    int* totals;  // [local_experts], rows of each expert
    int* from;    // [ranks], rows of each source
    u32* late;    // whether counts did not come
};

// Waits for everybody's counts and lays out this rank's output; threads `number` of `threads` of a block, the last ones.
// False when some do not come.
__device__ static bool place_experts(const TokenArgs& a, u64 counts, const Places& places, int number, int threads) {
    const int experts = (int)a.local_experts, ranks = (int)a.ranks, columns = experts + 1;
    if (number == 0) *places.late = 0;
    sync_some(1, threads);
    bool came = true;
    for (int i = number; i < ranks * columns; i += threads) {
        const int source = i / columns, column = i % columns;
        const i64 at = column < experts ? column : a.most_experts + a.rank;
        const int count = await_count(a, source, at, counts, came);
        *(column < experts ? places.first + source * experts + column : places.from + source) = count;
    }
    if (!came) or_shared(places.late, 1);
    sync_some(1, threads);
    for (int expert = number; expert < experts; expert += threads) {
        int rows = a.low_latency ? expert * ranks * (int)a.slots : 0;
        const int start = rows;
        for (int source = 0; source < ranks; ++source) {
            const int count = places.first[source * experts + expert];
            places.first[source * experts + expert] = rows;
            rows += count;
        }
        places.totals[expert] = rows - start;
    }
    sync_some(1, threads);
    if (a.low_latency) return *places.late == 0;
    if (number < 32) {
        int start = 0;
        for (int base = 0; base < experts; base += 32) {
            const int expert = base + lane_id(), alignment = (int)a.alignment;
            const int rows = expert < experts ? (places.totals[expert] + alignment - 1) / alignment * alignment : 0;
            int ends = rows;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int earlier = __shfl_up_sync(kAllLanes, ends, distance);
                if (lane_id() >= distance) ends += earlier;
            }
            if (expert < experts)
                for (int source = 0; source < ranks; ++source)
                    places.first[source * experts + expert] += start + ends - rows;
            start += __shfl_sync(kAllLanes, ends, 31);
        }
    }
    sync_some(1, threads);
    return *places.late == 0;
}

// One choice of a row, known to one lane below top_k: its row in the output, -1 where it is not here.
struct Choice {
    int to;
    float weight;
};

// The row in the output for a choice of `source`.
__device__ static int row_of(const TokenArgs& a, const int* first, int source, u32 place) {
    return first[source * a.local_experts + place / (u32)a.slots] + (int)(place % (u32)a.slots);
}

// One piece of a received row to each expert's block; `choose()` says where each lane's choice goes. `arrival`: the row's
// number among all that can come, below 0 where there is none.
template <bool kLow, typename From, typename Vecs, typename Scales, typename Choose>
__device__ static void expand_piece(const TokenArgs& a, From& from, Vecs* row, Scales* scales, i64 arrival, Piece part,
                                    const Choose& choose) {
    Choice choice{-1, 0.0f};
    u32 wanted = 0;
    const auto decide = [&] {
        choice = choose();
        return wanted = __ballot_sync(kAllLanes, choice.to >= 0);
    };
    Kept to;
    copy_piece<kLoads<kLow>>(row, part, from, to, decide, [&](int lane) {
        return a.out_rows + (i64)__shfl_sync(kAllLanes, choice.to, lane) * a.row_vecs;
    });
    if (part.first != 0 || arrival < 0) return;
    if (lane_id() < a.top_k) {
        a.arrived_at[arrival * a.top_k + lane_id()] = choice.to;
        a.arrived_weight[arrival * a.top_k + lane_id()] = choice.weight;
    }
    if (choice.to >= 0) a.out_weights[choice.to] = choice.weight;
    for (int base = 0; base < a.scale_words; base += 32) {
        const int i = base + lane_id();
        const bool mine = i < a.scale_words;
        u32 scale = mine ? from.load(scales + i) : 0;
        if (mine) from.settle(scales + i, scale);
        for (u32 left = wanted; left; left &= left - 1) {
            const i64 target = __shfl_sync(kAllLanes, choice.to, first_bit(left));
            if (mine) a.out_scales[target * a.scale_words + i] = scale;
        }
    }
}

// A piece of this rank's own tokens, which crosses nothing; `placed()` returns when `first` is known, or false. kFirst:
// one of a warp's, loaded before it is known to stay here; it may be behind the last.
template <bool kLow, bool kFirst, typename Placed>
__device__ static void expand_own(const TokenArgs& a, const int* first, int item, int items, const Placed& placed) {
    const int pieces = (int)a.pieces, token = item / pieces;
    const bool there = !kFirst || item < items;
    const int slot = there ? a.slot_of[token * a.ranks + a.rank] : -1;
    if (!kFirst && slot < 0) return;
    const auto choose = [&] {
        const i64 number = token * a.top_k + lane_id();
        const bool chooses = there && lane_id() < a.top_k;
        const u64 goes_to = chooses ? a.goes_to[number] : kNowhere;
        Choice choice{-1, chooses ? a.topk_weights[number] : 0.0f};
        if (placed() && goes_to >> 32 == (u64)a.rank) choice.to = row_of(a, first, (int)a.rank, (u32)goes_to);
        return choice;
    };
    Lying from;
    expand_piece<kLow>(a, from, a.rows + token * a.row_vecs, a.scales + token * a.scale_words,
                       slot < 0 ? -1 : a.rank * a.slots + slot,
                       there ? piece_of(a.row_vecs, pieces, item % pieces) : Piece{0, 0}, choose);
}

// A row of another rank's; false when it does not come.
template <bool kLow>
__device__ static bool expand_arrival(const TokenArgs& a, u64 epoch, const int* first, int source, int slot, int piece) {
    const i64 row = stage_row(a, epoch, source, slot);
    const u64* flag = at<u64>(a.heaps, a.rank, a.stage_flags_at) + row * a.pieces + piece;
    bool came = true;
    const auto choose = [&] {
        Choice choice{-1, 0.0f};
        if (lane_id() >= a.top_k) return choice;
        const u64* record = at<u64>(a.heaps, a.rank, a.stage_records_at) + row * 2 * a.top_k + lane_id();
        const u32 place = await_dated(record + a.top_k, epoch, source, waiting_of(a), came);
        choice.weight = bits_to_float(await_dated(record, epoch, source, waiting_of(a), came));
        if (came && place != kNotThere) choice.to = row_of(a, first, source, place);
        return choice;
    };
    const auto expand = [&](auto& from) {
        expand_piece<kLow>(a, from, at<Vec>(a.heaps, a.rank, a.stage_rows_at) + row * a.row_vecs,
                           at<u32>(a.heaps, a.rank, a.stage_scales_at) + row * a.scale_words, source * a.slots + slot,
                           piece_of(a.row_vecs, (int)a.pieces, piece), choose);
    };
    if (kLow) {
        Coming from{flag, epoch + 1, source, waiting_of(a), true};
        expand(from);
        came = came && from.came;
    } else {
        if (lane_id() == 0) came = wait_for(flag, epoch + 1, source, waiting_of(a));
        if (__ballot_sync(kAllLanes, !came)) return false;
        __syncwarp();
        Lying from;
        expand(from);
    }
    return __ballot_sync(kAllLanes, !came) == 0;
}

// Shared memory: 12 + 4 × (ranks × local_experts + local_experts + ranks) bytes. The first push_warps of a block send, the
// last take_warps expand.
template <bool kLow>
__device__ inline void dispatch(const TokenArgs& a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    Places places;
    places.first = reinterpret_cast<int*>(word + 1);
    places.totals = places.first + a.ranks * a.local_experts;
    places.from = places.totals + a.local_experts;
    places.late = reinterpret_cast<u32*>(places.from + a.ranks);
    const u64 epoch = *epoch_of_block(a.dispatch_state), counts = count_epoch(a, epoch);
    const int grid = gridDim.x, pieces = (int)a.pieces, warps = warps_per_block();
    const int own = tokens_of(a) * pieces;
    const bool closes = blockIdx.x == gridDim.x - 1;
    check_tokens(a);
    if (kLow) {
        // The last threads of the grid, which have the fewest rows to send.
        const int number = (grid * warps - 1 - (warp_id() * grid + (int)blockIdx.x)) * 32 + lane_id();
        push_counts(a, counts, number, grid * warps * 32);
    } else if (blockIdx.x == 0) {
        signal_all(a, a.header_flags_at, epoch);
    }
    if (warp_id() < a.push_warps) {
        u64 pushed = 0;
        const int stride = grid * (int)a.push_warps;
        for (int item = warp_id() * grid + blockIdx.x; item < own; item += stride) {
            const int piece = item % pieces;
            // Where much crosses, a release for each piece also keeps warps from filling the way out of a multiprocessor.
            const u32 wanted = kLow ? push_piece<kLow>(a, epoch, item / pieces, piece, Sent{false})
                                    : push_piece<kLow>(a, epoch, item / pieces, piece, Kept{});
            if (piece == 0) pushed += count_bits(wanted);
        }
        if (pushed && lane_id() == 0) fetch_add(&a.dispatch_state->rows_pushed, pushed);
    }
    const int taker = warp_id() - (warps - (int)a.take_warps);
    if (taker >= 0) {
        const int number = taker * 32 + lane_id(), threads = (int)a.take_warps * 32;
        bool complete = true;
        const auto place = [&] { return complete = place_experts(a, counts, places, number, threads); };
        const int stride = grid * (int)a.take_warps;
        int item = taker * grid + blockIdx.x;
        expand_own<kLow, true>(a, places.first, item, own, place);
        if (item < own) item += stride;
        for (; item < own && complete; item += stride)
            expand_own<kLow, false>(a, places.first, item, own, [] { return true; });
        item -= own;
        for (int distance = 1; distance < a.ranks && complete; ++distance) {
            const int source = (int)((a.rank + distance) % a.ranks), items = places.from[source] * pieces;
            for (; item < items && complete; item += stride)
                complete = expand_arrival<kLow>(a, epoch, places.first, source, item / pieces, item % pieces);
            item -= items;
        }
        if (closes) {
            for (int expert = number; expert < a.local_experts; expert += threads)
                a.expert_counts[expert] = places.totals[expert];
            if (number < a.ranks) a.source_counts[number] = a.received[number] = places.from[number];
        }
    }
    if (closes && !kLow) await_all(a, a.header_flags_at, epoch, word);
    leave(a.dispatch_state, epoch);
}

extern "C" __global__ void __launch_bounds__(512, 1) dispatch_expert(const TokenArgs a) { dispatch<false>(a); }
extern "C" __global__ void __launch_bounds__(640, 1) dispatch_expert_ll(const TokenArgs a) { dispatch<true>(a); }
NCCLEP_EXPORT(dispatch_expert)
NCCLEP_EXPORT(dispatch_expert_ll)
