// What the front end and the instances of one replay share: clock, messages on their way, requests, results.
#pragma once

#include "simulation/pool.hpp"
#include "simulation/queue.hpp"
#include "simulation/types.hpp"

#include <algorithm>
#include <vector>

namespace trinity::sim {

// Lines of the log that are commands; those of events have the number of their Kind.
enum class Told : int32_t { step = 20, encode, prefill, decode, pull, open, close, deliver, end, left };

// A line of the log by which the twin is proven equal: an event or a command, where and when.
struct Line {
    double time;
    int32_t who, kind, request, a, b, c;
};

struct Result {
    std::vector<double> times; // of each request's tokens, from Request::first_time on
    std::vector<int32_t> counts;
    std::vector<uint8_t> reasons;
    std::vector<double> busy;    // seconds of E, P and D, for each instance
    std::vector<int32_t> peak;   // most blocks held of images and KV, for each instance
    int64_t moved[3] = {0, 0, 0}; // bytes, by Blocks
    int64_t preemptions = 0;
    double ended = 0.0;
    uint64_t events = 0;
    int64_t unsettled = 0; // instances and front ends that hold something when nothing comes any more
    std::vector<Line> log;
};

struct Peers { // the instances of a stage
    std::vector<int> numbers;
    int32_t least_image = std::numeric_limits<int32_t>::max(), least_kv = least_image; // of their pools
    int32_t most_kv = 0;
};

// Units of work, by stage: visual tokens, prompt positions, rows that decode.
struct Units {
    int64_t counts[5] = {};
    int64_t &operator[](uint8_t stage) { return counts[stage]; }
};

struct World {
    World(const Workload &work, const std::vector<Setup> &setups, const Options &options, bool logged)
        : work(work), setups(setups), options(options), logged(logged), trails(work.requests.size()) {
        size_t blocks = 0, kv = 0, times = 0;
        for (const Item &item : work.items) blocks += item.blocks;
        for (const Request &request : work.requests) {
            kv += blocks_for(int64_t(request.prompt) + request.max_tokens - 1, options.kv_block);
            times += request.outputs;
        }
        for (int set : {0, 1, 2}) {
            slots[set].resize(work.items.size());
            image_blocks[set].resize(blocks);
        }
        if (options.prefix_cache)
            for (int set : {0, 1}) kv_blocks[set].resize(kv);
        for (uint8_t stage : {ENCODES, PREFILLS, DECODES})
            for (size_t number = 0; number < setups.size(); ++number)
                if (const Setup &setup = setups[number]; setup.roles & stage) {
                    peers[stage].numbers.push_back(int(number));
                    peers[stage].least_image = std::min(peers[stage].least_image, setup.image_blocks);
                    peers[stage].least_kv = std::min(peers[stage].least_kv, setup.kv_blocks);
                    peers[stage].most_kv = std::max(peers[stage].most_kv, setup.kv_blocks);
                }
        result.times.resize(times);
        result.counts.resize(work.requests.size());
        result.reasons.resize(work.requests.size());
        living.resize(setups.size());
        sent.resize(setups.size());
        result.busy.resize(3 * setups.size());
        result.peak.resize(2 * setups.size());
    }

    // A message: all take the same time, so that they come in the order in which they were sent.
    void send(int to, Kind kind, int32_t request, uint8_t what = 0, int32_t count = 0, int16_t extra = 0) {
        messages.push({now + options.message_s, sequence++, request, count, int16_t(to), extra, kind, what});
    }

    uint64_t post(double time, int to, Kind kind, int32_t request, uint8_t what = 0, int32_t count = 0) {
        heap.push({time, sequence, request, count, int16_t(to), 0, kind, what});
        return sequence++;
    }

    void tell(int who, Told kind, int32_t request, int32_t a = 0, int32_t b = 0, int32_t c = 0) {
        if (logged) result.log.push_back({now, who, int32_t(kind), request, a, b, c});
    }

    State &new_state(int at, int32_t request, Phase phase) {
        if (unused.empty()) {
            unused.push_back(int32_t(states.size()));
            states.emplace_back();
        }
        State &state = states[unused.back()];
        state = {};
        state.self = unused.back();
        unused.pop_back();
        state.request = request;
        state.among = int32_t(living[at].size());
        living[at].push_back(state.self);
        state.phase = phase;
        state.deadline = FOREVER;
        return state;
    }

    // What a request adds to the work of a stage.
    static int64_t units(uint8_t stage, const Request &request) {
        return stage == ENCODES ? request.media_tokens : stage == PREFILLS ? request.prompt : 1;
    }

    void arrive(int at, uint8_t stage, const Request &request) {
        if (options.least_loaded) sent[at][stage] -= units(stage, request);
    }

    void drop_state(int at, const State &state) {
        std::vector<int32_t> &here = living[at];
        states[here.back()].among = state.among;
        here[state.among] = here.back();
        here.pop_back();
        unused.push_back(state.self);
    }

    const Workload &work;
    const std::vector<Setup> &setups;
    const Options &options;
    const bool logged;
    Peers peers[5]; // by stage
    double now = 0.0;
    uint64_t sequence = 0;
    Ring<Event> messages;
    Ring<int32_t> lists; // what Ready and Emit messages name, in the order of the messages
    Heap heap;
    std::vector<Trail> trails; // by request
    std::vector<State> states;
    std::vector<int32_t> unused;           // of states
    std::vector<std::vector<int32_t>> living; // states, by instance
    std::vector<Units> sent;               // to each instance, and not there yet
    std::vector<Slot> slots[3];            // by item: on the first instance, and on those that it was migrated to
    std::vector<int32_t> image_blocks[3];  // likewise, from Item::first_block on
    std::vector<int32_t> kv_blocks[2];     // from Request::first_block on: where prefill runs, and where decode does
    Result result;
};

// Which instance is next among those that have the stage and the room: in turn or, where the options say so, the one
// that is through with its work first, of equal ones in turn. Of its work it knows all, the moment that it changes:
// live instances say it ten times a second (core/routing/router.py).
class Router {
  public:
    Router(World &world, int64_t first) : w(world), turn_{first, first, first, first, first} {}
    bool any(uint8_t stage, const Request &request) const; // whether any could ever hold it
    int choose(uint8_t stage, const Request &request);

  private:
    bool fits(int peer, uint8_t stage, const Request &request) const;
    bool all_fit(uint8_t stage, const Request &request) const;
    int next(uint8_t stage, const std::vector<int> &peers) { return peers[turn_[stage]++ % peers.size()]; }
    int least_loaded(uint8_t stage, const std::vector<int> &peers);
    double seconds(int peer, uint8_t stage) const;
    int64_t queued(int peer, uint8_t stage) const;

    World &w;
    int64_t turn_[5]; // by stage
    std::vector<int> equal_;
};

} // namespace trinity::sim
