// Attention in float32 with AVX-512 for many rows: chunks of a prefill over the cache, and an encoder's, which see each
// other. As in attention/amx.cpp, S^T = K Q^T and O^T = V^T P^T, so that lanes are queries: nothing goes across lanes,
// and an element of a key or of a value is broadcast as it lies. STEP of these by 48 queries are sums in registers.
// This file alone is compiled for those instructions; attention_avx512_rows() says whether they are there.
#include "attention/attention.hpp"
#include "instructions.hpp"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include "attention/lanes.hpp"

namespace trinity {
namespace {

constexpr int64_t STEP = 8;   // keys, or elements of a value, whose sums are in registers together
constexpr int64_t KEYS = 128; // that are packed and weighed together, at most
constexpr int64_t QUERIES = 960;

// What a task works on; all parts begin at multiples of 64 bytes.
struct Room {
    int64_t width, wide, tiles; // of a head, and as a multiple of LANES; tiles of queries
    float *query;               // [tiles, width, LANES], times the scale
    float *seen;                // [tiles, wide, LANES]
    float *most, *sums;         // [tiles, LANES]
    int32_t *first, *end;       // [tiles, LANES]: what each query sees
    float *keys, *values;       // [KEYS, wide]
    float *scores;              // [3, KEYS, LANES], and in their place the weights

    Room(int64_t head_width, int64_t rows, float *memory)
        : width(head_width), wide(up(width, LANES)), tiles(up(rows, LANES) / LANES) {
        query = memory;
        seen = query + tiles * width * LANES;
        most = seen + tiles * wide * LANES;
        sums = most + tiles * LANES;
        first = reinterpret_cast<int32_t *>(sums + tiles * LANES);
        end = first + tiles * LANES;
        keys = reinterpret_cast<float *>(end + tiles * LANES);
        values = keys + KEYS * wide;
        scores = values + KEYS * wide;
    }
    size_t floats() const { return static_cast<size_t>(scores - query + 3 * KEYS * LANES); }
};

// ---------------------------------------------------------------- products

// sums[i] += element i of `by` times a row of each of TILES tiles, which lie `apart` elements from each other, over
// `steps` rows; elements of `by` are `across` from each other and `down` from row to row.
template <int TILES>
inline void products(const float *by, int64_t across, int64_t down, const float *rows, int64_t apart, int64_t steps,
                     Vector (&sums)[STEP][TILES]) {
    for (int64_t step = 0; step < steps; step++, by += down, rows += LANES) {
        Vector row[TILES];
#pragma GCC unroll 3
        for (int q = 0; q < TILES; q++) row[q] = _mm512_load_ps(rows + q * apart);
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++) {
            const Vector each = all(by[i * across]);
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) sums[i][q] = _mm512_fmadd_ps(each, row[q], sums[i][q]);
        }
    }
}

// Scores of keys [from, to) for TILES tiles, from the first of which `query` is.
template <int TILES> void score(const Room &room, const float *query, int64_t from, int64_t to) {
    for (int64_t key = from; key < to; key += STEP) {
        Vector sums[STEP][TILES] = {};
        products<TILES>(room.keys + key * room.wide, room.wide, 1, query, room.width * LANES, room.width, sums);
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) _mm512_store_ps(room.scores + (q * KEYS + key + i) * LANES, sums[i][q]);
    }
}

// What was seen, shrunk, and the values of keys [from, to) by their weights.
template <int TILES> void weigh(const Room &room, float *seen, const Vector *shrunk, int64_t from, int64_t to) {
    const int64_t next = room.wide * LANES;
    for (int64_t at = 0; at < room.width; at += STEP) {
        Vector sums[STEP][TILES];
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++)
                sums[i][q] = _mm512_mul_ps(_mm512_load_ps(seen + q * next + (at + i) * LANES), shrunk[q]);
        products<TILES>(room.values + from * room.wide + at, 1, room.wide, room.scores + from * LANES, KEYS * LANES,
                        to - from, sums);
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) _mm512_store_ps(seen + q * next + (at + i) * LANES, sums[i][q]);
    }
}

// ---------------------------------------------------------------- softmax

// Scores of keys [from, to) become weights, in place. Returns what the results so far are to be multiplied with.
inline Vector weights_of(float *scores, int64_t from, int64_t to, float *most, float *sums) {
    const Vector before = _mm512_load_ps(most), unit = all(LOG2_E);
    const Vector now = _mm512_max_ps(largest(scores, from, to), before);
    const __mmask16 some = _mm512_cmp_ps_mask(now, all(NOTHING), _CMP_NEQ_UQ);
    const Vector least = _mm512_maskz_mov_ps(some, now);
    const Vector shrunk = exact_power(_mm512_mul_ps(_mm512_sub_ps(before, least), unit));
    Vector parts[4] = {_mm512_mul_ps(_mm512_load_ps(sums), shrunk), all(0), all(0), all(0)};
    for (float *at = scores + from * LANES; at < scores + to * LANES; at += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Vector less = _mm512_sub_ps(_mm512_load_ps(at + i * LANES), least);
            const Vector weight = exact_power(_mm512_mul_ps(less, unit));
            parts[i] = _mm512_add_ps(parts[i], weight);
            _mm512_store_ps(at + i * LANES, weight);
        }
    _mm512_store_ps(most, now);
    _mm512_store_ps(sums, _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3])));
    return shrunk;
}

// ---------------------------------------------------------------- a task

void begin(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Lanes<float> lanes(a, task, a.query, tile, rows);
        const int64_t m = tile * LANES;
        begin_lanes(a, lanes, 1.0f, room.first + m, room.end + m, room.most + m, room.sums + m);
        for (int64_t from = 0; from < room.width; from += LANES) {
            Bits turned[LANES];
            const auto there = static_cast<__mmask16>(below(room.width - from));
            for (int64_t i = 0; i < LANES; i++) {
                const float *row = lanes.at[i < lanes.count ? i : 0] + from;
                turned[i] = _mm512_castps_si512(
                    _mm512_mul_ps(_mm512_maskz_loadu_ps(i < lanes.count ? there : 0, row), all(a.scale)));
            }
            turn(turned);
            float *out = room.query + m * room.width + from * LANES;
            for (int64_t i = 0; i < least_of(LANES, room.width - from); i++)
                _mm512_store_si512(out + i * LANES, turned[i]);
        }
    }
    const int64_t all_seen = room.tiles * room.wide * LANES;
    for (int64_t i = 0; i < all_seen; i += LANES) _mm512_store_ps(room.seen + i, all(0));
}

void finish(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Lanes<float> lanes(a, task, a.out, tile, rows);
        const Vector total = _mm512_load_ps(room.sums + tile * LANES);
        for (int64_t from = 0; from < room.width; from += LANES) {
            Bits turned[LANES];
            const float *seen = room.seen + (tile * room.wide + from) * LANES;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                turned[i] = _mm512_castps_si512(_mm512_div_ps(_mm512_load_ps(seen + i * LANES), total));
            turn(turned);
            const auto there = static_cast<__mmask16>(below(room.width - from));
            for (int64_t lane = 0; lane < lanes.count; lane++)
                _mm512_mask_storeu_ps(lanes.at[lane] + from, there, _mm512_castsi512_ps(turned[lane]));
        }
    }
}

// `count` rows, and zeros after them up to a multiple of STEP.
void pack(const float *const *rows, int64_t count, const Room &room, float *out) {
    for (int64_t key = 0; key < up(count, STEP); key++)
        for (int64_t from = 0; from < room.wide; from += LANES, out += LANES) {
            const auto there = static_cast<__mmask16>(key < count ? below(room.width - from) : 0);
            _mm512_store_ps(out, _mm512_maskz_loadu_ps(there, rows[key < count ? key : 0] + from));
        }
}

// Keys [at, at + count), which are packed, for TILES tiles.
template <int TILES>
void attend_tiles(const Attention &a, const Room &room, int64_t tile, int64_t at, int64_t count) {
    const Ranges<TILES> ranges(room.first + tile * LANES, room.end + tile * LANES, at, count, STEP);
    const int64_t from = ranges.from, to = ranges.to;
    if (from >= to) return;
    score<TILES>(room, room.query + tile * room.width * LANES, from, to);
    Vector shrunk[TILES];
    for (int q = 0; q < TILES; q++) {
        float *scores = room.scores + q * KEYS * LANES;
        if (a.softcap != 0) capped(scores, from, to, 1, a.softcap);
        ranges.hide_from(q, scores);
        const int64_t m = (tile + q) * LANES;
        shrunk[q] = weights_of(scores, from, to, room.most + m, room.sums + m);
    }
    weigh<TILES>(room, room.seen + tile * room.wide * LANES, shrunk, from, to);
}

void attend(const Attention &a, const AttentionTask &task, const AttentionTask *, float *memory) {
    const int64_t rows = task.rows * a.group();
    const Room room(a.cache.width, rows, memory);
    begin(a, task, room, rows);
    const Span span(a, task);
    const int64_t packs = (span.end - span.first + KEYS - 1) / KEYS;
    const int64_t each = up((span.end - span.first + packs - 1) / packs, STEP);
    for (int64_t at = span.first; at < span.end; at += each) {
        const int64_t count = least_of(each, span.end - at);
        const float *keys[KEYS], *values[KEYS];
        locate(a, task, at, count, keys, values);
        pack(keys, count, room, room.keys);
        pack(values, count, room, room.values);
        int64_t tile = 0;
        for (; tile + 3 <= room.tiles; tile += 3) attend_tiles<3>(a, room, tile, at, count);
        if (tile + 2 == room.tiles) attend_tiles<2>(a, room, tile, at, count);
        if (tile + 1 == room.tiles) attend_tiles<1>(a, room, tile, at, count);
    }
    finish(a, task, room, rows);
}

size_t scratch(const Attention &a, const AttentionTask &task) {
    return Room(a.cache.width, task.rows * a.group(), nullptr).floats();
}

} // namespace

const AttentionKernel *attention_avx512_rows(const PagedCache &cache) {
    static constexpr AttentionKernel kernel{attend, scratch, QUERIES, 3 * LANES};
    return has_avx512() && !cache.bf16 && cache.width <= WIDEST ? &kernel : nullptr;
}

} // namespace trinity
#else
namespace trinity {
const AttentionKernel *attention_avx512_rows(const PagedCache &) { return nullptr; }
} // namespace trinity
#endif
