// Attention with AVX-512, and with its bf16 dot products where the processor has them; heads of a multiple of 32.
// This file alone is compiled for those instructions; attention_avx512() says whether they are there.
#include "attention/rows.hpp"
#include "instructions.hpp"

#ifdef __AVX512BF16__
#include <immintrin.h>
#include <initializer_list>

namespace trinity {
namespace {

constexpr int64_t FEW = 5;      // from so many query rows on, keys are turned: one vector is 16 keys, not one
constexpr int64_t WIDEST = 512; // elements of a head
constexpr float SLACK = 8;      // a maximum this far beyond the one in use makes no sum overflow, nor less exact
using Vector = __m512;

inline Vector load(const float *from) { return _mm512_loadu_ps(from); }
inline Vector wide_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Vector wide_odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// e^x for x <= 0, within 2 units of the last place: Cody-Waite reduction, a polynomial of Taylor's to the 7th power.
inline Vector exponential(Vector x) {
    const Vector least = _mm512_set1_ps(-87.33654f);
    const __mmask16 lost = _mm512_cmp_ps_mask(x, least, _CMP_LT_OQ);
    const Vector whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    Vector r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), r);
    Vector sum = _mm512_set1_ps(1.0f / 5040);
    constexpr float further[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (const float next : further)
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(next));
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(~lost), _mm512_scalef_ps(sum, whole));
}

inline Vector hyperbolic_tangent(Vector x) {
    const Vector size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x);
    const Vector e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
    const Vector one = _mm512_set1_ps(1.0f);
    const Vector large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    Vector small = _mm512_set1_ps(-17.0f / 315);
    constexpr float further[] = {2.0f / 15, -1.0f / 3, 1.0f};
    for (const float next : further) small = _mm512_fmadd_ps(small, square, _mm512_set1_ps(next));
    small = _mm512_mul_ps(small, size);
    const __mmask16 near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.125f), _CMP_LT_OQ);
    const Vector found = _mm512_mask_mov_ps(large, near, small);
    return _mm512_or_ps(found, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
}

inline Vector low_pairs(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline Vector high_pairs(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}
inline Vector paired(Vector a, Vector b) { return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
inline Vector quartered(Vector a, Vector b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// The sums of 16 vectors as one.
inline Vector sums_of(const Vector *of) {
    Vector twos[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        twos[i] = paired(of[2 * i], of[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        fours[i] = _mm512_add_ps(low_pairs(twos[2 * i], twos[2 * i + 1]), high_pairs(twos[2 * i], twos[2 * i + 1]));
    }
    return quartered(quartered(fours[0], fours[1]), quartered(fours[2], fours[3]));
}

// A square of 16 x 16 words, turned.
inline void turn(Vector *of) {
    Vector a[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_ps(of[2 * i], of[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(of[2 * i], of[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            of[4 * i + 2 * k] = low_pairs(a[4 * i + k], a[4 * i + 2 + k]);
            of[4 * i + 2 * k + 1] = high_pairs(a[4 * i + k], a[4 * i + 2 + k]);
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        a[k] = _mm512_shuffle_f32x4(of[k], of[4 + k], 0x88);
        a[4 + k] = _mm512_shuffle_f32x4(of[k], of[4 + k], 0xdd);
        a[8 + k] = _mm512_shuffle_f32x4(of[8 + k], of[12 + k], 0x88);
        a[12 + k] = _mm512_shuffle_f32x4(of[8 + k], of[12 + k], 0xdd);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        of[k] = _mm512_shuffle_f32x4(a[k], a[8 + k], 0x88);
        of[8 + k] = _mm512_shuffle_f32x4(a[k], a[8 + k], 0xdd);
        of[4 + k] = _mm512_shuffle_f32x4(a[4 + k], a[12 + k], 0x88);
        of[12 + k] = _mm512_shuffle_f32x4(a[4 + k], a[12 + k], 0xdd);
    }
}

// To the nearest bf16, ties to even, in the high half of each word; a NaN stays one.
inline __m512i rounded(Vector of) {
    const __m512i bits = _mm512_castps_si512(of);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 none = _mm512_cmp_ps_mask(of, of, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(near, none, bits, _mm512_set1_epi32(0x400000));
}

// How keys and values of one kind are read. A vector of 16 words of a key meets the same words of a query; `values`
// makes two vectors of 32 elements, and `put_back` elements of two such vectors.
struct Floats {
    using Element = float;
    static constexpr int64_t WORD = 1; // elements of a key in a word
    static void pack(const float *query, float *packed, int64_t width) {
        __builtin_memcpy(packed, query, static_cast<size_t>(width) * sizeof(float));
    }
    static void put_back(Vector low, Vector high, float *into) {
        _mm512_storeu_ps(into, low), _mm512_storeu_ps(into + 16, high);
    }
    static Vector words(const float *key, int64_t at) { return load(key + at); }
    static Vector joined(Vector sum, Vector key, Vector query) { return _mm512_fmadd_ps(key, query, sum); }
    static void values(const float *from, Vector *into) { into[0] = load(from), into[1] = load(from + 16); }
};

struct Dots {
    using Element = Bf16;
    static constexpr int64_t WORD = 2;
    static void pack(const Bf16 *query, float *packed, int64_t width) {
        __builtin_memcpy(packed, query, static_cast<size_t>(width) * sizeof(Bf16));
    }
    static void put_back(Vector even, Vector odd, Bf16 *into) {
        const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(static_cast<int>(0xffff0000)));
        _mm512_storeu_si512(into, _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), high));
    }
    static Vector words(const Bf16 *key, int64_t at) {
        return _mm512_castsi512_ps(_mm512_loadu_si512(key + 2 * at));
    }
    static Vector joined(Vector sum, Vector key, Vector query) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(key), reinterpret_cast<__m512bh>(query));
    }
    static void values(const Bf16 *from, Vector *into) {
        const __m512i pairs = _mm512_loadu_si512(from);
        into[0] = wide_even(pairs), into[1] = wide_odd(pairs);
    }
};

// Without dot products: both halves of a word by themselves.
struct Halves : Dots {
    static Vector joined(Vector sum, Vector key, Vector query) {
        const __m512i a = _mm512_castps_si512(key), b = _mm512_castps_si512(query);
        return _mm512_fmadd_ps(wide_odd(a), wide_odd(b), _mm512_fmadd_ps(wide_even(a), wide_even(b), sum));
    }
};

template <class Kind> struct Wide : Kind {
    using T = typename Kind::Element;

    static void store(T *out, const float *seen, int64_t width, const float *sums) {
        const Vector total = _mm512_set1_ps(_mm512_reduce_add_ps(load(sums)));
        for (int64_t i = 0; i < width; i += 32)
            Kind::put_back(_mm512_div_ps(load(seen + i), total), _mm512_div_ps(load(seen + i + 16), total), out + i);
    }

    static void scores(const float *query, int64_t rows, int64_t width, const T *keys, int64_t ahead, int64_t count,
                       float *scores, float *turned) {
        if (rows >= FEW) return many_rows(query, rows, width, keys, ahead, count, scores, turned);
        for (int64_t m = 0; m < rows; m++) {
            ask(keys + ahead, ahead == 0 ? 0 : count * width, m, rows);
            _mm512_storeu_ps(scores + m * TILE, one_row(query + m * width, width / Kind::WORD, keys, width, count));
        }
    }

    // One of `parts` parts of what is needed later: lines that are asked for all at once wait for each other.
    static void ask(const T *from, int64_t elements, int64_t part, int64_t parts) {
        const int64_t share = (elements + parts - 1) / parts, left = elements - part * share;
        prefetch(from + part * share, (left < share ? left : share) * static_cast<int64_t>(sizeof(T)));
    }

    // Keys beyond `count` are the first one again, and masked later.
    static const T *key_of(const T *keys, int64_t key, int64_t count, int64_t width) {
        return keys + (key < count ? key : 0) * width;
    }

    static Vector one_row(const float *query, int64_t words, const T *keys, int64_t width, int64_t count) {
        Vector sums[TILE];
#pragma GCC unroll 16
        for (int64_t k = 0; k < TILE; k++) sums[k] = _mm512_setzero_ps();
        for (int64_t at = 0; at < words; at += 16) {
            const Vector part = load(query + at);
            if (count == TILE) {
#pragma GCC unroll 16
                for (int64_t k = 0; k < TILE; k++)
                    sums[k] = Kind::joined(sums[k], Kind::words(keys + k * width, at), part);
            } else {
#pragma GCC unroll 16
                for (int64_t k = 0; k < TILE; k++)
                    sums[k] = Kind::joined(sums[k], Kind::words(key_of(keys, k, count, width), at), part);
            }
        }
        return sums_of(sums);
    }

    static void many_rows(const float *query, int64_t rows, int64_t width, const T *keys, int64_t ahead, int64_t count,
                          float *scores, float *turned) {
        const int64_t words = width / Kind::WORD;
        for (int64_t at = 0; at < words; at += 16) {
            ask(keys + ahead, ahead == 0 ? 0 : count * width, at / 16, words / 16);
            Vector square[TILE];
            for (int64_t k = 0; k < TILE; k++) square[k] = Kind::words(key_of(keys, k, count, width), at);
            turn(square);
            for (int64_t k = 0; k < TILE; k++) _mm512_storeu_ps(turned + (at + k) * TILE, square[k]);
        }
        int64_t m = 0;
        for (; m + 8 <= rows; m += 8) few_rows<8>(query + m * width, width, words, turned, scores + m * TILE);
        for (; m + 4 <= rows; m += 4) few_rows<4>(query + m * width, width, words, turned, scores + m * TILE);
        for (; m < rows; m++) few_rows<1>(query + m * width, width, words, turned, scores + m * TILE);
    }

    template <int ROWS>
    static void few_rows(const float *query, int64_t width, int64_t words, const float *turned, float *scores) {
        Vector sums[ROWS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) sums[i] = _mm512_setzero_ps();
        for (int64_t at = 0; at < words; at++) {
            const Vector keys = load(turned + at * TILE);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) sums[i] = Kind::joined(sums[i], keys, _mm512_set1_ps(query[i * width + at]));
        }
        for (int i = 0; i < ROWS; i++) _mm512_storeu_ps(scores + i * TILE, sums[i]);
    }

    static float softmax(float *scores, int64_t low, int64_t high, float scale, float softcap, float &most,
                         float *sums) {
        const int64_t from = low < 0 ? 0 : low;
        if (from >= high) {
            _mm512_storeu_ps(scores, _mm512_setzero_ps());
            return 1;
        }
        const auto seen = static_cast<__mmask16>((1u << high) - (1u << from));
        Vector score = _mm512_mul_ps(load(scores), _mm512_set1_ps(scale));
        if (softcap != 0)
            score = _mm512_mul_ps(hyperbolic_tangent(_mm512_div_ps(score, _mm512_set1_ps(softcap))),
                                  _mm512_set1_ps(softcap));
        float shrunk = 1;
        Vector before = load(sums);
        if (_mm512_mask_cmp_ps_mask(seen, score, _mm512_set1_ps(most + SLACK), _CMP_GT_OQ) != 0) {
            const float top = _mm512_mask_reduce_max_ps(seen, score);
            shrunk = _mm512_cvtss_f32(exponential(_mm512_set1_ps(most - top)));
            before = _mm512_mul_ps(before, _mm512_set1_ps(shrunk));
            most = top;
        }
        const Vector weights = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(score, _mm512_set1_ps(most))));
        _mm512_storeu_ps(scores, weights);
        _mm512_storeu_ps(sums, _mm512_add_ps(before, weights));
        return shrunk;
    }

    static void scaled(float *seen, int64_t width, float by) {
        for (int64_t i = 0; i < width; i += 16)
            _mm512_storeu_ps(seen + i, _mm512_mul_ps(load(seen + i), _mm512_set1_ps(by)));
    }

    static void weigh(const float *weights, int64_t rows, int64_t width, const T *values, int64_t ahead, int64_t count,
                      float *seen) {
        int64_t i = 0;
        for (; i + 64 <= width; i += 64) weigh_part<2>(weights, rows, width, values + i, ahead, count, seen + i);
        if (i < width) weigh_part<1>(weights, rows, width, values + i, ahead, count, seen + i);
    }

    template <int PAIRS>
    static void weigh_part(const float *weights, int64_t rows, int64_t width, const T *values, int64_t ahead,
                           int64_t count, float *seen) {
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4, ahead = 0)
            weigh_rows<PAIRS, 4>(weights + m * TILE, width, values, ahead, count, seen + m * width);
        if (rows - m == 3) weigh_rows<PAIRS, 3>(weights + m * TILE, width, values, ahead, count, seen + m * width);
        if (rows - m == 2) weigh_rows<PAIRS, 2>(weights + m * TILE, width, values, ahead, count, seen + m * width);
        if (rows - m == 1) weigh_rows<PAIRS, 1>(weights + m * TILE, width, values, ahead, count, seen + m * width);
    }

    template <int PAIRS, int ROWS>
    static void weigh_rows(const float *weights, int64_t width, const T *values, int64_t ahead, int64_t count,
                           float *seen) {
        Vector sums[ROWS][2 * PAIRS];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * PAIRS; i++) sums[m][i] = load(seen + m * width + 16 * i);
        for (int64_t k = 0; k < count; k++) {
            Vector value[2 * PAIRS];
            if (ahead != 0) prefetch(values + k * width + ahead, PAIRS * 32 * static_cast<int64_t>(sizeof(T)));
#pragma GCC unroll 2
            for (int i = 0; i < PAIRS; i++) Kind::values(values + k * width + 32 * i, value + 2 * i);
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; m++) {
                const Vector weight = _mm512_set1_ps(weights[m * TILE + k]);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * PAIRS; i++) sums[m][i] = _mm512_fmadd_ps(weight, value[i], sums[m][i]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * PAIRS; i++) _mm512_storeu_ps(seen + m * width + 16 * i, sums[m][i]);
    }
};

// Loads what attention of the same task loads, and does nothing with it: how fast that can be at best.
void load_only(const Attention &a, const AttentionTask &task, const AttentionTask *, float *scratch) {
    const PagedCache &cache = a.cache;
    const int64_t bytes = cache.bf16 ? 2 : 4, half = cache.heads * cache.head_size() * bytes;
    const int64_t head = a.layer * cache.layer_size() + task.head * cache.head_size();
    const auto *start = reinterpret_cast<const char *>(cache.address) + head * bytes;
    __m512i sums[4] = {};
    for (int64_t block = a.first[task.row] / cache.height; block * cache.height < a.end[task.row]; block++) {
        const char *keys = start + task.table[block] * cache.block_size() * bytes;
        for (const char *from : {keys, keys + half})
            for (int64_t at = 0; at + 256 <= task.heads * cache.head_size() * bytes; at += 256)
                for (int i = 0; i < 4; i++) sums[i] = _mm512_xor_si512(sums[i], _mm512_loadu_si512(from + at + 64 * i));
    }
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(scratch + 16 * i, sums[i]);
}

} // namespace

const AttentionKernel *attention_loads() {
    static constexpr AttentionKernel found{load_only, scratch, QUERIES, 1};
    return has_avx512() ? &found : nullptr;
}

const AttentionKernel *attention_avx512(const PagedCache &cache, bool dots) {
    if (!has_avx512() || cache.width % 32 != 0 || cache.width > WIDEST) return nullptr;
    if (!cache.bf16) return kernel<Wide<Floats>>();
    return dots && has_avx512_bf16() ? kernel<Wide<Dots>>() : kernel<Wide<Halves>>();
}

} // namespace trinity
#else
namespace trinity {
const AttentionKernel *attention_avx512(const PagedCache &, bool) { return nullptr; }
const AttentionKernel *attention_loads() { return nullptr; }
} // namespace trinity
#endif
