// Combine: the expert's rank pushes one row per received token back, its owner adds them up as they arrive; one launch.
//
// Stages alternate between two halves as in dispatch_expert.cu.
#include "ncclep/sums.cuh"
#include "ncclep/tokens.cuh"

using namespace ncclep;

// One received row as its owner shall get it: as it lies, or (staged) the weighted sum over its local experts.
struct Arrival {
    const Vec* row;  // not staged
    u32 choices;     // staged: lanes whose choice is here
    int at;          // this lane's
    float weight;
};

__device__ static Arrival arrival_of(const TokenArgs& a, const i64* row_first, i64 source, i64 slot) {
    Arrival arrival{a.returning, 0, -1, 0.0f};
    if (!a.staged) {
        arrival.row += (row_first[source] + slot) * a.row_vecs;
        return arrival;
    }
    if (lane_id() < a.top_k) {
        const i64 choice = (source * a.slots + slot) * a.top_k + lane_id();
        arrival.at = a.arrived_at[choice];
        arrival.weight = a.arrived_weight[choice];
    }
    arrival.choices = __ballot_sync(kAllLanes, arrival.at >= 0);
    return arrival;
}

// The weighted sum over the local experts of a staged arrival.
template <typename Element>
__device__ inline void add_choices(const TokenArgs& a, const Arrival& arrival, int first, int end,
                                   float (*sums)[Element::kPerVec]) {
    add_rows<Element>(
        arrival.choices,
        [&](int lane) { return a.returning + (i64)__shfl_sync(kAllLanes, arrival.at, lane) * a.row_vecs; },
        [&](int lane) { return __shfl_sync(kAllLanes, arrival.weight, lane); }, first, end, sums);
}

template <typename Element>
__device__ inline void push_back(const TokenArgs& a, u64 epoch, const i64* row_first, int source, int slot, int piece) {
    const Arrival arrival = arrival_of(a, row_first, source, slot);
    const i64 row = return_row(a, epoch, a.rank, slot);
    Vec* target = at<Vec>(a.heaps, source, a.return_rows_at) + row * a.row_vecs;
    const Piece part = piece_of(a.row_vecs, (int)a.return_pieces, piece);
    if (!a.staged) {
        copy_piece(arrival.row, part, [] { return 1u; }, [&](int) { return target; });
    } else {
        for (int base = part.first; base < part.end; base += 32 * kAtOnce) {
            float sums[kAtOnce][Element::kPerVec] = {};
            add_choices<Element>(a, arrival, base + lane_id(), part.end, sums);
            store_sums<Element>(target, base + lane_id(), part.end, sums);
        }
    }
    __syncwarp();
    if (lane_id() == 0)
        store_release(at<u64>(a.heaps, source, a.return_flags_at) + row * a.return_pieces + piece, epoch + 1);
}

// Sum of one piece of a token's rows; false when one does not come.
template <typename Element>
__device__ inline bool gather(const TokenArgs& a, u64 epoch, const i64* row_first, int token, int piece) {
    const int slot = lane_id() < a.ranks ? a.slot_of[token * a.ranks + lane_id()] : -1;
    const u32 wanted = __ballot_sync(kAllLanes, slot >= 0), away = wanted & ~(1u << a.rank);
    const bool here = wanted != away;
    Arrival own{};
    if (here) own = arrival_of(a, row_first, a.rank, __shfl_sync(kAllLanes, slot, (int)a.rank));
    const float weight = weight_of_lane(a, token);
    const i64 row = return_row(a, epoch, lane_id(), slot < 0 ? 0 : slot);
    const Vec* staged = at<Vec>(a.heaps, a.rank, a.return_rows_at);
    const Piece part = piece_of(a.row_vecs, (int)a.return_pieces, piece);
    const auto row_from = [&](int rank) {
        const Vec* from = staged + __shfl_sync(kAllLanes, row, rank) * a.row_vecs;
        return rank == a.rank ? own.row : from;
    };
    const auto weight_from = [&](int rank) { return __shfl_sync(kAllLanes, weight, rank); };
    const auto all_came = [&] {
        bool came = true;
        const u64* flags = at<u64>(a.heaps, a.rank, a.return_flags_at);
        if (away >> lane_id() & 1)
            came = wait_for(flags + row * a.return_pieces + piece, epoch + 1, lane_id(), waiting_of(a));
        const bool all = __ballot_sync(kAllLanes, !came) == 0;
        __syncwarp();
        return all;
    };
    Vec* sum = a.combined + token * a.row_vecs;
    for (int base = part.first; base < part.end; base += 32 * kAtOnce) {
        const int first = base + lane_id();
        float sums[kAtOnce][Element::kPerVec] = {};
        if (here && a.staged) add_choices<Element>(a, own, first, part.end, sums);
        if (base == part.first && !all_came()) return false;
        add_rows<Element>(a.staged ? away : wanted, row_from, weight_from, first, part.end, sums);
        store_sums<Element>(sum, first, part.end, sums);
    }
    return true;
}

// Shared memory: 8 + 12 × ranks bytes. The first push_warps of a block send, the last take_warps add up.
template <typename Element>
__device__ inline void combine(const TokenArgs& a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    i64* row_first = reinterpret_cast<i64*>(word + 1);
    int* received = reinterpret_cast<int*>(row_first + a.ranks);
    const u64 epoch = *epoch_of_block(a.combine_state);
    const int grid = gridDim.x, pieces = (int)a.return_pieces;
    if (blockIdx.x == 0) signal_all(a, a.return_headers_at, epoch);
    check_tokens(a);
    if (threadIdx.x < a.ranks) {
        received[threadIdx.x] = a.received[threadIdx.x];
        i64 first = a.low_latency ? threadIdx.x * a.slots : 0;
        for (int source = 0; source < (a.low_latency ? 0 : threadIdx.x); ++source) first += a.received[source];
        row_first[threadIdx.x] = first;
    }
    __syncthreads();
    if (warp_id() < a.push_warps) {
        u64 pushed = 0;
        const int stride = grid * (int)a.push_warps;
        int item = warp_id() * grid + blockIdx.x;
        for (int distance = 1; distance < a.ranks; ++distance) {
            const int source = (int)((a.rank + distance) % a.ranks), items = received[source] * pieces;
            for (; item < items; item += stride) {
                const int piece = item % pieces;
                push_back<Element>(a, epoch, row_first, source, item / pieces, piece);
                pushed += piece == 0;
            }
            item -= items;
        }
        if (pushed && lane_id() == 0) fetch_add(&a.combine_state->rows_pushed, pushed);
    }
    const int taker = warp_id() - (warps_per_block() - (int)a.take_warps);
    if (taker >= 0) {
        bool complete = true;
        const int items = tokens_of(a) * pieces;
        for (int item = taker * grid + blockIdx.x; item < items && complete;
             item += grid * (int)a.take_warps)
            complete = gather<Element>(a, epoch, row_first, item / pieces, item % pieces);
    }
    if (blockIdx.x == gridDim.x - 1) await_all(a, a.return_headers_at, epoch, word);
    leave(a.combine_state, epoch);
}

extern "C" __global__ void __launch_bounds__(512, 1) combine_float32(const TokenArgs a) { combine<Float32>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) combine_float16(const TokenArgs a) { combine<Float16>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) combine_bfloat16(const TokenArgs a) { combine<BFloat16>(a); }
NCCLEP_EXPORT(combine_float32)
NCCLEP_EXPORT(combine_float16)
NCCLEP_EXPORT(combine_bfloat16)
