// Additive attention of few outputs, as in decoding: y_n = sum_m p_m x_m, p = softmax over m of <v, 1 / (1 + u_nm)>,
// u = exp(-rate (q_n + k_m)) = a_n b_m.
//
// Inputs are read in order where they lie, for each head and output once forward and twice backward; the scores of one
// output are held. Steps over the same inputs keep the weights as well, and leave the gradients of x to their caller.
#pragma once

#include "api.h"
#include "lanes.h"
#include "parallel.h"
#include "ratio.h"
#include "strided_rows.h"

namespace structconv::SC_ISA {

inline bool decodes(const EdgeAttentionArgs& a, int64_t outputs, int64_t inputs) {
    return a.activation == kProduct && !a.causal && !a.half && !(a.drop.p > 0) && outputs > 0 &&
           outputs <= kDecodeOutputs && inputs > 0 && inputs <= kDecodeInputs;
}

// y = sum_m w_m row(m), 64 channels at a time.
template <class Row> void decode_sums(const float* w, const Row& row, int64_t inputs, int64_t channels, float factor,
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

// u of two factors.
struct OfFactors {
    v16 operator()(v16 own, v16 other) const { return Ratio::bounded(own * other); }
};

// u of q and k themselves.
struct OfSums {
    float rate;
    v16 operator()(v16 own, v16 other) const {
        const v16 x = (own + other) * -rate;
        return exponential(choose(x > 69.0f, splat<v16>(69.0f), x));
    }
};

// Scores of one output, -inf of inputs that are not kept, filled up with -inf to a multiple of 16.
template <class Row, class Power>
void decode_scores(const float* own, const float* vector, const Row& row, int64_t inputs, int64_t depth, float* scores,
                const Power& power, const uint8_t* keep = nullptr) {
    for (int64_t m = 0; m < inputs; ++m) {
        scores[m] = -INFINITY;
        if (keep && !keep[m]) continue;
        const float* other = row(m);
        v16 sum{};
        for_lanes(depth, [&](int64_t c, int part) {
            const v16 u = power(lanes(own + c, part), lanes(other + c, part));
            sum += lanes(vector + c, part) * Ratio::reciprocal(1.0f + u);
        });
        scores[m] = total(sum);
    }
    fill_up(scores, inputs);
}

inline void decode_forward(const EdgeAttentionArgs& a, int64_t head) {
    alignas(64) float w[kDecodeInputs];
    const int64_t inputs = a.by_target.slots;
    const auto values = [&](int64_t m) { return row_of<float>(a.x, m, head); };
    for (int64_t n = 0; n < a.by_target.rows; ++n) {
        decode_scores(row_of<float>(a.q, n, head), a.vector + head * a.depth,
                   [&](int64_t m) { return row_of<float>(a.k, m, head); }, inputs, a.depth, w, OfFactors{});
        const float top = greatest(w, inputs), sum = weights_of(w, inputs, top), inverse = 1.0f / sum;
        a.peaks[2 * n * a.heads + head] = top, a.peaks[(2 * n + 1) * a.heads + head] = std::log(sum);
        decode_sums(w, values, inputs, a.channels, inverse, row_of<float>(a.y, n, head));
    }
}

// The targets of the gradients ds of one output's scores, which are accumulated if `more`.
struct FewSlopes {
    const float *own, *vector, *ds;
    Rows others, grad_k;  // grad_k.x null, and grad_vector null: not wanted
    float *grad_q, *grad_vector;
    int64_t inputs, head;
    float rate;
    bool more;
};

// At NV vectors of channels from c on, the last with `part` of them.
template <int NV, class Power> void few_slopes_at(const FewSlopes& s, int64_t c, int part, const Power& power) {
    v16 mine[NV], v[NV], slopes[NV] = {}, sums[NV] = {};
    for (int i = 0; i < NV; ++i) {
        mine[i] = lanes(s.own + c + 16 * i, part);
        v[i] = lanes(s.vector + c + 16 * i, part) * s.rate;
    }
    for (int64_t m = 0; m < s.inputs; ++m) {
        const float* other = row_of<float>(s.others, m, s.head) + c;
        float* to = s.grad_k.x ? row_of<float>(s.grad_k, m, s.head) + c : nullptr;
        for (int i = 0; i < NV; ++i) {
            const v16 u = power(mine[i], lanes(other + 16 * i, part));
            const v16 r = Ratio::reciprocal(1.0f + u), slope = u * r * r * s.ds[m];
            if (to) put(to + 16 * i, s.more ? lanes(to + 16 * i, part) + slope * v[i] : slope * v[i], part);
            slopes[i] += slope;
            sums[i] += (r - 0.5f) * s.ds[m];
        }
    }
    for (int i = 0; i < NV; ++i) {
        put(s.grad_q + c + 16 * i, slopes[i] * v[i], part);
        if (!s.grad_vector) continue;
        float* to = s.grad_vector + c + 16 * i;
        put(to, s.more ? lanes(to, part) + sums[i] : sums[i], part);
    }
}

template <class Power> void decode_slopes(const FewSlopes& s, int64_t depth, const Power& power) {
    int64_t c = 0;
    for (; c + 64 <= depth; c += 64) few_slopes_at<4>(s, c, 16, power);
    for_lanes(depth, [&](int64_t c, int part) { few_slopes_at<1>(s, c, part, power); }, c);
}

inline void decode_backward(const EdgeAttentionArgs& a, int64_t head) {
    alignas(64) float p[kDecodeInputs], ds[kDecodeInputs];
    const int64_t inputs = a.by_target.slots;
    const float* vector = a.vector + head * a.depth;
    for (int64_t n = 0; n < a.by_target.rows; ++n) {
        const float *own = row_of<float>(a.q, n, head), *g = row_of<float>(a.grad, n, head);
        decode_scores(own, vector, [&](int64_t m) { return row_of<float>(a.k, m, head); }, inputs, a.depth, p,
                   OfFactors{});
        const float sum = weights_of(p, inputs, a.peaks[2 * n * a.heads + head]);
        for (int64_t m = 0; m < inputs; ++m) p[m] /= sum;
        const float shift = dot(g, row_of<float>(a.y, n, head), a.channels);
        for (int64_t m = 0; m < inputs; ++m)
            ds[m] = p[m] * (dot(g, row_of<float>(a.x, m, head), a.channels) - shift);
        const bool more = n > 0;
        decode_slopes({own, vector, ds, a.k, a.grad_k, row_of<float>(a.grad_q, n, head), a.grad_vector + head * a.depth,
                    inputs, head, static_cast<float>(a.parameter), more},
                   a.depth, OfFactors{});
        for (int64_t m = 0; m < inputs; ++m) {
            float* to = row_of<float>(a.grad_x, m, head);
            for_lanes(a.channels, [&](int64_t c, int part) {
                const v16 own_part = lanes(g + c, part) * p[m];
                put(to + c, more ? lanes(to + c, part) + own_part : own_part, part);
            });
        }
    }
}

// use(what is read of q_n, of k, how u is made of both): of factors, where those of q_n are normal numbers.
template <class Args, class Use> void with_powers(const Args& a, int64_t n, int64_t head, const Use& use) {
    alignas(64) float own[kMaxChannels];
    const float *q = row_of<float>(a.q, n, head), rate = static_cast<float>(a.rate);
    i16 normal = i16{} - 1;
    for_lanes(a.depth, [&](int64_t c, int part) {
        const v16 x = lanes(q + c, part) * -rate;
        normal &= (x <= 80.0f) & (x >= -80.0f);
        put(own + c, exponential(x), part);
    });
    bool all = true;
    for (int lane = 0; lane < 16; ++lane) all = all && normal[lane];
    all ? use(own, a.factor, OfFactors{}) : use(q, a.k, OfSums{rate});
}

inline void step_forward(const AdditiveStepArgs& a, int64_t head) {
    alignas(64) float w[kDecodeInputs];
    for (int64_t n = 0; n < a.outputs; ++n) {
        with_powers(a, n, head, [&](const float* own, const Rows& others, const auto& power) {
            decode_scores(own, a.vector + head * a.depth, [&](int64_t m) { return row_of<float>(others, m, head); },
                       a.inputs, a.depth, w, power, a.keep ? a.keep + head * a.inputs : nullptr);
        });
        const float top = greatest(w, a.inputs), sum = weights_of(w, a.inputs, top);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        float* weights = a.weights + (head * a.outputs + n) * a.inputs;
        for (int64_t m = 0; m < a.inputs; ++m) weights[m] = w[m] * inverse;
        decode_sums(weights, [&](int64_t m) { return row_of<float>(a.x, m, head); }, a.inputs, a.channels, 1.0f,
                 row_of<float>(a.y, n, head));
    }
}

inline void step_backward(const AdditiveStepBackwardArgs& a, int64_t head) {
    alignas(64) float ds[kDecodeInputs];
    for (int64_t n = 0; n < a.outputs; ++n) {
        const float* p = a.weights + (head * a.outputs + n) * a.inputs;
        dots_of(row_of<float>(a.grad, n, head), [&](int64_t m) { return row_of<float>(a.x, m, head); }, a.inputs,
                 a.channels, ds);
        float shift = 0.0f;
        for (int64_t m = 0; m < a.inputs; ++m) shift += p[m] * ds[m];
        for (int64_t m = 0; m < a.inputs; ++m) ds[m] = p[m] * (ds[m] - shift);
        with_powers(a, n, head, [&](const float* own, const Rows& others, const auto& power) {
            decode_slopes({own, a.vector + head * a.depth, ds, others, a.grad_k, row_of<float>(a.grad_q, n, head),
                        a.grad_vector ? a.grad_vector + head * a.depth : nullptr, a.inputs, head,
                        static_cast<float>(a.rate), n > 0 || !a.first},
                       a.depth, power);
        });
    }
}

// body(head) for all heads, on several threads where it is worth it.
template <class Body> void for_heads(int64_t heads, int64_t bytes, int64_t threads, const Body& body) {
    for_each(heads, bytes >= 1 << 18 ? threads : 1, body);
}

}  // namespace structconv::SC_ISA
