// A decode step reads every weight for a few rows: what counts is that memory is never waited for. Weights are taken in
// pieces that stay in the L1 while all rows pass over them, and meanwhile those further on are fetched.
#include "instructions.hpp"
#include "linear/few_rows.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <algorithm>
#include <immintrin.h>

namespace trinity {
namespace {

constexpr int64_t TOGETHER = 64; // outputs
constexpr int64_t PASS = 6;      // rows whose sums fit the registers
constexpr int64_t PIECE = 16;      // inputs
constexpr int64_t AHEAD = 1024;    // weights

struct Piece {
    const float *weights, *in;
    int64_t in_stride, inputs;
    int lines[2]; // of each input's weights AHEAD of these, those to fetch
};

template <int ROWS> void pass(const Piece &piece, float *sums) {
    __m512 sum[ROWS][4];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < 4; i++) sum[row][i] = _mm512_load_ps(sums + row * TOGETHER + i * 16);
    const float *weights = piece.weights, *in = piece.in;
    for (int64_t input = 0; input < piece.inputs; input++, weights += TOGETHER, in++) {
        for (int line = piece.lines[0]; line < piece.lines[1]; line++)
            _mm_prefetch(reinterpret_cast<const char *>(weights + AHEAD + line * 16), _MM_HINT_T0);
        __m512 part[4];
        for (int i = 0; i < 4; i++) part[i] = _mm512_loadu_ps(weights + i * 16);
        for (int row = 0; row < ROWS; row++) {
            const __m512 all = _mm512_set1_ps(in[row * piece.in_stride]);
            for (int i = 0; i < 4; i++) sum[row][i] = _mm512_fmadd_ps(part[i], all, sum[row][i]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < 4; i++) _mm512_store_ps(sums + row * TOGETHER + i * 16, sum[row][i]);
}

constexpr void (*PASSES[])(const Piece &, float *) = {pass<1>, pass<2>, pass<3>, pass<4>, pass<5>, pass<6>};

// The sums of TOGETHER outputs, from `at` on, over all inputs.
void sum(const FewRows &given, int64_t at, float *sums) {
    const int64_t passes = (given.rows + PASS - 1) / PASS, each = (given.rows + passes - 1) / passes;
    const float *weights = reinterpret_cast<const float *>(given.weight) + at * given.inputs;
    for (int64_t done = 0; done < given.inputs; done += PIECE)
        for (int64_t number = 0; number < passes; number++) {
            const int64_t row = number * each, rows = std::min(each, given.rows - row);
            if (rows <= 0) break;
            const float *in = reinterpret_cast<const float *>(given.in.address) + row * given.in.stride + done;
            const int low = static_cast<int>(number * 4 / passes), high = static_cast<int>((number + 1) * 4 / passes);
            const Piece piece{
                weights + done * TOGETHER, in, given.in.stride, std::min(PIECE, given.inputs - done), {low, high}};
            PASSES[rows - 1](piece, sums + row * TOGETHER);
        }
}

void few_rows(const FewRows &given, int64_t first, int64_t end) {
    const float *bias = reinterpret_cast<const float *>(given.bias);
    alignas(64) float sums[MOST_ROWS * TOGETHER];
    for (int64_t at = first; at < end; at += TOGETHER) {
        for (int64_t i = 0; i < TOGETHER; i += 16) {
            const __m512 start = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + at + i);
            for (int64_t row = 0; row < given.rows; row++) _mm512_store_ps(sums + row * TOGETHER + i, start);
        }
        sum(given, at, sums);
        for (int64_t row = 0; row < given.rows; row++) {
            float *out = reinterpret_cast<float *>(given.out.address) + row * given.out.stride + at;
            for (int64_t i = 0; i < TOGETHER; i += 16)
                _mm512_storeu_ps(out + i, _mm512_load_ps(sums + row * TOGETHER + i));
        }
    }
}

constexpr FewRowsKernel KERNEL{few_rows, TOGETHER, 1};

} // namespace

const FewRowsKernel *few_rows_avx512() {
    return has_avx512() ? &KERNEL : nullptr;
}

} // namespace trinity
#else
namespace trinity {
const FewRowsKernel *few_rows_avx512() { return nullptr; }
} // namespace trinity
#endif
