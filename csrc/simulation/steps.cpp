// Steps: a free lane gets the next batch, and what a step has done moves its requests on: core/instance/steps.py; and
// how long steps take on lanes that slow each other down: simulation/cluster_model.py.
#include "simulation/instance.hpp"

namespace trinity::sim {

// Admit migrations and fill free lanes until nothing more can start.
void Instance::pump() {
    for (bool again = true; again;) {
        admit_offers();
        again = false;
        uint32_t free = 0;
        for (size_t at = 0; at < lanes_.size(); ++at) free |= uint32_t(!lanes_[at].running) << at;
        for (size_t at = 0; at < lanes_.size(); ++at)
            if (free >> at & 1) again = fill(lanes_[at]) || again;
    }
}

// Start the lane's next step. True where something changed that may let more be admitted.
bool Instance::fill(Lane &lane) {
    const int64_t before = preemptions_;
    if (grows_ && lane.stages & DECODES) place();
    const bool waits =
        !encode_queue_.empty() || !prefill_queue_.empty() || !migrated_.empty() || !preempted_.empty();
    if (!waits && prefilling_.empty() && encoding_.empty()) { // most steps are such: every policy takes all decodes
        batch_.clear();
        batch_.decodes = lane.stages & DECODES;
        if (build(lane, batch_)) start(lane);
        return false;
    }
    schedule(lane.stages);
    admit();
    const bool scheduled = build(lane, batch_);
    if (scheduled) start(lane);
    for (int32_t number : batch_.new_encodes) media_progress(w.states[number], nullptr, 0);
    if (scheduled) announce_media(lane);
    return !batch_.new_encodes.empty() || !batch_.uncovered.empty() || preemptions_ > before;
}

bool Instance::build(Lane &lane, const Batch &batch) {
    lane.encodes.clear();
    lane.prefills.clear();
    lane.media_tokens = lane.media_squares = lane.prefill_tokens = 0;
    for (const EncodeRow &row : batch.encodes) {
        State &state = w.states[row.state];
        if (!to_encode(state, row.item)) continue;
        pending_[pending_of_.find(w.work.items[row.item].content)].in_step = true;
        state.in_step = true;
        const int64_t tokens = w.work.items[row.item].tokens;
        lane.media_tokens += tokens;
        lane.media_squares += tokens * tokens;
        lane.encodes.push_back(row);
    }
    for (const Chunk &chunk : batch.prefills) {
        w.states[chunk.state].in_step = true;
        lane.prefill_tokens += chunk.length;
        lane.prefills.push_back(chunk);
    }
    const int32_t rows = batch.decodes ? decoders_ : 0, decodes = rows ? rows - paused_ : 0;
    if (lane.encodes.empty() && lane.prefills.empty() && !decodes) return false;
    lane.rows = rows;
    lane.decodes = decodes;
    lane.running = true;
    ++steps_;
    return true;
}

double Instance::seconds(const Lane &lane) const {
    Load load{lane.decodes, lane.prefill_tokens, lane.media_tokens, 0.0, 0.0, int64_t(lane.prefills.size())};
    if (lane.media_tokens) load.image = static_cast<double>(lane.media_squares) / static_cast<double>(lane.media_tokens);
    int64_t looked_back = decoding_tokens_;
    for (int32_t row = 0; paused_ && row < lane.rows; ++row)
        if (const Row &each = decoding_[row]; each.paused) {
            const Request &asked = w.work.requests[each.request];
            looked_back -= asked.prompt + asked.outputs - each.left;
        }
    if (lane.decodes) load.context = static_cast<double>(looked_back) / lane.decodes;
    int64_t before = 0;
    for (const Chunk &chunk : lane.prefills) before += chunk.start;
    if (load.prefills) load.prefilled = static_cast<double>(before) / static_cast<double>(load.prefills);
    return setup_.cost->at(load);
}

void Instance::start(Lane &lane) {
    if (w.logged) {
        const int32_t at = int32_t(&lane - lanes_.data());
        w.tell(self_, Told::step, -1, steps_, at, lane.decodes);
        for (const EncodeRow &row : lane.encodes) {
            const int32_t asked = w.states[row.state].request;
            w.tell(self_, Told::encode, asked, row.item - w.work.requests[asked].first_item);
        }
        for (const Chunk &chunk : lane.prefills)
            w.tell(self_, Told::prefill, w.states[chunk.state].request, chunk.start, chunk.length);
        for (int32_t row = 0; row < lane.rows; ++row)
            if (!decoding_[row].paused) w.tell(self_, Told::decode, decoding_[row].request);
    }
    const double alone = seconds(lane);
    lane.running = false; // it has no share yet of the time that has passed
    elapse();
    lane.running = true;
    lane.started = w.now;
    lane.left = alone;
    bool both = lanes_.size() > 1 && lanes_[0].running && lanes_[1].running;
    if (both && w.options.interference > 1) return arrange();
    lane.number = w.post(w.now + lane.left * 1.0, self_, Kind::stepped, -1, uint8_t(&lane - lanes_.data()));
}

// Account for the time since the lanes' speed changed last.
void Instance::elapse() {
    const bool both = lanes_.size() > 1 && lanes_[0].running && lanes_[1].running;
    const double slow = both ? w.options.interference : 1.0;
    for (Lane &lane : lanes_)
        if (lane.running) lane.left -= (w.now - since_) / slow;
    since_ = w.now;
}

// The lanes' speed has changed: what was posted of their ends is void, and they come at other times.
void Instance::arrange() {
    const bool both = lanes_[0].running && lanes_[1].running;
    const double slow = both ? w.options.interference : 1.0;
    for (Lane &lane : lanes_)
        if (lane.running)
            lane.number = w.post(w.now + lane.left * slow, self_, Kind::stepped, -1, uint8_t(&lane - lanes_.data()));
}

bool Instance::is_end(const Event &event) {
    Lane &lane = lanes_[event.what];
    if (!lane.running || lane.number != event.sequence) return false;
    elapse();
    lane.running = false;
    if (lanes_.size() > 1 && w.options.interference > 1) arrange();
    book(lane, w.now - lane.started);
    return true;
}

// The device was busy with these rows. In a mixed step each stage has its share of what it takes alone.
void Instance::book(const Lane &lane, double seconds) {
    const int64_t counts[3] = {lane.media_tokens, lane.prefill_tokens, lane.decodes};
    double *busy = &w.result.busy[3 * self_];
    double alone[3] = {}, total = 0.0;
    const int present = int(counts[0] > 0) + int(counts[1] > 0) + int(counts[2] > 0);
    if (present > 1) {
        if (counts[0]) alone[0] = setup_.cost->seconds(0, 0, counts[0]);
        if (counts[1]) alone[1] = setup_.cost->seconds(0, counts[1], 0);
        if (counts[2]) alone[2] = setup_.cost->seconds(counts[2], 0, 0);
        for (double each : alone) total += each;
    }
    for (int stage = 0; stage < 3; ++stage)
        if (counts[stage]) busy[stage] += total != 0.0 ? seconds * alone[stage] / total : seconds;
}

void Instance::stepped(Lane &lane) {
    const int32_t rows = lane.rows;
    for (const EncodeRow &row : lane.encodes) w.states[row.state].in_step = false;
    for (const Chunk &chunk : lane.prefills) w.states[chunk.state].in_step = false;
    const bool leaving = leaving_, ends = emit(lane, rows);
    lane.rows = lane.decodes = 0;
    if (!lane.encodes.empty()) encoded(lane);
    for (const Chunk &chunk : lane.prefills) prefilled(chunk);
    if (ends) decoded(rows);
    if (leaving) sweep(lane, rows);
    if (!ends && !leaving) return;
    const auto gone = [](const Row &row) { return row.gone; };
    decoding_.erase(std::remove_if(decoding_.begin(), decoding_.begin() + rows, gone), decoding_.begin() + rows);
}

// All tokens of the step in one message, ahead of the ends that they bring about. Whether a decode ends with its token.
bool Instance::emit(const Lane &lane, int32_t rows) {
    const uint64_t before = w.lists.pushed();
    for (const Chunk &chunk : lane.prefills) {
        const State &state = w.states[chunk.state];
        const bool last = chunk.start + chunk.length == state.text;
        if (last && state.ending == Reason::none) w.lists.push(state.request);
    }
    const bool ends = emit_rows(rows);
    const uint64_t last = w.lists.pushed();
    if (last > before) w.send(FRONTEND, Kind::emit, -1, 0, int32_t(last - before));
    return ends;
}

bool Instance::emit_rows(int32_t rows) {
    bool ends = false;
    const uint64_t before = w.lists.pushed();
    w.lists.make_room(rows);
    for (int32_t at = 0; at < rows; ++at) {
        Row &row = decoding_[at];
        if (row.gone || row.paused) continue;
        w.lists.put(row.request);
        ends |= --row.left == 0;
    }
    decoding_tokens_ += w.lists.pushed() - before;
    return ends;
}

void Instance::encoded(const Lane &lane) {
    told_.clear();
    for (const EncodeRow &row : lane.encodes) {
        const int32_t content = w.work.items[row.item].content, at = pending_of_.find(content);
        told_.insert(told_.end(), pending_[at].providers.begin(), pending_[at].providers.end());
        pending_of_.erase(content);
        unused_pending_.push_back(at);
        publish_media(w.states[row.state], row.item);
    }
    for (size_t at = 0; at < told_.size(); ++at) { // by request, in the order of the first item of each
        if (told_[at].state < 0) continue;
        State &state = w.states[told_[at].state];
        items_.clear();
        for (size_t other = at; other < told_.size(); ++other)
            if (told_[other].state == state.self) {
                slot(state, told_[other].item).ready = true;
                items_.push_back(told_[other].item - request(state).first_item);
                told_[other].state = -1;
            }
        if (state.ending == Reason::none) media_progress(state, items_.data(), items_.size());
    }
}

// Some features are ready: announce them, or go on to prefill here once all are.
void Instance::media_progress(State &state, const int32_t *items, size_t count) {
    const Request &asked = request(state);
    if (!has(PREFILLS)) {
        if (state.outgoing != NO_BLOCKS && count) {
            for (size_t at = 0; at < count; ++at) w.lists.push(items[at]);
            w.send(trail(state).at[state.hop + 1], Kind::ready, state.request, IMAGE, int32_t(count));
        }
        if (may_offer(state)) offer_media(state);
        return;
    }
    for (int32_t item : asked.range())
        if (!slot(state, item).ready) return;
    leave(state);
    queue_prefill(state);
}

// The first features of some requests are about to be made: their target may reserve meanwhile.
void Instance::announce_media(const Lane &lane) {
    if (has(PREFILLS)) return;
    for (const EncodeRow &row : lane.encodes) {
        const std::vector<EncodeRow> providers = pending_[pending_of_.find(w.work.items[row.item].content)].providers;
        for (const EncodeRow &each : providers) {
            State &state = w.states[each.state];
            if (state.outgoing == NO_BLOCKS && may_offer(state)) offer_media(state);
        }
    }
}

void Instance::prefilled(const Chunk &chunk) {
    State &state = w.states[chunk.state];
    if (state.ending != Reason::none) return;
    state.done += chunk.length;
    publish_kv(state, state.done);
    if (chunk.start + chunk.length != state.text) return;
    leave(state);
    drop_media(state);
    if (took(state)) return;
    if (has(DECODES))
        start_decoding(state);
    else
        offer_kv(state);
}

// Those that ended with this step's token.
void Instance::decoded(int32_t rows) {
    for (int32_t at = 0; at < rows; ++at) {
        Row &row = decoding_[at];
        if (row.gone || row.left) continue;
        State &state = w.states[row.state];
        row.state = -1;
        row.gone = true;
        decoded(state);
    }
}

void Instance::decoded(State &state) {
    decoding_tokens_ -= request(state).prompt + request(state).outputs;
    --decoders_;
    state.place = Place::nowhere;
    state.tokens = request(state).outputs;
    end(state, request(state).reason());
}

// Requests that were to end and waited for this step.
void Instance::sweep(const Lane &lane, int32_t rows) {
    const auto quiet = [&](int32_t number) {
        State &state = w.states[number];
        state.in_step = false;
        conclude_if_quiet(state);
    };
    for (const EncodeRow &row : lane.encodes) quiet(row.state);
    for (const Chunk &chunk : lane.prefills) quiet(chunk.state);
    for (int32_t at = 0; at < rows; ++at)
        if (decoding_[at].gone && decoding_[at].state >= 0) quiet(decoding_[at].state);
}

// Take one token. True where the request ends with it.
bool Instance::took(State &state) {
    if (++state.tokens < request(state).outputs) return false;
    end(state, request(state).reason());
    return true;
}

} // namespace trinity::sim
