// Attention as Python calls it: a plan for each batch, then one call for each layer. Pointers are ints.
#include "attention/attention.hpp"
#include "instructions.hpp"

#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;
using trinity::Attention;
using trinity::AttentionKernel;
using trinity::AttentionTask;
using trinity::PagedCache;
using trinity::Strided;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Requests = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Rows = std::tuple<uintptr_t, int64_t, int64_t>; // address; elements from row to row and from head to head

namespace {

constexpr int64_t FILL_TILES = 8, FILL = 32; // rows times heads from which a kernel of many rows pays: AMX; float32

[[noreturn]] void refuse(const std::string &why) { throw std::invalid_argument(why); }

// For few rows: "best" of this processor, also where "many" rows have another; at most "avx512", without bf16 dot
// products; at most "avx2"; "portable"; "loads" reads and computes nothing.
const AttentionKernel *kernel_of(const std::string &name, const PagedCache &cache) {
    const AttentionKernel *found = nullptr;
    if (name == "best" || name == "avx512" || name == "many")
        found = trinity::attention_avx512(cache, name != "avx512");
    if (found == nullptr && name != "portable" && name != "loads") found = trinity::attention_avx2(cache);
    if (name == "loads") found = trinity::attention_loads();
    if (found == nullptr && name == "loads") refuse("no AVX-512 here: no pass to compare with");
    return found != nullptr ? found : trinity::attention_portable(cache);
}

// bf16 with AVX-512 and without tiles has none: torch's own products are faster there than AVX2.
const AttentionKernel *many_rows(const PagedCache &cache, float scale) {
    const AttentionKernel *found = nullptr;
    if (cache.bf16 && trinity::has_avx512()) return scale > 0 ? trinity::attention_amx(cache) : nullptr;
    if (!cache.bf16) found = trinity::attention_avx512_rows(cache);
    return found != nullptr ? found : trinity::attention_avx2_rows(cache);
}

// The kernel of many rows, or none, and for which requests: a decode, which waits for memory, is none.
struct Many {
    const AttentionKernel *kernel;
    bool always;
    int64_t fill;

    Many(const std::string &name, const PagedCache &cache, float scale)
        : kernel(name != "best" && name != "many" ? nullptr : many_rows(cache, scale)), always(name == "many"),
          fill(kernel != nullptr && kernel == trinity::attention_amx(cache) ? FILL_TILES : FILL) {}
    bool fit(int64_t rows, int64_t group) const { return kernel && (always || (rows > 1 && rows * group >= fill)); }
};

// How many of `rows` go into each task: all about as many, and such as go through the kernel together.
int64_t even(int64_t rows, int64_t group, const AttentionKernel &kernel) {
    const int64_t pieces = (rows * group + kernel.queries - 1) / kernel.queries;
    const int64_t filled = std::max<int64_t>(1, kernel.together / group);
    return pieces < 2 ? rows : ((rows + pieces - 1) / pieces + filled - 1) / filled * filled;
}

Strided strided(const Rows &rows) { return {std::get<0>(rows), std::get<1>(rows), std::get<2>(rows)}; }

// Where the rows of a batch live: checked once, used for every layer.
class Plan {
  public:
    Plan(const Numbers &shape, bool bf16, const Numbers &blocks, const Numbers &offsets, const Numbers &tables,
         const Requests &requests)
        : blocks_(blocks.data(), blocks.data() + blocks.size()),
          offsets_(offsets.data(), offsets.data() + offsets.size()),
          tables_(tables.data(), tables.data() + tables.size()),
          requests_(requests.data(), requests.data() + requests.size()) {
        if (shape.size() != 5) refuse("a cache is [blocks, layers, 2, kv_heads, block_rows, head_dim]");
        const int64_t *size = shape.data();
        cache_ = {0, size[0], size[1], size[2], size[3], size[4], bf16};
        if (*std::min_element(size, size + 5) < 1) refuse("a cache without blocks, layers, heads, rows or width");
        check();
    }

    void write(uintptr_t cache, int64_t layer, const Rows &keys, const Rows &values) const {
        trinity::write_rows(at(cache, layer), layer, strided(keys), strided(values), blocks_.data(), offsets_.data(),
                            rows());
    }

    void attend(uintptr_t cache, int64_t layer, const Rows &query, const Rows &out, int64_t heads,
                const Numbers &first, const Numbers &end, float scale, float softcap, uintptr_t sinks, int threads,
                const std::string &kernel) const {
        const PagedCache here = at(cache, layer);
        if (heads < here.heads || heads % here.heads != 0) refuse("query heads must be a multiple of kv_heads");
        check_seen(first, end);
        const Attention attention{here,  {here, layer}, strided(query), strided(out), heads, layer, first.data(),
                                  end.data(), reinterpret_cast<const float *>(sinks), scale, softcap};
        const std::vector<AttentionTask> tasks =
            tasks_for(attention, threads, *kernel_of(kernel, here), {kernel, here, scale});
        nb::gil_scoped_release released;
        trinity::run_attention(attention, tasks.data(), tasks.size(), threads);
    }

  private:
    int64_t rows() const { return static_cast<int64_t>(blocks_.size()); }
    size_t requests() const { return requests_.size() / 4; }

    PagedCache at(uintptr_t cache, int64_t layer) const {
        if (layer < 0 || layer >= cache_.layers) refuse("layer " + std::to_string(layer) + " is not in the cache");
        PagedCache here = cache_;
        here.address = cache;
        return here;
    }

    void check() const {
        if (offsets_.size() != blocks_.size()) refuse("as many offsets as blocks");
        for (const int64_t block : blocks_) check_block(block);
        for (const int64_t block : tables_) check_block(block);
        for (const int64_t offset : offsets_)
            if (offset < 0 || offset >= cache_.height)
                refuse("offset " + std::to_string(offset) + " is not in a block");
        for (size_t i = 0; i < requests(); i++) {
            const int64_t *at = &requests_[4 * i], all = static_cast<int64_t>(tables_.size());
            if (at[0] < 0 || at[1] < 1 || at[0] > rows() - at[1]) refuse("a request's rows are not in the batch");
            if (at[2] < 0 || at[3] < 1 || at[2] > all - at[3]) refuse("a request's table is not in the tables");
        }
    }

    void check_block(int64_t block) const {
        if (block < 0 || block >= cache_.blocks)
            refuse("block " + std::to_string(block) + " of a cache of " + std::to_string(cache_.blocks));
    }

    void check_seen(const Numbers &first, const Numbers &end) const {
        if (static_cast<int64_t>(first.size()) != rows() || first.size() != end.size())
            refuse("one range for each row");
        for (size_t i = 0; i < requests(); i++) {
            const int64_t *at = &requests_[4 * i];
            for (int64_t row = at[0]; row < at[0] + at[1]; row++)
                if (first.data()[row] < 0 || first.data()[row] >= end.data()[row] ||
                    end.data()[row] > at[3] * cache_.height)
                    refuse("row " + std::to_string(row) + " sees nothing, or more than its blocks hold");
        }
    }

    // A request's rows in pieces that share tiles. One row goes through all heads of a block, which lie together, at
    // once; where that leaves threads idle, and of more rows, each head is a task of its own.
    std::vector<AttentionTask> tasks_for(const Attention &attention, int threads, const AttentionKernel &kernel,
                                         const Many &many) const {
        std::vector<AttentionTask> tasks;
        const bool alone = requests() >= 2 * static_cast<size_t>(std::max(threads, 1)) || threads < 2;
        const int64_t group = attention.group();
        for (size_t i = 0; i < requests(); i++) {
            const int64_t *at = &requests_[4 * i], *table = tables_.data() + at[2];
            const bool tiled = many.fit(at[1], group);
            const AttentionKernel &used = tiled ? *many.kernel : kernel;
            const int64_t together = at[1] == 1 && alone && !tiled ? cache_.heads : 1;
            const int64_t most = tiled ? even(at[1], group, used) : std::max<int64_t>(1, used.queries / group);
            for (int64_t head = 0; head < cache_.heads; head += together)
                for (int64_t row = 0; row < at[1]; row += most)
                    tasks.push_back({&used, table, at[0] + row, std::min(most, at[1] - row), head, together});
        }
        return tasks;
    }

    PagedCache cache_{};
    std::vector<int64_t> blocks_, offsets_, tables_, requests_;
};

// Attention without a cache: [batch, rows, heads] see all of [batch, keys, kv_heads]; `keys` and `values` lie
// alike, and so do the parts of the batch, one after the other.
void attend_all(const Rows &query, const Rows &keys, uintptr_t values, const Rows &out,
                const std::tuple<int64_t, int64_t, int64_t> &sizes, const std::pair<int64_t, int64_t> &heads,
                int64_t width, bool bf16, float scale, int threads) {
    const auto [batch, rows, seen] = sizes;
    const auto [address, row, head] = keys;
    const auto [queries, held] = heads;
    if (std::min({batch, rows, seen}) < 0 || std::min({width, queries, held}) < 1 || queries % held != 0)
        refuse("attention of [batch, rows, heads, width] whose heads are a multiple of kv_heads");
    const PagedCache cache{0, batch, 1, held, std::max<int64_t>(seen, 1), width, bf16};
    const AttentionKernel *kernel = many_rows(cache, scale);
    if (kernel == nullptr || seen == 0) refuse("no kernel for such attention on this machine");
    const std::vector<int64_t> first(static_cast<size_t>(batch * rows), 0), end(first.size(), seen);
    const Attention attention{cache, {address, values, seen * row, head, row}, strided(query), strided(out), queries, 0,
                              first.data(), end.data(), nullptr, scale, 0};
    std::vector<int64_t> blocks(static_cast<size_t>(batch));
    std::iota(blocks.begin(), blocks.end(), 0);
    std::vector<AttentionTask> tasks;
    const int64_t most = even(rows, attention.group(), *kernel);
    for (int64_t part = 0; part < batch; part++)
        for (int64_t each = 0; each < held; each++)
            for (int64_t at = 0; at < rows; at += most)
                tasks.push_back({kernel, &blocks[static_cast<size_t>(part)], part * rows + at,
                                 std::min(most, rows - at), each, 1});
    nb::gil_scoped_release released;
    trinity::run_attention(attention, tasks.data(), tasks.size(), threads);
}

// Whether there is a kernel for many rows.
bool many(bool bf16, int64_t width) { return many_rows({0, 1, 1, 1, 1, width, bf16}, 1) != nullptr; }

// What does the work of few rows, or AMX that of many.
std::string instructions(bool bf16, int64_t width) {
    const PagedCache cache{0, 1, 1, 1, 1, width, bf16};
    if (trinity::attention_amx(cache) != nullptr) return "amx";
    if (trinity::attention_avx512(cache, true) != nullptr) return "avx512";
    return trinity::attention_avx2(cache) != nullptr ? "avx2" : "portable";
}

} // namespace

void bind_attention(nb::module_ &module) {
    nb::class_<Plan>(module, "PagedAttention")
        .def(nb::init<const Numbers &, bool, const Numbers &, const Numbers &, const Numbers &, const Requests &>(),
             "shape"_a.noconvert(), "bf16"_a, "blocks"_a.noconvert(), "offsets"_a.noconvert(), "tables"_a.noconvert(),
             "requests"_a.noconvert())
        .def("write", &Plan::write, "cache"_a, "layer"_a, "keys"_a, "values"_a)
        .def("attend", &Plan::attend, "cache"_a, "layer"_a, "query"_a, "out"_a, "heads"_a, "first"_a.noconvert(),
             "end"_a.noconvert(), "scale"_a, "softcap"_a, "sinks"_a, "threads"_a, "kernel"_a);
    module.def("attention_instructions", &instructions, "bf16"_a, "width"_a);
    module.def("attention_many", &many, "bf16"_a, "width"_a);
    module.def("attend_all", &attend_all, "query"_a, "keys"_a, "values"_a, "out"_a, "sizes"_a, "heads"_a, "width"_a,
               "bf16"_a, "scale"_a, "threads"_a);
}
