// Seconds of a step: costs/step_cost.py and costs/budgets.py, operation for operation.
#pragma once

#include <cstdint>
#include <vector>

namespace trinity::sim {

// What a step has: rows and, as means over its rows, how far back they look.
struct Load {
    int64_t decodes, prefill_tokens, media_tokens;
    double context, prefilled;
    int64_t prefills;
    double image = 0.0; // visual tokens of a visual token's own image, on average; 0: of the model's typical image
};

struct Cost {
    virtual ~Cost() = default;
    virtual double at(const Load &load) const = 0;
    // With the model's usual context and prefills that begin at their first token.
    virtual double seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const = 0;
};

// trinity.costs.step_cost.Roofline. Products that Python computes in whole numbers are whole numbers here.
struct Roofline final : Cost {
    double context;
    int64_t weights, head, attended, layers, width, dtype_bytes, read_bytes, kv_bytes;
    bool vision;
    double patches; // of a visual token
    int64_t vision_weights, projector, span, vision_attended, full_layers, vision_layers, vision_width, vision_bytes;
    int64_t feature_bytes, image_tokens;
    double flops, flops_share, vision_share, bandwidth, bandwidth_share, pass_s, row_s;

    double at(const Load &load) const override;
    double seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const override;

  private:
    double language(const Load &load) const;
    double encode(int64_t tokens, double image) const;
    double pass(double flops, double moved, double share) const;
};

struct Point {
    int64_t count;
    double seconds;
};
using Table = std::vector<Point>;

// trinity.costs.budgets.StepCost.
struct StepCost final : Cost {
    Table decodes, prefill, media;

    double at(const Load &load) const override;
    double seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const override;
};

// trinity.costs.step_cost.CostTables.
struct Tables final : Cost {
    double context;
    std::vector<double> contexts;
    std::vector<StepCost> costs;

    double at(const Load &load) const override;
    double seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const override;

  private:
    double between(double context, int64_t decodes, int64_t prefill_tokens) const;
};

// trinity.costs.emulated_cost.LinearCost.
struct Linear final : Cost {
    double step_s, decode_s, prefill_s, encode_s, media_s;

    double at(const Load &load) const override;
    double seconds(int64_t decodes, int64_t prefill_tokens, int64_t media_tokens) const override;
};

} // namespace trinity::sim
