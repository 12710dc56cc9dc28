// KV blocks as requests decode, and who gives them up where there are none: lifecycle.py and
// preemption.py of core/instance/.
#include "simulation/instance.hpp"

namespace trinity::sim {

// KV blocks that a request is admitted with, whose text of so many blocks is prefilled or pulled here.
int32_t Instance::need(const State &state, int32_t text) const {
    if (!has(DECODES)) return text;
    const int32_t whole = whole_need(state);
    return grows_ && !state.never_preempted ? std::min(whole, text + 1) : whole;
}

int32_t Instance::whole_need(const State &state) const {
    const Request &asked = request(state);
    return blocks_for(int64_t(asked.prompt) + asked.max_tokens - 1, w.options.kv_block);
}

// Whether no instance could prefill all that the request may come to: sent back, it would wait for blocks that are not
// there.
bool Instance::cannot_come_again(const State &state) const {
    return !has(PREFILLS) && whole_need(state) > w.peers[PREFILLS].most_kv;
}

// Every row of the next step gets a block for the token that it feeds, or is paused; the oldest get theirs first.
void Instance::place() {
    if (paused_)
        for (Row &row : decoding_) row.paused = false;
    paused_ = 0;
    full_.clear();
    for (const Row &row : decoding_)
        if (row.left < row.limit) full_.push_back(row.state);
    if (full_.empty()) return;
    if (int32_t(full_.size()) <= kv_.available()) { // nearly always
        for (Row &row : decoding_)
            if (row.left < row.limit) grow(row);
        return;
    }
    std::sort(full_.begin(), full_.end(),
              [&](int32_t one, int32_t other) { return age(w.states[one]) < age(w.states[other]); });
    for (int32_t number : full_) {
        const State &state = w.states[number];
        if (state.place != Place::decoding) continue; // it gave way to an older one
        if (make_room(state)) {
            grow(row_of(state));
        } else {
            row_of(state).paused = true;
            ++paused_;
        }
    }
}

void Instance::grow(Row &row) {
    State &state = w.states[row.state];
    allocate_kv(state, state.kv + 1);
    row.limit -= w.options.kv_block;
}

Instance::Row &Instance::row_of(const State &state) {
    return *std::find_if(decoding_.begin(), decoding_.end(), [&](const Row &row) { return row.state == state.self; });
}

// One block for this request. Only younger ones are preempted for it; it waits where what is left is older or on its
// way here: all of that ends by itself.
bool Instance::make_room(const State &state) {
    while (!kv_.available()) {
        State *youngest = nullptr;
        const auto look = [&](int32_t number) {
            State &each = w.states[number];
            if (!each.never_preempted && (!youngest || age(each) > age(*youngest))) youngest = &each;
        };
        for (const Row &row : decoding_) look(row.state);
        for (int32_t number : prefilling_) look(number);
        if (age(*youngest) <= age(state)) return false;
        preempt(*youngest);
    }
    return true;
}

// Take its KV blocks. It has no row in any step, and no pull of its KV is under way.
void Instance::preempt(State &state) {
    const bool prefilling = state.place == Place::prefilling;
    leave(state);
    const int32_t whole = request(state).prompt + state.tokens;
    state.text = whole;
    publish_kv(state, prefilling ? state.done : whole - 1);
    if (!w.options.prefix_cache)
        kv_.give(state.kv);
    else
        for (int32_t at = state.kv; at-- > 0;) kv_.drop(kv_of(state) + at, 1); // the end is evicted first
    w.tell(self_, Told::close, state.request);
    state.opened = false;
    state.kv = state.done = state.published = 0;
    state.preempted = true;
    ++preemptions_;
    ++w.result.preemptions;
    recompute(state);
}

// Wait for prefill where its features are here or not needed, else for the encoder; send it back where none is.
void Instance::recompute(State &state) {
    if (!has(PREFILLS)) return end(state, Reason::preempted);
    const Request &asked = request(state);
    state.skip_media = false;
    if (!state.media) // its KV may have come without its features
        for (int32_t item : asked.range()) slot(state, item) = {};
    state.media = true;
    const Range items = asked.range();
    bool ready = true;
    for (int32_t item : items) ready = ready && slot(state, item).ready;
    if (!ready) {
        state.skip_media = !needs_media(state);
        ready = state.skip_media || hold_features(state);
    }
    if (ready) return queue_prefill(state);
    if (!has(ENCODES) || state.incoming != NO_BLOCKS) return end(state, Reason::preempted); // its inputs are not here
    enter(state, Phase::image_queue);
    wait_in(encode_queue_, Place::encode_queue, state, true);
}

// Hold the features of all its media, where all are cached here.
bool Instance::hold_features(State &state) {
    const Request &asked = request(state);
    std::vector<int32_t> found;
    for (int32_t item : asked.range())
        if (!find_media(item, found)) return false;
    drop_media(state);
    const int32_t *blocks = found.data();
    for (int32_t item : asked.range()) {
        const int32_t count = w.work.items[item].blocks;
        image_.hold(blocks, count);
        std::copy(blocks, blocks + count, image_of(state, item));
        slot(state, item).held = slot(state, item).ready = true;
        blocks += count;
    }
    return true;
}

} // namespace trinity::sim
