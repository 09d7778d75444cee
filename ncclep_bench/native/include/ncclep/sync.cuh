// Flags in peer memory, waits that end, and the end of a grid.
#pragma once

#include "ncclep/platform.cuh"

namespace ncclep {

// What a rank's kernels keep between launches, in its own memory. Zero at first. An epoch is the number of launches
// done; both sides of a flag count alike. Behind it lies one more epoch for each block, of kernels whose grid never
// changes: a block that counts for itself waits for no other at the end.
struct State {
    u64 epoch;
    u64 rows_pushed;  // rows (or vectors) moved between ranks, ever
    u64 tokens;       // of a routing
};

// The first fault of this rank, as the host reads it in its own memory; all zero when there is none.
struct Told {
    u64 code;
    u64 rank;
    u64 value;
};

struct Fault {
    u64 claims;
    u64 late;  // nothing here waits any more
    Told* told;
};

constexpr u64 kPeerLate = 1, kExpertOutOfRange = 2, kOtherTokens = 3;

__device__ inline void raise_fault(Fault* fault, u64 code, u64 rank, u64 value) {
    if (fetch_add(&fault->claims, 1) != 0) return;
    fault->told->rank = rank;
    fault->told->value = value;
    store_release(&fault->told->code, code);
}

// The same of what makes waiting vain.
__device__ inline void give_up(Fault* fault, u64 code, u64 rank, u64 value) {
    raise_fault(fault, code, rank, value);
    store_word(&fault->late, 1);
}

struct Waiting {
    Fault* fault;
    u64 deadline_ns;  // of each wait
};

// Returns when `done` does not say false of `word`; false when a deadline has passed here or in any wait of this rank.
template <typename Done>
__device__ inline bool wait_until(const u64* word, const Done& done, u64 value, int peer, const Waiting& waiting) {
    NCCLEP_DELAY(word, value, 32);
    if (done()) return true;
    const u64 start = now_ns();
    for (u32 tries = 1;; ++tries) {
        NCCLEP_DELAY(word, value + tries, 4096);
        if (done()) return true;
        spin_pause();
        if (tries % 64 == 0) {
            if (load_word(&waiting.fault->late) != 0) return false;
            if (now_ns() - start > waiting.deadline_ns) {
                give_up(waiting.fault, kPeerLate, peer, value);
                return false;
            }
        }
    }
}

// Waits until `flag` has reached `value`; what its writer did before is then visible.
__device__ inline bool wait_for(const u64* flag, u64 value, int peer, const Waiting& waiting) {
    return wait_until(flag, [&] { return load_acquire(flag) >= value; }, value, peer, waiting);
}

// The memory of rank `rank` at an offset that is the same on all ranks.
template <typename T>
__device__ T* at(const u64* heaps, i64 rank, i64 offset) {
    return reinterpret_cast<T*>(heaps[rank] + offset);
}

__device__ inline u64* epoch_of_block(State* state) { return reinterpret_cast<u64*>(state + 1) + blockIdx.x; }

// Ends a launch that began with epoch_of_block.
__device__ inline void leave(State* state, u64 epoch) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    *epoch_of_block(state) = epoch + 1;
    if (blockIdx.x == 0) state->epoch = epoch + 1;
}

// Tells every rank that this one has come to `epoch`; what that announces has been ordered before.
__device__ inline void signal_ranks(const u64* heaps, i64 rank, i64 ranks, i64 flags_at, u64 epoch) {
    if (threadIdx.x < ranks) store_word(at<u64>(heaps, threadIdx.x, flags_at) + rank, epoch + 1);
}

// Returns on all threads of the block when every rank has come to `epoch`; false when one does not.
// `word`: 8 bytes of shared memory.
__device__ inline bool await_ranks(const u64* heaps, i64 rank, i64 ranks, i64 flags_at, u64 epoch,
                                   const Waiting& waiting, u64* word) {
    __syncthreads();
    if (threadIdx.x == 0) *word = 0;
    __syncthreads();
    if (threadIdx.x < ranks && !wait_for(at<u64>(heaps, rank, flags_at) + threadIdx.x, epoch + 1, threadIdx.x, waiting))
        or_shared(reinterpret_cast<u32*>(word), 1);
    __syncthreads();
    return *word == 0;
}

// Ends a launch that has written to other ranks: returns when they have written all they write here. Each block meets
// those of the same number; `flags_at`: [blocks][ranks], grids are equal. `word`: 8 bytes of shared memory.
__device__ inline void exchange_done(const u64* heaps, i64 rank, i64 ranks, i64 flags_at, u64 epoch,
                                     const Waiting& waiting, u64* word) {
    __syncthreads();
    if (threadIdx.x < ranks) fence_system();
    const i64 own = flags_at + 8 * ranks * (i64)blockIdx.x;
    signal_ranks(heaps, rank, ranks, own, epoch);
    await_ranks(heaps, rank, ranks, own, epoch, waiting, word);
}

__device__ inline int lane_id() { return threadIdx.x % 32; }
__device__ inline int warp_id() { return threadIdx.x / 32; }
__device__ inline int warps_per_block() { return blockDim.x / 32; }

}  // namespace ncclep
