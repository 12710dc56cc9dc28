// Costs of steps. The order of every operation is that of the Python source: a float hangs on it.
#include "simulation/cost.hpp"

#include <algorithm>
#include <cstddef>

namespace trinity::sim {

namespace {

constexpr int64_t ACTIVATIONS = 18; // costs/step_cost.py, _ACTIVATIONS

double slope(const Point &low, const Point &high) {
    return (high.seconds - low.seconds) / static_cast<double>(high.count - low.count);
}

double slope_beyond(const Table &table) {
    if (table.size() == 1) return slope({0, 0.0}, table[0]);
    return std::max(slope(table[table.size() - 2], table.back()), slope(table.front(), table.back()));
}

// costs/budgets.py, _at.
double looked_up(const Table &table, int64_t count) {
    if (count <= 0 || table.empty()) return 0.0;
    const auto past = [](int64_t wanted, const Point &point) { return wanted < point.count; };
    const size_t place = std::upper_bound(table.begin(), table.end(), count, past) - table.begin();
    if (place == 0) return table[0].seconds;
    const Point &low = table[place - 1];
    const double rate = place < table.size() ? slope(low, table[place]) : slope_beyond(table);
    return low.seconds + static_cast<double>(count - low.count) * rate;
}

} // namespace

double Roofline::at(const Load &load) const { return language(load) + encode(load.media_tokens, load.image); }

double Roofline::seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const {
    return at({decodes, prefill_tokens, media_tokens, context, 0.0, 1});
}

double Roofline::language(const Load &load) const {
    const int64_t decodes = load.decodes, tokens = load.prefill_tokens, prefills = std::max<int64_t>(1, load.prefills);
    if (decodes <= 0 && tokens <= 0) return 0.0;
    const int64_t sequences = decodes + (tokens ? prefills : 0);
    const double each = static_cast<double>(tokens) / static_cast<double>(prefills);
    const double pairs = decodes * load.context + tokens * (load.prefilled + each / 2);
    const double work = 2 * (static_cast<double>((decodes + tokens) * weights + sequences * head) + pairs * attended);
    const double looked_at = decodes * load.context + (tokens ? prefills * load.prefilled : 0.0);
    const int64_t activations = ACTIVATIONS * (decodes + tokens) * layers * width * dtype_bytes;
    const double moved = read_bytes + (looked_at + decodes + tokens) * kv_bytes + activations;
    return pass(work, moved, flops_share) + sequences * row_s;
}

double Roofline::encode(int64_t tokens, double image) const {
    if (tokens <= 0 || !vision) return 0.0;
    const double own = image > 0 ? image : static_cast<double>(std::min(tokens, image_tokens));
    const double seen = tokens * patches;
    const double pairs = seen * (full_layers * own * patches + (vision_layers - full_layers) * span);
    const double products = seen * vision_weights + static_cast<double>(tokens * projector) + pairs * vision_attended;
    const double activations = seen * (ACTIVATIONS * vision_layers * vision_width * dtype_bytes);
    const double moved = activations + static_cast<double>(vision_bytes + tokens * feature_bytes);
    return pass(2 * products, moved, vision_share);
}

double Roofline::pass(double work, double moved, double share) const {
    return std::max(work / (flops * share), moved / (bandwidth * bandwidth_share)) + pass_s;
}

double StepCost::at(const Load &load) const { return seconds(load.decodes, load.prefill_tokens, load.media_tokens); }

double StepCost::seconds(int64_t decoded, int64_t prefill_tokens, int64_t media_tokens) const {
    double language = looked_up(decodes, decoded) + looked_up(prefill, prefill_tokens);
    if (decoded > 0 && prefill_tokens > 0 && !decodes.empty() && !prefill.empty())
        language -= std::min(decodes[0].seconds, prefill[0].seconds);
    return language + looked_up(media, media_tokens);
}

double Tables::at(const Load &load) const {
    const StepCost &first = costs[0];
    const double language = between(load.context, load.decodes, 0);
    const double prefill = between(load.prefilled, 0, load.prefill_tokens);
    const double both = first.seconds(load.decodes, load.prefill_tokens, 0);
    const double shared = first.seconds(load.decodes, 0, 0) + first.seconds(0, load.prefill_tokens, 0) - both;
    const double together = std::max({language, prefill, language + prefill - shared});
    return together + first.seconds(0, 0, load.media_tokens);
}

double Tables::seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const {
    return at({decodes, prefill_tokens, media_tokens, context, 0.0, 1});
}

double Tables::between(double looked_back, int64_t decodes, int64_t prefill_tokens) const {
    const auto reaches = [&](double known) { return known >= looked_back; };
    const auto found = std::find_if(contexts.begin(), contexts.end(), reaches);
    const size_t place = found == contexts.end() ? contexts.size() - 1 : found - contexts.begin();
    const double high = costs[place].seconds(decodes, prefill_tokens, 0);
    if (place == 0) return high;
    const double low = costs[place - 1].seconds(decodes, prefill_tokens, 0);
    const double near = contexts[place - 1], far = contexts[place];
    return low + std::max(0.0, high - low) * (looked_back - near) / (far - near);
}

double Linear::at(const Load &load) const { return seconds(load.decodes, load.prefill_tokens, load.media_tokens); }

double Linear::seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const {
    const double language = decodes || prefill_tokens ? step_s : 0.0;
    const double encode = media_tokens ? encode_s : 0.0;
    const double rows = decode_s * decodes + prefill_s * prefill_tokens + media_s * media_tokens;
    return language + encode + rows;
}

} // namespace trinity::sim
