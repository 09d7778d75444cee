// Keeps a stream busy while the host fills it, so that launches that follow run without gaps.
#include "ncclep/sync.cuh"

using namespace ncclep;

struct HoldArgs {
    u64 hold_ns;
};

extern "C" __global__ void hold(const HoldArgs a) {
    await_previous();
    const u64 start = now_ns();
    while (now_ns() - start < a.hold_ns) spin_pause();
}
NCCLEP_EXPORT(hold)
