// Rows of two vectors, which are lanes: sums of SHARED outputs by 2 * LANES rows are in registers, and each weight is
// broadcast from where it lies, so that rows and results are turned and weights are not. Those of bf16 are widened into
// the L1 before, since shifts and masks beside broadcasts take the registers of sums. For product_avx2.cpp alone: all has
// internal linkage.
#pragma once

#include "linear/given.hpp"

namespace trinity {
namespace {

constexpr int64_t LANES = 16;    // rows, in two vectors
constexpr int64_t SHARED = 6;    // outputs whose sums are in registers together
constexpr int64_t SLICE = 256;   // inputs that are passed over together
constexpr int64_t TOGETHER = 24; // outputs that all rows pass over before the next

// [inputs, LANES] of `count` rows from `row` on; lanes beyond are those of the last row, and of no use.
template <class T> void lay_lanes(const Product &given, int64_t row, int64_t count, float *out) {
    for (int64_t half = 0; half < LANES; half += 8) {
        const T *in[8];
        for (int64_t i = 0; i < 8; i++) in[i] = row_of<T>(given.in, row + least_of(half + i, count - 1));
        float *to = out + half;
        int64_t k = 0;
        for (; k + 8 <= given.inputs; k += 8) {
            Vector turned[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) turned[i] = widened8(in[i] + k);
            turn(turned);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) _mm256_store_ps(to + (k + i) * LANES, turned[i]);
        }
        for (; k < given.inputs; k++)
            for (int64_t i = 0; i < 8; i++) to[k * LANES + i] = get(in[i][k]);
    }
}

// What `weights` are as floats, `deep` of each output; `ahead` elements on lie those to ask for.
inline void hold(const float *const (&weights)[SHARED], int64_t, int64_t, float *, const float *(&held)[SHARED]) {
    for (int64_t o = 0; o < SHARED; o++) held[o] = weights[o];
}
inline void hold(const Bf16 *const (&weights)[SHARED], int64_t ahead, int64_t deep, float *room, const float *(&held)[SHARED]) {
    for (int64_t o = 0; o < SHARED; o++, room += SLICE) {
        int64_t at = 0;
        for (; at + 32 <= deep; at += 32) {
            __builtin_prefetch(weights[o] + at + ahead);
#pragma GCC unroll 4
            for (int i = 0; i < 32; i += 8) _mm256_store_ps(room + at + i, widened8(weights[o] + at + i));
        }
        for (; at < deep; at++) room[at] = get(weights[o][at]);
        held[o] = room;
    }
}

// sums [SHARED, LANES] += `deep` weights of each output by lanes; `ahead` floats on lie those to ask for.
inline void pass_lanes(const float *const (&weights)[SHARED], int64_t ahead, const float *lanes, int64_t deep, float *sums,
                       bool begin) {
    Vector sum[SHARED][2];
#pragma GCC unroll 6
    for (int o = 0; o < SHARED; o++)
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++) sum[o][w] = begin ? all(0) : _mm256_load_ps(sums + o * LANES + 8 * w);
    for (int64_t at = 0; at < deep;) {
        const int64_t line = least_of(at + STEP, deep);
#pragma GCC unroll 6
        for (int o = 0; o < SHARED; o++) __builtin_prefetch(weights[o] + at + ahead);
#pragma GCC unroll 4
        for (; at < line; at++) {
            const Vector low = _mm256_load_ps(lanes + at * LANES), high = _mm256_load_ps(lanes + at * LANES + 8);
#pragma GCC unroll 6
            for (int o = 0; o < SHARED; o++) {
                const Vector each = _mm256_broadcast_ss(weights[o] + at);
                sum[o][0] = _mm256_fmadd_ps(each, low, sum[o][0]);
                sum[o][1] = _mm256_fmadd_ps(each, high, sum[o][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int o = 0; o < SHARED; o++)
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++) _mm256_store_ps(sums + o * LANES + 8 * w, sum[o][w]);
}

// Sums [outputs, LANES] of outputs [at, end) to the `count` rows from `row` on, with the bias.
template <class T>
void finish_lanes(const Product &given, int64_t row, int64_t count, int64_t at, int64_t end, const float *sums) {
    for (; at < end; at += 8, sums += 8 * LANES) {
        float bias[8];
        for (int64_t i = 0; i < 8; i++) bias[i] = at + i < end ? bias_of<T>(given, at + i) : 0;
        const Vector further = _mm256_loadu_ps(bias);
        for (int64_t half = 0; half < count; half += 8) {
            Vector turned[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) turned[i] = _mm256_load_ps(sums + i * LANES + half);
            turn(turned);
            for (int64_t r = 0; r < least_of(count - half, 8); r++) {
                T *out = out_of<T>(given, row + half + r) + at, last[8];
                T *to = at + 8 <= end ? out : last;
                put8(to, _mm256_add_ps(turned[r], further));
                for (int64_t i = 0; to == last && at + i < end; i++) out[i] = last[i];
            }
        }
    }
}

// The outputs [first, end), at most TOGETHER of them, of `count` rows from `row` on, which `lanes` has.
template <class T>
void run_lanes(const Product &given, int64_t row, int64_t count, const float *lanes, int64_t first, int64_t end, float *memory) {
    static_assert(TOGETHER % SHARED == 0 && TOGETHER % 8 == 0, "sums are of whole tiles");
    float *sums = memory, *room = sums + TOGETHER * LANES;
    for (int64_t from = 0; from < given.inputs; from += SLICE) {
        const int64_t deep = least_of(SLICE, given.inputs - from);
        for (int64_t at = first; at < end; at += SHARED) {
            const T *weights[SHARED];
            for (int64_t o = 0; o < SHARED; o++) weights[o] = weights_of<T>(given, least_of(at + o, end - 1)) + from;
            const int64_t next = from + deep < given.inputs ? deep - (at - first) * given.inputs : SHARED * given.inputs - from;
            const int64_t ahead = at + SHARED < end ? SHARED * given.inputs : next;
            const float *held[SHARED];
            hold(weights, ahead, deep, room, held);
            pass_lanes(held, sizeof(T) == 4 ? ahead : 0, lanes + from * LANES, deep, sums + (at - first) * LANES, from == 0);
        }
    }
    finish_lanes<T>(given, row, count, first, end, sums);
}

} // namespace
} // namespace trinity
