// Arguments of the kernels that move parameters and gradients, and of those that only meet.
#pragma once

#include "ncclep/sync.cuh"

namespace ncclep {

// One block of parameters to copy.
struct Copy {
    const Vec* from;
    Vec* to;
    u64 crosses;  // whether one of them is another rank's
};

// Fields are 64 bits wide each; the host packs them by name in this order. `*_at`: offset in every rank's heap.
struct BlockArgs {
    u64 heaps[32];
    i64 rank;
    i64 ranks;
    i64 ready_flags_at;
    i64 done_flags_at;
    i64 block_vecs;
    i64 chunk_vecs;  // vectors of a block that one warp copies, or adds up, at a time
    i64 blocks;      // copies, or sums
    const Copy* copies;
    const u64* terms;  // [blocks][ranks], address of each rank's gradient, 0: it has none
    const u64* sums;   // [blocks], address of the sum
    i64 crossing_vecs;  // of a meeting: what the copy engines have moved between ranks before it
    State* counted;     // where that is added
    State* state;
    Fault* fault;
    u64 deadline_ns;
};

}  // namespace ncclep
