// A map from numbers to numbers, as small as what is in it: an instance sees few of a trace's contents at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trinity::sim {

class Map { // open addressing, linear probing; keys and values are not negative
  public:
    static constexpr int32_t NONE = -1;

    int32_t find(int32_t key) const {
        for (size_t at = home(key); slots_[at].key != NONE; at = next(at))
            if (slots_[at].key == key) return slots_[at].value;
        return NONE;
    }

    void insert(int32_t key, int32_t value) { // of one that is not in
        if (2 * ++count_ > slots_.size()) grow();
        place(key, value);
    }

    void erase(int32_t key) { // of one that is in
        size_t hole = home(key);
        while (slots_[hole].key != key) hole = next(hole);
        for (size_t at = next(hole); slots_[at].key != NONE; at = next(at))
            if (((at - home(slots_[at].key)) & mask_) >= ((at - hole) & mask_)) { // may move back over the hole
                slots_[hole] = slots_[at];
                hole = at;
            }
        slots_[hole].key = NONE;
        --count_;
    }

  private:
    struct Slot {
        int32_t key = NONE, value = NONE;
    };

    size_t home(int32_t key) const { return (uint32_t(key) * 0x9E3779B1u >> 7) & mask_; }
    size_t next(size_t at) const { return (at + 1) & mask_; }

    void place(int32_t key, int32_t value) {
        size_t at = home(key);
        while (slots_[at].key != NONE) at = next(at);
        slots_[at] = {key, value};
    }

    void grow() {
        std::vector<Slot> before(2 * slots_.size());
        before.swap(slots_);
        mask_ = slots_.size() - 1;
        for (const Slot &slot : before)
            if (slot.key != NONE) place(slot.key, slot.value);
    }

    std::vector<Slot> slots_ = std::vector<Slot>(16);
    size_t mask_ = 15, count_ = 0;
};

} // namespace trinity::sim
