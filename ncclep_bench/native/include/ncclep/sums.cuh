// Weighted sums of rows, one warp each, in float32.
#pragma once

#include "ncclep/element.cuh"
#include "ncclep/stage.cuh"

namespace ncclep {

constexpr int kAtOnce = 4;  // vectors of a lane that are added up together
constexpr int kTerms = 2;   // rows whose vectors are loaded before the first is added

// Rows that have been there before this launch.
struct LyingRows {
    __device__ static Vec load(int, const Vec* address) { return load_once(address); }
    __device__ static void settle(int, const Vec*, Vec&) {}
};

// Adds up the same vectors of several rows: `row(bit)` and `weight(bit)` for each of `terms`, the same on all lanes.
// `from.load(bit, address)` and `from.settle(bit, address, vector)`: as Lying, which is meant without it, and Coming do.
template <typename Element, typename From, typename Row, typename Weight>
__device__ inline void add_rows(From& from, u32 terms, const Row& row, const Weight& weight, int first, int end,
                                float (*sums)[Element::kPerVec]) {
    while (terms) {
        Vec held[kTerms][kAtOnce];
        decltype(row(0)) vecs[kTerms];
        u32 left = terms;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            if (!left) break;
            vecs[term] = row(first_bit(left));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + 32 * i < end) held[term][i] = from.load(first_bit(left), vecs[term] + first + 32 * i);
            left &= left - 1;
        }
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            if (!terms) break;
            const float factor = weight(first_bit(terms));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + 32 * i < end) {
                    from.settle(first_bit(terms), vecs[term] + first + 32 * i, held[term][i]);
                    float values[Element::kPerVec];
                    Element::widen(held[term][i], values);
#pragma unroll
                    for (int j = 0; j < Element::kPerVec; ++j) sums[i][j] += factor * values[j];
                }
            terms &= terms - 1;
        }
    }
}

template <typename Element, typename Row, typename Weight>
__device__ inline void add_rows(u32 terms, const Row& row, const Weight& weight, int first, int end,
                                float (*sums)[Element::kPerVec]) {
    LyingRows from;
    add_rows<Element>(from, terms, row, weight, first, end, sums);
}

// `to`: Kept, which is meant without it, or Sent.
template <typename Element, typename To>
__device__ inline void store_sums(To& to, Vec* row, int first, int end, float (*sums)[Element::kPerVec]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < end) to.put(row + first + 32 * i, Element::narrow(sums[i]));
}

template <typename Element>
__device__ inline void store_sums(Vec* row, int first, int end, float (*sums)[Element::kPerVec]) {
    Kept to;
    store_sums<Element>(to, row, first, end, sums);
}

}  // namespace ncclep
