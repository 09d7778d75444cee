// Weighted sums of rows, one warp each, in float32.
#pragma once

#include "ncclep/element.cuh"

namespace ncclep {

constexpr int kAtOnce = 4;  // vectors of a lane that are added up together
constexpr int kTerms = 2;   // rows whose vectors are loaded before the first is added

// Adds up the same vectors of several rows: `row(bit)` and `weight(bit)` for each of `terms`, the same on all lanes.
template <typename Element, typename Row, typename Weight>
__device__ inline void add_rows(u32 terms, const Row& row, const Weight& weight, int first, int end,
                                float (*sums)[Element::kPerVec]) {
    while (terms) {
        Vec held[kTerms][kAtOnce];
        u32 left = terms;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            if (!left) break;
            const Vec* from = row(first_bit(left));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + 32 * i < end) held[term][i] = load_once(from + first + 32 * i);
            left &= left - 1;
        }
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
            if (!terms) break;
            const float factor = weight(first_bit(terms));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + 32 * i < end) {
                    float values[Element::kPerVec];
                    Element::widen(held[term][i], values);
#pragma unroll
                    for (int j = 0; j < Element::kPerVec; ++j) sums[i][j] += factor * values[j];
                }
            terms &= terms - 1;
        }
    }
}

template <typename Element>
__device__ inline void store_sums(Vec* row, int first, int end, float (*sums)[Element::kPerVec]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
        if (first + 32 * i < end) store_once(row + first + 32 * i, Element::narrow(sums[i]));
}

}  // namespace ncclep
