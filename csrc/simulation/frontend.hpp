// core/frontend/: routes, ends and deadlines. With messages that all take the same time tokens come in order.
#pragma once

#include "simulation/world.hpp"

#include <utility>
#include <vector>

namespace trinity::sim {

class Frontend {
  public:
    explicit Frontend(World &world);
    void submit(int32_t request);
    void abort(int32_t request, Reason reason);
    void handle(const Event &event);
    double next_timer();
    bool idle() const { return entries_alive_ == 0; }

  private:
    struct alignas(32) Entry {
        double *times; // of its tokens
        int32_t delivered, count;
        int16_t first;
        bool alive, ended, late;
        Reason aborted, finished;
        int8_t hops; // instances on its route, as its Finished says
    };

    bool refuses(const Request &request) const;
    void emitted(int32_t count);
    void finished(const Event &event);
    void expire();
    void settle(int32_t request);
    void again(int32_t request);
    void forget(int32_t request, int first, int hops, bool before);
    void end(int32_t request, Reason reason);
    void pop_due();

    World &w;
    Router router_;
    std::vector<Entry> entries_;    // by request
    std::vector<double> deadlines_; // likewise
    std::vector<Due> due_;       // a heap
    int32_t entries_alive_ = 0, waiting_ = 0, taken_ = 0;
    std::vector<std::vector<int16_t>> past_; // by request, once any was sent back: the instances of earlier attempts
    std::vector<int16_t> told_;
};

} // namespace trinity::sim
