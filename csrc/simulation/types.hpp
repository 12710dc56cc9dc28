// The compiled twin of the simulator: what a replay is told, and the values that its parts pass to each other.
//
// The twin does what trinity/core does under the clock of simulation/cluster_model.py: the same events in the same order
// at the same times. It has integers where that has names.
// docs/decisions/0017-compiled-twin.md says why there are two, and how they are kept equal.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace trinity::sim {

constexpr double FOREVER = std::numeric_limits<double>::infinity();
constexpr int FRONTEND = -1; // an instance's number, for the front end

enum Roles : uint8_t { ENCODES = 1, PREFILLS = 2, DECODES = 4 };
enum Blocks : uint8_t { NO_BLOCKS, IMAGE, KV };
enum class Policy : uint8_t { alg1, time, prefill_first };
enum class Order : uint8_t { fcfs, sjf, deadline };
enum class Reason : uint8_t { none, length, cancelled, deadline, error, stop, preempted };
enum class Cause : uint8_t { none, late };

// One media item of a request. Equal `content` means equal features; `key` is the first of its `blocks` content keys.
struct Item {
    int32_t tokens, blocks, content, key, offset, end;
    int32_t first_block; // where its blocks' numbers are kept
    bool atomic;
};

// Whole numbers from `first` to before `last`.
struct Range {
    struct At {
        int32_t value;
        int32_t operator*() const { return value; }
        At &operator++() {
            ++value;
            return *this;
        }
        bool operator!=(const At &other) const { return value != other.value; }
    };
    int32_t first, last;
    At begin() const { return {first}; }
    At end() const { return {last}; }
};

struct Request {
    int32_t prompt, max_tokens;
    int32_t outputs;          // tokens until it ends: all that it asked for, or fewer
    int32_t first_item, items;
    int32_t first_key;        // of its full blocks, in Workload::keys; those of outputs too where they are recomputed
    int32_t rank;             // the place of its name among all names: what decides between equal deadlines
    double deadline_s;        // FOREVER: as long as it likes
    int32_t media_tokens, media_blocks;
    int64_t first_time, first_block; // where its token times and its KV blocks' numbers are kept

    Range range() const { return {first_item, first_item + items}; } // of its items
    Reason reason() const { return outputs < max_tokens ? Reason::stop : Reason::length; }
};

// What the user does: asks, or gives up.
struct Act {
    double time;
    int32_t request;
    bool aborts;
};

struct Workload { // not changed by replays, so that several may have it at once
    std::vector<Request> requests;
    std::vector<Item> items;
    std::vector<int32_t> keys;
};

struct Cost; // simulation/cost.hpp

struct Rules {
    int32_t tokens, media;
    Policy policy;
    Order order;
    bool chunked, media_budget, decode_budget;
    double limit_s;
    const Cost *cost; // what policy "time" predicts with
};

struct Setup { // an instance
    uint8_t roles;
    bool two_lanes; // vision and language, else one that is joint
    int32_t image_blocks, kv_blocks;
    int32_t host;
    int32_t number; // of its name: where its turns begin
    Rules rules;
    const Cost *cost; // what its steps take
};

struct Link {
    double bandwidth, fixed_s;
    double seconds(double size) const { return size > 0 ? fixed_s + size / bandwidth : 0.0; }
};

struct Options { // of all instances
    int32_t media_block, kv_block;
    bool image_cache, prefix_cache, prefetch, early;
    bool optimistic; // KV blocks as requests decode
    bool least_loaded; // routing: to who has least to do, else in turn
    int32_t max_waiting;
    double message_s, interference;
    Link link, network; // within a host, and between two
    int64_t image_row_bytes, kv_row_bytes;
};

// Everything that can happen. What a core sends to another is named as in core/messages.py.
enum class Kind : uint8_t {
    submit, cancel, forget, offer, ready, commit, withdraw, release, moved, emit, finished, stepped, pulled, tick, abort
};

// An event on its way. What `count`, `what` and `extra` mean hangs on the kind.
struct Event {
    double time;
    uint64_t sequence;
    int32_t request;
    int32_t count;
    int16_t to, extra;
    Kind kind;
    uint8_t what;

    bool before(const Event &other) const {
        return time < other.time || (time == other.time && sequence < other.sequence);
    }
};

enum class Phase : uint8_t {
    image_queue, encoding, image_offer, image_pull, kv_queue, prefilling, kv_offer, kv_pull, decoding
};

// Where a request waits, or among which it runs.
enum class Place : uint8_t {
    nowhere, encode_queue, prefill_queue, migrated, preempted, image_offers, kv_offers, encoding, prefilling, decoding
};

// A request that lives on an instance.
struct State {
    int32_t self, request; // its own number
    int32_t among;          // its place in World::living of its instance
    Phase phase;
    Place place;
    int8_t hop;                     // how many instances it has been on before
    Reason ending;
    Cause cause;
    Blocks incoming, outgoing;      // the kind of blocks offered to it here, and by it from here
    bool released, committed, moved, kv_ready, kv_asked;
    bool skip_media, in_step, opened;
    bool media;                     // it has slots here
    bool preempted;                 // it was, here
    bool never_preempted;           // it has its whole KV need and is not preempted, where others grow
    int32_t tokens, done, cached;   // output tokens so far, positions prefilled, of these found in the cache
    int32_t text;                   // positions that a prefill fills: the prompt, and outputs that are recomputed
    int32_t kv, published;          // KV blocks held, and how many of them may be matched
    int32_t pulls, arrived;         // pulls in flight, parts that are here
    int32_t missing;                // KV blocks that are not here yet
    double deadline;
};

// A media item of a request on one instance.
struct Slot {
    bool held, ready;             // it has blocks here; they hold the features
    bool told, asked;             // the source has said that they are ready there; they were asked for
};

// The instances that a request has come by, and what is left of it there.
struct Trail {
    int8_t hops = 0;
    int8_t source[3] = {-1, -1, -1};    // by Blocks: the hop that offered them
    bool leased[3] = {false, false, false};
    bool tombstone[3] = {false, false, false};
    int16_t at[3] = {-1, -1, -1};
    int32_t state[3] = {-1, -1, -1};
    double left_s = FOREVER; // of its time, as its last Commit says
    double deadline_s = FOREVER; // of its time, when it came to its first instance
    int32_t number = 0;      // of its arrival: less is older
    int32_t attempt = 0;     // how often it was sent back to its first stage
    int32_t leased_kv = 0;   // blocks
    int32_t leased_tail = 0; // rows of the last of them, 0: all
};


inline int32_t blocks_for(int64_t tokens, int64_t block) { return static_cast<int32_t>((tokens + block - 1) / block); }

} // namespace trinity::sim
