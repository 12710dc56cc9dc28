// What a request holds on an instance, and what it finds cached there: state.py of core/instance/, kv_target.py of
// core/migration/.
#include "simulation/instance.hpp"

namespace trinity::sim {

// The hop of a request that is this instance, the last one where it has come back; -1 where it never was here.
int Instance::find_hop(int32_t request) const {
    const Trail &trail = w.trails[request];
    for (int hop = trail.hops; hop-- > 0;)
        if (trail.at[hop] == self_) return hop;
    return -1;
}

State *Instance::find(int32_t request) {
    const int hop = find_hop(request);
    if (hop < 0 || w.trails[request].state[hop] < 0) return nullptr;
    return &w.states[w.trails[request].state[hop]];
}

int32_t Instance::text_blocks(const State &state) const { return blocks_for(state.text, w.options.kv_block); }

int32_t *Instance::kv_of(const State &state) {
    return w.kv_blocks[state.incoming == KV].data() + request(state).first_block;
}

int32_t *Instance::image_of(const State &state, int32_t item) {
    return w.image_blocks[state.hop].data() + w.work.items[item].first_block;
}

// Whether all blocks of a media item are cached; then their numbers are appended.
bool Instance::find_media(int32_t number, std::vector<int32_t> &into) const {
    if (!w.options.image_cache) return false;
    const Item &item = w.work.items[number];
    const size_t before = into.size();
    for (int32_t at = 0; at < item.blocks; ++at) {
        const int32_t block = image_.find(item.key + at);
        if (block < 0) {
            into.resize(before);
            return false;
        }
        into.push_back(block);
    }
    return true;
}

// The cached blocks of the longest run of the first so many keys, appended; how many.
int32_t Instance::match(const State &state, int32_t keys, std::vector<int32_t> &into) const {
    if (!w.options.prefix_cache) return 0;
    const int32_t *key = w.work.keys.data() + request(state).first_key;
    for (int32_t at = 0; at < keys; ++at) {
        const int32_t block = kv_.find(key[at]);
        if (block < 0) return at;
        into.push_back(block);
    }
    return keys;
}

// Cached blocks that a prefill can start from: at most text - 1 tokens, and no atomic span cut.
int32_t Instance::prefix_hits(const State &state, std::vector<int32_t> &into) const {
    const Request &asked = request(state);
    const int32_t block = w.options.kv_block, found = match(state, (state.text - 1) / block, into);
    if (!found) return 0;
    int32_t usable = found;
    for (int32_t at = asked.first_item + asked.items; at-- > asked.first_item;) {
        const Item &item = w.work.items[at];
        if (item.atomic && item.offset < usable * block && usable * block < item.end) usable = item.offset / block;
    }
    into.resize(into.size() - (found - usable));
    return usable;
}

bool Instance::needs_media(const State &state) {
    hits_.clear();
    const int32_t covered = prefix_hits(state, hits_) * w.options.kv_block;
    const Request &asked = request(state);
    for (int32_t at : asked.range())
        if (w.work.items[at].end > covered) return true;
    return false;
}

void Instance::publish_kv(State &state, int32_t tokens) {
    if (!w.options.prefix_cache) return;
    const Request &asked = request(state);
    const int32_t whole = std::min(tokens, state.text) / w.options.kv_block;
    for (; state.published < whole; ++state.published)
        kv_.publish(kv_of(state)[state.published], w.work.keys[asked.first_key + state.published]);
}

void Instance::publish_media(const State &state, int32_t number) {
    if (!w.options.image_cache) return;
    const Item &item = w.work.items[number];
    for (int32_t at = 0; at < item.blocks; ++at) image_.publish(image_of(state, number)[at], item.key + at);
}

// Whether so many new blocks can be had beside the cached ones in hits_, which will be held. A request's images may be
// equal, its prefix keys cannot.
bool Instance::fits(const Pool &pool, int32_t count) const {
    int32_t cached = 0;
    for (auto hit = hits_.begin(); hit != hits_.end(); ++hit)
        if (pool.is_cached(*hit)) cached += &pool == &kv_ || std::find(hits_.begin(), hit, *hit) == hit;
    return count <= pool.available() - cached;
}

void Instance::hold_kv(State &state, const int32_t *blocks, int32_t count) {
    kv_.hold(blocks, count);
    if (count) std::copy(blocks, blocks + count, kv_of(state));
    state.kv = state.published = count;
}

// New blocks behind those that were found, `total` together.
void Instance::allocate_kv(State &state, int32_t total) {
    if (w.options.prefix_cache)
        kv_.allocate(total - state.kv, kv_of(state) + state.kv);
    else
        kv_.take(total - state.kv);
    state.kv = total;
}

} // namespace trinity::sim
