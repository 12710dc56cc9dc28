// Routing: core/routing/router.py, in turn or to the least loaded.
#include "simulation/cost.hpp"
#include "simulation/world.hpp"

namespace trinity::sim {

namespace {

// Of so many units alone, in steps no larger than the budget: core/scheduler.py, StepRates.seconds.
double step_seconds(const Cost &cost, uint8_t stage, int64_t count) {
    return cost.seconds(stage == DECODES ? count : 0, stage == PREFILLS ? count : 0, stage == ENCODES ? count : 0);
}

} // namespace

// core/routing/stage_peers.py, needs: the stages that follow without a gap on the same instance count as well.
bool Router::fits(int peer, uint8_t stage, const Request &request) const {
    const Setup &setup = w.setups[peer];
    uint8_t stages = stage;
    for (uint8_t next = stage * 2; next <= DECODES && (setup.roles & next); next *= 2) stages |= next;
    if (stages & (ENCODES | PREFILLS) && request.media_blocks > setup.image_blocks) return false;
    if (!(stages & (PREFILLS | DECODES))) return true;
    const int64_t tokens = request.prompt + (stages & DECODES ? request.max_tokens - 1 : 0);
    return blocks_for(tokens, w.options.kv_block) <= setup.kv_blocks;
}

// A quick yes, for most requests: each need at its largest against the smallest pools.
bool Router::all_fit(uint8_t stage, const Request &request) const {
    const Peers &peers = w.peers[stage];
    const int64_t tokens = int64_t(request.prompt) + request.max_tokens - 1;
    const bool image = stage == DECODES || request.media_blocks <= peers.least_image;
    return image && blocks_for(tokens, w.options.kv_block) <= peers.least_kv;
}

bool Router::any(uint8_t stage, const Request &request) const {
    const std::vector<int> &peers = w.peers[stage].numbers;
    if (!peers.empty() && all_fit(stage, request)) return true;
    return std::any_of(peers.begin(), peers.end(), [&](int peer) { return fits(peer, stage, request); });
}

int Router::choose(uint8_t stage, const Request &request) {
    const std::vector<int> *peers = &w.peers[stage].numbers;
    std::vector<int> fitting;
    if (!all_fit(stage, request)) {
        for (int peer : *peers)
            if (fits(peer, stage, request)) fitting.push_back(peer);
        peers = &fitting;
    }
    if (!w.options.least_loaded) return next(stage, *peers);
    const int chosen = least_loaded(stage, *peers);
    w.sent[chosen][stage] += World::units(stage, request);
    return chosen;
}

int Router::least_loaded(uint8_t stage, const std::vector<int> &peers) {
    double least = FOREVER;
    equal_.clear();
    for (int peer : peers) {
        const double own = seconds(peer, stage);
        if (own < least) equal_.clear();
        least = std::min(least, own);
        if (own == least) equal_.push_back(peer);
    }
    return next(stage, equal_);
}

double Router::seconds(int peer, uint8_t stage) const {
    const int64_t count = queued(peer, stage);
    if (!count) return 0.0;
    const Setup &setup = w.setups[peer];
    const Cost &cost = setup.rules.cost ? *setup.rules.cost : *setup.cost;
    if (stage == DECODES) return step_seconds(cost, stage, count);
    const int64_t budget = stage == ENCODES ? setup.rules.media : setup.rules.tokens, rest = count % budget;
    return double(count / budget) * step_seconds(cost, stage, budget) + (rest ? step_seconds(cost, stage, rest) : 0.0);
}

// Units that wait or run there, core/instance/loads.py, or are on their way.
int64_t Router::queued(int peer, uint8_t stage) const {
    int64_t count = w.sent[peer][stage];
    for (int32_t number : w.living[peer]) {
        const State &state = w.states[number];
        if (state.ending != Reason::none) continue;
        if (state.phase >= Phase::kv_offer) {
            count += stage == DECODES;
        } else if (stage == PREFILLS) {
            count += state.text - state.done;
        } else if (stage == ENCODES && state.phase <= Phase::encoding) {
            for (int32_t item : w.work.requests[state.request].range())
                if (!w.slots[state.hop][item].ready) count += w.work.items[item].tokens;
        }
    }
    return count;
}

} // namespace trinity::sim
