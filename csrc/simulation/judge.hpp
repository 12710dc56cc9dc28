// How many requests were in time, by each rule of trinity.traces.trace.SLO.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace trinity::sim {

struct Tokens { // of a complete request: when the first and the later ones came
    double first;
    const double *later;
    int32_t count; // of the later ones
    int64_t below; // gaps that are shorter than the bound
};

struct Judgement {
    int64_t p90 = 0, p99 = 0, guard = 0, tpot = 0;
    int64_t first = 0;            // whose first token was in time
    std::vector<double> finishes; // of complete requests

    void add(const Tokens &tokens, double arrival, double ttft, double tbt);
    void add(const double *times, int32_t count, double arrival, double ttft, double tbt);
};

// How many of the gaps up to each of these times are below a bound.
std::vector<int32_t> counted_gaps(const std::vector<double> &times, double tbt);

} // namespace trinity::sim
