// What lies between the products of a transformer layer, each in one pass over its rows: plain C++, no torch.
// Every step rounds to the rows' type where transformers' modules do, so that bf16 results are theirs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trinity {

// Rows of elements that lie together: element i of row r is address[r * stride + i].
struct Matrix {
    uintptr_t address;
    int64_t stride;
};

// out = in / sqrt(mean(in^2) + eps) * weight, row by row. With `added`, in + added takes the place of in, and is left in
// `sums`, which may be in; without `weight` that is all.
struct RmsNorm {
    Matrix in, added, sums, out;
    uintptr_t weight;
    int64_t width;
    float eps;
};

// out = silu(gate) * up; without up: out = gate * sigmoid(slope * gate).
struct Gated {
    Matrix gate, up, out;
    int64_t width;
    float slope;
};

// Rotary embedding of `heads` heads a row: both halves of a head of `width`, as transformers' rotate_half.
struct Rotary {
    Matrix in, out, cosine, sine;
    int64_t in_head, out_head, heads, width; // in_head, out_head: elements from head to head
};

// On the rows [first, end).
struct Elementwise {
    void (*rms_norm)(const RmsNorm &, int64_t first, int64_t end);
    void (*gated)(const Gated &, int64_t first, int64_t end);
    void (*rotary)(const Rotary &, int64_t first, int64_t end);
};

const Elementwise &elementwise_portable(bool bf16);
const Elementwise *elementwise_avx2(bool bf16); // nullptr: not on this processor
const Elementwise *elementwise_avx512(bool bf16);
const Elementwise *elementwise_bf16();

} // namespace trinity
