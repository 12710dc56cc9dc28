// Vectors of 8 floats as kernels of AVX2 and FMA share them. Included only where both are compiled for: all has internal
// linkage. A step is 16 elements in two vectors: of floats the first and the last 8, of bf16 those of even and of odd
// numbers, which is a shift and a mask in place of shuffles; `split` lays floats out alike.
#pragma once

#include "bf16.hpp"

#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t STEP = 16;
constexpr float LOG2_E = 1.44269504f;
using Vector = __m256;
using Bits = __m256i;

inline Vector all(float value) { return _mm256_set1_ps(value); }
inline Bits bits_at(const void *from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

// One of the two vectors of a step.
template <int HALF> inline Vector part(const float *from) { return _mm256_loadu_ps(from + 8 * HALF); }
template <int HALF> inline Vector part(const Bf16 *from) {
    const Bits pairs = bits_at(from);
    if (HALF == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// 8 elements as they lie.
inline Vector widened8(const float *from) { return _mm256_loadu_ps(from); }
inline Vector widened8(const Bf16 *from) {
    const __m128i few = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(few), 16));
}

// To the nearest bf16, ties to even, in the high half of each word; a NaN stays one.
inline Bits rounded(Vector of) {
    const Bits bits = _mm256_castps_si256(of), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const Bits near = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const Bits quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const Vector none = _mm256_cmp_ps(of, of, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(none));
}

// 8 elements in their order.
inline void put8(float *out, Vector of) { _mm256_storeu_ps(out, of); }
inline void put8(Bf16 *out, Vector of) {
    const Bits words = _mm256_srli_epi32(rounded(of), 16);
    const Bits halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm256_castsi256_si128(halves));
}

// A step back from its two vectors.
inline void join(float *out, Vector first, Vector second) { put8(out, first), put8(out + 8, second); }
inline void join(Bf16 *out, Vector even, Vector odd) {
    const Bits high = _mm256_and_si256(rounded(odd), _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    const Bits found = _mm256_or_si256(_mm256_srli_epi32(rounded(even), 16), high);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), found);
}

// `count` elements as floats, each step in its two vectors, with zeros up to a whole step.
template <class T> inline void split(const T *from, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP)
        _mm256_storeu_ps(out + i, part<0>(from + i)), _mm256_storeu_ps(out + i + 8, part<1>(from + i));
    if (i == count) return;
    T last[STEP] = {};
    for (int64_t k = 0; i + k < count; k++) last[k] = from[i + k];
    _mm256_storeu_ps(out + i, part<0>(last)), _mm256_storeu_ps(out + i + 8, part<1>(last));
}

inline float sum_of(Vector of) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(of), _mm256_extractf128_ps(of, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The sums of four vectors.
inline __m128 sums_of(Vector a, Vector b, Vector c, Vector d) {
    const Vector all_four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all_four), _mm256_extractf128_ps(all_four, 1));
}

// A square of 8 x 8 words, turned.
inline void turn(Vector *rows) {
    Vector a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const Vector *of = a + 4 * i;
        b[4 * i] = _mm256_shuffle_ps(of[0], of[2], 0x44), b[4 * i + 1] = _mm256_shuffle_ps(of[0], of[2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(of[1], of[3], 0x44), b[4 * i + 3] = _mm256_shuffle_ps(of[1], of[3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2f128_ps(b[i], b[4 + i], 0x31);
    }
}

// 2^x for x <= 0, within 1e-7 of itself; 0 below -126, NaN of NaN.
inline Vector power(Vector x) {
    const Vector least = all(-126.0f), kept = _mm256_max_ps(least, x), whole = _mm256_floor_ps(kept);
    const Vector rest = _mm256_sub_ps(kept, whole);
    Vector sum = all(0.00187932f);
    constexpr float further[] = {0.008991f, 0.05581868f, 0.24015927f, 0.69315174f, 1.0f};
    for (const float next : further) sum = _mm256_fmadd_ps(sum, rest, all(next));
    const Bits scale = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    const Vector found = _mm256_mul_ps(sum, _mm256_castsi256_ps(scale));
    return _mm256_and_ps(found, _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}

// softcap * tanh(score / softcap).
inline Vector capped(Vector score, float softcap) {
    const Vector sign = all(-0.0f), one = all(1.0f), x = _mm256_div_ps(score, all(softcap));
    const Vector e = power(_mm256_mul_ps(_mm256_andnot_ps(sign, x), all(-2 * LOG2_E)));
    const Vector size = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    return _mm256_mul_ps(_mm256_or_ps(size, _mm256_and_ps(x, sign)), all(softcap));
}

} // namespace
} // namespace trinity
