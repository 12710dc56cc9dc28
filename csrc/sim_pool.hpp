// Blocks of one kind on one instance: trinity/blocks.py. Which number a block has decides nothing, so that free ones
// are a stack here and runs of consecutive numbers there.
#pragma once

#include <cstdint>
#include <vector>

namespace trinity::sim {

class Pool {
  public:
    // `keys`: how many content keys there are; 0 where nothing is ever cached.
    void reset(int32_t size, int32_t keys) {
        size_ = available_ = size;
        references_.assign(size, 0);
        key_.assign(keys ? size : 0, NONE);
        block_.assign(keys, NONE);
        older_.assign(keys ? size + 1 : 0, size);
        newer_.assign(keys ? size + 1 : 0, size);
        free_.resize(size);
        for (int32_t at = 0; at < size; ++at) free_[at] = size - 1 - at;
    }

    // Only counts: of blocks that nobody shares and nothing keeps, take() and give() are all that is asked.
    void count_only(int32_t size) { size_ = available_ = size; }
    void take(int32_t count) { available_ -= count; }
    void give(int32_t count) { available_ += count; }

    int32_t size() const { return size_; }
    int32_t available() const { return available_; }

    // The block with this content, or -1.
    int32_t find(int32_t key) const { return block_.empty() ? NONE : block_[key]; }
    bool is_cached(int32_t block) const { return references_[block] == 0; } // of a block that find() has named

    void allocate(int32_t count, int32_t *blocks) {
        while (static_cast<int32_t>(free_.size()) < count) evict();
        for (int32_t at = 0; at < count; ++at) {
            blocks[at] = free_.back();
            free_.pop_back();
            references_[blocks[at]] = 1;
        }
        available_ -= count;
    }

    void hold(const int32_t *blocks, int32_t count) {
        for (int32_t at = 0; at < count; ++at)
            if (references_[blocks[at]]++ == 0) {
                unlink(blocks[at]);
                --available_;
            }
    }

    void drop(const int32_t *blocks, int32_t count) {
        for (int32_t at = 0; at < count; ++at)
            if (--references_[blocks[at]] == 0) retire(blocks[at]);
    }

    // The first block published under a key keeps it.
    void publish(int32_t block, int32_t key) {
        if (block_[key] != NONE || key_[block] != NONE) return;
        block_[key] = block;
        key_[block] = key;
    }

  private:
    static constexpr int32_t NONE = -1;

    void retire(int32_t block) {
        ++available_;
        if (key_.empty() || key_[block] == NONE) {
            free_.push_back(block);
            return;
        }
        const int32_t newest = older_[size_]; // the list's ends are at [size]
        older_[block] = newest;
        newer_[block] = size_;
        newer_[newest] = older_[size_] = block;
    }

    void unlink(int32_t block) {
        newer_[older_[block]] = newer_[block];
        older_[newer_[block]] = older_[block];
    }

    void evict() {
        const int32_t block = newer_[size_]; // the least recently used
        unlink(block);
        block_[key_[block]] = NONE;
        key_[block] = NONE;
        free_.push_back(block);
    }

    int32_t size_ = 0, available_ = 0;
    std::vector<int32_t> references_, key_, block_, older_, newer_, free_;
};

} // namespace trinity::sim
