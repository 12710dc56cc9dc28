// How many requests were in time by each rule, and when they ended: SLO.met (traces/trace.py) and completed_share
// (traces/goodput.py), without a Python object for each token.
#include "simulation/judge.hpp"

#include <cmath>
#include <cstddef>

namespace trinity::sim {

namespace {

// The sum of doubles, rounded once: math.fsum, by Shewchuk's growing expansions.
class ExactSum {
  public:
    void add(double value) {
        size_t kept = 0;
        for (double part : parts_) {
            if (std::fabs(value) < std::fabs(part)) std::swap(value, part);
            const double high = value + part, low = part - (high - value);
            if (low != 0.0) parts_[kept++] = low;
            value = high;
        }
        parts_.resize(kept);
        parts_.push_back(value);
    }

    double rounded() const {
        size_t at = parts_.size();
        if (!at) return 0.0;
        double high = parts_[--at], low = 0.0;
        while (at) {
            const double before = high, part = parts_[--at];
            high = before + part;
            low = part - (high - before);
            if (low != 0.0) break;
        }
        if (at && ((low < 0.0 && parts_[at - 1] < 0.0) || (low > 0.0 && parts_[at - 1] > 0.0))) {
            const double twice = low * 2.0, other = high + twice; // half way between two: what is below decides
            if (twice == other - high) high = other;
        }
        return high;
    }

  private:
    std::vector<double> parts_;
};

// Of the gaps between ascending times. Where none is less than half the one after it each gap is exact (Sterbenz), so
// that the sum of all is what lies between the ends.
double summed_gaps(const double *times, int32_t count) {
    bool exact = times[0] >= times[count - 1] / 2;
    if (!exact) {
        exact = true;
        for (int32_t at = 1; at < count; ++at) exact &= times[at - 1] >= times[at] / 2;
    }
    if (exact) return times[count - 1] - times[0];
    ExactSum sum;
    for (int32_t at = 1; at < count; ++at) sum.add(times[at] - times[at - 1]);
    return sum.rounded();
}

} // namespace

void Judgement::add(const double *times, int32_t count, double arrival, double ttft, double tbt) {
    if (!count) return;
    const double since = times[0] - arrival, sum = summed_gaps(times, count);
    finishes.push_back(arrival + since + sum);
    if (!(since < ttft)) return;
    ++first;
    const int64_t gaps = count - 1;
    int64_t below = 0;
    for (int32_t at = 1; at < count; ++at) below += times[at] - times[at - 1] < tbt;
    const bool often = 100 * below >= 90 * gaps;
    p90 += often;
    p99 += 100 * below >= 99 * gaps;
    guard += often && since + sum <= ttft + gaps * tbt;
    tpot += !gaps || sum < tbt * gaps;
}

} // namespace trinity::sim
