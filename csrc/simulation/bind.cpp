// trinity._native: the Python side of the compiled twin. simulation/compiled_engine.py makes the arrays and reads them.
#include "simulation/engine.hpp"
#include "simulation/judge.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;
using namespace trinity::sim;

namespace {

template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Rows = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char *what) {
    if (!holds) throw std::invalid_argument(std::string("the twin was given ") + what);
}

template <class T> nb::object array_of(std::vector<T> values) {
    auto *kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void *pointer) noexcept { delete static_cast<std::vector<T> *>(pointer); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

struct AnyCost { // a cost model as Python holds it
    std::shared_ptr<Cost> cost;
};

// The order of the numbers is that of simulation/compiled_engine.py, _roofline.
AnyCost roofline(const In<int64_t> &whole, const In<double> &real) {
    require(whole.size() == 19 && real.size() == 9, "a roofline of another size");
    const int64_t *n = whole.data();
    const double *x = real.data();
    auto made = std::make_shared<Roofline>();
    made->weights = n[0], made->head = n[1], made->attended = n[2], made->layers = n[3], made->width = n[4];
    made->dtype_bytes = n[5], made->read_bytes = n[6], made->kv_bytes = n[7];
    made->vision = n[8], made->vision_weights = n[9], made->projector = n[10], made->span = n[11];
    made->vision_attended = n[12], made->full_layers = n[13], made->vision_layers = n[14], made->vision_width = n[15];
    made->vision_bytes = n[16], made->feature_bytes = n[17], made->image_tokens = n[18];
    made->context = x[0], made->patches = x[1], made->flops = x[2], made->flops_share = x[3], made->vision_share = x[4];
    made->bandwidth = x[5], made->bandwidth_share = x[6], made->pass_s = x[7], made->row_s = x[8];
    return {made};
}

Table table(const Rows<double> &rows) {
    require(rows.shape(1) == 2, "a table without pairs");
    Table made;
    for (size_t at = 0; at < rows.shape(0); ++at) {
        const double *pair = rows.data() + 2 * at;
        made.push_back({int64_t(pair[0]), pair[1]});
    }
    return made;
}

AnyCost step_cost(const Rows<double> &decodes, const Rows<double> &prefill, const Rows<double> &media) {
    auto made = std::make_shared<StepCost>();
    made->decodes = table(decodes), made->prefill = table(prefill), made->media = table(media);
    return {made};
}

AnyCost tables(double context, const std::vector<double> &contexts, const nb::list &costs) {
    auto made = std::make_shared<Tables>();
    made->context = context;
    made->contexts = contexts;
    for (nb::handle each : costs) {
        const auto *cost = dynamic_cast<const StepCost *>(nb::cast<const AnyCost &>(each).cost.get());
        require(cost, "tables that are none");
        made->costs.push_back(*cost);
    }
    require(!contexts.empty() && contexts.size() == made->costs.size(), "as many contexts as tables");
    return {made};
}

AnyCost linear(double step_s, double decode_s, double prefill_s, double encode_s, double media_s) {
    auto made = std::make_shared<Linear>();
    made->step_s = step_s, made->decode_s = decode_s, made->prefill_s = prefill_s, made->encode_s = encode_s;
    made->media_s = media_s;
    return {made};
}

// Requests: prompt, max_tokens, outputs, items, keys, rank. Items: tokens, content, first key, offset, end, atomic.
std::unique_ptr<Workload> workload(const Rows<int32_t> &requests, const In<double> &deadlines,
                                   const Rows<int32_t> &items, const In<int32_t> &keys, int32_t media_block,
                                   int32_t kv_block) {
    require(requests.shape(1) == 6 && items.shape(1) == 6, "rows of another width");
    require(deadlines.size() == requests.shape(0) && media_block > 0 && kv_block > 0, "a deadline for each request");
    auto made = std::make_unique<Workload>();
    int32_t blocks = 0;
    for (size_t at = 0; at < items.shape(0); ++at) {
        const int32_t *row = items.data() + 6 * at;
        require(row[0] > 0 && row[1] >= 0 && row[2] >= 0, "an item without tokens, content or keys");
        const int32_t count = blocks_for(row[0], media_block);
        made->items.push_back({row[0], count, row[1], row[2], row[3], row[4], blocks, row[5] != 0});
        blocks += count;
    }
    made->keys.assign(keys.data(), keys.data() + keys.size());
    for (int32_t key : made->keys) require(key >= 0, "a negative key");
    int32_t item = 0, key = 0;
    int64_t time = 0, block = 0;
    for (size_t at = 0; at < requests.shape(0); ++at) {
        const int32_t *row = requests.data() + 6 * at;
        require(row[0] > 0 && row[2] > 0 && row[3] >= 0 && row[4] >= 0, "a request without tokens");
        require(row[1] >= row[2], "a request that asks for fewer tokens than it uses");
        Request request{row[0], row[1], row[2], item, row[3], key, row[5], deadlines.data()[at], 0, 0, time, block};
        item += row[3], key += row[4], time += row[2];
        require(size_t(item) <= made->items.size() && size_t(key) <= made->keys.size(), "too few items or keys");
        for (int32_t each = item - row[3]; each < item; ++each) {
            request.media_tokens += made->items[each].tokens;
            request.media_blocks += made->items[each].blocks;
        }
        block += blocks_for(int64_t(row[0]) + row[1] - 1, kv_block);
        made->requests.push_back(request);
    }
    return made;
}

std::vector<Act> acts_of(const Workload &work, const In<double> &times, const In<int32_t> &asked,
                         const uint8_t *aborts) {
    std::vector<Act> acts;
    for (size_t at = 0; at < times.size(); ++at) {
        const Act act{times.data()[at], asked.data()[at], aborts && aborts[at]};
        require(act.request >= 0 && size_t(act.request) < work.requests.size(), "an act for no request");
        require(act.time >= (acts.empty() ? 0.0 : acts.back().time), "acts out of order");
        acts.push_back(act);
    }
    return acts;
}

// One row an instance: roles, two lanes, image blocks, KV blocks, host, tokens, media, policy, order, chunked, media
// budget, decode budget, number of the name.
std::vector<Setup> setups_of(const Rows<int32_t> &rows, const In<double> &limits, const nb::list &costs,
                             const nb::list &rule_costs) {
    const size_t count = rows.shape(0);
    require(rows.shape(1) == 13 && limits.size() == count && costs.size() == count && rule_costs.size() == count,
            "a row, a limit and costs for each instance");
    require(count > 0 && count < 32768, "no instance, or more than 32767");
    std::vector<Setup> made;
    for (size_t at = 0; at < count; ++at) {
        const int32_t *row = rows.data() + 13 * at;
        require(row[2] >= 0 && row[3] >= 0 && row[5] > 0 && row[6] > 0, "pools or budgets that cannot be");
        const Cost *cost = nb::cast<const AnyCost &>(costs[at]).cost.get();
        const Cost *rule = rule_costs[at].is_none() ? nullptr : nb::cast<const AnyCost &>(rule_costs[at]).cost.get();
        require(rule || Policy(row[7]) != Policy::time, "a policy that predicts and nothing to predict with");
        const double limit = limits.data()[at];
        const Rules rules{row[5],       row[6],        Policy(row[7]), Order(row[8]), row[9] != 0,
                          row[10] != 0, row[11] != 0, limit,          rule};
        made.push_back({uint8_t(row[0]), row[1] != 0, row[2], row[3], row[4], row[12], rules, cost});
    }
    return made;
}

// Whole: media_block, kv_block, image_cache, prefix_cache, prefetch, early, optimistic, least_loaded, max_waiting, bytes
// of an image block and of a KV block.
// Real: message_s, interference, bandwidth and fixed seconds of the link and of the network.
Options options_of(const In<int64_t> &n, const In<double> &x) {
    require(n.size() == 11 && x.size() == 6, "options of another number");
    return {int32_t(n.data()[0]), int32_t(n.data()[1]), n.data()[2] != 0, n.data()[3] != 0, n.data()[4] != 0,
            n.data()[5] != 0, n.data()[6] != 0, n.data()[7] != 0, int32_t(n.data()[8]), x.data()[0], x.data()[1],
            {x.data()[2], x.data()[3]}, {x.data()[4], x.data()[5]}, n.data()[9], n.data()[10]};
}

nb::object log_of(const std::vector<Line> &lines) {
    std::vector<double> times;
    std::vector<int32_t> rest;
    for (const Line &line : lines) {
        times.push_back(line.time);
        rest.insert(rest.end(), {line.who, line.kind, line.request, line.a, line.b, line.c});
    }
    return nb::make_tuple(array_of(std::move(times)), array_of(std::move(rest)));
}

nb::tuple simulate(const Workload &work, const In<double> &times, const In<int32_t> &asked, const In<uint8_t> &aborts,
                   const Rows<int32_t> &rows, const In<double> &limits, const nb::list &costs,
                   const nb::list &rule_costs, const In<int64_t> &whole, const In<double> &real, bool logged) {
    require(times.size() == asked.size() && times.size() == aborts.size(), "a time for each act");
    const std::vector<Act> acts = acts_of(work, times, asked, aborts.data());
    const std::vector<Setup> setups = setups_of(rows, limits, costs, rule_costs);
    const Options options = options_of(whole, real);
    Result result;
    {
        nb::gil_scoped_release released;
        Engine engine(work, acts, setups, options, logged);
        engine.run();
        result = std::move(engine.world.result);
    }
    const std::vector<int64_t> moved(result.moved, result.moved + 3);
    return nb::make_tuple(array_of(std::move(result.times)), array_of(std::move(result.counts)),
                          array_of(std::move(result.reasons)), array_of(std::move(result.busy)),
                          array_of(std::move(result.peak)), array_of(moved), result.ended, result.events,
                          result.unsettled, result.preemptions, log_of(result.log));
}

// As simulate(), of requests that nobody gives up: those in time by each rule, those whose first token was, when complete
// ones ended, what instances did, and how many requests have ended.
nb::tuple tried(const Workload &work, const In<double> &times, const In<int32_t> &asked, const Rows<int32_t> &rows,
                const In<double> &limits, const nb::list &costs, const nb::list &rule_costs, const In<int64_t> &whole,
                const In<double> &real, const In<double> &arrivals, double ttft, double tbt) {
    require(times.size() == asked.size() && arrivals.size() == work.requests.size(), "a time for each request");
    const std::vector<Act> acts = acts_of(work, times, asked, nullptr);
    const std::vector<Setup> setups = setups_of(rows, limits, costs, rule_costs);
    const Options options = options_of(whole, real);
    Result result;
    Judgement found;
    {
        nb::gil_scoped_release released;
        Engine engine(work, acts, setups, options, false);
        engine.run();
        found = engine.judged(arrivals.data(), ttft, tbt);
        result = std::move(engine.world.result);
    }
    const auto settled = std::count_if(result.reasons.begin(), result.reasons.end(), [](uint8_t each) { return each; });
    return nb::make_tuple(found.p90, found.p99, found.guard, found.tpot, found.first,
                          array_of(std::move(found.finishes)), array_of(std::move(result.busy)),
                          array_of(std::move(result.peak)), result.ended, result.unsettled, int64_t(settled));
}

// (p90, p99, guard, tpot, first, when complete ones ended) of token times: how tried() judges, by itself.
nb::tuple judged(const In<double> &times, const In<int64_t> &first, const In<int32_t> &counts,
                 const In<uint8_t> &reasons, const In<double> &arrivals, double ttft, double tbt) {
    const size_t requests = first.size();
    require(counts.size() == requests && reasons.size() == requests && arrivals.size() == requests, "other lengths");
    Judgement found;
    for (size_t at = 0; at < requests; ++at) {
        const Reason reason = Reason(reasons.data()[at]);
        if (reason != Reason::length && reason != Reason::stop) continue;
        require(first.data()[at] >= 0 && size_t(first.data()[at] + counts.data()[at]) <= times.size(), "too few times");
        found.add(times.data() + first.data()[at], counts.data()[at], arrivals.data()[at], ttft, tbt);
    }
    return nb::make_tuple(found.p90, found.p99, found.guard, found.tpot, found.first,
                          array_of(std::move(found.finishes)));
}

} // namespace

void bind_simulator(nb::module_ &module) {
    module.attr("SIMULATOR") = 5; // raised with every change of what it takes or answers (test_compiled_version.py)
    nb::class_<AnyCost>(module, "SimCost");
    nb::class_<Workload>(module, "SimWorkload");
    module.def("sim_roofline", &roofline, "whole"_a, "real"_a);
    module.def("sim_step_cost", &step_cost, "decodes"_a, "prefill"_a, "media"_a);
    module.def("sim_tables", &tables, "context"_a, "contexts"_a, "costs"_a);
    module.def("sim_linear", &linear, "step_s"_a, "decode_s"_a, "prefill_s"_a, "encode_s"_a, "media_s"_a);
    module.def("sim_workload", &workload, "requests"_a, "deadlines"_a, "items"_a, "keys"_a, "media_block"_a,
               "kv_block"_a);
    module.def("sim_judged", &judged, "times"_a, "first"_a, "counts"_a, "reasons"_a, "arrivals"_a, "ttft"_a, "tbt"_a);
    module.def("sim_tried", &tried, "work"_a, "times"_a, "asked"_a, "instances"_a, "limits"_a, "costs"_a,
               "rule_costs"_a, "whole"_a, "real"_a, "arrivals"_a, "ttft"_a, "tbt"_a);
    module.def("simulate", &simulate, "work"_a, "times"_a, "asked"_a, "aborts"_a, "instances"_a, "limits"_a, "costs"_a,
               "rule_costs"_a, "whole"_a, "real"_a, "logged"_a);
}
