// A build with NCCLEP_DELAYS=SEED dawdles wherever ranks order what they do to each other's memory: before and after each
// word that announces something, before each look at one that is awaited. So whoever announces too soon, or does not
// wait, or waits for too little, gives wrong rows. Without the switch there is nothing of it.
#pragma once

#ifdef NCCLEP_DELAYS

namespace ncclep {

#ifdef __CUDACC__
constexpr u32 kShortestDelayNs = 64, kLongDelayNs = 200'000;

__device__ inline void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns) : "memory"); }
#else
constexpr u32 kShortestDelayNs = 4000, kLongDelayNs = 100'000'000;

inline void sleep_ns(u32 ns) {
    const timespec duration{0, ns};
    nanosleep(&duration, nullptr);
}
#endif

// Half of the time none, else the shortest or up to 256 times that, and one in so many outlasts a launch: pseudo-random
// for each thread, word and value, so that no thread has to keep anything.
__device__ inline void delay(u64 word, u64 value, u32 long_one_in) {
    u64 bits = NCCLEP_DELAYS + word * 0x9e3779b97f4a7c15ull + value * 0xd1342543de82ef95ull;
    bits += (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 0xda942042e4dd58b5ull;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
    bits ^= bits >> 31;
    if ((bits >> 16) % long_one_in == 0)
        sleep_ns(kLongDelayNs);
    else if (bits & 1)
        sleep_ns(kShortestDelayNs << (bits >> 8) % 9);
}

}  // namespace ncclep

#define NCCLEP_DELAY(word, value, long_one_in) ncclep::delay((u64)(word), (u64)(value), long_one_in)

#else

#define NCCLEP_DELAY(word, value, long_one_in)

#endif
