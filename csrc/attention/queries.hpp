// What kernels of many rows share whatever their vectors are: where a task's queries, keys and values lie.
// Included once for each instruction set: all has internal linkage.
#pragma once

#include "attention/attention.hpp"

namespace trinity {
namespace {

constexpr int64_t WIDEST = 512; // elements of a head
constexpr float NOTHING = -__builtin_inff();

inline int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
inline int64_t most_of(int64_t one, int64_t other) { return one > other ? one : other; }
inline int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// The heads of a tile's queries in `from`, LANES of them; nothing beyond `rows`.
template <class T, int64_t LANES> struct Queries {
    T *at[LANES] = {};
    int64_t row[LANES], head[LANES], count;

    Queries(const Attention &a, const AttentionTask &task, const Strided &from, int64_t tile, int64_t rows)
        : count(least_of(rows - tile * LANES, LANES)) {
        const int64_t group = a.group(), first = tile * LANES;
        int64_t down = task.row + first / group, across = first % group;
        for (int64_t lane = 0; lane < count; lane++) {
            row[lane] = down;
            head[lane] = task.head * group + across;
            at[lane] = reinterpret_cast<T *>(from.address) + down * from.row + head[lane] * from.head;
            if (++across == group) across = 0, down++;
        }
    }
};

// What a tile's queries see, their largest scores so far in units of `unit`, and the sums of their weights.
template <class T, int64_t LANES>
void begin_lanes(const Attention &a, const Queries<T, LANES> &lanes, float unit, int32_t *first, int32_t *end, float *most,
                 float *sums) {
    for (int64_t lane = 0; lane < LANES; lane++) {
        const bool there = lane < lanes.count;
        first[lane] = there ? static_cast<int32_t>(a.first[lanes.row[lane]]) : INT32_MAX;
        end[lane] = there ? static_cast<int32_t>(a.end[lanes.row[lane]]) : 0;
        most[lane] = there && a.sinks ? a.sinks[lanes.head[lane]] * unit : NOTHING;
        sums[lane] = there && a.sinks ? 1 : 0;
    }
}

// Of its request's positions, those [first, end) that some row of a task sees.
struct Span {
    int64_t first, end;

    Span(const Attention &a, const AttentionTask &task) : first(a.first[task.row]), end(a.end[task.row]) {
        for (int64_t row = task.row + 1; row < task.row + task.rows; row++) {
            first = least_of(first, a.first[row]);
            end = most_of(end, a.end[row]);
        }
    }
};

// Where keys [at, at + count) of a request and their values lie.
template <class T>
void locate(const Attention &a, const AttentionTask &task, int64_t at, int64_t count, const T **keys,
            const T **values) {
    const int64_t height = a.cache.height;
    const auto *key = reinterpret_cast<const T *>(a.held.keys);
    const auto *value = reinterpret_cast<const T *>(a.held.values);
    int64_t block = at / height, offset = at % height;
    for (int64_t i = 0; i < count; i++) {
        const int64_t place = task.table[block] * a.held.block + task.head * a.held.head + offset * a.held.row;
        keys[i] = key + place;
        values[i] = value + place;
        if (++offset == height) offset = 0, block++;
    }
}

} // namespace
} // namespace trinity
