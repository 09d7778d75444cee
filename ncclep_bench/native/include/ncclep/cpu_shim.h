// Runs kernels on a CPU: for tests where there is no GPU, never for speed.
//
// The threads of a launch take turns on the thread that launches them, each until it waits: a few cores have no time to
// lose on hundreds of real ones. Builds that look for races and for faults of the protocol, with ThreadSanitizer or
// NCCLEP_DELAYS, have a real one each, NCCLEP_REAL_THREADS.
//
// Covered: blocks, __syncthreads, __syncwarp, shuffles, ballots, dynamic shared memory, system-scope loads and stores,
// atomics. Not covered: lockstep, divergent barriers, the weakness of a GPU's memory order.
#pragma once

#if defined(__SANITIZE_THREAD__) || defined(NCCLEP_DELAYS)
#define NCCLEP_REAL_THREADS
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#undef _FORTIFY_SOURCE  // Its longjmp takes another stack for a broken one.
#include <setjmp.h>
#include <ucontext.h>
#endif

#include <sched.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

namespace ncclep {

constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

class Barrier {
   public:
    explicit Barrier(int count) : count_(count) {}
    void wait() { wait(count_); }
    void wait(int count) {
        const u32 generation = __atomic_load_n(&generation_, __ATOMIC_ACQUIRE);
        if (__atomic_add_fetch(&here_, 1, __ATOMIC_ACQ_REL) == count) {
            __atomic_store_n(&here_, 0, __ATOMIC_RELAXED);
            __atomic_fetch_add(&generation_, 1, __ATOMIC_RELEASE);
            wake();
        } else {
            await_after(generation);
        }
    }
    bool is_past(u32 generation) const { return __atomic_load_n(&generation_, __ATOMIC_ACQUIRE) != generation; }

   private:
    void wake();
    void await_after(u32 generation);

    const int count_;
    int here_ = 0;
    u32 generation_ = 0;
};

struct Warp {
    explicit Warp(int lanes) : barrier(lanes) {}
    Barrier barrier;
    // Exchanges take turns, so that one meeting each is enough: who comes to the next is done with the one before.
    u64 lane[2][kWarp] = {};
};

struct Block {
    Block(int threads, size_t shared) : barrier(threads), some(threads), bytes(shared / 16 + 1) {
        for (int first = 0; first < threads; first += kWarp)
            warps.emplace_back(threads - first < kWarp ? threads - first : kWarp);
    }
    Barrier barrier;
    Barrier some;  // one such barrier is enough for the kernels
    std::deque<Warp> warps;
    std::vector<Vec> bytes;
};

struct Index {
    int x;
};

struct Store {
    Vec* to;
    const Vec* from;
    std::vector<Vec> vecs;
    bool ended, read;
};

struct Thread {
    Block* block;
    Index thread_index, block_index, block_size, grid_size;
    u32 exchanges;  // of its warp
    std::vector<Store> stores;
};

inline thread_local Thread* this_thread;

inline Warp& this_warp() { return this_thread->block->warps[this_thread->thread_index.x / kWarp]; }

// What every lane of the warp has given.
inline const u64* exchange(u64 bits) {
    Warp& warp = this_warp();
    u64* lanes = warp.lane[this_thread->exchanges++ % 2];
    lanes[this_thread->thread_index.x % kWarp] = bits;
    warp.barrier.wait();
    return lanes;
}

using Work = void (*)(const void*);

#ifdef NCCLEP_REAL_THREADS

inline void Barrier::wake() { syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr); }

inline void Barrier::await_after(u32 generation) {
    for (int looks = 0; !is_past(generation); ++looks) {
        if (looks < 16)
            sched_yield();
        else
            syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, generation, nullptr);
    }
}

inline void spin_pause() { sched_yield(); }
inline void let_others() {}

inline void run_all(std::vector<Thread>& threads, Work work, const void* argument) {
    struct Start {
        Thread* thread;
        Work work;
        const void* argument;
        pthread_t running;
    };
    std::vector<Start> starts;
    for (Thread& thread : threads) starts.push_back(Start{&thread, work, argument, {}});
    const auto run = [](void* given) -> void* {
        const Start& start = *static_cast<const Start*>(given);
        this_thread = start.thread;
        start.work(start.argument);
        return nullptr;
    };
    for (Start& start : starts)
        if (pthread_create(&start.running, nullptr, run, &start) != 0) abort();
    for (Start& start : starts) pthread_join(start.running, nullptr);
}

#else

// What a thread of a launch runs on; kept for the next launch.
struct Fiber {
    static constexpr size_t kStackBytes = 256 << 10;
    char* stack = new char[kStackBytes];  // what is used of it takes memory
    bool started = false, busy = false;
    const Barrier* barrier = nullptr;  // that it waits at for the end of
    u32 generation = 0;
    jmp_buf left;
    ~Fiber() { delete[] stack; }
};

struct Fibers {
    std::deque<Fiber> all;
    Fiber* running = nullptr;
    Work work = nullptr;
    const void* argument = nullptr;
    jmp_buf left;  // where they are resumed
    bool waits = false;
    u64 turns = 0;
};

// Of this thread, which they never leave.
inline thread_local Fibers fibers;

// Not swapcontext, which calls the kernel and takes 20 times as long.
inline void leave_fiber() {
    if (_setjmp(fibers.running->left) == 0) _longjmp(fibers.left, 1);
}

inline void run_fiber() {
    for (;;) {
        fibers.work(fibers.argument);
        fibers.running->busy = false;
        leave_fiber();
    }
}

inline void resume(Fiber& fiber) {
    fibers.running = &fiber;
    if (_setjmp(fibers.left) != 0) return;
    if (fiber.started) _longjmp(fiber.left, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = Fiber::kStackBytes;
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

inline void Barrier::wake() {}

inline void Barrier::await_after(u32 generation) {
    fibers.running->barrier = this;
    fibers.running->generation = generation;
    leave_fiber();
}

inline void spin_pause() { leave_fiber(); }

// Before what other ranks see, so that who takes rows looks for them as early as if all ran at the same time.
inline void let_others() {
    fibers.waits = false;
    leave_fiber();
}

// One bit for each warp: whether it rests. Pseudo-random and another for each rank, for 32 turns on end, so that some
// warps are ahead as they are on a machine that runs them in its own order.
inline u64 resting(u64 turn) {
    u64 bits = ((u64)&fibers + turn / 32) * 0x9e3779b97f4a7c15ull;
    bits = (bits ^ bits >> 32) * 0xd1342543de82ef95ull;
    return bits ^ bits >> 32;
}

inline void run_all(std::vector<Thread>& threads, Work work, const void* argument) {
    const size_t count = threads.size();
    while (fibers.all.size() < count) fibers.all.emplace_back();
    fibers.work = work;
    fibers.argument = argument;
    for (size_t i = 0; i < count; ++i) fibers.all[i].busy = true;
    for (size_t left = count; left > 0;) {
        fibers.waits = true;
        const u64 rest = resting(++fibers.turns);
        for (size_t i = 0; i < count; ++i) {
            // To and fro, so that no thread is always ahead of another.
            const size_t at = fibers.turns % 2 ? count - 1 - i : i;
            Fiber& fiber = fibers.all[at];
            if (!fiber.busy || rest >> at / kWarp % 64 & 1 || (fiber.barrier != nullptr && !fiber.barrier->is_past(fiber.generation))) continue;
            fiber.barrier = nullptr;
            this_thread = &threads[at];
            resume(fiber);
            left -= !fiber.busy;
            fibers.waits = fibers.waits && fiber.busy && fiber.barrier == nullptr;
        }
        if (fibers.waits) sched_yield();  // for what other ranks do
    }
}

#endif

}  // namespace ncclep

#define threadIdx ncclep::this_thread->thread_index
#define blockIdx ncclep::this_thread->block_index
#define blockDim ncclep::this_thread->block_size
#define gridDim ncclep::this_thread->grid_size

#include "ncclep/delays.cuh"

inline void __syncthreads() { ncclep::this_thread->block->barrier.wait(); }
inline void __syncwarp() { ncclep::this_warp().barrier.wait(); }

template <typename T>
T __shfl_sync(u32, T value, int from) {
    static_assert(sizeof(T) <= 8, "a lane holds 8 bytes");
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = ncclep::exchange(bits)[from];
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
T __shfl_xor_sync(u32 lanes, T value, int mask) {
    return __shfl_sync(lanes, value, (threadIdx.x % 32) ^ mask);
}

template <typename T>
T __shfl_up_sync(u32 lanes, T value, int distance) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(lanes, value, lane < distance ? lane : lane - distance);
}

inline u32 __ballot_sync(u32, bool vote) {
    const u64* votes = ncclep::exchange(vote);
    u32 bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (u32)votes[lane] << lane;
    return bits;
}

namespace ncclep {

inline unsigned char* shared_bytes() { return reinterpret_cast<unsigned char*>(this_thread->block->bytes.data()); }
inline u64 load_acquire(const u64* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
inline void store_release(u64* address, u64 value) {
    let_others();
    NCCLEP_DELAY(address, value, 32);
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
    NCCLEP_DELAY(address, ~value, 32);
}
// Stronger than on a GPU: there the end of a launch orders what a word of the next one announces.
inline u64 load_word(const u64* address) { return load_acquire(address); }
inline void store_word(u64* address, u64 value) { store_release(address, value); }
inline u64 fetch_add(u64* address, u64 value) { return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL); }
inline void sync_some(int, int threads) { this_thread->block->some.wait(threads); }
inline void or_shared(u32* address, u32 bits) { __atomic_fetch_or(address, bits, __ATOMIC_RELAXED); }
#ifdef __SANITIZE_THREAD__
// ThreadSanitizer knows no fences; the release that follows each of them orders the same here.
inline void fence_system() {}
#else
inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif
inline u64 now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1'000'000'000 + (u64)now.tv_nsec;
}
inline void await_previous() {}  // launches follow each other here

inline Vec load_once(const Vec* address) { return *address; }
inline void store_once(Vec* address, Vec v) { *address = v; }
inline u32 load_words(const u32* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
inline void store_words(u32* address, u32 value) { __atomic_store_n(address, value, __ATOMIC_RELAXED); }
// Word by word, so that half a vector is seen at times.
inline Vec load_words(const Vec* v) {
    return Vec{load_words(&v->x), load_words(&v->y), load_words(&v->z), load_words(&v->w)};
}
inline void store_words(Vec* to, Vec v) {
    let_others();
    NCCLEP_DELAY(to, v.w, 4096);
    store_words(&to->w, v.w), store_words(&to->z, v.z);
    NCCLEP_DELAY(to, v.x, 4096);
    store_words(&to->y, v.y), store_words(&to->x, v.x);
}
inline float bits_to_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline u32 float_to_bits(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline int count_bits(u32 bits) { return __builtin_popcount(bits); }
inline int first_bit(u32 bits) { return __builtin_ffs((int)bits) - 1; }

inline float half_to_float(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
        const float value = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    return bits_to_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}

inline u32 float_to_half(float value) {
    const u32 bits = float_to_bits(value), sign = bits >> 16 & 0x8000u;
    const float magnitude = bits_to_float(bits & 0x7fffffffu);
    if (magnitude != magnitude) return 0x7e00u;
    if (magnitude >= 65520.0f) return sign | 0x7c00u;
    // Adding half of 2^24 units in the last place of a subnormal rounds to nearest even there.
    if (magnitude < 6.103515625e-5f) return sign | (float_to_bits(magnitude + 0.5f) - 0x3f000000u);
    const u32 rounded = (bits & 0x7fffffffu) + 0xfff + (bits >> 13 & 1);
    return sign | ((rounded >> 13) - (112 << 10));
}

inline u32 floats_to_halves(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }

inline u32 float_to_brain(float value) {
    const u32 bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

inline u32 floats_to_brains(float low, float high) { return float_to_brain(low) | float_to_brain(high) << 16; }

// Bulk copies at their worst: a load reads its source at once, spoils where it goes and writes when it is awaited; a
// store reads its source when it must have been read and writes when it must have been written. So whoever waits for
// too little is caught.
struct Landing {
    u64 loads;  // that are there
    struct Load* pending;
};

struct Load {
    Vec* to;
    std::vector<Vec> vecs;
};

inline void begin_landing(Landing* landing) { *landing = Landing{}; }
inline void fence_bulk() {}

inline void bulk_load(Vec* to, const Vec* from, int vecs, Landing* landing) {
    Load* load = new Load{to, std::vector<Vec>(from, from + vecs)};
    std::memset(to, 0x5a, vecs * sizeof(Vec));
    __atomic_store_n(&landing->pending, load, __ATOMIC_RELEASE);
}

inline void await_landing(Landing* landing, u32 number) {
    while ((load_acquire(&landing->loads) & 1) == (number & 1)) {
        if (Load* load = __atomic_exchange_n(&landing->pending, nullptr, __ATOMIC_ACQ_REL)) {
            std::memcpy(load->to, load->vecs.data(), load->vecs.size() * sizeof(Vec));
            delete load;
            fetch_add(&landing->loads, 1);
        }
        spin_pause();
    }
}

inline void bulk_store(Vec* to, const Vec* from, int vecs) {
    this_thread->stores.push_back(Store{to, from, std::vector<Vec>(vecs), false, false});
}

inline void end_stores() {
    for (Store& store : this_thread->stores) store.ended = true;
}

inline void await_stores_read() {
    for (Store& store : this_thread->stores)
        if (store.ended && !store.read) {
            store.vecs.assign(store.from, store.from + store.vecs.size());
            store.read = true;
        }
}

inline void await_stores() {
    await_stores_read();
    std::vector<Store> left;
    for (Store& store : this_thread->stores) {
        if (store.read)
            std::memcpy(store.to, store.vecs.data(), store.vecs.size() * sizeof(Vec));
        else
            left.push_back(store);
    }
    this_thread->stores.swap(left);
}

template <typename Arguments>
void launch(void (*kernel)(Arguments), int blocks, int threads, size_t shared, const void* packed) {
    Arguments arguments;
    std::memcpy(&arguments, packed, sizeof arguments);
    std::deque<Block> grid;
    std::vector<Thread> all;
    for (int block = 0; block < blocks; ++block) {
        grid.emplace_back(threads, shared);
        for (int thread = 0; thread < threads; ++thread)
            all.push_back(Thread{&grid[block], {thread}, {block}, {threads}, {blocks}, 0, {}});
    }
    const auto run = [&] { kernel(arguments); };
    run_all(all, [](const void* argument) { (*static_cast<decltype(run)*>(argument))(); }, &run);
}

}  // namespace ncclep

// Every kernel takes one struct, so one signature launches them all.
#define NCCLEP_EXPORT(kernel)                                                                          \
    extern "C" void kernel##_launch(int blocks, int threads, u64 shared, const void* arguments) {      \
        ncclep::launch(kernel, blocks, threads, shared, arguments);                                    \
    }
