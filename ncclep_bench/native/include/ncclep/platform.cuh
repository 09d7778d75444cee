// What kernels ask of the machine: CUDA (nvcc or NVRTC, no header of the toolkit), or a CPU through cpu_shim.h.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) Vec {
    u32 x, y, z, w;
};

#ifdef __CUDACC__

#include "ncclep/delays.cuh"

#define NCCLEP_EXPORT(kernel)

namespace ncclep {

constexpr u32 kAllLanes = 0xffffffffu;

__device__ inline unsigned char* shared_bytes() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
}

__device__ inline u64 load_acquire(const u64* address) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_release(u64* address, u64 value) {
    NCCLEP_DELAY(address, value, 32);
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
    NCCLEP_DELAY(address, ~value, 32);
}

// Without order: for words that say all they have to say by themselves.
__device__ inline u64 load_word(const u64* address) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_word(u64* address, u64 value) {
    NCCLEP_DELAY(address, value, 32);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
    NCCLEP_DELAY(address, ~value, 32);
}

__device__ inline u64 fetch_add(u64* address, u64 value) { return atomicAdd(address, value); }

// A barrier among `threads` threads of a block, whole warps; `number` from 1 on, 0 is __syncthreads.
__device__ inline void sync_some(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline void or_shared(u32* address, u32 bits) { atomicOr(address, bits); }

__device__ inline void fence_system() { __threadfence_system(); }

__device__ inline u64 now_ns() {
    u64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

__device__ inline void spin_pause() {}

__device__ inline Vec load_once(const Vec* address) {
    Vec v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

__device__ inline void store_once(Vec* address, Vec v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// The same without order and seen by all: for words that say all they have to say by themselves.
__device__ inline Vec load_words(const Vec* address) {
    Vec v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

__device__ inline void store_words(Vec* address, Vec v) {
    NCCLEP_DELAY(address, v.x, 4096);
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ inline u32 load_words(const u32* address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline void store_words(u32* address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline float half_to_float(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

// Two values rounded, the first in the lower half.
__device__ inline u32 floats_to_halves(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ inline u32 floats_to_brains(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ inline float bits_to_float(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 float_to_bits(float value) { return __float_as_uint(value); }
__device__ inline int count_bits(u32 bits) { return __popc(bits); }
__device__ inline int first_bit(u32 bits) { return __ffs((int)bits) - 1; }

// Every kernel begins with it: what was enqueued before this launch is done and seen. Where the host has asked for early
// launches, blocks come while the kernel before still runs, and wait here; the next kernel's may come from here on.
__device__ inline void await_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Bulk copies between global and shared memory, sm_90 and newer: the host launches no kernel with them on older chips.
// One thread asks; a load is over when its Landing says so, stores are over in the order of their groups.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NCCLEP_BULK(...) asm volatile(__VA_ARGS__)
#else
#define NCCLEP_BULK(...) __trap()
#endif

typedef u64 Landing;  // in shared memory; its loads are counted, one at a time

__device__ inline u32 shared_address(const void* address) { return (u32)__cvta_generic_to_shared(address); }

__device__ inline void begin_landing(Landing* landing) {
    NCCLEP_BULK("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(landing)) : "memory");
}

// What this thread has written or seen by ordinary accesses comes before its bulk copies, and the other way round.
__device__ inline void fence_bulk() { NCCLEP_BULK("fence.proxy.async;" ::: "memory"); }

__device__ inline void bulk_load(Vec* to, const Vec* from, int vecs, Landing* landing) {
    const u32 bytes = vecs * (u32)sizeof(Vec), barrier = shared_address(landing);
    (void)bytes;
    NCCLEP_BULK("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    NCCLEP_BULK("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                    shared_address(to)),
                "l"(from), "r"(bytes), "r"(barrier)
                : "memory");
}

// Returns when load number `number` (from 0) of an landing is there; the one before it must have been awaited.
__device__ inline void await_landing(Landing* landing, u32 number) {
    u32 there = 0;
    while (!there)
        NCCLEP_BULK(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(there)
            : "r"(shared_address(landing)), "r"(number & 1)
            : "memory");
}

__device__ inline void bulk_store(Vec* to, const Vec* from, int vecs) {
    NCCLEP_BULK("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                "r"(vecs * (u32)sizeof(Vec))
                : "memory");
}

// Closes the group of this thread's stores since the last one.
__device__ inline void end_stores() { NCCLEP_BULK("cp.async.bulk.commit_group;" ::: "memory"); }

// This thread's groups have been read from shared memory; it may be used again.
__device__ inline void await_stores_read() { NCCLEP_BULK("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// This thread's groups have been written, as seen by it: others see them after fence_bulk and a release.
__device__ inline void await_stores() { NCCLEP_BULK("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace ncclep

#else
#include "ncclep/cpu_shim.h"
#endif
