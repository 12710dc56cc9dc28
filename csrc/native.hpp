// Copies and digests of paged blocks: plain C++, no Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trinity {

// A pool: `blocks` blocks of `block_bytes` bytes, one after the other.
struct Pool {
    uintptr_t address;
    int64_t blocks;
};

// Of every block, the bytes [offset, offset + length).
struct Within {
    int64_t block_bytes;
    int64_t offset;
    int64_t length;
};

// Copies piece by piece from source blocks to target blocks. Throws std::invalid_argument before a byte moves where a
// number is out of range or a target block is named twice.
void copy_blocks(Pool target, Pool source, const int64_t *to, const int64_t *from, size_t count, Within within,
                 int threads);

// One digest for each block: see blocks/digest.cpp for its definition.
void digest_blocks(Pool source, const int64_t *from, size_t count, Within within, int64_t *out);

void check_within(Within within);
void check_numbers(const char *what, const int64_t *numbers, size_t count, int64_t blocks);

// Runs work(index) for each index below `count`, on the calling thread and at most `threads` - 1 of a pool.
using Work = void (*)(void *state, size_t index);
void run_parallel(size_t count, int threads, Work work, void *state);

} // namespace trinity
