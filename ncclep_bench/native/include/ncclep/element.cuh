// Sixteen bytes of elements, widened to float32 and rounded back.
#pragma once

#include "ncclep/platform.cuh"

namespace ncclep {

struct Float32 {
    static constexpr int kPerVec = 4;
    __device__ static void widen(Vec v, float* values) {
        values[0] = bits_to_float(v.x);
        values[1] = bits_to_float(v.y);
        values[2] = bits_to_float(v.z);
        values[3] = bits_to_float(v.w);
    }
    __device__ static Vec narrow(const float* values) {
        return Vec{float_to_bits(values[0]), float_to_bits(values[1]), float_to_bits(values[2]),
                   float_to_bits(values[3])};
    }
};

template <typename Half>
struct Packed {
    static constexpr int kPerVec = 8;
    __device__ static void widen(Vec v, float* values) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[2 * i] = Half::widen(words[i] & 0xffffu);
            values[2 * i + 1] = Half::widen(words[i] >> 16);
        }
    }
    __device__ static Vec narrow(const float* values) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = Half::narrow(values[2 * i], values[2 * i + 1]);
        return Vec{words[0], words[1], words[2], words[3]};
    }
};

struct Half16 {
    __device__ static float widen(u32 bits) { return half_to_float(bits); }
    __device__ static u32 narrow(float low, float high) { return floats_to_halves(low, high); }
};

struct Brain16 {
    __device__ static float widen(u32 bits) { return bits_to_float(bits << 16); }
    __device__ static u32 narrow(float low, float high) { return floats_to_brains(low, high); }
};

typedef Packed<Half16> Float16;
typedef Packed<Brain16> BFloat16;

}  // namespace ncclep
