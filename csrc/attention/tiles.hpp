// What attention in AMX tiles works on, and how rows of memory become tiles. For attention/amx.cpp alone.
#pragma once

#include "attention/lanes.hpp"
#include "bf16.hpp"

namespace trinity {
namespace {

constexpr int64_t STEP = 32;         // elements that a product sums in one instruction
constexpr int64_t TILE_BYTES = 1024; // 16 rows of 64 bytes
constexpr int64_t TILE_FLOATS = TILE_BYTES / 4;
constexpr int64_t KEYS = 256;        // that are packed and weighed together, at most

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

} // namespace
} // namespace trinity
