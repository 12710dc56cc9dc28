// The same in bf16 by AMX tiles, which take up to 16 rows at the cost of one.
#include "linear/few_rows.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && defined(__x86_64__)
#include "amx.hpp"
#include "bf16.hpp"

#include <algorithm>
#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t TOGETHER = 32; // outputs: two tiles
constexpr int64_t STEP = 32;     // inputs of a tile
constexpr int64_t BYTES = TOGETHER * STEP * 2;
constexpr int64_t LINE = 64;
constexpr int64_t AHEAD = 4096;   // bytes

struct alignas(64) Configuration {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of rows [0, 16) and of those behind; 4, 5: these rows; 6, 7: weights.
void configure(int64_t rows) {
    Configuration found;
    const auto few = static_cast<uint8_t>(std::min<int64_t>(rows, 16)), more = static_cast<uint8_t>(rows - few);
    const uint8_t of[8] = {few, few, more, more, few, more, 16, 16};
    for (int tile = 0; tile < 8; tile++)
        if (of[tile] > 0) found.rows[tile] = of[tile], found.bytes[tile] = LINE;
    _tile_loadconfig(&found);
}

inline void fetch(const char *weights) {
#pragma GCC unroll 32
    for (int64_t at = 0; at < BYTES; at += LINE) _mm_prefetch(weights + AHEAD + at, _MM_HINT_T0);
}

template <bool MORE> void sum(const FewRows &given, const char *weights, float *sums) {
    const int64_t stride = given.in.stride * 2;
    const char *in = reinterpret_cast<const char *>(given.in.address), *end = in + given.inputs * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (MORE) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; in < end; in += STEP * 2, weights += BYTES) {
        fetch(weights);
        _tile_loadd(4, in, stride);
        _tile_loadd(6, weights, TOGETHER * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + LINE, TOGETHER * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (MORE) {
            _tile_loadd(5, in + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, TOGETHER * 4);
    _tile_stored(1, sums + 16, TOGETHER * 4);
    if (MORE) {
        _tile_stored(2, sums + 16 * TOGETHER, TOGETHER * 4);
        _tile_stored(3, sums + 16 * TOGETHER + 16, TOGETHER * 4);
    }
    __asm__ volatile("" ::: "memory"); // compilers may not know that tiles were stored there
}

__m512 bias_of(const Bf16 *bias) {
    if (bias == nullptr) return _mm512_setzero_ps();
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(bias)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void few_rows(const FewRows &given, int64_t first, int64_t end) {
    alignas(64) float sums[MOST_ROWS * TOGETHER];
    const Bf16 *bias = reinterpret_cast<const Bf16 *>(given.bias);
    configure(given.rows);
    for (int64_t at = first; at < end; at += TOGETHER) {
        const char *weights = reinterpret_cast<const char *>(given.weight) + at * given.inputs * 2;
        given.rows > 16 ? sum<true>(given, weights, sums) : sum<false>(given, weights, sums);
        for (int64_t i = 0; i < TOGETHER; i += 16) {
            const __m512 by = bias_of(bias == nullptr ? nullptr : bias + at + i);
            for (int64_t row = 0; row < given.rows; row++) {
                Bf16 *out = reinterpret_cast<Bf16 *>(given.out.address) + row * given.out.stride + at + i;
                const __m512 found = _mm512_add_ps(_mm512_load_ps(sums + row * TOGETHER + i), by);
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(found)));
            }
        }
    }
    _tile_release();
}

constexpr FewRowsKernel KERNEL{few_rows, TOGETHER, STEP};

} // namespace

const FewRowsKernel *few_rows_amx() {
    static const bool here = amx_granted();
    return here ? &KERNEL : nullptr;
}

} // namespace trinity
#else
namespace trinity {
const FewRowsKernel *few_rows_amx() { return nullptr; }
} // namespace trinity
#endif
