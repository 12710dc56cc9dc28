// A request comes to an instance, waits there, ends or goes on: admission.py, lifecycle.py, instance_core.py.
#include "simulation/instance.hpp"

#include <functional>

namespace trinity::sim {

Instance::Instance(World &world, int number)
    : w(world), setup_(world.setups[number]), self_(number), grows_(world.options.optimistic && setup_.roles & DECODES),
      router_(world, setup_.number), image_(setup_.image_blocks), kv_(setup_.kv_blocks) {
    lanes_.resize(setup_.two_lanes ? 2 : 1);
    lanes_.back().stages = PREFILLS | DECODES; // the language lane, or the joint one
    lanes_.front().stages |= ENCODES;
}

void Instance::handle(const Event &event) {
    switch (event.kind) {
    case Kind::submit: submit(event); break;
    case Kind::cancel: cancel(event.request); break;
    case Kind::forget: forget(event.request); break;
    case Kind::offer: offered(event); break;
    case Kind::ready: ready(event); break;
    case Kind::commit: committed(event); break;
    case Kind::withdraw: withdrawn(event); break;
    case Kind::release: released(event); break;
    case Kind::stepped: stepped(lanes_[event.what]); break;
    case Kind::pulled: pulled(event); break;
    case Kind::tick: expire(); break;
    default: break;
    }
    pump();
    int32_t *peak = &w.result.peak[2 * self_];
    peak[0] = std::max(peak[0], image_.size() - image_.available());
    peak[1] = std::max(peak[1], kv_.size() - kv_.available());
    w.tell(self_, Told::left, event.request, image_.available(), kv_.available());
}

bool Instance::idle() const {
    const auto runs = [](const Lane &lane) { return lane.running; };
    return !requests_ && !leases_ && std::none_of(lanes_.begin(), lanes_.end(), runs);
}

void Instance::submit(const Event &event) {
    State &state = w.new_state(self_, event.request, Phase::image_queue);
    Trail &way = trail(state);
    way.at[0] = int16_t(self_);
    way.state[0] = state.self;
    way.hops = 1;
    ++requests_;
    const Request &asked = request(state);
    w.arrive(self_, asked.items ? ENCODES : PREFILLS, asked);
    state.tokens = event.count;
    state.text = asked.prompt + state.tokens;
    set_deadline(state, way.deadline_s);
    state.media = true;
    for (int32_t item : asked.range()) slot(state, item) = {};
    state.skip_media = asked.items && has(PREFILLS) && !needs_media(state);
    if (!asked.items || state.skip_media)
        queue_prefill(state);
    else
        wait_in(encode_queue_, Place::encode_queue, state);
}

// Behind all others, or where the order of the rules says; ahead: of all, or of equal ones. The preempted by their age.
void Instance::wait_in(Queue &queue, Place place, State &state, bool ahead) {
    state.place = place;
    const bool ordered = place == Place::encode_queue || place == Place::prefill_queue;
    const Order order = ordered ? setup_.rules.order : Order::fcfs;
    const auto key = [&](int32_t number) {
        const State &each = w.states[number];
        if (place == Place::preempted) return double(age(each));
        if (order == Order::deadline) return each.deadline;
        return double(place == Place::encode_queue ? request(each).media_tokens : request(each).prompt);
    };
    const double own = key(state.self);
    if (order == Order::fcfs && place != Place::preempted)
        return ahead ? queue.push_front(state.self) : queue.push(state.self);
    queue.insert(state.self, [&](int32_t number) { return ahead ? key(number) >= own : key(number) > own; });
}

void Instance::enter(State &state, Phase phase) {
    image_pulls_ += (phase == Phase::image_pull);
    kv_pulls_ += (phase == Phase::kv_pull);
    state.phase = phase;
}

void Instance::queue_prefill(State &state) {
    enter(state, Phase::kv_queue);
    if (state.preempted || trail(state).attempt)
        wait_in(preempted_, Place::preempted, state);
    else if (state.incoming != NO_BLOCKS)
        wait_in(migrated_, Place::migrated, state);
    else
        wait_in(prefill_queue_, Place::prefill_queue, state);
}

void Instance::start_decoding(State &state) {
    enter(state, Phase::decoding);
    state.place = Place::decoding;
    const Request &asked = request(state);
    const int32_t left = asked.outputs - state.tokens;
    const int32_t limit = asked.prompt + asked.outputs - state.kv * w.options.kv_block;
    decoding_.push_back({state.self, state.request, left, limit, false, false});
    decoding_tokens_ += asked.prompt + state.tokens;
    ++decoders_;
}

void Instance::cancel(int32_t number) {
    if (State *state = find(number)) return call_off(*state);
    const int hop = find_hop(number);
    if (hop >= 0 && w.trails[number].tombstone[hop]) w.send(w.trails[number].at[hop + 1], Kind::cancel, number);
}

void Instance::forget(int32_t number) {
    State *state = find(number);
    const int hop = find_hop(number);
    if (hop >= 0) w.trails[number].tombstone[hop] = false;
    if (state) call_off(*state);
}

void Instance::call_off(State &state) {
    if (state.outgoing != NO_BLOCKS && trail(state).leased[state.outgoing])
        w.send(trail(state).at[state.hop + 1], Kind::cancel, state.request);
    end(state, Reason::cancelled);
}

// No further step or transfer includes the request; it is gone once those in flight have ended.
void Instance::end(State &state, Reason reason, Cause cause) {
    if (state.ending != Reason::none) return;
    state.ending = reason;
    state.cause = cause;
    ++leaving_;
    leave(state);
    conclude_if_quiet(state);
}

void Instance::conclude_if_quiet(State &state) {
    if (state.ending != Reason::none && !state.pulls && !state.in_step) conclude(state);
}

void Instance::conclude(State &state) {
    if (state.incoming != NO_BLOCKS && !state.released) release(state);
    const bool late = state.cause == Cause::late;
    if (state.outgoing == NO_BLOCKS) {
        const int16_t extra = int16_t((state.hop + 1) | (late ? 4 : 0));
        w.send(FRONTEND, Kind::finished, state.request, uint8_t(state.ending), state.tokens, extra);
    } else if (state.ending == Reason::error && trail(state).leased[state.outgoing]) {
        w.send(trail(state).at[state.hop + 1], Kind::withdraw, state.request, state.outgoing, late);
    }
    --leaving_;
    drop_all(state);
}

// It is gone from here: blocks, rows, and the state itself.
void Instance::drop_all(State &state) {
    drop_media(state);
    if (state.kv && w.options.prefix_cache)
        kv_.drop(kv_of(state), state.kv);
    else if (state.kv)
        kv_.give(state.kv - (state.outgoing == KV && trail(state).leased[KV] ? trail(state).leased_kv : 0));
    if (state.opened) w.tell(self_, Told::close, state.request);
    trail(state).state[state.hop] = -1;
    --requests_;
    state.ending = Reason::none; // who still has its number finds nothing to end
    w.drop_state(self_, state);
}

void Instance::drop_media(State &state) {
    if (!state.media) return;
    const Request &asked = request(state);
    for (int32_t item : asked.range()) {
        const int32_t content = w.work.items[item].content;
        if (const int32_t at = has(ENCODES) ? pending_of_.find(content) : Map::NONE; at != Map::NONE) {
            std::vector<EncodeRow> &rows = pending_[at].providers;
            const auto mine = [&](const EncodeRow &row) { return row.state == state.self && row.item == item; };
            rows.erase(std::remove_if(rows.begin(), rows.end(), mine), rows.end());
            if (rows.empty()) {
                pending_of_.erase(content);
                unused_pending_.push_back(at);
            }
        }
        Slot &here = slot(state, item);
        if (here.held) image_.drop(image_of(state, item), w.work.items[item].blocks);
        here.held = here.ready = false;
    }
}

void Instance::leave(State &state) {
    switch (state.place) {
    case Place::encode_queue: encode_queue_.remove(state.self); break;
    case Place::prefill_queue: prefill_queue_.remove(state.self); break;
    case Place::migrated: migrated_.remove(state.self); break;
    case Place::preempted: preempted_.remove(state.self); break;
    case Place::image_offers: image_offers_.remove(state.self); break;
    case Place::kv_offers: kv_offers_.remove(state.self); break;
    case Place::encoding: encoding_.remove(state.self); break;
    case Place::prefilling: prefilling_.remove(state.self); break;
    case Place::decoding: leave_decoding(state); break;
    case Place::nowhere: break;
    }
    state.place = Place::nowhere;
}

void Instance::leave_decoding(State &state) {
    const auto mine = [&](const Row &row) { return row.state == state.self; };
    const auto row = std::find_if(decoding_.begin(), decoding_.end(), mine);
    Lane &lane = lanes_.back();
    const bool within = row - decoding_.begin() < lane.rows;
    state.tokens = request(state).outputs - row->left;
    decoding_tokens_ -= request(state).prompt + state.tokens;
    --decoders_;
    if (within && !row->paused) {
        row->gone = state.in_step = true;
        return;
    }
    lane.rows -= within;
    paused_ -= row->paused;
    decoding_.erase(row);
}

void Instance::set_deadline(State &state, double seconds) {
    if (seconds == FOREVER) return;
    state.deadline = w.now + seconds;
    deadlines_.push_back({state.deadline, request(state).rank, state.request});
    std::push_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
}

double Instance::next_timer() {
    while (!deadlines_.empty()) {
        const Due due = deadlines_.front();
        const State *state = find(due.request);
        if (state && state->deadline == due.time && state->ending == Reason::none) return due.time;
        std::pop_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
        deadlines_.pop_back();
    }
    return FOREVER;
}

void Instance::expire() {
    while (!deadlines_.empty() && deadlines_.front().time <= w.now) {
        const Due due = deadlines_.front();
        std::pop_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
        deadlines_.pop_back();
        State *state = find(due.request);
        if (state && state->deadline == due.time) end(*state, Reason::error, Cause::late);
    }
}

} // namespace trinity::sim
