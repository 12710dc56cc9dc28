// An encoder's kernels as Python calls them, rows split among threads. Pointers are ints; their sizes are not checked.
#include "encoder/encoder.hpp"
#include "native.hpp"

#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;
using namespace trinity;
using Rows = std::pair<uintptr_t, int64_t>; // address, elements from row to row

namespace {

constexpr int64_t SHARE = 1 << 15; // elements that are worth a thread

// "best" of this processor; at most "avx2"; "portable".
const Encoder &kernels_of(const std::string &name, bool bf16) {
    const Encoder *found = name == "best" ? encoder_avx512(bf16) : nullptr;
    if (found == nullptr && name != "portable") found = encoder_avx2(bf16);
    return found != nullptr ? *found : encoder_portable(bf16);
}

Matrix matrix(const Rows &rows) { return {rows.first, rows.second}; }

// `kernel` over all rows of `asked`, some for each thread.
template <class Asked>
void share(const Asked &asked, void (*kernel)(const Asked &, int64_t, int64_t), int64_t rows, int threads) {
    if (rows < 0 || asked.width < 1) throw std::invalid_argument("rows of at least one element");
    struct State {
        const Asked &asked;
        void (*kernel)(const Asked &, int64_t, int64_t);
        int64_t rows, each;
    };
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(threads, rows * asked.width / SHARE));
    State state{asked, kernel, rows, std::max<int64_t>(1, (rows + wanted - 1) / wanted)};
    const auto part = [](void *given, size_t index) {
        const auto *of = static_cast<const State *>(given);
        const int64_t first = static_cast<int64_t>(index) * of->each;
        of->kernel(of->asked, first, std::min(first + of->each, of->rows));
    };
    run_parallel(static_cast<size_t>((rows + state.each - 1) / state.each), threads, part, &state);
}

void norm(const Rows &in, const Rows &added, const Rows &sums, uintptr_t weight, uintptr_t bias, const Rows &out,
          int64_t rows, int64_t width, float eps, bool bf16, int threads, const std::string &kernel) {
    const LayerNorm asked{matrix(in), matrix(added), matrix(sums), matrix(out), weight, bias, width, eps};
    share(asked, kernels_of(kernel, bf16).layer_norm, rows, threads);
}

void map(const Rows &in, uintptr_t table, const Rows &out, int64_t rows, int64_t width, int threads,
         const std::string &kernel) {
    const Mapped asked{matrix(in), matrix(out), table, width};
    share(asked, kernels_of(kernel, true).mapped, rows, threads);
}

} // namespace

void bind_encoder(nb::module_ &module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def("layer_norm", &norm, "rows_in"_a, "added"_a, "sums"_a, "weight"_a, "bias"_a, "out"_a, "rows"_a,
               "width"_a, "eps"_a, "bf16"_a, "threads"_a, "kernel"_a, Released());
    module.def("mapped", &map, "rows_in"_a, "table"_a, "out"_a, "rows"_a, "width"_a, "threads"_a, "kernel"_a,
               Released());
}
