// Online softmax over the blocks of one request; Milakov & Gimelshein (2018), as in FlashAttention. Included once for
// each instruction set, whose `Ops` do the arithmetic on tiles of at most TILE keys. Nothing here may be shared between
// files of different compiler flags: all has internal linkage, and no std function that may be emitted is called.
#pragma once

#include "attention/attention.hpp"
#include "bf16.hpp"

namespace trinity {
namespace {

constexpr int64_t AHEAD = 2; // blocks that are asked for before they are read, into the second cache
constexpr float NOTHING = -__builtin_inff();

constexpr int64_t QUERIES = 48; // rows times heads that share a pass over a tile: its keys are turned once for them

// Where a task keeps what it works on, per key-value head: M query rows (rows * group), `width` each.
struct Scratch {
    int64_t rows, width;
    float *memory;

    float *base(int64_t head) const { return memory + width * TILE + head * rows * (2 * width + 3 * TILE); }
    float *query(int64_t head) const { return base(head); }
    float *seen(int64_t head) const { return base(head) + rows * width; }
    float *scores(int64_t head) const { return base(head) + rows * 2 * width; }          // [rows, TILE]
    float *sums(int64_t head) const { return base(head) + rows * (2 * width + TILE); }   // [rows, TILE]: one per lane
    float *most(int64_t head) const { return base(head) + rows * (2 * width + 2 * TILE); } // [rows], padded
    float *turned() const { return memory; }                                             // [width, TILE]
};

inline size_t scratch(const Attention &a, const AttentionTask &task) {
    const int64_t rows = task.rows * a.group(), width = a.cache.width;
    return static_cast<size_t>(task.heads * rows * (2 * width + 3 * TILE) + width * TILE);
}

template <class T> const T *row_of(const Strided &rows, int64_t row, int64_t head) {
    return reinterpret_cast<const T *>(rows.address) + row * rows.row + head * rows.head;
}

inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char *>(from) + at, 0, 2);
}

template <class Ops> void begin(const Attention &a, const AttentionTask &task, const Scratch &scratch) {
    const int64_t group = a.group(), width = a.cache.width;
    for (int64_t h = 0; h < task.heads; h++)
        for (int64_t m = 0; m < scratch.rows; m++) {
            const int64_t head = (task.head + h) * group + m % group;
            Ops::pack(row_of<typename Ops::Element>(a.query, task.row + m / group, head),
                      scratch.query(h) + m * width, width);
            for (int64_t i = 0; i < width; i++) scratch.seen(h)[m * width + i] = 0;
            for (int64_t i = 0; i < TILE; i++) scratch.sums(h)[m * TILE + i] = 0;
            scratch.most(h)[m] = a.sinks ? a.sinks[head] : NOTHING;
            if (a.sinks) scratch.sums(h)[m * TILE] = 1;
        }
}

// One tile of `count` keys of every head, of which the first is at position `at`; none from `end` on is weighed. Heads
// go through each step together: what one waits for, another computes. `ahead` elements on lies what to ask for now.
template <class Ops>
void tile(const Attention &a, const AttentionTask &task, const Scratch &scratch, const typename Ops::Element *keys,
          const typename Ops::Element *values, int64_t ahead, int64_t at, int64_t count, int64_t end) {
    const int64_t group = a.group(), width = a.cache.width, step = a.cache.head_size();
    for (int64_t h = 0; h < task.heads; h++)
        Ops::scores(scratch.query(h), scratch.rows, width, keys + h * step, ahead, count, scratch.scores(h),
                    scratch.turned());
    for (int64_t h = 0; h < task.heads; h++)
        for (int64_t m = 0; m < scratch.rows; m++) {
            const int64_t row = task.row + m / group, high = a.end[row] - at;
            const float shrunk =
                Ops::softmax(scratch.scores(h) + m * TILE, a.first[row] - at, high < count ? high : count, a.scale,
                             a.softcap, scratch.most(h)[m], scratch.sums(h) + m * TILE);
            if (shrunk != 1) Ops::scaled(scratch.seen(h) + m * width, width, shrunk);
        }
    const int64_t weighed = count < end - at ? count : end - at;
    for (int64_t h = 0; h < task.heads; h++)
        Ops::weigh(scratch.scores(h), scratch.rows, width, values + h * step, ahead, weighed, scratch.seen(h));
}

template <class Ops> void finish(const Attention &a, const AttentionTask &task, const Scratch &scratch) {
    using T = typename Ops::Element;
    const int64_t group = a.group(), width = a.cache.width;
    for (int64_t h = 0; h < task.heads; h++)
        for (int64_t m = 0; m < scratch.rows; m++) {
            T *out = const_cast<T *>(row_of<T>(a.out, task.row + m / group, (task.head + h) * group + m % group));
            Ops::store(out, scratch.seen(h) + m * width, width, scratch.sums(h) + m * TILE);
        }
}

// How many elements lie between a block and the one that is read AHEAD blocks after it, which after the last, before
// `end`, is one of the next task's; 0: nothing to ask for.
inline int64_t ahead_of(const Attention &a, const AttentionTask &task, const AttentionTask *next, int64_t block,
                        int64_t end) {
    const PagedCache &cache = a.cache;
    const int64_t beyond = block + AHEAD - (end + cache.height - 1) / cache.height;
    if (beyond < 0) return (task.table[block + AHEAD] - task.table[block]) * cache.block_size();
    if (next == nullptr) return 0;
    const int64_t there = a.first[next->row] / cache.height + beyond;
    if (there * cache.height >= a.end[next->row]) return 0;
    return (next->table[there] - task.table[block]) * cache.block_size() + (next->head - task.head) * cache.head_size();
}

template <class Ops>
void attend(const Attention &a, const AttentionTask &task, const AttentionTask *next, float *memory) {
    using T = typename Ops::Element;
    const PagedCache &cache = a.cache;
    const Scratch scratch{task.rows * a.group(), cache.width, memory};
    begin<Ops>(a, task, scratch);
    int64_t first = a.first[task.row], end = a.end[task.row];
    for (int64_t row = task.row + 1; row < task.row + task.rows; row++) {
        if (a.first[row] < first) first = a.first[row];
        if (a.end[row] > end) end = a.end[row];
    }
    const int64_t head_size = cache.head_size(), values = cache.heads * head_size;
    const auto *layer = reinterpret_cast<const T *>(cache.address) + a.layer * cache.layer_size();
    layer += task.head * head_size;
    for (int64_t block = first / cache.height; block * cache.height < end; block++) {
        const T *here = layer + task.table[block] * cache.block_size();
        const int64_t ahead = ahead_of(a, task, next, block, end);
        for (int64_t within = 0; within < cache.height; within += TILE) {
            const int64_t at = block * cache.height + within;
            const int64_t count = cache.height - within < TILE ? cache.height - within : TILE;
            if (at >= end || at + count <= first) continue;
            const T *keys = here + within * cache.width;
            tile<Ops>(a, task, scratch, keys, keys + values, ahead, at, count, end);
        }
    }
    finish<Ops>(a, task, scratch);
}

template <class Ops> const AttentionKernel *kernel() {
    static constexpr AttentionKernel found{attend<Ops>, scratch, QUERIES, 1};
    return &found;
}

} // namespace
} // namespace trinity
