// One replay: simulation/event_loop.py with what simulation/cluster_model.py says of messages, steps and pulls.
#pragma once

#include "simulation/frontend.hpp"
#include "simulation/instance.hpp"
#include "simulation/judge.hpp"
#include "simulation/world.hpp"

namespace trinity::sim {

class Engine {
  public:
    // `acts` by time; equal ones in the order in which the user did them.
    Engine(const Workload &work, const std::vector<Act> &acts, const std::vector<Setup> &setups, const Options &options,
           bool logged);
    void run(); // until nothing is under way any more
    Judgement judged(const double *arrivals, double ttft, double tbt) const; // by the time at which each was to come
    World world;

  private:
    bool next(Event &event);
    void dispatch(const Event &event);
    void arm(const Event &event);
    bool over() const;
    bool completed(size_t request) const;

    const std::vector<Act> &acts_;
    Frontend frontend_;
    std::vector<Instance> instances_;
    size_t acted_ = 0; // of acts_
    bool timed_ = false;
    size_t timers_ = 0;       // Ticks of instances on their way
    std::vector<double> due_; // when each core's next Tick comes, the front end's last
};

} // namespace trinity::sim
