#include "simulation/frontend.hpp"

#include <functional>

namespace trinity::sim {

Frontend::Frontend(World &world)
    : w(world), router_(world, 0), entries_(world.work.requests.size()),
      deadlines_(world.work.requests.size(), FOREVER) {}

void Frontend::handle(const Event &event) {
    switch (event.kind) {
    case Kind::emit: return emitted(event.count);
    case Kind::finished: return finished(event);
    case Kind::tick: return expire();
    default: return; // Moved: its route matters only where an instance is lost
    }
}

bool Frontend::refuses(const Request &request) const {
    if (waiting_ >= w.options.max_waiting) return true;
    if (request.items && !router_.any(ENCODES, request)) return true;
    return !router_.any(PREFILLS, request) || (request.max_tokens > 1 && !router_.any(DECODES, request));
}

void Frontend::submit(int32_t number) {
    const Request &request = w.work.requests[number];
    ++taken_;
    if (refuses(request)) {
        w.result.reasons[number] = uint8_t(Reason::error);
        w.result.ended = w.now;
        w.tell(FRONTEND, Told::end, number, int32_t(Reason::error));
        return;
    }
    Entry &entry = entries_[number];
    entry = {};
    entry.alive = true;
    entry.first = int16_t(router_.choose(request.items ? ENCODES : PREFILLS, request));
    entry.times = w.result.times.data() + request.first_time;
    w.trails[number].number = taken_;
    w.trails[number].deadline_s = request.deadline_s;
    ++entries_alive_;
    ++waiting_;
    if (request.deadline_s < FOREVER) {
        deadlines_[number] = w.now + request.deadline_s;
        due_.push_back({deadlines_[number], request.rank, number});
        std::push_heap(due_.begin(), due_.end(), std::greater<>());
    }
    w.send(entry.first, Kind::submit, number);
}

void Frontend::emitted(int32_t count) {
    for (; count; --count) {
        const int32_t number = w.lists.pop();
        Entry &entry = entries_[number];
        if (!entry.alive || entry.aborted != Reason::none) continue;
        if (!entry.delivered) --waiting_;
        w.tell(FRONTEND, Told::deliver, number, entry.delivered);
        entry.times[entry.delivered++] = w.now;
        if (entry.finished != Reason::none) settle(number);
    }
}

void Frontend::finished(const Event &event) {
    Entry &entry = entries_[event.request];
    if (!entry.alive) return forget(event.request, w.trails[event.request].at[0], event.extra & 3, false);
    if (entry.finished == Reason::none) {
        entry.finished = Reason(event.what);
        entry.count = event.count;
        entry.hops = event.extra & 3;
        entry.late = event.extra & 4;
    }
    settle(event.request);
}

void Frontend::abort(int32_t number, Reason reason) {
    Entry &entry = entries_[number];
    if (!entry.alive || entry.aborted != Reason::none || entry.ended) return;
    entry.aborted = reason;
    w.send(entry.first, Kind::cancel, number);
    end(number, reason);
    settle(number);
}

void Frontend::pop_due() {
    std::pop_heap(due_.begin(), due_.end(), std::greater<>());
    due_.pop_back();
}

double Frontend::next_timer() {
    while (!due_.empty()) {
        const Due &next = due_.front();
        if (entries_[next.request].alive && deadlines_[next.request] == next.time) return next.time;
        pop_due();
    }
    return FOREVER;
}

void Frontend::expire() {
    while (next_timer() <= w.now) {
        const int32_t number = due_.front().request;
        pop_due();
        abort(number, Reason::deadline);
    }
}

void Frontend::settle(int32_t number) {
    Entry &entry = entries_[number];
    const bool aborted = entry.aborted != Reason::none;
    if (entry.finished == Reason::none || (!aborted && entry.delivered < entry.count)) return;
    if (entry.finished == Reason::preempted && !aborted) return again(number);
    if (!entry.ended) end(number, aborted ? entry.aborted : entry.late ? Reason::deadline : entry.finished);
    forget(number, entry.first, entry.hops, true);
    entry.alive = false;
    --entries_alive_;
}

// It was preempted where it cannot be recomputed: from its first stage on, with its tokens so far.
void Frontend::again(int32_t number) {
    Entry &entry = entries_[number];
    Trail &trail = w.trails[number];
    const Request &request = w.work.requests[number];
    if (past_.empty()) past_.resize(entries_.size());
    past_[number].insert(past_[number].end(), trail.at, trail.at + entry.hops);
    Trail fresh;
    fresh.number = trail.number;
    fresh.attempt = trail.attempt + 1;
    if (request.deadline_s < FOREVER) fresh.deadline_s = deadlines_[number] - w.now;
    trail = fresh;
    entry.first = int16_t(router_.choose(request.items ? ENCODES : PREFILLS, request));
    entry.finished = Reason::none;
    w.send(entry.first, Kind::submit, number, 0, entry.delivered);
}

// Tell each instance that it has been on, once.
void Frontend::forget(int32_t number, int first, int hops, bool before) {
    told_.clear();
    const auto tell = [&](int16_t name) {
        if (std::find(told_.begin(), told_.end(), name) != told_.end()) return;
        told_.push_back(name);
        w.send(name, Kind::forget, number);
    };
    tell(int16_t(first));
    if (before && !past_.empty())
        for (int16_t name : past_[number]) tell(name);
    for (int hop = 0; hop < hops; ++hop) tell(w.trails[number].at[hop]);
}

void Frontend::end(int32_t number, Reason reason) {
    Entry &entry = entries_[number];
    entry.ended = true;
    if (!entry.delivered) --waiting_;
    w.result.reasons[number] = uint8_t(reason);
    w.result.counts[number] = entry.delivered;
    w.result.ended = w.now;
    w.tell(FRONTEND, Told::end, number, int32_t(reason));
}

} // namespace trinity::sim
