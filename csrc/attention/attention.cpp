// What of attention is the same for every processor: where rows go, who computes what.
#include "attention/attention.hpp"
#include "native.hpp"

#include <cstring>
#include <vector>

namespace trinity {
namespace {

constexpr size_t LINE = 64;

struct Shared {
    const Attention *attention;
    const AttentionTask *tasks;
    size_t in_order; // tasks whose successor the same thread computes
};

// Kept by each thread from call to call: fresh pages would cost more than short tasks.
float *scratch_of(size_t floats) {
    thread_local std::vector<float> kept;
    if (kept.size() < floats + LINE / sizeof(float)) kept.resize(floats + LINE / sizeof(float));
    const auto address = reinterpret_cast<uintptr_t>(kept.data());
    return reinterpret_cast<float *>((address + LINE - 1) / LINE * LINE);
}

void compute(void *state, size_t index) {
    const auto *shared = static_cast<const Shared *>(state);
    const AttentionTask &task = shared->tasks[index];
    const AttentionTask *next = index < shared->in_order ? &task + 1 : nullptr;
    const AttentionKernel &kernel = *task.kernel;
    kernel.compute(*shared->attention, task, next, scratch_of(kernel.scratch(*shared->attention, task)));
}

const char *at(const Strided &rows, int64_t bytes) { return reinterpret_cast<const char *>(rows.address) + bytes; }

} // namespace

void write_rows(const PagedCache &cache, int64_t layer, Strided keys, Strided values, const int64_t *blocks,
                const int64_t *offsets, int64_t rows) {
    const int64_t bytes = cache.element(), width = cache.width * bytes;
    auto *start = reinterpret_cast<char *>(cache.address) + layer * cache.layer_size() * bytes;
    for (int64_t row = 0; row < rows; row++) {
        char *place = start + (blocks[row] * cache.block_size() + offsets[row] * cache.width) * bytes;
        for (const Strided &part : {keys, values})
            for (int64_t head = 0; head < cache.heads; head++, place += cache.head_size() * bytes)
                std::memcpy(place, at(part, (row * part.row + head * part.head) * bytes), static_cast<size_t>(width));
    }
}

void run_attention(const Attention &attention, const AttentionTask *tasks, size_t count, int threads) {
    Shared shared{&attention, tasks, threads < 2 && count > 0 ? count - 1 : 0};
    run_parallel(count, threads, compute, &shared);
}

} // namespace trinity
