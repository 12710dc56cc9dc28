// What attention in AMX tiles works on, and how rows of memory become tiles; powers of 2. For attention_amx.cpp alone.
#pragma once

#include "attention.hpp"
#include "bf16.hpp"

#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t LANES = 16;        // queries of a tile
constexpr int64_t STEP = 32;         // elements that a product sums in one instruction
constexpr int64_t TILE_BYTES = 1024; // 16 rows of 64 bytes
constexpr int64_t TILE_FLOATS = TILE_BYTES / 4;
constexpr int64_t KEYS = 256;        // that are packed and weighed together, at most
constexpr int64_t WIDEST = 512;      // elements of a head
constexpr float NOTHING = -__builtin_inff();
constexpr float LOG2_E = 1.44269504f;
using Vector = __m512;
using Bits = __m512i;

inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t most_of(int64_t one, int64_t other) { return one > other ? one : other; }
inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
inline Vector all(float value) { return _mm512_set1_ps(value); }

// What a task works on; all parts begin at multiples of 64 bytes.
struct Room {
    int64_t width, steps, tiles; // of a head, a multiple of STEP; its steps; tiles of queries
    char *query;                 // [tiles, steps]: pairs of dimensions down, queries across
    float *seen;                 // [tiles, width, LANES]
    float *most, *sums;          // [tiles, LANES]: maximum in use as a power of 2
    int32_t *first, *end;        // [tiles, LANES]: what each query sees
    char *keys;                  // [KEYS / 16, steps]: keys down, dimensions across
    char *values;                // [width / 16, KEYS / STEP]: dimensions down, keys across
    float *scores;               // [2, KEYS, LANES], and over them the weights: pairs of keys down, queries across

    Room(int64_t head_width, int64_t rows, float *memory)
        : width(up(head_width, STEP)), steps(width / STEP), tiles(up(rows, LANES) / LANES) {
        seen = memory;
        most = seen + tiles * width * LANES;
        sums = most + tiles * LANES;
        first = reinterpret_cast<int32_t *>(sums + tiles * LANES);
        end = first + tiles * LANES;
        scores = reinterpret_cast<float *>(end + tiles * LANES);
        query = reinterpret_cast<char *>(scores + 2 * KEYS * LANES);
        keys = query + tiles * steps * TILE_BYTES;
        values = keys + KEYS * width * 2;
    }
    size_t floats() const { return static_cast<size_t>(reinterpret_cast<float *>(values) - seen + KEYS * width / 2); }
};

// ---------------------------------------------------------------- packing

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

// `count` rows of at most 16.
inline void pack_queries(const Bf16 *const *rows, int64_t count, int64_t width, int64_t steps, char *out) {
    for (int64_t step = 0; step < steps; step++, out += TILE_BYTES) {
        Bits turned[16];
        const __mmask32 there = below(width - step * STEP);
        for (int64_t i = 0; i < 16; i++)
            turned[i] = _mm512_maskz_loadu_epi16(i < count ? there : 0, rows[i < count ? i : 0] + step * STEP);
        turn(turned);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(out + 64 * i, turned[i]);
    }
}

// `count` rows and zeros after them up to a multiple of STEP.
void pack_keys(const Bf16 *const *rows, int64_t count, int64_t width, int64_t steps, char *out) {
    for (int64_t key = 0; key < up(count, STEP); key++) {
        char *place = out + key / 16 * steps * TILE_BYTES + key % 16 * 64;
        for (int64_t step = 0; step < steps; step++) {
            const __mmask32 there = key < count ? below(width - step * STEP) : 0;
            const void *from = key < count ? rows[key] + step * STEP : rows[0];
            _mm512_store_si512(place + step * TILE_BYTES, _mm512_maskz_loadu_epi16(there, from));
        }
    }
}

// 32 keys of 32 dimensions: two tiles, of 16 dimensions each, `apart` bytes from each other.
inline void pack_square(const Bf16 *const *rows, int64_t count, int64_t from, int64_t width, char *out,
                        int64_t apart) {
    Bits low[16], high[16]; // pairs of keys: dimensions 0 to 3 of each 8, and 4 to 7
    const __mmask32 there = below(width - from);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const Bits none = _mm512_setzero_si512();
        const Bits even = 2 * i < count ? _mm512_maskz_loadu_epi16(there, rows[2 * i] + from) : none;
        const Bits odd = 2 * i + 1 < count ? _mm512_maskz_loadu_epi16(there, rows[2 * i + 1] + from) : none;
        low[i] = _mm512_unpacklo_epi16(even, odd);
        high[i] = _mm512_unpackhi_epi16(even, odd);
    }
    turn(low);
    turn(high);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) { // vector i of `low` is dimension 8 (i / 4) + i % 4
        char *tile = out + i / 8 * apart + (i % 8 / 4 * 8 + i % 4) * 64;
        _mm512_store_si512(tile, low[i]);
        _mm512_store_si512(tile + 4 * 64, high[i]);
    }
}

void pack_values(const Bf16 *const *rows, int64_t count, int64_t width, int64_t steps, char *out) {
    constexpr int64_t apart = KEYS / STEP * TILE_BYTES;
    for (int64_t key = 0; key < count; key += STEP)
        for (int64_t step = 0; step < steps; step++)
            pack_square(rows + key, count - key, step * STEP, width, out + 2 * step * apart + key / STEP * TILE_BYTES,
                        apart);
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

} // namespace
} // namespace trinity
