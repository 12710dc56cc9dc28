// The loops of encoder/encoder.hpp, included once for each instruction set, as those of elementwise/rows.hpp are.
#pragma once

#include "elementwise/rows.hpp"
#include "encoder/encoder.hpp"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace trinity {
namespace {

template <class T> const T *sums_of(const LayerNorm &norm, int64_t row) {
    const T *in = row_of<const T>(norm.in, row);
    if (norm.added.address == 0) return in;
    const T *added = row_of<const T>(norm.added, row);
    T *sums = row_of<T>(norm.sums, row);
#pragma omp simd
    for (int64_t i = 0; i < norm.width; i++) set(sums + i, get(in[i]) + get(added[i]));
    return sums;
}

// Deviations are squared, and not the numbers: those may be far from zero and close to each other.
template <class T> void layer_norm(const LayerNorm &norm, int64_t first, int64_t end) {
    const T *weight = reinterpret_cast<const T *>(norm.weight), *bias = reinterpret_cast<const T *>(norm.bias);
    const int64_t width = norm.width;
    const float size = static_cast<float>(width);
    for (int64_t row = first; row < end; row++) {
        const T *in = sums_of<T>(norm, row);
        T *out = row_of<T>(norm.out, row);
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += get(in[i]);
        const float mean = sum / size;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += (get(in[i]) - mean) * (get(in[i]) - mean);
        const float by = 1.0F / __builtin_sqrtf(squares / size + norm.eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) set(out + i, (get(in[i]) - mean) * by * get(weight[i]) + get(bias[i]));
    }
}

inline int64_t mapped_vectors(const uint16_t *in, uint16_t *out, const uint16_t *table, int64_t width) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= width; i += 16) { // what is read beside an entry is cut off
        const __m512i at = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(in + i)));
        const __m512i found = _mm512_i32gather_epi32(at, table, 2);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), _mm512_cvtepi32_epi16(found));
    }
#else
    (void)in, (void)out, (void)table, (void)width;
#endif
    return i;
}

inline void mapped(const Mapped &given, int64_t first, int64_t end) {
    const auto *table = reinterpret_cast<const uint16_t *>(given.table);
    for (int64_t row = first; row < end; row++) {
        const uint16_t *in = row_of<const uint16_t>(given.in, row);
        uint16_t *out = row_of<uint16_t>(given.out, row);
        for (int64_t i = mapped_vectors(in, out, table, given.width); i < given.width; i++) out[i] = table[in[i]];
    }
}

template <class T> constexpr Encoder ENCODER{layer_norm<T>, mapped};

} // namespace
} // namespace trinity
