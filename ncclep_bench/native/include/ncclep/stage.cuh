// How rows come into a stage: announced by flags (mode ht), or telling by themselves that they have come (mode ll). Then
// a stage is blank, all ones, where nothing has come, and whoever takes a word blanks it again: that has reached memory when
// his launch ends, and who writes there next waits for a launch after it. So words need no flag, and nobody waits until what he has sent has arrived. A piece that holds blank words of
// its own is announced by a flag when all of it is there; whoever finds blank words looks at the flag too.
#pragma once

#include "ncclep/sync.cuh"

namespace ncclep {

// In a build with delays, or if asked to, words look blank more often.
#if !defined(NCCLEP_BLANK_BITS) && defined(NCCLEP_DELAYS)
#define NCCLEP_BLANK_BITS 0x7fu
#elif !defined(NCCLEP_BLANK_BITS)
#define NCCLEP_BLANK_BITS 0xffffffffu
#endif

__device__ inline bool is_blank(u32 word) { return (word & NCCLEP_BLANK_BITS) == NCCLEP_BLANK_BITS; }
__device__ inline bool is_blank(Vec v) { return is_blank(v.x) || is_blank(v.y) || is_blank(v.z) || is_blank(v.w); }
__device__ inline void blank(u32* word) { store_words(word, 0xffffffffu); }
__device__ inline void blank(Vec* v) { store_words(v, Vec{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}); }

// Words that have been there before this launch.
struct Lying {
    __device__ static Vec load(const Vec* address) { return load_once(address); }
    __device__ static u32 load(const u32* address) { return *address; }
    template <typename Words>
    __device__ static void settle(const Words*, Words&) {}
};

// Words of a piece in a stage, each taken by one lane once.
struct Coming {
    const u64* flag;
    u64 value;
    int peer;
    Waiting waiting;
    bool came;  // false when a word of this lane's has not

    template <typename Words>
    __device__ static Words load(const Words* address) {
        return load_words(address);
    }

    // Goes on with what has come, once it has.
    template <typename Words>
    __device__ void settle(Words* address, Words& words) {
        if (is_blank(words)) came = await(address, words) && came;
        blank(address);
    }

    template <typename Words>
    __device__ bool await(const Words* address, Words& words) const {
        const auto there = [&] {
            words = load_words(address);
            if (!is_blank(words)) return true;
            if (load_word(flag) < value) return false;
            load_acquire(flag);  // Not at every look: it costs much more.
            words = load_words(address);
            return true;
        };
        return wait_until(flag, there, value, peer, waiting);
    }
};

// Ordinary stores, ordered by whoever announces them.
struct Kept {
    __device__ static void put(Vec* address, Vec v) { store_once(address, v); }
    __device__ static void put(u32* address, u32 word) { *address = word; }

    __device__ static bool needs_flag() {
        __syncwarp();
        return true;
    }
};

// Words that tell by themselves that they have come.
struct Sent {
    bool looks_blank;  // something that this lane has sent

    template <typename Words>
    __device__ void put(Words* address, Words words) {
        store_words(address, words);
        looks_blank = looks_blank || is_blank(words);
    }

    // When the warp has sent a piece: whether its flag must follow.
    __device__ bool needs_flag() const {
        const bool needed = __ballot_sync(kAllLanes, looks_blank) != 0;
        __syncwarp();
        return needed;
    }
};

// A word of 32 bits that carries its epoch, so that several may read it and nobody blanks it.
__device__ inline u64 dated(u64 epoch, u32 word) { return (epoch + 1) << 32 | word; }
__device__ inline bool is_of(u64 dated_word, u64 epoch) { return (u32)(dated_word >> 32) == (u32)(epoch + 1); }

// The word, which may be on its way; 0, and false in `came`, when it does not come.
__device__ inline u32 await_dated(const u64* address, u64 epoch, int peer, const Waiting& waiting, bool& came) {
    u64 value = 0;
    const auto there = [&] {
        value = load_word(address);
        return is_of(value, epoch);
    };
    if (wait_until(address, there, epoch + 1, peer, waiting)) return (u32)value;
    came = false;
    return 0;
}

}  // namespace ncclep
