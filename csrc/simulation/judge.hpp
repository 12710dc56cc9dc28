// How many requests were in time, by each rule of trinity.traces.trace.SLO.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace trinity::sim {

struct Judgement {
    int64_t p90 = 0, p99 = 0, guard = 0, tpot = 0;
    int64_t first = 0;            // whose first token was in time
    std::vector<double> finishes; // of complete requests

    // A complete request, by the times of its tokens.
    void add(const double *times, int32_t count, double arrival, double ttft, double tbt);
};

} // namespace trinity::sim
