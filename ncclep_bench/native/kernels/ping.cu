// A word back and forth between two ranks: what one way through peer memory takes.
#include "ncclep/sync.cuh"

using namespace ncclep;

// Fields are 64 bits wide each; the host packs them by name in this order.
struct PingArgs {
    u64 heaps[32];
    i64 rank;
    i64 peer;  // -1: this rank has none
    i64 rounds;
    i64 flags_at;
    State* state;
    Fault* fault;
    u64 deadline_ns;
};

// One block of one warp.
extern "C" __global__ void ping(const PingArgs a) {
    await_previous();
    const u64 epoch = *epoch_of_block(a.state);
    if (threadIdx.x == 0 && a.peer >= 0) {
        const u64* mine = at<u64>(a.heaps, a.rank, a.flags_at);
        u64* theirs = at<u64>(a.heaps, a.peer, a.flags_at);
        const Waiting waiting{a.fault, a.deadline_ns};
        const bool first = a.rank < a.peer;
        for (i64 round = 1; round <= a.rounds; ++round) {
            const u64 value = epoch * (u64)a.rounds + (u64)round;
            if (first) store_release(theirs, value);
            if (!wait_for(mine, value, (int)a.peer, waiting)) break;
            if (!first) store_release(theirs, value);
        }
    }
    leave(a.state, epoch);
}
NCCLEP_EXPORT(ping)
