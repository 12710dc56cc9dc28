// What kernels of many rows share, whose lanes are queries: 16 queries a tile, a vector of scores for each key.
// Included once for each instruction set: all has internal linkage.
#pragma once

#include "attention/attention.hpp"

#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t LANES = 16;   // queries of a tile
constexpr int64_t WIDEST = 512; // elements of a head
constexpr float NOTHING = -__builtin_inff();
constexpr float LOG2_E = 1.44269504f;
using Vector = __m512;
using Bits = __m512i;

inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t most_of(int64_t one, int64_t other) { return one > other ? one : other; }
inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
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

// ---------------------------------------------------------------- rows

// The heads of a tile's queries in `from`; nothing beyond `rows`.
template <class T> struct Lanes {
    T *at[LANES] = {};
    int64_t row[LANES], head[LANES], count;

    Lanes(const Attention &a, const AttentionTask &task, const Strided &from, int64_t tile, int64_t rows)
        : count(least_of(rows - tile * LANES, LANES)) {
        const int64_t group = a.group(), first = tile * LANES;
        int64_t down = task.row + first / group, across = first % group;
        for (int64_t lane = 0; lane < count; lane++) {
            row[lane] = down;
            head[lane] = task.head * group + across;
            at[lane] = reinterpret_cast<T *>(from.address) + down * from.row + head[lane] * from.head;
            if (++across == group) across = 0, down++;
        }
    }
};

// What 16 queries see, their largest scores so far in units of `unit`, and the sums of their weights.
template <class T>
void begin_lanes(const Attention &a, const Lanes<T> &lanes, float unit, int32_t *first, int32_t *end, float *most,
                 float *sums) {
    for (int64_t lane = 0; lane < LANES; lane++) {
        const bool there = lane < lanes.count;
        first[lane] = there ? static_cast<int32_t>(a.first[lanes.row[lane]]) : INT32_MAX;
        end[lane] = there ? static_cast<int32_t>(a.end[lanes.row[lane]]) : 0;
        most[lane] = there && a.sinks ? a.sinks[lanes.head[lane]] * unit : NOTHING;
        sums[lane] = there && a.sinks ? 1 : 0;
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

// Of its request's positions, those [first, end) that some row of a task sees.
struct Span {
    int64_t first, end;

    Span(const Attention &a, const AttentionTask &task) : first(a.first[task.row]), end(a.end[task.row]) {
        for (int64_t row = task.row + 1; row < task.row + task.rows; row++) {
            first = least_of(first, a.first[row]);
            end = most_of(end, a.end[row]);
        }
    }
};

// Where keys [at, at + count) of a request and their values lie.
template <class T>
void locate(const Attention &a, const AttentionTask &task, int64_t at, int64_t count, const T **keys,
            const T **values) {
    const int64_t height = a.cache.height;
    const auto *key = reinterpret_cast<const T *>(a.held.keys);
    const auto *value = reinterpret_cast<const T *>(a.held.values);
    int64_t block = at / height, offset = at % height;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = task.table[block] * a.held.block + task.head * a.held.head + offset * a.held.row;
        keys[i] = key + place;
        values[i] = value + place;
        if (++offset == height) offset = 0, block++;
    }
}

} // namespace
} // namespace trinity
