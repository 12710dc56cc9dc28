// The loops of elementwise/elementwise.hpp, included once for each instruction set: the compiler's own vectors do the rest. All has
// internal linkage, and no std function that may be emitted is called.
#pragma once

#include "bf16.hpp"
#include "elementwise/elementwise.hpp"

namespace trinity {
namespace {

template <class T> T *row_of(const Matrix &rows, int64_t row) {
    return reinterpret_cast<T *>(rows.address) + row * rows.stride;
}

// To the nearest, ties to even. A NaN stays one: of those that come of bfloat16 rows the low half is zero.
inline uint32_t nearest(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits + 0x7fff + (bits >> 16 & 1);
}

// To the element's type and back.
template <class T> inline float rounded(float value) {
    if (sizeof(T) == sizeof(float)) return value;
    const uint32_t bits = nearest(value) & 0xffff0000U;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

inline void set(float *out, float value) { *out = value; }
inline void set(Bf16 *out, float value) { *out = static_cast<Bf16>(nearest(value) >> 16); }

inline float sum_of(float product, float by, float further) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(product, by, further);
#else
    return product * by + further;
#endif
}

// e^x within 2 ulp for |x| <= 87, beyond that as there (NaN too). Powers of two times Cephes' polynomial. The bound is
// one of whole numbers: of floats the compiler makes branches, computes both, and divides into slow denormals.
inline float exponential(float x) {
    uint32_t given;
    __builtin_memcpy(&given, &x, 4);
    const uint32_t size = given & 0x7fffffffU, most = 0x42ae0000U; // 87.0F
    given = (given & 0x80000000U) | (size < most ? size : most);
    __builtin_memcpy(&x, &given, 4);
    constexpr float SHIFT = 12582912.0F; // 1.5 * 2^23: the sum's low bits are the nearest whole number
    const float moved = sum_of(x, 1.44269504F, SHIFT), whole = moved - SHIFT;
    const float r = sum_of(whole, 2.12194440e-4F, sum_of(whole, -0.693359375F, x));
    float power = sum_of(1.9875691500e-4F, r, 1.3981999507e-3F);
    power = sum_of(power, r, 8.3334519073e-3F);
    power = sum_of(power, r, 4.1665795894e-2F);
    power = sum_of(power, r, 1.6666665459e-1F);
    power = sum_of(power, r, 5.0000001201e-1F);
    power = sum_of(power, r * r, r) + 1.0F;
    uint32_t bits;
    __builtin_memcpy(&bits, &moved, 4);
    bits = (bits + 127) << 23;
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    return power * scale;
}

template <class T> void rms_norm(const RmsNorm &norm, int64_t first, int64_t end) {
    const T *weight = reinterpret_cast<const T *>(norm.weight);
    const int64_t width = norm.width;
    for (int64_t row = first; row < end; row++) {
        const T *in = row_of<const T>(norm.in, row);
        T *out = row_of<T>(norm.out, row);
        if (norm.added.address != 0) {
            const T *added = row_of<const T>(norm.added, row);
            T *sums = row_of<T>(norm.sums, row);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) set(sums + i, get(in[i]) + get(added[i]));
            in = sums;
        }
        if (weight == nullptr) continue;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += get(in[i]) * get(in[i]);
        const float by = 1.0F / __builtin_sqrtf(sum / static_cast<float>(width) + norm.eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) set(out + i, rounded<T>(get(in[i]) * by) * get(weight[i]));
    }
}

template <class T> void gated(const Gated &given, int64_t first, int64_t end) {
    const int64_t width = given.width;
    const float slope = given.slope;
    for (int64_t row = first; row < end; row++) {
        const T *gate = row_of<const T>(given.gate, row);
        T *out = row_of<T>(given.out, row);
        if (given.up.address == 0) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                const float x = get(gate[i]);
                set(out + i, x * rounded<T>(1.0F / (1.0F + exponential(-rounded<T>(slope * x)))));
            }
            continue;
        }
        const T *up = row_of<const T>(given.up, row);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            const float x = get(gate[i]);
            set(out + i, rounded<T>(x / (1.0F + exponential(-slope * x))) * get(up[i]));
        }
    }
}

template <class T> void rotary(const Rotary &given, int64_t first, int64_t end) {
    const int64_t half = given.width / 2;
    for (int64_t row = first; row < end; row++) {
        const T *cosine = row_of<const T>(given.cosine, row), *sine = row_of<const T>(given.sine, row);
        for (int64_t head = 0; head < given.heads; head++) {
            const T *in = row_of<const T>(given.in, row) + head * given.in_head;
            T *out = row_of<T>(given.out, row) + head * given.out_head;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float low = get(in[i]), high = get(in[half + i]);
                set(out + i, rounded<T>(low * get(cosine[i])) + rounded<T>(-high * get(sine[i])));
                set(out + half + i,
                    rounded<T>(high * get(cosine[half + i])) + rounded<T>(low * get(sine[half + i])));
            }
        }
    }
}

template <class T> constexpr Elementwise LOOPS{rms_norm<T>, gated<T>, rotary<T>};

} // namespace
} // namespace trinity
