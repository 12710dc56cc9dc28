// Which rows go which way: a few by dot products, sixteen at a time as lanes, many over panels of weights. In all three weights
// are read where they lie. This file alone is compiled for AVX2 and FMA; product_avx2() says whether they are there.
#include "linear/product.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include "instructions.hpp"
#include "linear/dots_avx2.hpp"
#include "linear/lanes_avx2.hpp"
#include "linear/panels_avx2.hpp"

namespace trinity {
namespace {

constexpr int64_t FEW = 64;   // rows that pass over weights as they lie
constexpr int64_t IDLE = 2;   // lanes that may be
constexpr int64_t ROOM = TOGETHER * LANES + SHARED * SLICE;

// How many of a few rows are lanes. Dot products take the last ones: they are faster than lanes of which a quarter is idle.
inline int64_t count_lanes(int64_t rows) { return least_of((rows + IDLE) / LANES * LANES, rows); }

template <class T> void run_few(const Product &given, int64_t first, int64_t end, float *memory) {
    const int64_t inputs = given.inputs, apart = up(inputs, STEP), laid = count_lanes(given.rows);
    float *lanes = memory + ROOM, *dotted = lanes + up(laid, LANES) * inputs;
    for (int64_t row = 0; row < laid; row += LANES)
        lay_lanes<T>(given, row, least_of(LANES, laid - row), lanes + row * inputs);
    for (int64_t row = laid; row < given.rows; row++)
        split(row_of<T>(given.in, row), inputs, dotted + (row - laid) * apart);
    const Dotted further{laid, given.rows, dotted, apart};
    for (int64_t at = first; at < end; at += TOGETHER) {
        const int64_t to = least_of(at + TOGETHER, end);
        for (int64_t row = 0; row < laid; row += LANES)
            run_lanes<T>(given, row, least_of(LANES, laid - row), lanes + row * inputs, at, to, memory);
        if (laid < given.rows) run_dots<T>(given, further, at, to);
    }
}

size_t scratch_of_few(const Product &given) {
    const int64_t laid = count_lanes(given.rows);
    return static_cast<size_t>(ROOM + up(laid, LANES) * given.inputs + (given.rows - laid) * up(given.inputs, STEP));
}

template <class T> void run(const Product &given, int64_t first, int64_t end, float *memory) {
    given.rows <= FEW ? run_few<T>(given, first, end, memory) : run_many<T>(given, first, end, memory);
}

size_t scratch(const Product &given) { return given.rows <= FEW ? scratch_of_few(given) : scratch_of_many(given); }

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
