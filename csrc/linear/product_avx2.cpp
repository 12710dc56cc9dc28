// Few rows: each weight is read once, widened in registers and multiplied where it lies, so that bf16 halves what memory
// has to give. Many rows: PANEL outputs' weights for DEEP inputs are widened and turned into the L1, where blocks of rows
// pass over them. This file alone is compiled for AVX2 and FMA; product_avx2() says whether they are there.
#include "linear/product.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "avx2.hpp"
#include "instructions.hpp"

namespace trinity {
namespace {

constexpr int64_t FEW = 32;      // rows that pass over weights as they lie
constexpr int64_t AHEAD = 4;     // outputs whose weights are asked for ahead
constexpr int64_t PANEL = 16;    // outputs
constexpr int64_t DEEP = 256;    // inputs of a panel
constexpr int64_t TILE = 6;      // rows whose sums fit the registers
constexpr int64_t HIGH = 192;    // rows of a block, which stays in the L2
constexpr int64_t BROAD = 2048;  // outputs whose sums are kept together

inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

template <class T> const T *row_of(const Matrix &rows, int64_t row) {
    return reinterpret_cast<const T *>(rows.address) + row * rows.stride;
}
template <class T> float bias_of(const Product &given, int64_t output) {
    return given.bias == 0 ? 0.0f : get(reinterpret_cast<const T *>(given.bias)[output]);
}

// ---------------------------------------------------------------- few rows

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

// OUTS outputs from `at` on of the rows [row, row + ROWS); `rows` has all, split.
template <int ROWS, int OUTS, class T>
void few(const Product &given, const float *rows, int64_t apart, int64_t row, int64_t at) {
    Vector sums[ROWS][OUTS] = {};
    const T *weights = reinterpret_cast<const T *>(given.weight) + at * given.inputs;
    dots<ROWS, OUTS>(rows + row * apart, apart, weights, given.inputs, sums);
    for (int r = 0; r < ROWS; r++) {
        float found[OUTS];
        for (int o = 0; o < OUTS; o++) found[o] = sum_of(sums[r][o]);
        T *out = const_cast<T *>(row_of<T>(given.out, row + r)) + at;
        for (int o = 0; o < OUTS; o++) put(out + o, found[o] + bias_of<T>(given, at + o));
    }
}

// OUTS outputs of all rows, ROWS or fewer at a time.
template <int ROWS, int OUTS, class T> void few_of(const Product &given, const float *rows, int64_t apart, int64_t at) {
    int64_t row = 0;
    for (; row + ROWS <= given.rows; row += ROWS) few<ROWS, OUTS, T>(given, rows, apart, row, at);
    for (; row + 2 <= given.rows; row += 2) few<2, OUTS, T>(given, rows, apart, row, at);
    if (row < given.rows) few<1, OUTS, T>(given, rows, apart, row, at);
}

template <class T> void run_few(const Product &given, int64_t first, int64_t end, float *memory) {
    const int64_t apart = up(given.inputs, STEP);
    for (int64_t row = 0; row < given.rows; row++)
        split(row_of<T>(given.in, row), given.inputs, memory + row * apart);
    int64_t at = first;
    if (given.rows == 1)
        for (; at + 8 <= end; at += 8) few_of<1, 8, T>(given, memory, apart, at);
    if (sizeof(T) == 4 && given.rows > 3)
        for (; at + 3 <= end; at += 3) few_of<4, 3, T>(given, memory, apart, at);
    for (; at + 4 <= end; at += 4) few_of<2, 4, T>(given, memory, apart, at);
    for (; at < end; at++) few_of<2, 1, T>(given, memory, apart, at);
}

// ---------------------------------------------------------------- many rows

// `count` rows of DEEP floats, the inputs [from, from + deep) of rows from `row` on.
template <class T> void widen(const Product &given, int64_t row, int64_t count, int64_t from, int64_t deep, float *out) {
    for (int64_t r = 0; r < count; r++, out += DEEP) {
        const T *in = row_of<T>(given.in, row + r) + from;
        int64_t i = 0;
        for (; i + 8 <= deep; i += 8) _mm256_storeu_ps(out + i, widened8(in + i));
        for (; i < deep; i++) out[i] = get(in[i]);
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
            rows[i] = reinterpret_cast<const T *>(given.weight) + output * given.inputs + from;
            if (output >= end) rows[i] = NONE;
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

// sums [ROWS, PANEL] += rows [ROWS, deep] * panel [deep, PANEL].
template <int ROWS> void pass(const float *rows, const float *panel, int64_t deep, float *sums, bool begin) {
    Vector sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) sum[r][i] = begin ? all(0) : _mm256_load_ps(sums + r * PANEL + 8 * i);
    for (int64_t k = 0; k < deep; k++, panel += PANEL) {
        const Vector low = _mm256_load_ps(panel), high = _mm256_load_ps(panel + 8);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const Vector each = _mm256_broadcast_ss(rows + r * DEEP + k);
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
        T *out = const_cast<T *>(row_of<T>(given.out, row + r)) + at;
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
    float *rows = memory, *panel = rows + HIGH * DEEP, *sums = panel + DEEP * PANEL;
    for (int64_t from = 0; from < given.inputs; from += DEEP) {
        const int64_t deep = least_of(DEEP, given.inputs - from);
        widen<T>(given, row, count, from, deep, rows);
        float *sum = sums;
        for (int64_t at = first; at < end; at += PANEL, sum += count * PANEL) {
            turn_panel<T>(given, at, end, from, deep, panel);
            for (int64_t r = 0; r < count; r += TILE)
                PASSES[least_of(TILE, count - r) - 1](rows + r * DEEP, panel, deep, sum + r * PANEL, from == 0);
            if (from + deep == given.inputs) finish<T>(given, row, count, at, end, sum);
        }
    }
}

int64_t rows_of_block(int64_t rows) { return up((rows + (rows + HIGH - 1) / HIGH - 1) / ((rows + HIGH - 1) / HIGH), TILE); }

template <class T> void run(const Product &given, int64_t first, int64_t end, float *memory) {
    if (given.rows <= FEW) return run_few<T>(given, first, end, memory);
    const int64_t each = rows_of_block(given.rows);
    for (int64_t at = first; at < end; at += BROAD)
        for (int64_t row = 0; row < given.rows; row += each)
            run_block<T>(given, row, least_of(each, given.rows - row), at, least_of(at + BROAD, end), memory);
}

size_t scratch(const Product &given) {
    if (given.rows <= FEW) return static_cast<size_t>(given.rows * up(given.inputs, STEP));
    const int64_t outputs = up(least_of(given.outputs, BROAD), PANEL);
    return static_cast<size_t>(HIGH * DEEP + DEEP * PANEL + rows_of_block(given.rows) * outputs);
}

constexpr ProductKernel FLOATS{run<float>, scratch}, HALVES{run<Bf16>, scratch};

} // namespace

const ProductKernel *product_avx2(bool bf16) {
    if (!has_avx2()) return nullptr;
    return bf16 ? &HALVES : &FLOATS;
}

} // namespace trinity
#else
namespace trinity {
const ProductKernel *product_avx2(bool) { return nullptr; }
} // namespace trinity
#endif
