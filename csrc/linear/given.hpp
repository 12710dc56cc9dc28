// What the products of AVX2 share: where rows, weights and results lie. All has internal linkage.
#pragma once

#include "avx2.hpp"
#include "linear/product.hpp"

namespace trinity {
namespace {

inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

template <class T> const T *row_of(const Matrix &rows, int64_t row) {
    return reinterpret_cast<const T *>(rows.address) + row * rows.stride;
}
template <class T> const T *weights_of(const Product &given, int64_t output) {
    return reinterpret_cast<const T *>(given.weight) + output * given.inputs;
}
template <class T> T *out_of(const Product &given, int64_t row) {
    return reinterpret_cast<T *>(given.out.address) + row * given.out.stride;
}
template <class T> float bias_of(const Product &given, int64_t output) {
    return given.bias == 0 ? 0.0f : get(reinterpret_cast<const T *>(given.bias)[output]);
}

} // namespace
} // namespace trinity
