// Both sides of a pull migration: core/migration/.
#include "simulation/instance.hpp"

namespace trinity::sim {

// ---------------------------------------------------------------- the source

bool Instance::may_offer(const State &state) const {
    const Request &asked = request(state);
    bool all = true, any = false;
    for (int32_t item : asked.range()) {
        const bool ready = slot(state, item).ready;
        const int32_t pending = pending_of_.find(w.work.items[item].content);
        all = all && ready;
        any = any || ready || (w.options.early && pending >= 0 && pending_[pending].in_step);
    }
    return w.options.prefetch ? any : all;
}

void Instance::offer_media(State &state) {
    const Request &asked = request(state);
    int32_t ready = 0;
    for (int32_t item : asked.range()) ready += slot(state, item).ready;
    if (state.outgoing == NO_BLOCKS) {
        open_offer(state, PREFILLS, IMAGE);
        for (int32_t at = 0; at < asked.items; ++at)
            if (slot(state, asked.first_item + at).ready) w.lists.push(at);
        if (ready) w.send(trail(state).at[state.hop + 1], Kind::ready, state.request, IMAGE, ready);
    }
    if (ready == asked.items) commit(state);
}

void Instance::offer_kv(State &state) {
    open_offer(state, DECODES, KV);
    w.lists.push(0);
    w.send(trail(state).at[state.hop + 1], Kind::ready, state.request, KV, 1);
    commit(state);
}

// Lease the blocks to an instance with that stage: the offer's own reference.
void Instance::open_offer(State &state, uint8_t stage, Blocks kind) {
    const int target = router_.choose(stage, request(state));
    const Request &asked = request(state);
    Trail &way = trail(state);
    if (kind == IMAGE) {
        for (int32_t item : asked.range())
            image_.hold(image_of(state, item), w.work.items[item].blocks);
    } else if (w.options.prefix_cache) {
        kv_.hold(kv_of(state), text_blocks(state));
    }
    if (kind == KV) {
        way.leased_kv = text_blocks(state);
        way.leased_tail = state.text % w.options.kv_block;
    }
    way.leased[kind] = true;
    way.source[kind] = state.hop;
    ++leases_;
    state.outgoing = kind;
    way.tombstone[state.hop] = true;
    way.at[state.hop + 1] = int16_t(target); // of the one that it will be there
    w.send(target, Kind::offer, state.request, kind, 0, state.hop);
}

// No part will follow. Only the lease and a tombstone stay.
void Instance::commit(State &state) {
    Trail &way = trail(state);
    if (way.deadline_s < FOREVER) way.left_s = state.deadline - w.now;
    w.send(way.at[state.hop + 1], Kind::commit, state.request, state.outgoing, state.tokens);
    leave(state);
    drop_all(state);
}

void Instance::released(const Event &event) {
    const Blocks kind = Blocks(event.what);
    Trail &way = w.trails[event.request];
    if (!way.leased[kind]) return;
    way.leased[kind] = false;
    --leases_;
    const int32_t living = way.state[way.source[kind]];
    State *state = living < 0 ? nullptr : &w.states[living];
    const Request &asked = w.work.requests[event.request];
    if (kind == IMAGE) {
        for (int32_t item : asked.range())
            image_.drop(w.image_blocks[way.source[kind]].data() + w.work.items[item].first_block,
                        w.work.items[item].blocks);
    } else if (w.options.prefix_cache) {
        kv_.drop(w.kv_blocks[0].data() + asked.first_block, way.leased_kv);
    } else if (!state) {
        kv_.give(way.leased_kv);
    }
    if (state) end(*state, Reason::cancelled); // released before the commit: the target gave it up
}

// ---------------------------------------------------------------- the target

void Instance::offered(const Event &event) {
    State &state = w.new_state(self_, event.request, event.what == KV ? Phase::kv_offer : Phase::image_offer);
    Trail &way = trail(state);
    state.hop = int8_t(event.extra + 1);
    way.hops = int8_t(state.hop + 1);
    way.state[state.hop] = state.self;
    state.incoming = Blocks(event.what);
    ++requests_;
    w.send(FRONTEND, Kind::moved, state.request);
    const Request &asked = request(state);
    w.arrive(self_, event.what == KV ? DECODES : PREFILLS, asked);
    state.text = asked.prompt;
    state.media = state.incoming != KV;
    set_deadline(state, way.deadline_s);
    if (state.incoming == KV) return wait_in(kv_offers_, Place::kv_offers, state);
    for (int32_t item : asked.range()) slot(state, item) = {};
    state.skip_media = !needs_media(state);
    if (!state.skip_media) wait_in(image_offers_, Place::image_offers, state);
}

// The request that an offer's message is for, unless it was released.
State *Instance::incoming(const Event &event) {
    State *state = find(event.request);
    return state && state->incoming == event.what && !state->released ? state : nullptr;
}

void Instance::ready(const Event &event) {
    State *state = incoming(event);
    const bool wanted = state && state->ending == Reason::none;
    for (int32_t at = 0; at < event.count; ++at) {
        const int32_t part = w.lists.pop();
        if (!wanted) continue;
        if (event.what == KV)
            state->kv_ready = true;
        else
            slot(*state, request(*state).first_item + part).told = true;
    }
    if (!wanted) return;
    ask(*state);
    complete(*state);
}

void Instance::committed(const Event &event) {
    State *state = incoming(event);
    if (!state || state->ending != Reason::none) return;
    state->committed = true;
    state->tokens = event.count;
    if (event.count && state->incoming == IMAGE) state->text = request(*state).prompt + event.count;
    set_deadline(*state, trail(*state).left_s);
    if (state->skip_media) queue_prefill(*state); // cached KV covers every image: prefill releases or asks
    complete(*state);
}

void Instance::withdrawn(const Event &event) {
    if (State *state = incoming(event)) end(*state, Reason::error, event.count ? Cause::late : Cause::none);
}

// Reserve the whole need of the oldest migration of each kind, as long as it fits.
void Instance::admit_offers() {
    for (Queue *queue : {&image_offers_, &kv_offers_})
        while (!queue->empty()) {
            State &state = w.states[queue->front()];
            if (!(queue == &kv_offers_ ? reserve_kv(state) : reserve_media(state))) break;
            leave(state);
            ask(state);
            complete(state);
        }
}

bool Instance::reserve_media(State &state) {
    if (!w.options.prefetch && (!prefilling_.empty() || !migrated_.empty() || image_pulls_)) return false;
    const Request &asked = request(state);
    int32_t need = 0;
    hits_.clear();
    for (int32_t item : asked.range()) {
        Slot &here = slot(state, item);
        const size_t first = hits_.size();
        here.ready = find_media(item, hits_);
        if (here.ready)
            std::copy(hits_.begin() + first, hits_.end(), image_of(state, item));
        else
            need += w.work.items[item].blocks;
    }
    if (!fits(image_, need)) {
        for (int32_t item : asked.range()) slot(state, item).ready = false;
        return false;
    }
    image_.hold(hits_.data(), int32_t(hits_.size()));
    for (int32_t item : asked.range()) {
        if (!slot(state, item).ready) image_.allocate(w.work.items[item].blocks, image_of(state, item));
        slot(state, item).held = true;
    }
    enter(state, Phase::image_pull);
    return true;
}

// The whole need of a request that will decode here, less what is cached.
bool Instance::reserve_kv(State &state) {
    if (setup_.rules.decode_budget && decoders_ + kv_pulls_ >= setup_.rules.tokens) return false;
    state.never_preempted = grows_ && cannot_come_again(state);
    const int32_t pulled = trail(state).leased_kv, total = need(state, pulled);
    hits_.clear();
    const int32_t found = match(state, state.text / w.options.kv_block, hits_);
    if (!preempted_.empty() || !fits(kv_, total - found + spare())) return false;
    hold_kv(state, hits_.data(), found);
    allocate_kv(state, total);
    state.missing = std::max(0, pulled - found);
    enter(state, Phase::kv_pull);
    return true;
}

// Pull what is ready there and is not here already.
void Instance::ask(State &state) {
    if (state.phase == Phase::kv_pull && state.kv_ready && !state.kv_asked) {
        state.kv_asked = true;
        if (state.missing) start_pull(state, 0, state.missing);
    } else if (state.phase == Phase::image_pull) {
        const Request &asked = request(state);
        for (int32_t part = 0; part < asked.items; ++part) {
            Slot &here = slot(state, asked.first_item + part);
            if (!here.told || here.asked) continue;
            here.asked = true;
            if (here.ready)
                ++state.arrived;
            else
                start_pull(state, part, w.work.items[asked.first_item + part].blocks);
        }
    }
}

// The rows that a pull moves: core/transfers.py.
static int64_t rows_moved(int64_t blocks, int64_t tail, int64_t rows) {
    const int64_t filled = tail ? (blocks - 1) * rows + tail : blocks * rows;
    return 10 * blocks * rows > 11 * filled ? filled : blocks * rows;
}

// The pulls into one instance are served one after the other.
void Instance::start_pull(State &state, int32_t part, int32_t blocks) {
    ++state.pulls;
    const int source = trail(state).at[state.hop - 1];
    int64_t bytes;
    if (state.incoming == KV) {
        bytes = rows_moved(blocks, trail(state).leased_tail, w.options.kv_block) * w.options.kv_row_bytes;
    } else {
        const int32_t rows = w.options.media_block, tokens = w.work.items[request(state).first_item + part].tokens;
        bytes = rows_moved(blocks, tokens % rows, rows) * w.options.image_row_bytes;
    }
    const Link &link = w.setups[source].host == setup_.host ? w.options.link : w.options.network;
    pulls_end_ = std::max(w.now, pulls_end_) + link.seconds(static_cast<double>(bytes));
    w.result.moved[state.incoming] += bytes;
    w.tell(self_, Told::pull, state.request, part, blocks);
    w.post(pulls_end_, self_, Kind::pulled, state.request, state.incoming, part);
}

void Instance::pulled(const Event &event) {
    State &state = *incoming(event);
    --state.pulls;
    if (state.phase == Phase::kv_pull) state.missing = 0;
    if (state.ending != Reason::none) return conclude_if_quiet(state);
    ++state.arrived;
    if (state.phase == Phase::image_pull) {
        const int32_t item = request(state).first_item + event.count;
        slot(state, item).ready = true;
        publish_media(state, item);
    }
    ask(state);
    complete(state);
}

// All parts are here and committed: release the source and go on to the next stage.
void Instance::complete(State &state) {
    if (state.phase == Phase::image_pull) {
        if (state.arrived != request(state).items || !state.committed) return;
        release(state);
        queue_prefill(state);
    } else if (state.phase == Phase::kv_pull) {
        if (state.missing) return;
        if (!state.kv_ready || state.kv_asked) publish_kv(state, request(state).prompt);
        if (!state.committed) return;
        release(state);
        w.tell(self_, Told::open, state.request, state.kv);
        state.opened = true;
        start_decoding(state);
    }
}

// The source may let go. Once for each offer.
void Instance::release(State &state) {
    state.released = true;
    image_pulls_ -= state.phase == Phase::image_pull;
    kv_pulls_ -= state.phase == Phase::kv_pull;
    w.send(trail(state).at[state.hop - 1], Kind::release, state.request, state.incoming);
}

} // namespace trinity::sim
