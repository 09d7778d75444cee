// Fills memory larger than the cache, so that whatever the cache held before is there no more.
#include "ncclep/platform.cuh"

using namespace ncclep;

struct FlushArgs {
    Vec* target;
    i64 vecs;
};

extern "C" __global__ void flush(const FlushArgs a) {
    await_previous();
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 vec = (i64)blockIdx.x * blockDim.x + threadIdx.x; vec < a.vecs; vec += stride) {
        const u32 word = (u32)vec;
        store_once(a.target + vec, Vec{word, ~word, word, ~word});
    }
}
NCCLEP_EXPORT(flush)
