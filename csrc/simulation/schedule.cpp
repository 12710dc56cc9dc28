// Algorithm 1, and what an admitted request reserves: core/scheduler.py and core/instance/admission.py.
#include "simulation/instance.hpp"

namespace trinity::sim {

// What is left of both budgets: counted, or of the latency bound where the policy is to predict it.
class Room {
  public:
    Room(const Rules &rules, const Load &outstanding) : rules_(rules), other_(outstanding) {}

    int64_t decodes = 0, prefill_tokens = 0, media_tokens = 0;

    int32_t tokens() const {
        int64_t low = std::max<int64_t>(0, rules_.tokens - decodes - prefill_tokens);
        if (rules_.policy != Policy::time) return int32_t(low);
        int64_t high = low;
        low = 0;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (seconds(middle, 0) <= rules_.limit_s)
                low = middle;
            else
                high = middle - 1;
        }
        return int32_t(decodes || prefill_tokens || media_tokens ? low : std::max<int64_t>(low, 1));
    }

    bool media_fits(int32_t count) const {
        if (rules_.policy == Policy::time) return !(prefill_tokens || media_tokens) || seconds(0, count) <= rules_.limit_s;
        return !rules_.media_budget || !media_tokens || media_tokens + count <= rules_.media;
    }

    bool chunked() const { return rules_.chunked; }

  private:
    double seconds(int64_t prefill, int64_t media) const {
        return rules_.cost->seconds(decodes + other_.decodes, prefill_tokens + prefill + other_.prefill_tokens,
                                    media_tokens + media + other_.media_tokens);
    }

    const Rules &rules_;
    const Load other_;
};

// Fills batch_: decodes, then running prefills and encodes, then new ones within both budgets.
void Instance::schedule(uint8_t stages) {
    batch_.clear();
    Room room(setup_.rules, outstanding());
    const bool language = stages & PREFILLS, vision = stages & ENCODES;
    const bool last = setup_.rules.policy == Policy::prefill_first;
    if (language && !last) {
        batch_.decodes = true;
        room.decodes = decoders_ - paused_;
    }
    if (language)
        for (int32_t number : prefilling_) add_chunk(room, w.states[number], w.states[number].done);
    if (vision) add_running(room);
    if (language) admit_prefills(room);
    if (vision) admit_encodes(room);
    if (last && language && batch_.prefills.empty() && batch_.encodes.empty()) batch_.decodes = true;
}

void Instance::add_running(Room &room) {
    for (int32_t number : encoding_) {
        const State &state = w.states[number];
        const Request &asked = request(state);
        for (int32_t item : asked.range())
            if (to_encode(state, item) && !add_item(room, state, item)) break;
    }
}

// Head-of-line blocking: nobody is skipped. Migrations that wait for blocks go first, the preempted ahead of them.
void Instance::admit_prefills(Room &room) {
    const bool others = kv_offers_.empty();
    int32_t free = others || !preempted_.empty() ? std::max(0, kv_.available() - spare()) : 0;
    if (!room.tokens()) return;
    for (const Queue *queue : {&preempted_, &migrated_, &prefill_queue_}) {
        if (queue != &preempted_ && !others) return;
        for (int32_t number : *queue) {
            const State &state = w.states[number];
            if (state.skip_media && needs_media(state)) {
                batch_.uncovered.push_back(number);
                continue;
            }
            const size_t first = batch_.numbers.size();
            const int32_t hits = prefix_hits(state, batch_.numbers);
            const int32_t fresh = pin(state, KV, first, need(state, text_blocks(state)) - hits);
            if (fresh > free || !add_chunk(room, state, hits * w.options.kv_block)) return;
            free -= fresh;
            batch_.pins.back().admitted = true;
            batch_.new_prefills.emplace_back(number, int32_t(batch_.pins.size()) - 1);
            if (!room.tokens()) return;
        }
    }
}

void Instance::admit_encodes(Room &room) {
    int32_t free = image_offers_.empty() ? image_.available() : 0;
    for (int32_t number : encode_queue_) {
        const State &state = w.states[number];
        const Request &asked = request(state);
        const size_t pins = batch_.pins.size();
        items_.clear();
        int32_t need = 0;
        for (int32_t item : asked.range()) {
            const size_t first = batch_.numbers.size();
            if (find_media(item, batch_.numbers)) {
                need += pin(state, IMAGE, first, 0);
            } else if (pending_of_.find(w.work.items[item].content) == Map::NONE) {
                items_.push_back(item);
                need += w.work.items[item].blocks;
            }
        }
        if (need > free) return;
        size_t chosen = 0;
        while (chosen < items_.size() && add_item(room, state, items_[chosen])) ++chosen;
        if (!items_.empty() && !chosen) return;
        free -= need;
        for (size_t at = pins; at < batch_.pins.size(); ++at) batch_.pins[at].admitted = true;
        batch_.new_encodes.push_back(number);
    }
}

bool Instance::add_chunk(Room &room, const State &state, int32_t start) {
    const int32_t left = state.text - start;
    const bool forced = batch_.prefills.empty();
    int32_t length = std::min(left, room.tokens());
    if (length < left && !room.chunked()) length = forced && length ? left : 0;
    if (length < left && room.chunked()) length = whole(state, start, length, forced);
    if (length <= 0) return false;
    room.prefill_tokens += length;
    batch_.prefills.push_back({state.self, start, length});
    return true;
}

// Move the chunk's end out of an atomic span: before it, or behind it where nothing else runs.
int32_t Instance::whole(const State &state, int32_t start, int32_t length, bool forced) const {
    const Request &asked = request(state);
    int32_t end = start + length;
    for (int32_t at : asked.range()) {
        const Item &item = w.work.items[at];
        if (item.atomic && item.offset < end && end < item.end)
            end = item.offset > start || !(forced && length) ? item.offset : item.end;
    }
    return end - start;
}

bool Instance::add_item(Room &room, const State &state, int32_t item) {
    const int32_t tokens = w.work.items[item].tokens;
    if (!room.media_fits(tokens)) return false;
    room.media_tokens += tokens;
    batch_.encodes.push_back({state.self, item});
    return true;
}

// Hold the hits, the last numbers of the batch; how many blocks reserving takes from what is available.
int32_t Instance::pin(const State &state, Blocks kind, size_t first, int32_t fresh) {
    Pool &pool = kind == KV ? kv_ : image_;
    const int32_t before = pool.available(), count = int32_t(batch_.numbers.size() - first);
    pool.hold(batch_.numbers.data() + first, count);
    batch_.pins.push_back({state.self, int32_t(first), count, kind, false});
    return fresh + before - pool.available();
}

void Instance::unpin(bool admitted) {
    for (const Pin &each : batch_.pins) {
        Pool &pool = each.kind == KV ? kv_ : image_;
        if (each.admitted == admitted) pool.drop(batch_.numbers.data() + each.first, each.count);
    }
}

// Reserve for those that the schedule admitted; nobody else's pins may stand in their way.
void Instance::admit() {
    unpin(false);
    for (int32_t number : batch_.new_encodes) admit_encode(w.states[number]);
    for (const auto &[number, hits] : batch_.new_prefills) admit_prefill(w.states[number], batch_.pins[hits]);
    unpin(true);
    for (int32_t number : batch_.uncovered) back_to_media(w.states[number]);
}

// Image blocks of all items: cached ones are held, those under way are shared, the rest is new.
void Instance::admit_encode(State &state) {
    leave(state);
    const Request &asked = request(state);
    for (int32_t item : asked.range()) {
        Slot &here = slot(state, item);
        const int32_t blocks = w.work.items[item].blocks;
        hits_.clear();
        here.ready = find_media(item, hits_);
        here.held = true;
        if (here.ready) {
            image_.hold(hits_.data(), blocks);
            std::copy(hits_.begin(), hits_.end(), image_of(state, item));
            continue;
        }
        const int32_t content = w.work.items[item].content;
        int32_t at = pending_of_.find(content);
        if (at == Map::NONE) {
            if (unused_pending_.empty()) {
                unused_pending_.push_back(int32_t(pending_.size()));
                pending_.emplace_back();
            }
            at = unused_pending_.back();
            unused_pending_.pop_back();
            pending_of_.insert(content, at);
            image_.allocate(blocks, image_of(state, item));
            pending_[at].providers.clear();
            pending_[at].in_step = false;
        } else {
            const EncodeRow &other = pending_[at].providers[0];
            const int32_t *shared = image_of(w.states[other.state], other.item);
            image_.hold(shared, blocks);
            std::copy(shared, shared + blocks, image_of(state, item));
        }
        pending_[at].providers.push_back({state.self, item});
    }
    enter(state, Phase::encoding);
    state.place = Place::encoding;
    encoding_.push(state.self);
}

// The whole KV need, keeping what is cached; the source of covered images may let them go.
void Instance::admit_prefill(State &state, const Pin &hits) {
    leave(state);
    hold_kv(state, batch_.numbers.data() + hits.first, hits.count);
    allocate_kv(state, need(state, text_blocks(state)));
    state.done = state.cached = hits.count * w.options.kv_block;
    if (state.incoming != NO_BLOCKS && !state.released) release(state);
    w.tell(self_, Told::open, state.request, state.kv, state.cached);
    state.opened = true;
    enter(state, Phase::prefilling);
    state.place = Place::prefilling;
    prefilling_.push(state.self);
}

// The cached KV that covered the images was evicted while the request waited.
void Instance::back_to_media(State &state) {
    leave(state);
    state.skip_media = false;
    if (state.incoming != NO_BLOCKS && !state.released) {
        enter(state, Phase::image_offer);
        wait_in(image_offers_, Place::image_offers, state);
    } else if (state.preempted) {
        recompute(state);
    } else {
        enter(state, Phase::image_queue);
        wait_in(encode_queue_, Place::encode_queue, state);
    }
}

// What other lanes are running just now.
Load Instance::outstanding() const {
    Load load{};
    for (const Lane &lane : lanes_)
        if (lane.running) {
            load.decodes += lane.decodes;
            load.prefill_tokens += lane.prefill_tokens;
            load.media_tokens += lane.media_tokens;
        }
    return load;
}

// Whether this request is the one to encode the item, and no step is encoding it.
bool Instance::to_encode(const State &state, int32_t item) const {
    if (slot(state, item).ready) return false;
    const int32_t at = pending_of_.find(w.work.items[item].content);
    if (at == Map::NONE || pending_[at].in_step) return false;
    const EncodeRow &first = pending_[at].providers[0];
    return first.state == state.self && first.item == item;
}

} // namespace trinity::sim
