// Attention of few rows with AVX2 and FMA, in float and bf16; heads of a multiple of 16. Queries and what was seen lie in
// steps of avx2.hpp, so that bf16 keys and values are widened without a shuffle.
// This file alone is compiled for those instructions; attention_avx2() says whether they are there.
#include "attention/rows.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "avx2.hpp"
#include "instructions.hpp"

namespace trinity {
namespace {

constexpr int64_t WIDEST = 512; // elements of a head
constexpr float SLACK = 8;      // a maximum this far beyond the one in use makes no sum overflow, nor less exact

inline float largest_of(Vector one, Vector other) {
    const Vector most = _mm256_max_ps(one, other);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

template <class T> struct Wide {
    using Element = T;

    static void pack(const T *query, float *packed, int64_t width) { split(query, width, packed); }

    // Keys beyond `count` are the first one again, and masked later.
    static void scores(const float *query, int64_t rows, int64_t width, const T *keys, int64_t ahead, int64_t count,
                       float *scores, float *) {
        for (int64_t k = 0; k < TILE; k += 4) {
            const T *four[4];
            for (int64_t i = 0; i < 4; i++) four[i] = keys + (k + i < count ? k + i : 0) * width;
            if (ahead != 0 && k < count)
                prefetch(keys + k * width + ahead, (count - k < 4 ? count - k : 4) * width * int64_t(sizeof(T)));
            int64_t m = 0;
            for (; m + 2 <= rows; m += 2) dots<2>(query + m * width, width, four, scores + m * TILE + k);
            if (m < rows) dots<1>(query + m * width, width, four, scores + m * TILE + k);
        }
    }

    template <int HALF, int ROWS>
    static void join_half(const float *query, int64_t width, const T *const *keys, int64_t at, Vector (&sums)[ROWS][4]) {
        Vector key[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) key[k] = part<HALF>(keys[k] + at);
#pragma GCC unroll 2
        for (int m = 0; m < ROWS; m++) {
            const Vector row = _mm256_loadu_ps(query + m * width + at + 8 * HALF);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) sums[m][k] = _mm256_fmadd_ps(key[k], row, sums[m][k]);
        }
    }

    template <int ROWS> static void dots(const float *query, int64_t width, const T *const *keys, float *scores) {
        Vector sums[ROWS][4] = {};
        for (int64_t at = 0; at < width; at += STEP) {
            join_half<0>(query, width, keys, at, sums);
            join_half<1>(query, width, keys, at, sums);
        }
        for (int m = 0; m < ROWS; m++)
            _mm_storeu_ps(scores + m * TILE, sums_of(sums[m][0], sums[m][1], sums[m][2], sums[m][3]));
    }

    static float softmax(float *scores, int64_t low, int64_t high, float scale, float softcap, float &most,
                         float *sums) {
        const int64_t from = low < 0 ? 0 : low;
        if (from >= high) {
            for (int i = 0; i < TILE; i += 8) _mm256_storeu_ps(scores + i, all(0));
            return 1;
        }
        const Bits first = _mm256_set1_epi32(static_cast<int>(from) - 1), end = _mm256_set1_epi32(static_cast<int>(high));
        Vector score[2];
        for (int i = 0; i < 2; i++) {
            const Bits at = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * i));
            const Bits seen = _mm256_and_si256(_mm256_cmpgt_epi32(at, first), _mm256_cmpgt_epi32(end, at));
            score[i] = _mm256_mul_ps(_mm256_loadu_ps(scores + 8 * i), all(scale));
            if (softcap != 0) score[i] = capped(score[i], softcap);
            score[i] = _mm256_blendv_ps(all(NOTHING), score[i], _mm256_castsi256_ps(seen));
        }
        float shrunk = 1;
        const Vector bound = all(most + SLACK);
        const Vector beyond = _mm256_or_ps(_mm256_cmp_ps(score[0], bound, _CMP_GT_OQ), _mm256_cmp_ps(score[1], bound, _CMP_GT_OQ));
        if (_mm256_movemask_ps(beyond) != 0) {
            const float top = largest_of(score[0], score[1]);
            shrunk = _mm256_cvtss_f32(power(all((most - top) * LOG2_E)));
            most = top;
        }
        for (int i = 0; i < 2; i++) {
            const Vector weight = power(_mm256_mul_ps(_mm256_sub_ps(score[i], all(most)), all(LOG2_E)));
            _mm256_storeu_ps(scores + 8 * i, weight);
            _mm256_storeu_ps(sums + 8 * i, _mm256_fmadd_ps(_mm256_loadu_ps(sums + 8 * i), all(shrunk), weight));
        }
        return shrunk;
    }

    static void scaled(float *seen, int64_t width, float by) {
        for (int64_t i = 0; i < width; i += 8)
            _mm256_storeu_ps(seen + i, _mm256_mul_ps(_mm256_loadu_ps(seen + i), all(by)));
    }

    static void store(T *out, const float *seen, int64_t width, const float *sums) {
        const Vector total = all(sum_of(_mm256_add_ps(_mm256_loadu_ps(sums), _mm256_loadu_ps(sums + 8))));
        for (int64_t i = 0; i < width; i += STEP)
            join(out + i, _mm256_div_ps(_mm256_loadu_ps(seen + i), total),
                 _mm256_div_ps(_mm256_loadu_ps(seen + i + 8), total));
    }

    static void weigh(const float *weights, int64_t rows, int64_t width, const T *values, int64_t ahead, int64_t count,
                      float *seen) {
        int64_t i = 0;
        for (; i + 2 * STEP <= width; i += 2 * STEP) weigh_part<2>(weights, rows, width, values + i, ahead, count, seen + i);
        if (i < width) weigh_part<1>(weights, rows, width, values + i, ahead, count, seen + i);
    }

    template <int STEPS>
    static void weigh_part(const float *weights, int64_t rows, int64_t width, const T *values, int64_t ahead,
                           int64_t count, float *seen) {
        int64_t m = 0;
        for (; m + 2 <= rows; m += 2, ahead = 0)
            weigh_rows<STEPS, 2>(weights + m * TILE, width, values, ahead, count, seen + m * width);
        if (m < rows) weigh_rows<STEPS, 1>(weights + m * TILE, width, values, ahead, count, seen + m * width);
    }

    template <int STEPS, int ROWS>
    static void weigh_rows(const float *weights, int64_t width, const T *values, int64_t ahead, int64_t count,
                           float *seen) {
        Vector sums[ROWS][2 * STEPS];
#pragma GCC unroll 2
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * STEPS; i++) sums[m][i] = _mm256_loadu_ps(seen + m * width + 8 * i);
        for (int64_t k = 0; k < count; k++) {
            const T *from = values + k * width;
            if (ahead != 0) prefetch(from + ahead, STEPS * STEP * int64_t(sizeof(T)));
            Vector value[2 * STEPS];
#pragma GCC unroll 2
            for (int i = 0; i < STEPS; i++)
                value[2 * i] = part<0>(from + STEP * i), value[2 * i + 1] = part<1>(from + STEP * i);
#pragma GCC unroll 2
            for (int m = 0; m < ROWS; m++) {
                const Vector weight = _mm256_broadcast_ss(weights + m * TILE + k);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * STEPS; i++) sums[m][i] = _mm256_fmadd_ps(weight, value[i], sums[m][i]);
            }
        }
#pragma GCC unroll 2
        for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * STEPS; i++) _mm256_storeu_ps(seen + m * width + 8 * i, sums[m][i]);
    }
};

} // namespace

const AttentionKernel *attention_avx2(const PagedCache &cache) {
    if (!has_avx2() || cache.width % STEP != 0 || cache.width > WIDEST) return nullptr;
    return cache.bf16 ? kernel<Wide<Bf16>>() : kernel<Wide<float>>();
}

} // namespace trinity
#else
namespace trinity {
const AttentionKernel *attention_avx2(const PagedCache &) { return nullptr; }
} // namespace trinity
#endif
