// Products with weights as torch has them, [outputs, inputs], for any number of rows: plain C++, no torch.
#pragma once

#include "elementwise/elementwise.hpp"

namespace trinity {

// out = in * weight^T + bias, in float or bf16; sums are float32, and rounded once. bias: 0 where there is none.
struct Product {
    Matrix in, out; // strides in elements
    uintptr_t weight, bias;
    int64_t rows, inputs, outputs;
};

// `run` makes the outputs [first, end); `memory` has room for scratch(...) floats and begins at a multiple of 64 bytes.
struct ProductKernel {
    void (*run)(const Product &, int64_t first, int64_t end, float *memory);
    size_t (*scratch)(const Product &);
};

const ProductKernel *product_avx2(bool bf16); // nullptr: not on this processor

} // namespace trinity
