#include "simulation/engine.hpp"

namespace trinity::sim {

namespace {

// Whether nobody gives up, or may have to.
bool patient(const Workload &work, const std::vector<Act> &acts) {
    const auto aborts = [](const Act &act) { return act.aborts; };
    const auto timed = [](const Request &request) { return request.deadline_s < FOREVER; };
    return std::none_of(acts.begin(), acts.end(), aborts) &&
           std::none_of(work.requests.begin(), work.requests.end(), timed);
}

} // namespace

Engine::Engine(const Workload &work, const std::vector<Act> &acts, const std::vector<Setup> &setups,
               const Options &options, bool logged)
    : world(work, setups, options, logged, patient(work, acts)), acts_(acts), frontend_(world),
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

const double *Engine::later(size_t request) const {
    if (!world.by_step) return world.result.times.data() + world.work.requests[request].first_time + 1;
    const Stretch &stretch = world.stretches[request];
    return instances_[stretch.instance].decode_times().data() + stretch.first;
}

void Engine::write_times() {
    if (!world.by_step || world.work.requests.empty()) return;
    const Request &last = world.work.requests.back();
    world.result.times.resize(last.first_time + last.outputs);
    for (size_t at = 0; at < world.work.requests.size(); ++at)
        if (completed(at)) {
            double *times = world.result.times.data() + world.work.requests[at].first_time;
            *times = world.firsts[at];
            std::copy_n(later(at), world.stretches[at].count, times + 1);
        }
}

Judgement Engine::judged(const double *arrivals, double ttft, double tbt) const {
    std::vector<std::vector<int32_t>> short_gaps(instances_.size()); // of each instance's steps up to each
    for (size_t at = 0; at < instances_.size(); ++at)
        short_gaps[at] = counted_gaps(instances_[at].decode_times(), tbt);
    Judgement found;
    for (size_t at = 0; at < world.work.requests.size(); ++at) {
        if (!completed(at)) continue;
        const double *times = later(at);
        if (!world.by_step) {
            found.add(times - 1, world.result.counts[at], arrivals[at], ttft, tbt);
            continue;
        }
        const Stretch &own = world.stretches[at];
        int64_t below = 0;
        if (own.count) {
            const std::vector<int32_t> &counts = short_gaps[own.instance];
            below = (times[0] - world.firsts[at] < tbt) + counts[own.first + own.count - 1] - counts[own.first];
        }
        found.add({world.firsts[at], times, own.count, below}, arrivals[at], ttft, tbt);
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
