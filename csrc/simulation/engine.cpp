#include "simulation/engine.hpp"

namespace trinity::sim {

Engine::Engine(const Workload &work, const std::vector<Act> &acts, const std::vector<Setup> &setups,
               const Options &options, bool logged)
    : world(work, setups, options, logged), acts_(acts), frontend_(world),
      due_(setups.size() + 1, FOREVER) {
    instances_.reserve(setups.size());
    for (size_t number = 0; number < setups.size(); ++number) instances_.emplace_back(world, int(number));
    world.sequence = work.requests.size() + acts.size(); // what the user does has the first numbers
    for (const Request &request : work.requests) timed_ = timed_ || request.deadline_s < FOREVER;
}

void Engine::run() {
    Event event;
    while (!over() && next(event)) {
        world.now = event.time;
        if (event.kind == Kind::stepped && !instances_[event.to].is_end(event)) continue;
        ++world.result.events;
        world.tell(event.to, Told(int32_t(event.kind)), event.request, event.what, event.count);
        dispatch(event);
        if (timed_) arm(event);
    }
    world.result.unsettled = !frontend_.idle();
    for (const Instance &instance : instances_) world.result.unsettled += !instance.idle() || instance.holds();
}

bool Engine::completed(size_t request) const {
    const Reason reason = Reason(world.result.reasons[request]);
    return (reason == Reason::length || reason == Reason::stop) && world.result.counts[request];
}

Judgement Engine::judged(const double *arrivals, double ttft, double tbt) const {
    Judgement found;
    for (size_t at = 0; at < world.work.requests.size(); ++at)
        if (completed(at)) {
            const double *times = world.result.times.data() + world.work.requests[at].first_time;
            found.add(times, world.result.counts[at], arrivals[at], ttft, tbt);
        }
    return found;
}

// The earliest of what the user does, messages, and all that comes at times of its own; of equal ones the first posted.
bool Engine::next(Event &event) {
    const bool acts = acted_ < acts_.size();
    const bool sent = !world.messages.empty(), timers = !world.heap.empty();
    if (sent && (!timers || world.messages.front().before(world.heap.top()))) {
        if (!acts || world.messages.front().time < acts_[acted_].time) {
            event = world.messages.pop();
            return true;
        }
    } else if (timers && (!acts || world.heap.top().time < acts_[acted_].time)) {
        event = world.heap.pop();
        return true;
    }
    if (!acts) return false;
    const Act &act = acts_[acted_++];
    event = {act.time, 0, act.request, 0, FRONTEND, 0, act.aborts ? Kind::abort : Kind::submit, 0};
    return true;
}

void Engine::dispatch(const Event &event) {
    if (event.to != FRONTEND) return instances_[event.to].handle(event);
    if (event.kind == Kind::submit) return frontend_.submit(event.request);
    if (event.kind == Kind::abort) return frontend_.abort(event.request, Reason::cancelled);
    frontend_.handle(event);
}

void Engine::arm(const Event &event) {
    const size_t place = event.to == FRONTEND ? instances_.size() : size_t(event.to);
    if (event.kind == Kind::tick && world.now >= due_[place]) due_[place] = FOREVER;
    timers_ -= event.kind == Kind::tick && event.to != FRONTEND;
    const double due = event.to == FRONTEND ? frontend_.next_timer() : instances_[place].next_timer();
    if (due >= due_[place]) return;
    due_[place] = due;
    timers_ += event.to != FRONTEND;
    world.post(std::max(due, world.now), event.to, Kind::tick, -1);
}

// Where there are deadlines, all that is left may be timers of instances, for requests that have ended.
bool Engine::over() const {
    if (acted_ < acts_.size() || !world.messages.empty() || world.heap.size() > timers_) return false;
    const auto idle = [](const Instance &instance) { return instance.idle(); };
    return world.heap.empty() || (frontend_.idle() && std::all_of(instances_.begin(), instances_.end(), idle));
}

} // namespace trinity::sim
