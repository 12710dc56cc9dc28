// trinity._native: the Python side. Pointers are ints and block numbers int64 arrays: no torch is linked.
#include "instructions.hpp"
#include "native.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Released = nb::call_guard<nb::gil_scoped_release>;

void bind_simulator(nb::module_ &module); // simulation/bind.cpp
void bind_attention(nb::module_ &module); // attention/bind.cpp
void bind_elementwise(nb::module_ &module); // elementwise/elementwise.cpp
void bind_encoder(nb::module_ &module);     // encoder/encoder.cpp
void bind_few_rows(nb::module_ &module);    // linear/few_rows.cpp
void bind_product(nb::module_ &module);     // linear/product.cpp

namespace {

void same_length(size_t left, size_t right) {
    if (left != right) throw std::invalid_argument("as many source blocks as target blocks, and as many digests");
}

void copy(uintptr_t target, int64_t target_blocks, uintptr_t source, int64_t source_blocks, const Numbers &to,
          const Numbers &from, int64_t block_bytes, int64_t offset, int64_t length, int threads) {
    same_length(to.size(), from.size());
    trinity::copy_blocks({target, target_blocks}, {source, source_blocks}, to.data(), from.data(), to.size(),
                         {block_bytes, offset, length}, threads);
}

void digest(uintptr_t source, int64_t source_blocks, const Numbers &from, int64_t block_bytes, int64_t offset,
            int64_t length, const Digests &out) {
    same_length(out.size(), from.size());
    trinity::digest_blocks({source, source_blocks}, from.data(), from.size(), {block_bytes, offset, length},
                           out.data());
}

} // namespace

NB_MODULE(_native, module) {
#ifndef TRINITY_SANITIZE
    // At exit nanobind lists what is still held, and calls it a fault of the bindings: a daemon thread's frame, or a
    // cache of the user's, is enough. `make asan` keeps the lists.
    nb::set_leak_warnings(false);
#endif
    module.attr("API") = 1; // raised with every change of a signature: an old file in a newer checkout is not used
    module.def("instructions", &trinity::instructions);
    module.def("copy_blocks", &copy, "target"_a, "target_blocks"_a, "source"_a, "source_blocks"_a,
               "to"_a.noconvert(), "from_"_a.noconvert(), "block_bytes"_a, "offset"_a, "length"_a, "threads"_a,
               Released());
    module.def("digests", &digest, "source"_a, "source_blocks"_a, "from_"_a.noconvert(), "block_bytes"_a, "offset"_a,
               "length"_a, "out"_a.noconvert(), Released());
    bind_simulator(module);
    bind_attention(module);
    bind_elementwise(module);
    bind_encoder(module);
    bind_few_rows(module);
    bind_product(module);
}
