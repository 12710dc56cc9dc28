// What kernels of many rows with AVX-512 share, whose lanes are queries: 16 queries a tile, a vector of scores for each key.
// Included once for each instruction set: all has internal linkage.
#pragma once

#include "attention/queries.hpp"

#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t LANES = 16; // queries of a tile
constexpr float LOG2_E = 1.44269504f;
using Vector = __m512;
using Bits = __m512i;
template <class T> using Lanes = Queries<T, LANES>;

inline Vector all(float value) { return _mm512_set1_ps(value); }
inline __mmask32 below(int64_t count) { return count >= 32 ? ~0U : count <= 0 ? 0U : (1U << count) - 1; }

// 16 vectors of 16 elements of 4 bytes, turned.
inline void turn(Bits *rows) {
    Bits pairs[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    Bits fours[16]; // [4 * i + j]: rows 4i to 4i + 3, column 4k + j in lane k
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const Bits *of = pairs + 4 * i;
        fours[4 * i] = _mm512_unpacklo_epi64(of[0], of[2]);
        fours[4 * i + 1] = _mm512_unpackhi_epi64(of[0], of[2]);
        fours[4 * i + 2] = _mm512_unpacklo_epi64(of[1], of[3]);
        fours[4 * i + 3] = _mm512_unpackhi_epi64(of[1], of[3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const Bits low_even = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
        const Bits low_odd = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
        const Bits high_even = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
        const Bits high_odd = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
        rows[j] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
        rows[8 + j] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
        rows[4 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        rows[12 + j] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
}

// ---------------------------------------------------------------- powers of 2

// 2^x within 1e-4 of itself (a weight keeps 8 bits), 1 where x is 0, 0 where it is -inf.
inline Vector power(Vector x) {
    const Vector part = _mm512_reduce_ps(x, 0x09); // x - floor(x)
    Vector sum = _mm512_fmadd_ps(all(0.07826797f), part, all(0.22630768f));
    sum = _mm512_fmadd_ps(sum, part, all(0.69542435f));
    sum = _mm512_fmadd_ps(sum, part, all(1.0f));
    return _mm512_scalef_ps(sum, x);
}

// 2^x within 1e-7 of itself.
inline Vector exact_power(Vector x) {
    const Vector part = _mm512_reduce_ps(x, 0x09);
    Vector sum = all(0.00187932f);
    constexpr float further[] = {0.008991f, 0.05581868f, 0.24015927f, 0.69315174f, 1.0f};
    for (const float next : further) sum = _mm512_fmadd_ps(sum, part, all(next));
    return _mm512_scalef_ps(sum, x);
}

// ---------------------------------------------------------------- scores

// The largest of each lane's scores of keys [from, count).
inline Vector largest(float *scores, int64_t from, int64_t count) {
    Vector most[4] = {all(NOTHING), all(NOTHING), all(NOTHING), all(NOTHING)};
    for (int64_t key = from; key < count; key += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) most[i] = _mm512_max_ps(most[i], _mm512_load_ps(scores + (key + i) * LANES));
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

// Where a query does not see a key, its score becomes none.
inline void hide(float *scores, int64_t from, int64_t count, Bits first, Bits end) {
    for (int64_t key = from; key < count; key++) {
        const Bits at = _mm512_set1_epi32(static_cast<int>(key));
        const __mmask16 seen = _mm512_cmp_epi32_mask(at, first, _MM_CMPINT_NLT);
        const auto hidden = static_cast<__mmask16>(~_mm512_mask_cmp_epi32_mask(seen, at, end, _MM_CMPINT_LT));
        _mm512_mask_store_ps(scores + key * LANES, hidden, all(NOTHING));
    }
}

// Scores of keys [from, count) as softcap * tanh(score * scale / softcap), by exact powers: softcap multiplies errors.
void capped(float *scores, int64_t from, int64_t count, float scale, float softcap) {
    const Vector by = all(scale / softcap), sign = all(-0.0f), one = all(1.0f);
    for (float *at = scores + from * LANES; at < scores + count * LANES; at += LANES) {
        const Vector x = _mm512_mul_ps(_mm512_load_ps(at), by);
        const Vector e = exact_power(_mm512_mul_ps(_mm512_abs_ps(x), all(-2 * LOG2_E)));
        const Vector size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
        _mm512_store_ps(at, _mm512_mul_ps(_mm512_or_ps(size, _mm512_and_ps(x, sign)), all(softcap)));
    }
}

// Of keys [at, at + count), those [from, to) that some query of TILES tiles sees; multiples of `step`, but for `at`.
template <int TILES> struct Ranges {
    Bits first[TILES], end[TILES];
    int64_t from, to, all_from = 0, all_to = INT32_MAX; // between these, every query sees every key

    Ranges(const int32_t *firsts, const int32_t *ends, int64_t at, int64_t count, int64_t step) {
        int64_t lowest = INT32_MAX, highest = 0;
        const Bits base = _mm512_set1_epi32(static_cast<int>(at));
        for (int q = 0; q < TILES; q++) {
            first[q] = _mm512_sub_epi32(_mm512_load_si512(firsts + q * LANES), base);
            end[q] = _mm512_sub_epi32(_mm512_load_si512(ends + q * LANES), base);
            lowest = least_of(lowest, _mm512_reduce_min_epi32(first[q]));
            highest = most_of(highest, _mm512_reduce_max_epi32(end[q]));
            all_from = most_of(all_from, _mm512_reduce_max_epi32(first[q]));
            all_to = least_of(all_to, _mm512_reduce_min_epi32(end[q]));
        }
        from = most_of(lowest, 0) / step * step;
        to = up(least_of(highest, count), step);
    }

    void hide_from(int tile, float *scores) const {
        hide(scores, from, least_of(all_from, to), first[tile], end[tile]);
        hide(scores, most_of(most_of(all_from, all_to), from), to, first[tile], end[tile]);
    }
};

} // namespace
} // namespace trinity
