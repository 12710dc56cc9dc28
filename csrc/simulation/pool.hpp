// Blocks of one kind on one instance: core/block_pool.py. Which number a block has decides nothing, so that free ones
// are a stack here and runs of consecutive numbers there. What is kept of a block is made when it is first used.
#pragma once

#include "simulation/map.hpp"

#include <cstdint>
#include <vector>

namespace trinity::sim {

class Pool {
  public:
    explicit Pool(int32_t size) : size_(size), available_(size) {}

    int32_t size() const { return size_; }
    int32_t available() const { return available_; }

    // Only counts: of blocks that nobody shares and nothing keeps.
    void take(int32_t count) { available_ -= count; }
    void give(int32_t count) { available_ += count; }

    // The block with this content, or -1.
    int32_t find(int32_t key) const { return block_.find(key); }
    bool is_cached(int32_t block) const { return blocks_[block].references == 0; } // of one that find() has named

    void allocate(int32_t count, int32_t *blocks) {
        for (int32_t left = count - int32_t(free_.size()) - (size_ - used()); left > 0; --left) evict();
        for (int32_t at = 0; at < count; ++at) {
            if (free_.empty()) {
                blocks_.emplace_back();
                free_.push_back(used());
            }
            blocks[at] = free_.back();
            free_.pop_back();
            blocks_[blocks[at]].references = 1;
        }
        available_ -= count;
    }

    void hold(const int32_t *blocks, int32_t count) {
        for (int32_t at = 0; at < count; ++at)
            if (blocks_[blocks[at]].references++ == 0) {
                unlink(blocks[at]);
                --available_;
            }
    }

    void drop(const int32_t *blocks, int32_t count) {
        for (int32_t at = 0; at < count; ++at)
            if (--blocks_[blocks[at]].references == 0) retire(blocks[at]);
    }

    // The first block published under a key keeps it.
    void publish(int32_t block, int32_t key) {
        if (blocks_[block].key != NONE || block_.find(key) != NONE) return;
        block_.insert(key, block);
        blocks_[block].key = key;
    }

  private:
    static constexpr int32_t NONE = -1, ENDS = 0; // the ends of the list of cached blocks; blocks count from 1

    struct Block {
        int32_t references = 0, key = NONE, older = ENDS, newer = ENDS;
    };

    int32_t used() const { return int32_t(blocks_.size()) - 1; }

    void retire(int32_t block) {
        ++available_;
        if (blocks_[block].key == NONE) {
            free_.push_back(block);
            return;
        }
        const int32_t newest = blocks_[ENDS].older;
        blocks_[block].older = newest;
        blocks_[block].newer = ENDS;
        blocks_[newest].newer = blocks_[ENDS].older = block;
    }

    void unlink(int32_t block) {
        const Block &gone = blocks_[block];
        blocks_[gone.older].newer = gone.newer;
        blocks_[gone.newer].older = gone.older;
    }

    void evict() {
        const int32_t block = blocks_[ENDS].newer; // the least recently used
        unlink(block);
        block_.erase(blocks_[block].key);
        blocks_[block].key = NONE;
        free_.push_back(block);
    }

    int32_t size_, available_;
    std::vector<Block> blocks_ = std::vector<Block>(1);
    std::vector<int32_t> free_;
    Map block_; // by key
};

} // namespace trinity::sim
