// What lies between the products of an encoder's layer, each in one pass over its rows: plain C++, no torch.
#pragma once

#include "elementwise/elementwise.hpp"

namespace trinity {

// out = (in - mean(in)) / sqrt(variance(in) + eps) * weight + bias, row by row. With `added`, in + added takes the place
// of in, and is left in `sums`, which may be in or added. Rounded as a sum and a layer norm one after the other.
struct LayerNorm {
    Matrix in, added, sums, out;
    uintptr_t weight, bias;
    int64_t width;
    float eps;
};

// out = table[in], where both are 16 bits wide; out may be in. Behind `table`'s 65536 entries there is one more.
struct Mapped {
    Matrix in, out;
    uintptr_t table;
    int64_t width;
};

// On the rows [first, end).
struct Encoder {
    void (*layer_norm)(const LayerNorm &, int64_t first, int64_t end);
    void (*mapped)(const Mapped &, int64_t first, int64_t end);
};

const Encoder &encoder_portable(bool bf16);
const Encoder *encoder_avx2(bool bf16); // nullptr: not on this processor
const Encoder *encoder_avx512(bool bf16);

} // namespace trinity
