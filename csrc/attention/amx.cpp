// Attention in bf16 by AMX tiles, for rows enough to fill them: chunks of a prefill over the cache, and an encoder's,
// which see each other. Online softmax as in attention/rows.hpp, but scores and results lie the other way round:
// S^T = K Q^T, O^T = V^T P^T. A vector is then one key's scores for 16 queries, so that no maximum and no sum goes
// across lanes, and two such vectors are, rounded and interleaved, what the second product reads in pairs.
// This file alone is compiled for AMX; attention_amx() says whether it is there, and asks the system for it.
#include "attention/attention.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && defined(__x86_64__)
#include "amx.hpp"
#include "attention/tiles.hpp"

namespace trinity {
namespace {

// ---------------------------------------------------------------- products

// Compilers may not know that tiles are loaded from what was stored: nothing moves over this.
inline void settle() { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 += A B over `steps`; A is two tiles, at `a` and `a_next`, B QUERIES tiles, `apart` bytes apart.
template <int QUERIES>
inline void products(const char *a, const char *a_next, const char *b, int64_t apart, int64_t steps) {
    for (int64_t step = 0; step < steps; step++) {
        const int64_t at = step * TILE_BYTES;
        _tile_loadd(6, b + at, 64);
        _tile_loadd(4, a + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a_next + at, 64);
        _tile_dpbf16ps(1, 5, 6);
        if (QUERIES == 2) {
            _tile_loadd(7, b + apart + at, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// Scores of keys [0, count) for QUERIES tiles, from the first of which `query` is.
template <int QUERIES> void score(const Room &room, const char *query, int64_t from, int64_t count) {
    const int64_t row = room.steps * TILE_BYTES;
    settle();
    for (int64_t key = from; key < count; key += STEP) {
        const char *keys = room.keys + key / 16 * row;
        float *out = room.scores + key * LANES;
        _tile_zero(0);
        _tile_zero(1);
        if (QUERIES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        products<QUERIES>(keys, keys + row, query, row, room.steps);
        _tile_stored(0, out, 64);
        _tile_stored(1, out + TILE_FLOATS, 64);
        if (QUERIES == 2) {
            _tile_stored(2, out + KEYS * LANES, 64);
            _tile_stored(3, out + KEYS * LANES + TILE_FLOATS, 64);
        }
    }
    settle();
}

// What was seen, and the values of keys [from, count) by their weights.
template <int QUERIES> void weigh(const Room &room, float *seen, int64_t from, int64_t count) {
    const int64_t next = room.width * LANES, apart = KEYS / STEP * TILE_BYTES, steps = up(count - from, STEP) / STEP;
    const char *weights = reinterpret_cast<const char *>(room.scores) + from / STEP * TILE_BYTES;
    const char *values = room.values + from / STEP * TILE_BYTES;
    settle();
    for (int64_t tile = 0; tile < room.width / 16; tile += 2) {
        float *out = seen + tile * TILE_FLOATS;
        _tile_loadd(0, out, 64);
        _tile_loadd(1, out + TILE_FLOATS, 64);
        if (QUERIES == 2) {
            _tile_loadd(2, out + next, 64);
            _tile_loadd(3, out + next + TILE_FLOATS, 64);
        }
        products<QUERIES>(values + tile * apart, values + (tile + 1) * apart, weights, KEYS * LANES * 4, steps);
        _tile_stored(0, out, 64);
        _tile_stored(1, out + TILE_FLOATS, 64);
        if (QUERIES == 2) {
            _tile_stored(2, out + next, 64);
            _tile_stored(3, out + next + TILE_FLOATS, 64);
        }
    }
    settle();
}

// ---------------------------------------------------------------- softmax

// Scores of keys [from, count) become weights, in place. Returns what the results so far are to be multiplied with.
inline Vector weights_of(float *scores, int64_t from, int64_t count, Vector scale, float *most, float *sums) {
    const Vector before = _mm512_load_ps(most);
    const Vector now = _mm512_max_ps(_mm512_mul_ps(largest(scores, from, count), scale), before);
    const __mmask16 some = _mm512_cmp_ps_mask(now, all(NOTHING), _CMP_NEQ_UQ);
    const Vector least = _mm512_maskz_mov_ps(some, now), shrunk = power(_mm512_sub_ps(before, least));
    const Bits mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, //
                                        21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    Vector even = _mm512_mul_ps(_mm512_load_ps(sums), shrunk), odd = _mm512_setzero_ps();
    float *out = scores + from / 2 * LANES;
#pragma GCC unroll 2
    for (int64_t key = from; key < count; key += 2, out += LANES) {
        const Vector one = power(_mm512_fmsub_ps(_mm512_load_ps(scores + key * LANES), scale, least));
        const Vector other = power(_mm512_fmsub_ps(_mm512_load_ps(scores + (key + 1) * LANES), scale, least));
        even = _mm512_add_ps(even, one);
        odd = _mm512_add_ps(odd, other);
        const Bits both = reinterpret_cast<Bits>(_mm512_cvtne2ps_pbh(other, one));
        _mm512_store_si512(out, _mm512_permutexvar_epi16(mixed, both));
    }
    _mm512_store_ps(most, now);
    _mm512_store_ps(sums, _mm512_add_ps(even, odd));
    return shrunk;
}

void scaled(float *seen, int64_t width, Vector by) {
    if (_mm512_cmp_ps_mask(by, all(1.0f), _CMP_NEQ_UQ) == 0) return;
    for (int64_t i = 0; i < width * LANES; i += LANES)
        _mm512_store_ps(seen + i, _mm512_mul_ps(_mm512_load_ps(seen + i), by));
}

// ---------------------------------------------------------------- a task

void begin(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Lanes<Bf16> lanes(a, task, a.query, tile, rows);
        const int64_t m = tile * LANES;
        begin_lanes(a, lanes, LOG2_E, room.first + m, room.end + m, room.most + m, room.sums + m);
        pack_queries(lanes.at, lanes.count, a.cache.width, room.steps, room.query + tile * room.steps * TILE_BYTES);
    }
    const int64_t all_seen = room.tiles * room.width * LANES;
    for (int64_t i = 0; i < all_seen; i += LANES) _mm512_store_ps(room.seen + i, all(0));
}

void finish(const Attention &a, const AttentionTask &task, const Room &room, int64_t rows) {
    for (int64_t tile = 0; tile < room.tiles; tile++) {
        const Lanes<Bf16> lanes(a, task, a.out, tile, rows);
        const Vector share = _mm512_div_ps(all(1.0f), _mm512_load_ps(room.sums + tile * LANES));
        for (int64_t from = 0; from < a.cache.width; from += 16) {
            Bits turned[16];
            const float *seen = room.seen + (tile * room.width + from) * LANES;
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                turned[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(seen + i * LANES), share));
            turn(turned);
            const auto there = static_cast<__mmask16>(below(a.cache.width - from));
            for (int64_t lane = 0; lane < lanes.count; lane++) {
                const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(turned[lane]));
                _mm256_mask_storeu_epi16(lanes.at[lane] + from, there, reinterpret_cast<__m256i>(rounded));
            }
        }
    }
}

// Keys [at, at + count), which are packed, for QUERIES tiles.
template <int QUERIES>
void attend_tiles(const Attention &a, const Room &room, int64_t tile, int64_t at, int64_t count) {
    const Ranges<QUERIES> ranges(room.first + tile * LANES, room.end + tile * LANES, at, count, STEP);
    const int64_t from = ranges.from, to = ranges.to;
    if (from >= to) return;
    score<QUERIES>(room, room.query + tile * room.steps * TILE_BYTES, from, to);
    const Vector scale = all((a.softcap != 0 ? 1 : a.scale) * LOG2_E);
    for (int q = 0; q < QUERIES; q++) {
        float *scores = room.scores + q * KEYS * LANES;
        if (a.softcap != 0) capped(scores, from, to, a.scale, a.softcap);
        ranges.hide_from(q, scores);
        const int64_t m = (tile + q) * LANES;
        const Vector shrunk = weights_of(scores, from, to, scale, room.most + m, room.sums + m);
        scaled(room.seen + m * room.width, room.width, shrunk);
    }
    weigh<QUERIES>(room, room.seen + tile * LANES * room.width, from, to);
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void attend(const Attention &a, const AttentionTask &task, const AttentionTask *, float *memory) {
    const int64_t rows = task.rows * a.group();
    const Room room(a.cache.width, rows, memory);
    begin(a, task, room, rows);
    const Span span(a, task);
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    const int64_t packs = (span.end - span.first + KEYS - 1) / KEYS;
    const int64_t each = up((span.end - span.first + packs - 1) / packs, STEP);
    for (int64_t at = span.first; at < span.end; at += each) {
        const int64_t count = least_of(each, span.end - at);
        const Bf16 *keys[KEYS], *values[KEYS];
        locate(a, task, at, count, keys, values);
        pack_keys(keys, count, a.cache.width, room.steps, room.keys);
        pack_values(values, count, a.cache.width, room.steps, room.values);
        int64_t tile = 0;
        for (; tile + 2 <= room.tiles; tile += 2) attend_tiles<2>(a, room, tile, at, count);
        if (tile < room.tiles) attend_tiles<1>(a, room, tile, at, count);
    }
    _tile_release();
    finish(a, task, room, rows);
}

size_t scratch(const Attention &a, const AttentionTask &task) {
    return Room(a.cache.width, task.rows * a.group(), nullptr).floats();
}

} // namespace

const AttentionKernel *attention_amx(const PagedCache &cache) {
    static const bool here = amx_granted();
    static const AttentionKernel kernel{attend, scratch, 1024, 2 * LANES};
    return here && cache.bf16 && cache.width <= WIDEST ? &kernel : nullptr;
}

} // namespace trinity
#else
namespace trinity {
const AttentionKernel *attention_amx(const PagedCache &) { return nullptr; }
} // namespace trinity
#endif
