// Products of a few rows with weights that lie in memory as oneDNN packs them, which are read once: plain C++, no torch.
#pragma once

#include "elementwise/elementwise.hpp"

namespace trinity {

// out = in * weight^T + bias. bias: 0 where there is none.
struct FewRows {
    Matrix in, out; // strides in elements
    uintptr_t weight, bias;
    int64_t rows, inputs, outputs;
};

constexpr int64_t MOST_ROWS = 32;

// The weights of `outputs` outputs lie together: for the first input (in bf16 the first two) those of all these outputs,
// then for the next. Of both there must be multiples. `run` makes the outputs [first, end).
struct FewRowsKernel {
    void (*run)(const FewRows &, int64_t first, int64_t end);
    int64_t outputs, inputs;
};

const FewRowsKernel *few_rows_avx512(); // float32
const FewRowsKernel *few_rows_amx();    // bf16; nullptr: not on this processor

} // namespace trinity
