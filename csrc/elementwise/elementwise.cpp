// Elementwise kernels as Python calls them, rows split among threads. Pointers are ints; their sizes are not checked.
#include "elementwise/elementwise.hpp"
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
using Released = nb::call_guard<nb::gil_scoped_release>;

namespace {

constexpr int64_t SHARE = 1 << 15; // elements that are worth a thread

// "best" of this processor; at most "avx512", without its own rounding to bf16; at most "avx2"; "portable".
const Elementwise &kernels_of(const std::string &name, bool bf16) {
    const bool widest = name == "best" || name == "avx512";
    const Elementwise *found = name == "best" && bf16 ? elementwise_bf16() : nullptr;
    if (found == nullptr && widest) found = elementwise_avx512(bf16);
    if (found == nullptr && name != "portable") found = elementwise_avx2(bf16);
    return found != nullptr ? *found : elementwise_portable(bf16);
}

Matrix matrix(const Rows &rows) { return {rows.first, rows.second}; }

template <class Asked> struct Shared {
    const Asked *asked;
    void (*kernel)(const Asked &, int64_t, int64_t);
    int64_t rows, each;
};

template <class Asked> void part(void *state, size_t index) {
    const auto *shared = static_cast<const Shared<Asked> *>(state);
    const int64_t first = static_cast<int64_t>(index) * shared->each;
    shared->kernel(*shared->asked, first, std::min(first + shared->each, shared->rows));
}

template <class Asked>
void spread(const Asked &asked, void (*kernel)(const Asked &, int64_t, int64_t), int64_t rows, int64_t width,
            int threads) {
    if (rows < 0 || width < 1) throw std::invalid_argument("rows of at least one element");
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(threads, rows * width / SHARE));
    const int64_t each = std::max<int64_t>(1, (rows + wanted - 1) / wanted);
    Shared<Asked> shared{&asked, kernel, rows, each};
    run_parallel(static_cast<size_t>((rows + each - 1) / each), threads, part<Asked>, &shared);
}

void norm(const Rows &in, uintptr_t weight, const Rows &out, int64_t rows, int64_t width, float eps, bool bf16,
          int threads, const std::string &kernel) {
    const RmsNorm asked{matrix(in), {}, {}, matrix(out), weight, width, eps};
    spread(asked, kernels_of(kernel, bf16).rms_norm, rows, width, threads);
}

void add_norm(const Rows &in, const Rows &added, const Rows &sums, uintptr_t weight, const Rows &out, int64_t rows,
              int64_t width, float eps, bool bf16, int threads, const std::string &kernel) {
    const RmsNorm asked{matrix(in), matrix(added), matrix(sums), matrix(out), weight, width, eps};
    spread(asked, kernels_of(kernel, bf16).rms_norm, rows, width, threads);
}

void gate(const Rows &in, const Rows &up, const Rows &out, int64_t rows, int64_t width, float slope, bool bf16,
          int threads, const std::string &kernel) {
    const Gated asked{matrix(in), matrix(up), matrix(out), width, slope};
    spread(asked, kernels_of(kernel, bf16).gated, rows, width, threads);
}

void turn(const Rows &in, int64_t in_head, const Rows &cosine, const Rows &sine, const Rows &out, int64_t out_head,
          int64_t rows, int64_t heads, int64_t width, bool bf16, int threads, const std::string &kernel) {
    if (width % 2 != 0) throw std::invalid_argument("a head of two halves");
    const Rotary asked{matrix(in), matrix(out), matrix(cosine), matrix(sine), in_head, out_head, heads, width};
    spread(asked, kernels_of(kernel, bf16).rotary, rows, heads * width, threads);
}

} // namespace

void bind_elementwise(nb::module_ &module) {
    module.def("rms_norm", &norm, "rows_in"_a, "weight"_a, "out"_a, "rows"_a, "width"_a, "eps"_a, "bf16"_a,
               "threads"_a, "kernel"_a, Released());
    module.def("add_rms_norm", &add_norm, "rows_in"_a, "added"_a, "sums"_a, "weight"_a, "out"_a, "rows"_a, "width"_a,
               "eps"_a, "bf16"_a, "threads"_a, "kernel"_a, Released());
    module.def("gated", &gate, "gate"_a, "up"_a, "out"_a, "rows"_a, "width"_a, "slope"_a, "bf16"_a, "threads"_a,
               "kernel"_a, Released());
    module.def("rotary", &turn, "rows_in"_a, "in_head"_a, "cosine"_a, "sine"_a, "out"_a, "out_head"_a, "rows"_a,
               "heads"_a, "width"_a, "bf16"_a, "threads"_a, "kernel"_a, Released());
}
