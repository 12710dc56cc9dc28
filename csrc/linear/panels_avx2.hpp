// Many rows: the weights of PANEL outputs for DEEP inputs are widened and turned into the L1, where rows of a block pass
// over them, TILE at a time; those are widened and laid beside each other before, so that a pass reads one stream.
// For product_avx2.cpp alone: all has internal linkage.
#pragma once

#include "linear/given.hpp"

namespace trinity {
namespace {

constexpr int64_t PANEL = 16;    // outputs
constexpr int64_t DEEP = 256;    // inputs of a panel
constexpr int64_t TILE = 6;      // rows whose sums fit the registers
constexpr int64_t HIGH = 300;    // rows of a block, which stays in the L2
constexpr int64_t BROAD = 2048;  // outputs whose sums are kept together
constexpr int64_t BEYOND = 8;    // floats behind the last tile that are written and not read

// Tiles [deep, TILE] of the inputs [from, from + deep) of `count` rows from `row` on; what the last lacks is of no use.
template <class T>
void lay_tiles(const Product &given, int64_t row, int64_t count, int64_t from, int64_t deep, float *out) {
    for (int64_t r = 0; r < count; r += TILE, out += deep * TILE) {
        const T *in[TILE];
        for (int64_t i = 0; i < TILE; i++) in[i] = row_of<T>(given.in, row + least_of(r + i, count - 1)) + from;
        int64_t k = 0;
        for (; k + 8 <= deep; k += 8) {
            Vector turned[8] = {};
#pragma GCC unroll 6
            for (int i = 0; i < TILE; i++) turned[i] = widened8(in[i] + k);
            turn(turned);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) _mm256_storeu_ps(out + (k + j) * TILE, turned[j]); // the next covers two of these
        }
        for (; k < deep; k++)
            for (int64_t i = 0; i < TILE; i++) out[k * TILE + i] = get(in[i][k]);
    }
}

// What turns 8 outputs' weights of a step: 16 vectors of 8 outputs, one of each input.
inline void turned(const float *const *rows, Vector *out) {
    for (int i = 0; i < 8; i++) out[i] = _mm256_loadu_ps(rows[i]), out[8 + i] = _mm256_loadu_ps(rows[i] + 8);
    turn(out), turn(out + 8);
}
inline void turned(const Bf16 *const *rows, Vector *out) {
    Vector pairs[8];
    for (int i = 0; i < 8; i++) pairs[i] = _mm256_castsi256_ps(bits_at(rows[i]));
    turn(pairs);
    const Bits odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    for (int i = 0; i < 8; i++) {
        const Bits bits = _mm256_castps_si256(pairs[i]);
        out[2 * i] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
        out[2 * i + 1] = _mm256_castsi256_ps(_mm256_and_si256(bits, odd));
    }
}

// A whole step of 8 outputs' weights, which `rows` point at, into `panel` [STEP, PANEL].
template <class T> inline void turn_step(const T *const *rows, int64_t count, float *panel) {
    Vector found[STEP];
    turned(rows, found);
#pragma GCC unroll 16
    for (int64_t j = 0; j < STEP; j++)
        if (j < count) _mm256_store_ps(panel + j * PANEL, found[j]);
}

// The weights of the inputs [from, from + deep) of PANEL outputs from `at` on as [deep, PANEL]; zeros from `end` on.
template <class T>
void turn_panel(const Product &given, int64_t at, int64_t end, int64_t from, int64_t deep, float *panel) {
    static constexpr T NONE[DEEP] = {};
    for (int64_t half = 0; half < PANEL; half += 8) {
        const T *rows[8];
        for (int64_t i = 0; i < 8; i++) {
            const int64_t output = at + half + i;
            rows[i] = output < end ? weights_of<T>(given, output) + from : NONE;
        }
        int64_t k = 0;
        for (; k + STEP <= deep; k += STEP) {
            turn_step(rows, STEP, panel + k * PANEL + half);
            for (int64_t i = 0; i < 8; i++) rows[i] += STEP;
        }
        if (k == deep) continue;
        T last[8][STEP] = {};
        for (int64_t i = 0; i < 8; i++) {
            for (int64_t j = 0; j < deep - k; j++) last[i][j] = rows[i][j];
            rows[i] = last[i];
        }
        turn_step(rows, deep - k, panel + k * PANEL + half);
    }
}

// sums [ROWS, PANEL] += a tile [deep, TILE], of which the first ROWS are, by a panel [deep, PANEL].
template <int ROWS> void pass(const float *tile, const float *panel, int64_t deep, float *sums, bool begin) {
    Vector sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) sum[r][i] = begin ? all(0) : _mm256_load_ps(sums + r * PANEL + 8 * i);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) __builtin_prefetch(sums + (TILE + r) * PANEL, 1); // those of the next tile
#pragma GCC unroll 4
    for (int64_t k = 0; k < deep; k++, panel += PANEL, tile += TILE) {
        const Vector low = _mm256_load_ps(panel), high = _mm256_load_ps(panel + 8);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vector each = _mm256_broadcast_ss(tile + r);
            sum[r][0] = _mm256_fmadd_ps(each, low, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(each, high, sum[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) _mm256_store_ps(sums + r * PANEL + 8 * i, sum[r][i]);
}

constexpr void (*PASSES[])(const float *, const float *, int64_t, float *, bool) = {pass<1>, pass<2>, pass<3>,
                                                                                   pass<4>, pass<5>, pass<6>};

// The sums of rows [row, row + count) and PANEL outputs from `at` on, with the bias.
template <class T> void finish(const Product &given, int64_t row, int64_t count, int64_t at, int64_t end, const float *sums) {
    float bias[PANEL];
    for (int64_t i = 0; i < PANEL; i++) bias[i] = at + i < end ? bias_of<T>(given, at + i) : 0;
    const Vector low = _mm256_loadu_ps(bias), high = _mm256_loadu_ps(bias + 8);
    for (int64_t r = 0; r < count; r++, sums += PANEL) {
        T *out = out_of<T>(given, row + r) + at;
        T last[PANEL];
        T *to = at + PANEL <= end ? out : last;
        put8(to, _mm256_add_ps(_mm256_load_ps(sums), low));
        put8(to + 8, _mm256_add_ps(_mm256_load_ps(sums + 8), high));
        for (int64_t i = 0; to == last && at + i < end; i++) out[i] = last[i];
    }
}

// The outputs [first, end) of rows [row, row + count).
template <class T>
void run_block(const Product &given, int64_t row, int64_t count, int64_t first, int64_t end, float *memory) {
    float *panel = memory, *tiles = panel + DEEP * PANEL, *sums = tiles + up(HIGH, TILE) * DEEP + BEYOND;
    for (int64_t from = 0; from < given.inputs; from += DEEP) {
        const int64_t deep = least_of(DEEP, given.inputs - from);
        lay_tiles<T>(given, row, count, from, deep, tiles);
        float *sum = sums;
        for (int64_t at = first; at < end; at += PANEL, sum += count * PANEL) {
            turn_panel<T>(given, at, end, from, deep, panel);
            for (int64_t r = 0; r < count; r += TILE)
                PASSES[least_of(TILE, count - r) - 1](tiles + r * deep, panel, deep, sum + r * PANEL, from == 0);
            if (from + deep == given.inputs) finish<T>(given, row, count, at, end, sum);
        }
    }
}

inline int64_t rows_of_block(int64_t rows) {
    const int64_t blocks = (rows + HIGH - 1) / HIGH;
    return least_of(up((rows + blocks - 1) / blocks, TILE), HIGH);
}

template <class T> void run_many(const Product &given, int64_t first, int64_t end, float *memory) {
    const int64_t each = rows_of_block(given.rows);
    for (int64_t at = first; at < end; at += BROAD)
        for (int64_t row = 0; row < given.rows; row += each)
            run_block<T>(given, row, least_of(each, given.rows - row), at, least_of(at + BROAD, end), memory);
}

inline size_t scratch_of_many(const Product &given) {
    const int64_t outputs = up(least_of(given.outputs, BROAD), PANEL);
    return static_cast<size_t>(DEEP * PANEL + up(HIGH, TILE) * DEEP + BEYOND + rows_of_block(given.rows) * outputs);
}

} // namespace
} // namespace trinity
