// Products with plain weights as Python calls them, outputs split among threads. Pointers are ints; sizes are not checked.
#include "linear/product.hpp"
#include "native.hpp"

#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <stdexcept>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;
using namespace trinity;
using Rows = std::pair<uintptr_t, int64_t>; // address, elements from row to row

namespace {

constexpr int64_t SHARE = 1 << 18;  // weights that are worth a thread
constexpr int64_t TOGETHER = 16;    // outputs
constexpr size_t LINE = 64;

struct Shared {
    const Product *asked;
    const ProductKernel *kernel;
    int64_t each;
};

// Kept by each thread from call to call: fresh pages would cost more than short products.
float *scratch_of(size_t floats) {
    thread_local std::vector<float> kept;
    if (kept.size() < floats + LINE / sizeof(float)) kept.resize(floats + LINE / sizeof(float));
    const auto address = reinterpret_cast<uintptr_t>(kept.data());
    return reinterpret_cast<float *>((address + LINE - 1) / LINE * LINE);
}

void part(void *state, size_t index) {
    const auto *shared = static_cast<const Shared *>(state);
    const int64_t first = static_cast<int64_t>(index) * shared->each;
    float *memory = scratch_of(shared->kernel->scratch(*shared->asked));
    shared->kernel->run(*shared->asked, first, std::min(first + shared->each, shared->asked->outputs), memory);
}

void product(const Rows &in, const Rows &out, uintptr_t weight, uintptr_t bias, int64_t rows, int64_t inputs,
             int64_t outputs, bool bf16, int threads) {
    const ProductKernel *kernel = product_avx2(bf16);
    if (kernel == nullptr) throw std::invalid_argument("no kernel for plain weights on this processor");
    if (rows < 0 || inputs < 1 || outputs < 1) throw std::invalid_argument("rows of at least one input and one output");
    if (rows == 0) return;
    const Product asked{{in.first, in.second}, {out.first, out.second}, weight, bias, rows, inputs, outputs};
    const int64_t blocks = (outputs + TOGETHER - 1) / TOGETHER;
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>({threads, blocks, inputs * outputs / SHARE}));
    Shared shared{&asked, kernel, (blocks + wanted - 1) / wanted * TOGETHER};
    run_parallel(static_cast<size_t>((outputs + shared.each - 1) / shared.each), threads, part, &shared);
}

bool has_product(bool bf16) { return product_avx2(bf16) != nullptr; }

} // namespace

void bind_product(nb::module_ &module) {
    module.def("product", &product, "rows_in"_a, "out"_a, "weight"_a, "bias"_a, "rows"_a, "inputs"_a, "outputs"_a,
               "bf16"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("has_product", &has_product, "bf16"_a);
}
