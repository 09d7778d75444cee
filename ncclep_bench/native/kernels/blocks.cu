// Blocks of parameters to where they are needed, sums of gradients at their owners, and a meeting of all ranks.
#include "ncclep/blocks.cuh"
#include "ncclep/element.cuh"

using namespace ncclep;

constexpr int kInFlight = 8;
constexpr int kAtOnce = 4;

__device__ static Waiting waiting_of(const BlockArgs& a) { return Waiting{a.fault, a.deadline_ns}; }

// All ranks have come to this launch: whatever the streams before it read or wrote is done.
__device__ static bool begin(const BlockArgs& a, u64 epoch, u64* word) {
    if (blockIdx.x == 0) signal_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch);
    return await_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch, waiting_of(a), word);
}

// All ranks have done what this launch does.
__device__ static void finish(const BlockArgs& a, u64 epoch, u64* word) {
    exchange_done(a.heaps, a.rank, a.ranks, a.done_flags_at, epoch, waiting_of(a), word);
    leave(a.state, epoch);
}

// A barrier of all ranks, which counts what the copy engines have moved; one block, 8 bytes of shared memory, as the
// other kernels here.
extern "C" __global__ void meet(const BlockArgs a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    const u64 epoch = *epoch_of_block(a.state);
    signal_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch);
    await_ranks(a.heaps, a.rank, a.ranks, a.ready_flags_at, epoch, waiting_of(a), word);
    if (a.crossing_vecs && threadIdx.x == 0) fetch_add(&a.counted->rows_pushed, (u64)a.crossing_vecs);
    leave(a.state, epoch);
}
NCCLEP_EXPORT(meet)

extern "C" __global__ void __launch_bounds__(512, 1) copy_blocks(const BlockArgs a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    const u64 epoch = *epoch_of_block(a.state);
    u64 moved = 0;
    if (begin(a, epoch, word)) {
        const i64 chunks = (a.block_vecs + a.chunk_vecs - 1) / a.chunk_vecs;
        const i64 warps = (i64)gridDim.x * warps_per_block();
        for (i64 item = (i64)warp_id() * gridDim.x + blockIdx.x; item < a.blocks * chunks; item += warps) {
            const Copy copy = a.copies[item / chunks];
            const i64 first = item % chunks * a.chunk_vecs;
            const i64 end = first + a.chunk_vecs < a.block_vecs ? first + a.chunk_vecs : a.block_vecs;
            for (i64 base = first + lane_id(); base < end; base += 32 * kInFlight) {
                Vec held[kInFlight];
#pragma unroll
                for (int i = 0; i < kInFlight; ++i)
                    if (base + 32 * i < end) held[i] = load_once(copy.from + base + 32 * i);
#pragma unroll
                for (int i = 0; i < kInFlight; ++i)
                    if (base + 32 * i < end) store_once(copy.to + base + 32 * i, held[i]);
            }
            if (copy.crosses) moved += end - first;
        }
    }
    if (moved && lane_id() == 0) fetch_add(&a.state->rows_pushed, moved);
    finish(a, epoch, word);
}
NCCLEP_EXPORT(copy_blocks)

// Each owner reads the ranks that have a gradient, in their order, and adds in float32.
template <typename Element>
__device__ inline void add_blocks(const BlockArgs& a) {
    await_previous();
    u64* word = reinterpret_cast<u64*>(shared_bytes());
    const u64 epoch = *epoch_of_block(a.state);
    u64 moved = 0;
    if (begin(a, epoch, word)) {
        const i64 chunks = (a.block_vecs + a.chunk_vecs - 1) / a.chunk_vecs;
        const i64 warps = (i64)gridDim.x * warps_per_block();
        for (i64 item = (i64)warp_id() * gridDim.x + blockIdx.x; item < a.blocks * chunks; item += warps) {
            const i64 block = item / chunks, first = item % chunks * a.chunk_vecs;
            const i64 end = first + a.chunk_vecs < a.block_vecs ? first + a.chunk_vecs : a.block_vecs;
            const u64* terms = a.terms + block * a.ranks;
            Vec* sum = reinterpret_cast<Vec*>(a.sums[block]);
            for (i64 base = first + lane_id(); base < end; base += 32 * kAtOnce) {
                float sums[kAtOnce][Element::kPerVec] = {};
                for (i64 rank = 0; rank < a.ranks; ++rank) {
                    const Vec* term = reinterpret_cast<const Vec*>(terms[rank]);
                    if (term == nullptr) continue;
                    Vec held[kAtOnce];
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
                        if (base + 32 * i < end) held[i] = load_once(term + base + 32 * i);
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
                        if (base + 32 * i < end) {
                            float values[Element::kPerVec];
                            Element::widen(held[i], values);
#pragma unroll
                            for (int j = 0; j < Element::kPerVec; ++j) sums[i][j] += values[j];
                        }
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    if (base + 32 * i < end) store_once(sum + base + 32 * i, Element::narrow(sums[i]));
            }
            for (i64 rank = 0; rank < a.ranks; ++rank)
                if (rank != a.rank && terms[rank] != 0) moved += end - first;
        }
    }
    if (moved && lane_id() == 0) fetch_add(&a.state->rows_pushed, moved);
    finish(a, epoch, word);
}

extern "C" __global__ void __launch_bounds__(512, 1) add_blocks_float32(const BlockArgs a) { add_blocks<Float32>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) add_blocks_float16(const BlockArgs a) { add_blocks<Float16>(a); }
extern "C" __global__ void __launch_bounds__(512, 1) add_blocks_bfloat16(const BlockArgs a) { add_blocks<BFloat16>(a); }
NCCLEP_EXPORT(add_blocks_float32)
NCCLEP_EXPORT(add_blocks_float16)
NCCLEP_EXPORT(add_blocks_bfloat16)
