// Attention by plain loops, for every processor and every width of heads.
#include "attention/rows.hpp"

#include <cmath>

namespace trinity {
namespace {

template <class T> struct Plain {
    using Element = T;

    static void pack(const T *query, float *packed, int64_t width) {
        for (int64_t i = 0; i < width; i++) packed[i] = get(query[i]);
    }

    static float dot(const float *query, const T *key, int64_t width) {
        float parts[8] = {}; // sums that do not wait for each other
        int64_t i = 0;
        for (; i + 8 <= width; i += 8)
            for (int64_t k = 0; k < 8; k++) parts[k] += query[i + k] * get(key[i + k]);
        for (; i < width; i++) parts[0] += query[i] * get(key[i]);
        return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }

    static void scores(const float *query, int64_t rows, int64_t width, const T *keys, int64_t, int64_t count,
                       float *scores, float *) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t k = 0; k < TILE; k++)
                scores[m * TILE + k] = k < count ? dot(query + m * width, keys + k * width, width) : 0;
    }

    // Scores become weights, those outside [low, high) none; returns by how much all that was added before shrinks.
    static float softmax(float *scores, int64_t low, int64_t high, float scale, float softcap, float &most,
                         float *sums) {
        float top = most;
        for (int64_t k = 0; k < TILE; k++) {
            float score = scores[k] * scale;
            if (softcap != 0) score = std::tanh(score / softcap) * softcap;
            scores[k] = k >= low && k < high ? score : NOTHING;
            if (scores[k] > top || scores[k] != scores[k]) top = scores[k]; // NaN shows in the result
        }
        const float shrunk = top == most ? 1 : std::exp(most - top);
        for (int64_t k = 0; k < TILE; k++) {
            scores[k] = scores[k] == NOTHING ? 0 : std::exp(scores[k] - top);
            sums[k] = sums[k] * shrunk + scores[k];
        }
        most = top;
        return shrunk;
    }

    static void scaled(float *seen, int64_t width, float by) {
        for (int64_t i = 0; i < width; i++) seen[i] *= by;
    }

    static void store(T *out, const float *seen, int64_t width, const float *sums) {
        float total = 0;
        for (int64_t i = 0; i < TILE; i++) total += sums[i];
        for (int64_t i = 0; i < width; i++) put(out + i, seen[i] / total);
    }

    static void weigh(const float *weights, int64_t rows, int64_t width, const T *values, int64_t, int64_t count,
                      float *seen) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t k = 0; k < count; k++)
                for (int64_t i = 0; i < width; i++)
                    seen[m * width + i] += weights[m * TILE + k] * get(values[k * width + i]);
    }
};

} // namespace

const AttentionKernel *attention_portable(const PagedCache &cache) {
    return cache.bf16 ? kernel<Plain<Bf16>>() : kernel<Plain<float>>();
}

} // namespace trinity
