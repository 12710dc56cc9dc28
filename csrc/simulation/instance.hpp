// trinity/core: the decisions of one instance, and what its lanes and its device are doing (simulation/cluster_model.py).
#pragma once

#include "simulation/cost.hpp"
#include "simulation/world.hpp"

#include <utility>
#include <vector>

namespace trinity::sim {

struct Chunk { // of a prompt: positions [start, start + length)
    int32_t state, start, length;
};

struct EncodeRow {
    int32_t state, item; // an index into Workload::items
};

struct Lane {
    uint8_t stages = 0;
    bool running = false;
    std::vector<EncodeRow> encodes;
    std::vector<Chunk> prefills;
    int32_t rows = 0;    // of the first in Instance::decoding_, less those that are paused
    int32_t decodes = 0; // so many
    double started = 0.0, left = 0.0;
    uint64_t number = 0; // of the event that is its end, unless its speed has changed since
    int64_t prefill_tokens = 0, media_tokens = 0, media_squares = 0; // squares: of each item's tokens, summed
};

// Cached blocks that a schedule counts on: held for its length, so that no admission evicts them.
struct Pin {
    int32_t state, first, count; // their numbers are in Batch::numbers
    Blocks kind;
    bool admitted;
};

// The next step of a lane, while it is being chosen.
struct Batch {
    bool decodes;
    std::vector<Chunk> prefills;
    std::vector<EncodeRow> encodes;
    std::vector<Pin> pins;
    std::vector<int32_t> numbers, new_encodes, uncovered;
    std::vector<std::pair<int32_t, int32_t>> new_prefills; // a state and its pin

    void clear() {
        decodes = false;
        prefills.clear();
        encodes.clear();
        pins.clear();
        numbers.clear();
        new_encodes.clear();
        uncovered.clear();
        new_prefills.clear();
    }
};

class Room; // simulation/schedule.cpp

class Instance {
  public:
    Instance(World &world, int number);
    bool is_end(const Event &event); // of a step; false where another event has taken its place
    void handle(const Event &event);
    double next_timer();
    bool idle() const;
    bool holds() const { return image_.available() < image_.size() || kv_.available() < kv_.size(); }

  private:
    struct Row {
        int32_t state, request;
        int32_t left;   // tokens to come
        int32_t limit;  // where `left` is less, its blocks have no place for the next one's key and value
        bool gone;      // it ended while a step had it
        bool paused;    // no step has it until there is a block for it
    };
    // Media that several requests here may be waiting for: encoded once, by its first provider.
    struct Pending {
        std::vector<EncodeRow> providers;
        const int32_t *blocks;
        bool in_step;
    };

    // ---- a request's way (simulation/life.cpp)
    void submit(const Event &event);
    void cancel(int32_t request);
    void forget(int32_t request);
    void call_off(State &state);
    void end(State &state, Reason reason, Cause cause = Cause::none);
    void conclude_if_quiet(State &state);
    void conclude(State &state);
    void drop_all(State &state);
    void drop_media(State &state);
    void leave(State &state);
    void leave_decoding(State &state);
    void enter(State &state, Phase phase);
    void wait_in(Queue &queue, Place place, State &state, bool ahead = false);
    void queue_prefill(State &state);
    void start_decoding(State &state);
    void set_deadline(State &state, double seconds);
    void expire();

    // ---- optimistic reservation (simulation/growth.cpp)
    void place();
    void grow(Row &row);
    Row &row_of(const State &state);
    bool make_room(const State &state);
    void preempt(State &state);
    void recompute(State &state);
    bool hold_features(State &state);
    int32_t need(const State &state, int32_t text) const;
    int32_t whole_need(const State &state) const;
    bool cannot_come_again(const State &state) const;
    int32_t spare() const { return grows_ ? decoders_ : 0; }
    int32_t age(const State &state) const { return w.trails[state.request].number; }

    // ---- migration (simulation/migration.cpp)
    void offer_media(State &state);
    void offer_kv(State &state);
    void open_offer(State &state, uint8_t stage, Blocks kind);
    bool may_offer(const State &state) const;
    void commit(State &state);
    void released(const Event &event);
    void offered(const Event &event);
    void ready(const Event &event);
    void committed(const Event &event);
    void withdrawn(const Event &event);
    void pulled(const Event &event);
    void admit_offers();
    bool reserve_media(State &state);
    bool reserve_kv(State &state);
    void ask(State &state);
    void start_pull(State &state, int32_t part, int32_t blocks);
    void complete(State &state);
    void release(State &state);
    State *incoming(const Event &event);

    // ---- steps (simulation/steps.cpp)
    void pump();
    bool fill(Lane &lane);
    bool build(Lane &lane, const Batch &batch);
    void start(Lane &lane);
    void arrange();
    void elapse();
    void book(const Lane &lane, double seconds);
    void stepped(Lane &lane);
    bool emit(const Lane &lane, int32_t rows);
    bool emit_rows(int32_t rows);
    void encoded(const Lane &lane);
    void media_progress(State &state, const int32_t *items, size_t count);
    void announce_media(const Lane &lane);
    void prefilled(const Chunk &chunk);
    void decoded(int32_t rows);
    void decoded(State &state);
    void sweep(const Lane &lane, int32_t rows);
    bool took(State &state);
    double seconds(const Lane &lane) const;

    // ---- Algorithm 1 (simulation/schedule.cpp)
    void schedule(uint8_t stages);
    void add_running(Room &room);
    void admit_prefills(Room &room);
    void admit_encodes(Room &room);
    bool add_chunk(Room &room, const State &state, int32_t start);
    int32_t whole(const State &state, int32_t start, int32_t length, bool forced) const;
    bool add_item(Room &room, const State &state, int32_t item);
    int32_t pin(const State &state, Blocks kind, size_t first, int32_t fresh);
    void unpin(bool admitted);
    void admit();
    void admit_encode(State &state);
    void admit_prefill(State &state, const Pin &hits);
    void back_to_media(State &state);
    Load outstanding() const;
    bool to_encode(const State &state, int32_t item) const;

    // ---- blocks (simulation/blocks.cpp)
    bool find_media(int32_t item, std::vector<int32_t> &into) const;
    bool await_media(State &state, int32_t item);
    int32_t match(const State &state, int32_t keys, std::vector<int32_t> &into) const;
    int32_t prefix_hits(const State &state, std::vector<int32_t> &into) const;
    bool needs_media(const State &state);
    void publish_kv(State &state, int32_t tokens);
    void publish_media(const State &state, int32_t item);
    void hold_kv(State &state, const int32_t *blocks, int32_t count);
    void allocate_kv(State &state, int32_t total);
    bool fits(const Pool &pool, int32_t count) const;
    int32_t text_blocks(const State &state) const;
    int32_t *kv_of(const State &state);
    int32_t *image_of(const State &state, int32_t item);
    Slot &slot(const State &state, int32_t item) { return w.slots[state.hop][item]; }
    const Slot &slot(const State &state, int32_t item) const { return w.slots[state.hop][item]; }

    const Request &request(const State &state) const { return w.work.requests[state.request]; }
    Trail &trail(const State &state) { return w.trails[state.request]; }
    State *find(int32_t request);
    int find_hop(int32_t request) const;
    bool has(uint8_t role) const { return setup_.roles & role; }

    World &w;
    const Setup &setup_;
    const int self_;
    const bool grows_; // those that decode here
    Router router_;
    Pool image_, kv_;
    Queue encode_queue_, prefill_queue_, migrated_, preempted_, image_offers_, kv_offers_; // of states
    Queue encoding_, prefilling_;
    std::vector<Row> decoding_;
    int64_t decoding_tokens_ = 0; // prompts and outputs of all who decode
    int32_t decoders_ = 0;        // who have not gone
    int32_t paused_ = 0;          // of them
    Map pending_of_; // by content: an index into pending_
    std::vector<Pending> pending_;
    std::vector<int32_t> unused_pending_;
    std::vector<Lane> lanes_;
    Batch batch_;
    std::vector<int32_t> hits_;                   // of one look into a pool
    std::vector<int32_t> items_;                  // of one request
    std::vector<EncodeRow> told_;                 // whom the items of a step are for
    std::vector<int32_t> full_;                   // states that need a block
    std::vector<Due> deadlines_; // a heap
    int32_t requests_ = 0, leases_ = 0, leaving_ = 0, image_pulls_ = 0, kv_pulls_ = 0;
    int32_t steps_ = 0;
    int64_t preemptions_ = 0;
    double since_ = 0.0, pulls_end_ = 0.0;
};

} // namespace trinity::sim
