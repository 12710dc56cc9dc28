// One row, or a few: each weight is read once, widened in registers and multiplied where it lies, so that bf16 halves
// what memory has to give. For product_avx2.cpp alone: all has internal linkage.
#pragma once

#include "linear/given.hpp"

namespace trinity {
namespace {

// sums[r][o] += one half of a step of ROWS rows, `apart` floats from each other, and of OUTS outputs' weights.
template <int HALF, int ROWS, int OUTS, class T>
inline void join_half(const float *rows, int64_t apart, const T *const (&weights)[OUTS], int64_t at,
                      Vector (&sums)[ROWS][OUTS]) {
    Vector held[OUTS];
#pragma GCC unroll 8
    for (int o = 0; o < OUTS; o++) held[o] = part<HALF>(weights[o] + at);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        const Vector row = _mm256_loadu_ps(rows + r * apart + at + 8 * HALF);
#pragma GCC unroll 8
        for (int o = 0; o < OUTS; o++) sums[r][o] = _mm256_fmadd_ps(held[o], row, sums[r][o]);
    }
}

template <int ROWS, int OUTS, class T>
inline void dots(const float *rows, int64_t apart, const T *first, int64_t inputs, Vector (&sums)[ROWS][OUTS]) {
    const T *weights[OUTS];
    for (int o = 0; o < OUTS; o++) weights[o] = first + o * inputs;
    int64_t at = 0;
    for (; at + STEP <= inputs; at += STEP) {
#pragma GCC unroll 8
        for (int o = 0; o < OUTS; o++) __builtin_prefetch(weights[o] + at + OUTS * inputs);
        join_half<0>(rows, apart, weights, at, sums);
        __asm__ volatile("" ::: "memory"); // weights are read again: kept over both halves, sums would be spilt
        join_half<1>(rows, apart, weights, at, sums);
    }
    if (at == inputs) return;
    T last[OUTS][STEP] = {};
    for (int o = 0; o < OUTS; o++) {
        for (int64_t k = at; k < inputs; k++) last[o][k - at] = weights[o][k];
        weights[o] = last[o];
    }
    join_half<0>(rows + at, apart, weights, 0, sums);
    join_half<1>(rows + at, apart, weights, 0, sums);
}

// Rows [first, end) of a product, of which `split` has one after the other, `apart` floats each.
struct Dotted {
    int64_t first, end;
    const float *split;
    int64_t apart;
};

// OUTS outputs from `at` on of the rows [row, row + ROWS).
template <int ROWS, int OUTS, class T> void dot(const Product &given, const Dotted &rows, int64_t row, int64_t at) {
    Vector sums[ROWS][OUTS] = {};
    dots<ROWS, OUTS>(rows.split + (row - rows.first) * rows.apart, rows.apart, weights_of<T>(given, at), given.inputs, sums);
    for (int r = 0; r < ROWS; r++) {
        float found[OUTS];
        for (int o = 0; o < OUTS; o++) found[o] = sum_of(sums[r][o]);
        T *out = out_of<T>(given, row + r) + at;
        for (int o = 0; o < OUTS; o++) put(out + o, found[o] + bias_of<T>(given, at + o));
    }
}

// OUTS outputs of all rows, ROWS or fewer at a time.
template <int ROWS, int OUTS, class T> void dot_all(const Product &given, const Dotted &rows, int64_t at) {
    int64_t row = rows.first;
    for (; row + ROWS <= rows.end; row += ROWS) dot<ROWS, OUTS, T>(given, rows, row, at);
    for (; row + 2 <= rows.end; row += 2) dot<2, OUTS, T>(given, rows, row, at);
    if (row < rows.end) dot<1, OUTS, T>(given, rows, row, at);
}

// Outputs [at, end).
template <class T> void run_dots(const Product &given, const Dotted &rows, int64_t at, int64_t end) {
    if (rows.end - rows.first == 1)
        for (; at + 8 <= end; at += 8) dot_all<1, 8, T>(given, rows, at);
    if (sizeof(T) == 4 && rows.end - rows.first > 3)
        for (; at + 3 <= end; at += 3) dot_all<4, 3, T>(given, rows, at);
    for (; at + 4 <= end; at += 4) dot_all<2, 4, T>(given, rows, at);
    for (; at < end; at++) dot_all<2, 1, T>(given, rows, at);
}

} // namespace
} // namespace trinity
