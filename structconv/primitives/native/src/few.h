// Additive attention of few outputs, as in decoding: y_n = sum_m p_m x_m, p = softmax over m of <v, 1 / (1 + a_n b_m)>.
//
// Inputs are read in order where they lie, for each head and output once forward and twice backward; the scores of one
// output are held.
#pragma once

#include "api.h"
#include "ratio.h"
#include "rows.h"

namespace structconv::SC_ISA {

constexpr int64_t kFewOutputs = 8, kFewInputs = 4096;

template <class Args> bool few_outputs(const Args& a, int64_t outputs, int64_t inputs) {
    return a.activation == kProduct && !a.causal && !a.half && !(a.drop.p > 0) && outputs > 0 &&
           outputs <= kFewOutputs && inputs > 0 && inputs <= kFewInputs;
}

// visit(first channel, how many of 16) over channels from the first on.
template <class Visit> void for_lanes(int64_t channels, const Visit& visit, int64_t first = 0) {
    for (int64_t c = first; c < channels; c += 16) visit(c, static_cast<int>(channels - c < 16 ? channels - c : 16));
}

inline v16 lanes(const float* from, int part) { return part == 16 ? load<v16>(from) : load_part<v16>(from, part); }

inline void put(float* to, v16 v, int part) { part == 16 ? store(to, v) : store_part(to, v, part); }

// y = sum_m w_m row(m), 64 channels at a time.
template <class Row> void few_sums(const float* w, const Row& row, int64_t inputs, int64_t channels, float factor,
                                   float* y) {
    int64_t c = 0;
    for (; c + 64 <= channels; c += 64) {
        v16 found[4] = {};
        for (int64_t m = 0; m < inputs; ++m)
            for (int i = 0; i < 4; ++i) found[i] += load<v16>(row(m) + c + 16 * i) * w[m];
        for (int i = 0; i < 4; ++i) store(y + c + 16 * i, found[i] * factor);
    }
    for_lanes(channels, [&](int64_t c, int part) {
        v16 found{};
        for (int64_t m = 0; m < inputs; ++m) found += lanes(row(m) + c, part) * w[m];
        put(y + c, found * factor, part);
    }, c);
}

inline float few_dot(const float* a, const float* b, int64_t channels) {
    v16 sum{};
    for_lanes(channels, [&](int64_t c, int part) { sum += lanes(a + c, part) * lanes(b + c, part); });
    return total(sum);
}

// Scores of one output, filled up with -inf to a multiple of 16.
template <class Row> void few_scores(const float* own, const float* vector, const Row& row, int64_t inputs, int64_t depth,
                                     float* scores) {
    for (int64_t m = 0; m < inputs; ++m) {
        const float* other = row(m);
        v16 sum{};
        for_lanes(depth, [&](int64_t c, int part) {
            const v16 u = Ratio::bounded(lanes(own + c, part) * lanes(other + c, part));
            sum += lanes(vector + c, part) * Ratio::reciprocal(1.0f + u);
        });
        scores[m] = total(sum);
    }
    for (int64_t m = inputs; m % 16; ++m) scores[m] = -INFINITY;
}

// exp(score - base) in the place of scores; returns their sum.
inline float few_weights(float* scores, int64_t inputs, float base) {
    v16 sum{};
    for (int64_t m = 0; m < inputs; m += 16) {
        const v16 p = exponential(load<v16>(scores + m) - base);
        sum += p;
        store(scores + m, p);
    }
    return total(sum);
}

inline void few_forward(const AdditiveForwardArgs& a, int64_t head) {
    alignas(64) float w[kFewInputs];
    const int64_t inputs = a.layout.slots;
    const auto values = [&](int64_t m) { return row_of<float>(a.x, m, head); };
    for (int64_t n = 0; n < a.layout.rows; ++n) {
        few_scores(row_of<float>(a.q, n, head), a.vector + head * a.depth,
                   [&](int64_t m) { return row_of<float>(a.k, m, head); }, inputs, a.depth, w);
        float top = -INFINITY;
        for (int64_t m = 0; m < inputs; ++m) top = w[m] > top ? w[m] : top;
        const float sum = few_weights(w, inputs, top), inverse = 1.0f / sum;
        a.lse[n * a.heads + head] = top + std::log(sum);
        few_sums(w, values, inputs, a.channels, inverse, row_of<float>(a.y, n, head));
    }
}

// What comes of the gradients of one output's scores at NV vectors of channels from c on, the last with `part` of them.
template <int NV> void few_slopes(const AdditiveBackwardArgs& a, int64_t head, int64_t n, int64_t c, int part,
                                  const float* ds) {
    const float *own = row_of<float>(a.q, n, head) + c, *vector = a.vector + head * a.depth + c;
    const bool more = n > 0;
    v16 mine[NV], v[NV], slopes[NV] = {}, sums[NV] = {};
    for (int i = 0; i < NV; ++i) {
        mine[i] = lanes(own + 16 * i, part);
        v[i] = lanes(vector + 16 * i, part) * static_cast<float>(a.parameter);
    }
    for (int64_t m = 0; m < a.by_target.slots; ++m) {
        const float* other = row_of<float>(a.k, m, head) + c;
        float* to = row_of<float>(a.grad_k, m, head) + c;
        for (int i = 0; i < NV; ++i) {
            const v16 u = Ratio::bounded(mine[i] * lanes(other + 16 * i, part));
            const v16 r = Ratio::reciprocal(1.0f + u), slope = u * r * r * ds[m];
            put(to + 16 * i, more ? lanes(to + 16 * i, part) + slope * v[i] : slope * v[i], part);
            slopes[i] += slope;
            sums[i] += (r - 0.5f) * ds[m];
        }
    }
    float *grad_q = row_of<float>(a.grad_q, n, head) + c, *grad_vector = a.grad_vector + head * a.depth + c;
    for (int i = 0; i < NV; ++i) {
        put(grad_q + 16 * i, slopes[i] * v[i], part);
        put(grad_vector + 16 * i, more ? lanes(grad_vector + 16 * i, part) + sums[i] : sums[i], part);
    }
}

inline void few_backward(const AdditiveBackwardArgs& a, int64_t head) {
    alignas(64) float p[kFewInputs], ds[kFewInputs];
    const int64_t inputs = a.by_target.slots;
    const float* vector = a.vector + head * a.depth;
    for (int64_t n = 0; n < a.by_target.rows; ++n) {
        const float *own = row_of<float>(a.q, n, head), *g = row_of<float>(a.grad, n, head);
        few_scores(own, vector, [&](int64_t m) { return row_of<float>(a.k, m, head); }, inputs, a.depth, p);
        few_weights(p, inputs, a.lse[n * a.heads + head]);
        const float shift = few_dot(g, row_of<float>(a.y, n, head), a.channels);
        for (int64_t m = 0; m < inputs; ++m)
            ds[m] = p[m] * (few_dot(g, row_of<float>(a.x, m, head), a.channels) - shift);
        const bool more = n > 0;
        int64_t c = 0;
        for (; c + 64 <= a.depth; c += 64) few_slopes<4>(a, head, n, c, 16, ds);
        for_lanes(a.depth, [&](int64_t c, int part) { few_slopes<1>(a, head, n, c, part, ds); }, c);
        for (int64_t m = 0; m < inputs; ++m) {
            float* to = row_of<float>(a.grad_x, m, head);
            for_lanes(a.channels, [&](int64_t c, int part) {
                const v16 own_part = lanes(g + c, part) * p[m];
                put(to + c, more ? lanes(to + c, part) + own_part : own_part, part);
            });
        }
    }
}

// body(head) for all heads, on several threads where it is worth it.
template <class Body> void for_heads(int64_t heads, int64_t bytes, int64_t threads, const Body& body) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads)) if (threads > 1 && bytes >= 1 << 18)
    for (int64_t head = 0; head < heads; ++head) body(head);
}

}  // namespace structconv::SC_ISA
