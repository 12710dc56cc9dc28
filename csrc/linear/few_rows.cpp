// Products of a few rows as Python calls them, outputs split among threads. Pointers are ints; sizes are not checked.
#include "linear/few_rows.hpp"
#include "native.hpp"

#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;
using namespace trinity;
using Rows = std::pair<uintptr_t, int64_t>; // address, elements from row to row

namespace {

constexpr int64_t SHARE = 1 << 18; // weights that are worth a thread

const FewRowsKernel *kernel_of(bool bf16) { return bf16 ? few_rows_amx() : few_rows_avx512(); }

struct Shared {
    const FewRows *asked;
    const FewRowsKernel *kernel;
    int64_t each;
};

void part(void *state, size_t index) {
    const auto *shared = static_cast<const Shared *>(state);
    const int64_t first = static_cast<int64_t>(index) * shared->each;
    shared->kernel->run(*shared->asked, first, std::min(first + shared->each, shared->asked->outputs));
}

void product(const Rows &in, const Rows &out, uintptr_t weight, uintptr_t bias, int64_t rows, int64_t inputs,
             int64_t outputs, bool bf16, int threads) {
    const FewRowsKernel *kernel = kernel_of(bf16);
    if (kernel == nullptr) throw std::invalid_argument("not on this processor");
    if (rows < 0 || rows > MOST_ROWS || inputs < 1 || inputs % kernel->inputs || outputs < 1 ||
        outputs % kernel->outputs)
        throw std::invalid_argument("too many rows, or a number of inputs or outputs that few_rows_of does not allow");
    if (rows == 0) return;
    const FewRows asked{{in.first, in.second}, {out.first, out.second}, weight, bias, rows, inputs, outputs};
    const int64_t blocks = outputs / kernel->outputs;
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>({threads, blocks, inputs * outputs / SHARE}));
    Shared shared{&asked, kernel, (blocks + wanted - 1) / wanted * kernel->outputs};
    run_parallel(static_cast<size_t>((outputs + shared.each - 1) / shared.each), threads, part, &shared);
}

// Outputs and inputs of which there must be multiples; nothing of both where there is no kernel for this processor.
std::pair<int64_t, int64_t> multiples(bool bf16) {
    const FewRowsKernel *kernel = kernel_of(bf16);
    return kernel == nullptr ? std::pair<int64_t, int64_t>{0, 0} : std::pair{kernel->outputs, kernel->inputs};
}

} // namespace

void bind_few_rows(nb::module_ &module) {
    module.def("few_rows", &product, "rows_in"_a, "out"_a, "weight"_a, "bias"_a, "rows"_a, "inputs"_a, "outputs"_a,
               "bf16"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("few_rows_of", &multiples, "bf16"_a);
}
