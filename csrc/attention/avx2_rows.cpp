// Attention with AVX2 and FMA for many rows, as attention/avx512_rows.cpp has it: S^T = K Q^T and O^T = V^T P^T, lanes are
// queries. STEP keys, or elements of a value, by 24 queries are sums in registers. bf16 is widened as it is packed, and
// results are rounded once. This file alone is compiled for those instructions; attention_avx2_rows() says whether they
// are there.
#include "attention/queries.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "avx2.hpp"
#include "instructions.hpp"

namespace trinity {
namespace {

constexpr int64_t LANES = 8; // queries of a tile
constexpr int64_t EACH = 4;  // keys, or elements of a value, whose sums are in registers together
constexpr int64_t KEYS = 128; // that are packed and weighed together, at most
constexpr int64_t QUERIES = 480;

// What a task works on; all parts begin at multiples of 32 bytes.
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

// At most LANES elements, and zeros after them.
template <class T> Vector some(const T *from, int64_t count) {
    if (count >= LANES) return widened8(from);
    alignas(32) float few[LANES] = {};
    for (int64_t i = 0; i < count; i++) few[i] = get(from[i]);
    return _mm256_load_ps(few);
}

// ---------------------------------------------------------------- products

// sums[i] += element i of `by` times a row of each of TILES tiles, which lie `apart` elements from each other, over
// `steps` rows; elements of `by` are `across` from each other and `down` from row to row.
template <int TILES>
inline void products(const float *by, int64_t across, int64_t down, const float *rows, int64_t apart, int64_t steps,
                     Vector (&sums)[EACH][TILES]) {
    for (int64_t step = 0; step < steps; step++, by += down, rows += LANES) {
        Vector row[TILES];
#pragma GCC unroll 3
        for (int q = 0; q < TILES; q++) row[q] = _mm256_load_ps(rows + q * apart);
#pragma GCC unroll 4
        for (int i = 0; i < EACH; i++) {
            const Vector each = _mm256_broadcast_ss(by + i * across);
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) sums[i][q] = _mm256_fmadd_ps(each, row[q], sums[i][q]);
        }
    }
}

// Scores of keys [from, to) for TILES tiles, from the first of which `query` is.
template <int TILES> void score(const Room &room, const float *query, int64_t from, int64_t to) {
    for (int64_t key = from; key < to; key += EACH) {
        Vector sums[EACH][TILES] = {};
        products<TILES>(room.keys + key * room.wide, room.wide, 1, query, room.width * LANES, room.width, sums);
#pragma GCC unroll 4
        for (int i = 0; i < EACH; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) _mm256_store_ps(room.scores + (q * KEYS + key + i) * LANES, sums[i][q]);
    }
}

// What was seen, shrunk, and the values of keys [from, to) by their weights.
template <int TILES> void weigh(const Room &room, float *seen, const Vector *shrunk, int64_t from, int64_t to) {
    const int64_t next = room.wide * LANES;
    for (int64_t at = 0; at < room.width; at += EACH) {
        Vector sums[EACH][TILES];
#pragma GCC unroll 4
        for (int i = 0; i < EACH; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++)
                sums[i][q] = _mm256_mul_ps(_mm256_load_ps(seen + q * next + (at + i) * LANES), shrunk[q]);
        products<TILES>(room.values + from * room.wide + at, 1, room.wide, room.scores + from * LANES, KEYS * LANES,
                        to - from, sums);
#pragma GCC unroll 4
        for (int i = 0; i < EACH; i++)
#pragma GCC unroll 3
            for (int q = 0; q < TILES; q++) _mm256_store_ps(seen + q * next + (at + i) * LANES, sums[i][q]);
    }
}

// ---------------------------------------------------------------- softmax

inline Vector largest(const float *scores, int64_t from, int64_t to) {
    Vector most[EACH] = {all(NOTHING), all(NOTHING), all(NOTHING), all(NOTHING)};
    for (int64_t key = from; key < to; key += EACH)
#pragma GCC unroll 4
        for (int i = 0; i < EACH; i++) most[i] = _mm256_max_ps(most[i], _mm256_load_ps(scores + (key + i) * LANES));
    return _mm256_max_ps(_mm256_max_ps(most[0], most[1]), _mm256_max_ps(most[2], most[3]));
}

// Scores of keys [from, to) become weights, in place. Returns what the results so far are to be multiplied with.
inline Vector weights_of(float *scores, int64_t from, int64_t to, float *most, float *sums) {
    const Vector before = _mm256_load_ps(most), unit = all(LOG2_E);
    const Vector now = _mm256_max_ps(largest(scores, from, to), before);
    const Vector least = _mm256_and_ps(now, _mm256_cmp_ps(now, all(NOTHING), _CMP_NEQ_UQ));
    const Vector shrunk = power(_mm256_mul_ps(_mm256_sub_ps(before, least), unit));
    Vector parts[2] = {_mm256_mul_ps(_mm256_load_ps(sums), shrunk), all(0)};
    for (float *at = scores + from * LANES; at < scores + to * LANES; at += 2 * LANES)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Vector weight = power(_mm256_mul_ps(_mm256_sub_ps(_mm256_load_ps(at + i * LANES), least), unit));
            parts[i] = _mm256_add_ps(parts[i], weight);
            _mm256_store_ps(at + i * LANES, weight);
        }
    _mm256_store_ps(most, now);
    _mm256_store_ps(sums, _mm256_add_ps(parts[0], parts[1]));
    return shrunk;
}

// Of keys [at, at + count), those [from, to) that some query of TILES tiles sees; multiples of EACH, but for `at`.
template <int TILES> struct Ranges {
    const int32_t *first, *end;
    int64_t at, from, to, all_from = 0, all_to = INT32_MAX; // between these, every query sees every key

    Ranges(const int32_t *firsts, const int32_t *ends, int64_t base, int64_t count) : first(firsts), end(ends), at(base) {
        int64_t lowest = INT32_MAX, highest = 0;
        for (int i = 0; i < TILES * LANES; i++) {
            lowest = least_of(lowest, first[i] - at), highest = most_of(highest, end[i] - at);
            all_from = most_of(all_from, first[i] - at), all_to = least_of(all_to, end[i] - at);
        }
        from = most_of(lowest, 0) / EACH * EACH;
        to = up(least_of(highest, count), EACH);
    }

    void hide_from(int tile, float *scores) const {
        hide(tile, scores, from, least_of(all_from, to));
        hide(tile, scores, most_of(most_of(all_from, all_to), from), to);
    }

    // Where a query does not see a key, its score becomes none.
    void hide(int tile, float *scores, int64_t low, int64_t high) const {
        const Bits begins = bits_at(first + tile * LANES), ends = bits_at(end + tile * LANES);
        for (int64_t key = low; key < high; key++) {
            const Bits here = _mm256_set1_epi32(static_cast<int>(at + key));
            const Bits seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(begins, here), _mm256_cmpgt_epi32(ends, here));
            float *score = scores + key * LANES;
            _mm256_store_ps(score, _mm256_blendv_ps(all(NOTHING), _mm256_load_ps(score), _mm256_castsi256_ps(seen)));
        }
    }
};

// ---------------------------------------------------------------- a task

template <class T> void begin(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Queries<T, LANES> lanes(a, task, a.query, tile, rows);
        const int64_t m = tile * LANES;
        begin_lanes(a, lanes, 1.0f, room.first + m, room.end + m, room.most + m, room.sums + m);
        for (int64_t from = 0; from < room.width; from += LANES) {
            Vector turned[LANES];
            for (int64_t i = 0; i < LANES; i++)
                turned[i] = i < lanes.count ? _mm256_mul_ps(some(lanes.at[i] + from, room.width - from), all(a.scale)) : all(0);
            turn(turned);
            float *out = room.query + m * room.width + from * LANES;
            for (int64_t i = 0; i < least_of(LANES, room.width - from); i++) _mm256_store_ps(out + i * LANES, turned[i]);
        }
    }
    const int64_t all_seen = room.tiles * room.wide * LANES;
    for (int64_t i = 0; i < all_seen; i += LANES) _mm256_store_ps(room.seen + i, all(0));
}

template <class T> void finish(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Queries<T, LANES> lanes(a, task, a.out, tile, rows);
        const Vector total = _mm256_load_ps(room.sums + tile * LANES);
        for (int64_t from = 0; from < room.width; from += LANES) {
            Vector turned[LANES];
            const float *seen = room.seen + (tile * room.wide + from) * LANES;
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) turned[i] = _mm256_div_ps(_mm256_load_ps(seen + i * LANES), total);
            turn(turned);
            const int64_t count = least_of(LANES, room.width - from);
            for (int64_t lane = 0; lane < lanes.count; lane++) {
                T few[LANES];
                put8(count == LANES ? lanes.at[lane] + from : few, turned[lane]);
                for (int64_t i = 0; count < LANES && i < count; i++) lanes.at[lane][from + i] = few[i];
            }
        }
    }
}

// `count` rows, and zeros after them up to a multiple of EACH.
template <class T> void pack(const T *const *rows, int64_t count, const Room &room, float *out) {
    for (int64_t key = 0; key < up(count, EACH); key++)
        for (int64_t from = 0; from < room.wide; from += LANES, out += LANES)
            _mm256_store_ps(out, key < count ? some(rows[key] + from, room.width - from) : all(0));
}

// Keys [at, at + count), which are packed, for TILES tiles.
template <int TILES>
void attend_tiles(const Attention &a, const Room &room, int64_t tile, int64_t at, int64_t count) {
    const Ranges<TILES> ranges(room.first + tile * LANES, room.end + tile * LANES, at, count);
    const int64_t from = ranges.from, to = ranges.to;
    if (from >= to) return;
    score<TILES>(room, room.query + tile * room.width * LANES, from, to);
    Vector shrunk[TILES];
    for (int q = 0; q < TILES; q++) {
        float *scores = room.scores + q * KEYS * LANES;
        for (int64_t i = from * LANES; a.softcap != 0 && i < to * LANES; i += LANES)
            _mm256_store_ps(scores + i, capped(_mm256_load_ps(scores + i), a.softcap));
        ranges.hide_from(q, scores);
        const int64_t m = (tile + q) * LANES;
        shrunk[q] = weights_of(scores, from, to, room.most + m, room.sums + m);
    }
    weigh<TILES>(room, room.seen + tile * room.wide * LANES, shrunk, from, to);
}

template <class T> void attend(const Attention &a, const AttentionTask &task, const AttentionTask *, float *memory) {
    const int64_t rows = task.rows * a.group();
    const Room room(a.cache.width, rows, memory);
    begin<T>(a, task, room, rows);
    const Span span(a, task);
    const int64_t packs = (span.end - span.first + KEYS - 1) / KEYS;
    const int64_t each = up((span.end - span.first + packs - 1) / packs, EACH);
    for (int64_t at = span.first; at < span.end; at += each) {
        const int64_t count = least_of(each, span.end - at);
        const T *keys[KEYS], *values[KEYS];
        locate(a, task, at, count, keys, values);
        pack(keys, count, room, room.keys);
        pack(values, count, room, room.values);
        int64_t tile = 0;
        for (; tile + 3 <= room.tiles; tile += 3) attend_tiles<3>(a, room, tile, at, count);
        if (tile + 2 == room.tiles) attend_tiles<2>(a, room, tile, at, count);
        if (tile + 1 == room.tiles) attend_tiles<1>(a, room, tile, at, count);
    }
    finish<T>(a, task, room, rows);
}

size_t scratch(const Attention &a, const AttentionTask &task) {
    return Room(a.cache.width, task.rows * a.group(), nullptr).floats();
}

template <class T> constexpr AttentionKernel KERNEL{attend<T>, scratch, QUERIES, 3 * LANES};

} // namespace

const AttentionKernel *attention_avx2_rows(const PagedCache &cache) {
    if (!has_avx2() || cache.width > WIDEST) return nullptr;
    return cache.bf16 ? &KERNEL<Bf16> : &KERNEL<float>;
}

} // namespace trinity
#else
namespace trinity {
const AttentionKernel *attention_avx2_rows(const PagedCache &) { return nullptr; }
} // namespace trinity
#endif
