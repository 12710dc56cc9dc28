// Paged attention on a CPU over the block-major cache: plain C++, no Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trinity {

constexpr int64_t TILE = 16; // keys that are looked at together

// The cache [blocks, layers, 2, heads, height, width] of float or bf16, contiguous.
struct PagedCache {
    uintptr_t address;
    int64_t blocks, layers, heads, height, width;
    bool bf16;

    int64_t element() const { return bf16 ? 2 : 4; }
    int64_t head_size() const { return height * width; }
    int64_t layer_size() const { return 2 * heads * head_size(); }
    int64_t block_size() const { return layers * layer_size(); }
};

// Rows of heads of `width` elements that lie together: element (row, head, i) is address[row * row + head * head + i].
struct Strided {
    uintptr_t address;
    int64_t row, head;
};

// Where keys and values lie: element (block, head, offset, i) is at block * block + head * head + offset * row + i.
struct Held {
    uintptr_t keys, values;
    int64_t block, head, row;

    Held(uintptr_t keys, uintptr_t values, int64_t block, int64_t head, int64_t row)
        : keys(keys), values(values), block(block), head(head), row(row) {}
    Held(const PagedCache &cache, int64_t layer)
        : keys(cache.address + layer * cache.layer_size() * cache.element()),
          values(keys + cache.layer_size() / 2 * cache.element()), block(cache.block_size()), head(cache.head_size()),
          row(cache.width) {}
};

// One layer of one batch. `first`, `end` [rows]: each row sees the positions [first, end) of its own request.
struct Attention {
    PagedCache cache;
    Held held;
    Strided query, out;
    int64_t heads, layer;
    const int64_t *first, *end;
    const float *sinks; // [heads]: a further score of each head that has no value; or none
    float scale, softcap; // softcap 0: none

    int64_t group() const { return heads / cache.heads; }
};

struct AttentionKernel;

// Rows [row, row + rows) of one request, for the key-value heads [head, head + heads); `table`: its blocks.
struct AttentionTask {
    const AttentionKernel *kernel;
    const int64_t *table;
    int64_t row, rows, head, heads;
};

// `compute`: a task. `memory` has room for scratch(...) floats and begins at a multiple of 64 bytes. `next`: the task
// that this thread is known to compute after it, or none. `queries`: rows times heads that a task should have at most;
// `together`: those that go through it together.
struct AttentionKernel {
    void (*compute)(const Attention &, const AttentionTask &, const AttentionTask *next, float *memory);
    size_t (*scratch)(const Attention &, const AttentionTask &);
    int64_t queries, together;
};

const AttentionKernel *attention_portable(const PagedCache &cache);
// nullptr: not on this processor, or not of this width. `dots`: with its bf16 dot products, if it has them.
const AttentionKernel *attention_avx512(const PagedCache &cache, bool dots);
// nullptr: not on this processor or system, or not of this width or dtype. For tasks of one head, scales above 0.
const AttentionKernel *attention_amx(const PagedCache &cache);
// The same in float32, for any scale.
const AttentionKernel *attention_avx512_rows(const PagedCache &cache);
// Of few rows, and of many, in float32 and bf16, for any scale. nullptr: not on this processor, or not of this width.
const AttentionKernel *attention_avx2(const PagedCache &cache);
const AttentionKernel *attention_avx2_rows(const PagedCache &cache);

// Reads a task's keys and values and computes nothing: the limit that benchmarks show; nullptr without AVX-512.
const AttentionKernel *attention_loads();

// Copies rows of keys and values [rows, cache.heads, width] into their places of one layer.
void write_rows(const PagedCache &cache, int64_t layer, Strided keys, Strided values, const int64_t *blocks,
                const int64_t *offsets, int64_t rows);

// Tasks on at most `threads` threads, the caller's among them.
void run_attention(const Attention &attention, const AttentionTask *tasks, size_t count, int threads);

} // namespace trinity
