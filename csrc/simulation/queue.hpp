// Queues of the twin: what waits in order, what is on its way, and what comes at a time of its own.
#pragma once

#include "simulation/types.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace trinity::sim {

// First in, first out, in a buffer that grows to the most that were ever in it.
template <class T> class Ring {
  public:
    bool empty() const { return first_ == last_; }
    const T &front() const { return buffer_[first_ & mask_]; }
    T &at(uint64_t number) { return buffer_[number & mask_]; } // of one that is still in
    uint64_t pushed() const { return last_; }

    void push(const T &value) {
        if (last_ - first_ == buffer_.size()) grow();
        buffer_[last_++ & mask_] = value;
    }

    void make_room(size_t count) { // for so many of put()
        while (last_ - first_ + count > buffer_.size()) grow();
    }
    void put(const T &value) { buffer_[last_++ & mask_] = value; }

    T pop() { return buffer_[first_++ & mask_]; }

  private:
    void grow() {
        std::vector<T> larger(std::max<size_t>(64, 2 * buffer_.size()));
        const uint64_t mask = larger.size() - 1;
        for (uint64_t at = first_; at != last_; ++at) larger[at & mask] = buffer_[at & mask_];
        buffer_.swap(larger);
        mask_ = mask;
    }

    std::vector<T> buffer_;
    uint64_t first_ = 0, last_ = 0, mask_ = 0;
};

// Requests in order, of which any may leave. Most leave at the front.
class Queue {
  public:
    bool empty() const { return head_ == items_.size(); }
    size_t size() const { return items_.size() - head_; }
    const int32_t *begin() const { return items_.data() + head_; }
    const int32_t *end() const { return items_.data() + items_.size(); }
    int32_t front() const { return items_[head_]; }
    void push(int32_t request) { items_.push_back(request); }

    // Behind those that `later(other)` does not hold for, so that the queue stays sorted and equals keep their order.
    template <class Later> void insert(int32_t request, Later later) {
        const auto first = items_.begin() + head_;
        items_.insert(std::partition_point(first, items_.end(), [&](int32_t other) { return !later(other); }), request);
    }

    void push_front(int32_t request) { items_.insert(items_.begin() + head_, request); }

    void remove(int32_t request) {
        if (items_[head_] != request) {
            items_.erase(std::find(items_.begin() + head_, items_.end(), request));
        } else if (++head_ > 32 && 2 * head_ > items_.size()) {
            items_.erase(items_.begin(), items_.begin() + head_);
            head_ = 0;
        }
    }

  private:
    std::vector<int32_t> items_;
    size_t head_ = 0;
};

// Earliest first, of equal ones the one posted first.
class Heap {
  public:
    bool empty() const { return events_.empty(); }
    size_t size() const { return events_.size(); }
    const Event &top() const { return events_.front(); }

    void push(const Event &event) {
        events_.push_back(event);
        std::push_heap(events_.begin(), events_.end(), after);
    }

    Event pop() {
        std::pop_heap(events_.begin(), events_.end(), after);
        const Event event = events_.back();
        events_.pop_back();
        return event;
    }

  private:
    static bool after(const Event &one, const Event &other) { return other.before(one); }
    std::vector<Event> events_;
};

// A request's deadline, in a heap with the earliest on top.
struct Due {
    double time;
    int32_t rank, request;

    bool operator>(const Due &other) const {
        return time > other.time || (time == other.time && rank > other.rank);
    }
};

} // namespace trinity::sim
