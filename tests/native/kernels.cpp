// Runs every kernel on heap blocks of exactly the right size, for a memory checker to watch: graphs with empty rows,
// duplicates, loops and one long row, no edges, no entries; channel counts that fill no vector; both storage types; and
// a power law of degrees with a node of 10^5 in-edges.
// With all rows of x equal to one, weighted means are one: that much of the numbers is checked too.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "api.h"

#define DECLARE(name, Args) extern "C" void SC_JOIN(name, SC_ISA)(const structconv::Args*)
DECLARE(spmm, SpmmArgs);
DECLARE(sddmm, SddmmArgs);
DECLARE(conditioned_sums, ConditionedArgs);
DECLARE(conditioned_adjoint, ConditionedArgs);
DECLARE(affine_forward, AffineForwardArgs);
DECLARE(affine_backward, AffineBackwardArgs);
DECLARE(bilinear_forward, BilinearForwardArgs);
DECLARE(bilinear_backward, BilinearBackwardArgs);
DECLARE(additive_forward, AdditiveForwardArgs);
DECLARE(additive_backward, AdditiveBackwardArgs);
DECLARE(additive_step, AdditiveStepArgs);
DECLARE(additive_step_backward, AdditiveStepBackwardArgs);
DECLARE(edge_weights, EdgeWeightsArgs);
DECLARE(window_forward, WindowForwardArgs);
DECLARE(window_backward, WindowBackwardArgs);
DECLARE(project, ProjectArgs);
DECLARE(outer, OuterArgs);
DECLARE(drop_block, DropBlockArgs);
DECLARE(attention_step, AttentionStepArgs);
DECLARE(edges, EdgesArgs);
DECLARE(adjacency, AdjacencyArgs);
DECLARE(groups, GroupsArgs);
DECLARE(transpose, TransposeArgs);
DECLARE(maxima, MaximaArgs);
DECLARE(maxima_backward, MaximaArgs);
DECLARE(sample_bounds, SampleBoundsArgs);
DECLARE(sample_draw, SampleDrawArgs);
DECLARE(number, NumberArgs);
#define CALL(name) SC_JOIN(name, SC_ISA)

using namespace structconv;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int64_t heads, int64_t channels, int half) {
    if (holds) return;
    std::printf("failed: %s, %ld heads of %ld channels, half %d\n", what, heads, channels, half);
    ++failures;
}

struct Side {
    std::vector<int32_t> indptr, index, order;
    Layout layout() const {
        return {indptr.data(), index.data(), order.data(), static_cast<int64_t>(indptr.size()) - 1,
                static_cast<int64_t>(index.size())};
    }
};

Side group(const std::vector<int32_t>& rows, const std::vector<int32_t>& columns, int32_t count) {
    Side side{std::vector<int32_t>(count + 1), std::vector<int32_t>(rows.size()), std::vector<int32_t>(rows.size())};
    for (int32_t row : rows) ++side.indptr[row + 1];
    for (int32_t row = 0; row < count; ++row) side.indptr[row + 1] += side.indptr[row];
    std::vector<int32_t> next(side.indptr.begin(), side.indptr.end() - 1);
    for (size_t e = 0; e < rows.size(); ++e) {
        const int32_t slot = next[rows[e]]++;
        side.index[slot] = columns[e];
        side.order[slot] = static_cast<int32_t>(e);
    }
    return side;
}

// Numbers in float32 or bfloat16 storage, in a block of their exact size.
struct Block {
    std::vector<unsigned char> bytes;
    int half;
    Block(int64_t count, int half, float low, float high) : bytes(count * (half ? 2 : 4)), half(half) {
        static std::mt19937 random(0);
        std::uniform_real_distribution<float> uniform(low, high);
        for (int64_t i = 0; i < count; ++i) set(i, uniform(random));
    }
    void set(int64_t i, float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (half) {
            const uint16_t top = static_cast<uint16_t>(bits >> 16);
            std::memcpy(&bytes[i * 2], &top, 2);
        } else {
            std::memcpy(&bytes[i * 4], &value, 4);
        }
    }
    float get(int64_t i) const {
        uint32_t bits = 0;
        if (half) {
            uint16_t top;
            std::memcpy(&top, &bytes[i * 2], 2);
            bits = static_cast<uint32_t>(top) << 16;
        } else {
            std::memcpy(&bits, &bytes[i * 4], 4);
        }
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    int64_t size() const { return static_cast<int64_t>(bytes.size()) / (half ? 2 : 4); }
    void* data() { return bytes.data(); }
    float* floats() { return reinterpret_cast<float*>(bytes.data()); }
    bool finite() const {
        for (int64_t i = 0; i < size(); ++i)
            if (!std::isfinite(get(i))) return false;
        return true;
    }
};

struct Case {
    Side by_target, by_source;
    int64_t inputs, outputs, edges;
};

Case grouped(int32_t inputs, int32_t outputs, const std::vector<int32_t>& source, const std::vector<int32_t>& target) {
    return {group(target, source, outputs), group(source, target, inputs), inputs, outputs,
            static_cast<int>(source.size())};
}

Case make(int32_t inputs, int32_t outputs, int edges) {
    std::mt19937 random(1);
    std::vector<int32_t> source, target;
    for (int e = 0; e < edges; ++e) {
        source.push_back(static_cast<int32_t>(random() % (inputs - 1)));
        target.push_back(e < edges / 2 ? outputs / 2 : static_cast<int32_t>(random() % (outputs - 1)));
    }
    return grouped(inputs, outputs, source, target);
}

// Degrees by a power law on both sides; `hub` of the edges end in one output, or begin in one input.
Case power_law(int32_t entries, int edges, int hub, bool of_inputs) {
    std::mt19937 random(2);
    std::uniform_real_distribution<double> uniform(0, 1);
    std::vector<int32_t> ends, others;
    for (int e = 0; e < edges; ++e) {
        ends.push_back(e < hub ? entries / 3 : static_cast<int32_t>(entries * std::pow(uniform(random), 4)));
        others.push_back(static_cast<int32_t>(entries * std::pow(uniform(random), 4)));
    }
    return of_inputs ? grouped(entries, entries, ends, others) : grouped(entries, entries, others, ends);
}

bool means(const Block& y, const Case& c, int64_t row_size) {
    for (int64_t n = 0; n < c.outputs; ++n) {
        const bool empty = c.by_target.indptr[n] == c.by_target.indptr[n + 1];
        for (int64_t i = 0; i < row_size; ++i)
            if (std::fabs(y.get(n * row_size + i) - (empty ? 0.0f : 1.0f)) > 1e-2f) return false;
    }
    return true;
}

void products(const Case& c, int64_t heads, int64_t channels, int half) {
    Block x(heads * c.inputs * channels, half, 1, 1);
    Block values(heads * c.edges, half, -1, 1), s(heads * c.edges, half, 0, 0);
    for (int64_t mode = 0; mode < 4; ++mode) {  // apart, shared x, summed heads, shared values
        const int64_t rows = mode == 2 ? 1 : heads;
        Block y(rows * c.outputs * channels, half, 0, 0), z(rows * c.outputs * channels, half, 0, 1);
        const SpmmArgs args{c.by_target.layout(), values.data(), x.data(), z.data(), y.data(), c.inputs, channels,
                            heads, c.edges, mode == 3 ? heads : 1, mode == 1 ? heads : 1, heads / rows, half, 2, 0.5,
                            2.0};
        CALL(spmm)(&args);
        expect(y.finite(), "spmm", heads, channels, half);
    }
    Block q(heads * c.outputs * channels, half, 1, 1);
    const SddmmArgs args{c.by_target.layout(), q.data(), x.data(), s.data(), c.inputs, channels, heads, 1, 1, half, 2};
    CALL(sddmm)(&args);
    for (int64_t i = 0; i < s.size(); ++i)
        expect(std::fabs(s.get(i) - channels) <= 0.01f * channels, "sddmm", heads, channels, half);
}

// The second block of `heads` heads of three: of ones, so that a sum counts edges, and its adjoint all that they reach.
void conditioned(const Case& c, int64_t heads, int64_t channels) {
    const int64_t wide = 3 * heads;
    Block values(c.edges * wide, 0, 1, 1), x(c.inputs * channels, 0, 1, 1), sums(c.outputs * heads * channels, 0, 0, 0);
    Block grad_values(c.edges * wide, 0, 0, 0), grad_x(c.inputs * channels, 0, 0, 0);
    const ConditionedArgs forward{c.by_target.layout(), values.floats() + heads, x.floats(), sums.floats(), nullptr,
                                  nullptr, wide, heads, channels, 2};
    CALL(conditioned_sums)(&forward);
    for (int64_t n = 0; n < c.outputs; ++n)
        for (int64_t i = 0; i < heads * channels; ++i)
            expect(sums.get(n * heads * channels + i) == c.by_target.indptr[n + 1] - c.by_target.indptr[n],
                   "conditioned_sums", heads, channels, 0);
    Block ones(c.outputs * heads * channels, 0, 1, 1);
    const ConditionedArgs adjoint{c.by_source.layout(), values.floats() + heads, x.floats(), ones.floats(),
                                  grad_values.floats() + heads, grad_x.floats(), wide, heads, channels, 2};
    CALL(conditioned_adjoint)(&adjoint);
    for (int64_t e = 0; e < c.edges; ++e)
        expect(grad_values.get(e * wide + heads) == channels && grad_values.get(e * wide) == 0, "conditioned_adjoint",
               heads, channels, 0);
    for (int64_t m = 0; m < c.inputs && channels; ++m)
        expect(grad_x.get(m * channels) == heads * (c.by_source.indptr[m + 1] - c.by_source.indptr[m]),
               "conditioned_adjoint", heads, channels, 0);
}

Rows rows(Block& block, int64_t heads, int64_t channels) { return {block.data(), heads * channels, channels}; }

void affine(const Case& c, int64_t heads, int64_t channels, int half, double p, Terms terms) {
    const int64_t in = c.inputs * heads, out = c.outputs * heads, wide = std::max<int64_t>(128, (channels + 7) / 8 * 8);
    Block source(in, 0, -3, 3), target(out, 0, -3, 3), lse(out, 0, 0, 0), mass(out, 0, 0, 0);
    Block x(in * channels, half, 1, 1), y(out * channels, half, 0, 0), y2(out * channels, half, 0, 0);
    Block z(out * channels, half, -1, 1), grad_z(out * channels, half, 0, 0), u(heads * channels, 0, -1, 1);
    Block v(heads * channels, 0, -1, 1), grad_u(heads * channels, 0, 0, 0), grad_v(heads * channels, 0, 0, 0);
    Block grad(out * channels, half, -1, 1), grad_x(in * channels, half, 0, 0), packed(4 * out, 0, 0, 0);
    Block grad_source(in, 0, 0, 0), grad_target(out, 0, 0, 0), partial(256 * 3 * wide, 0, 0, 0);
    Block bias(heads * channels, 0, 0, 0), grad_bias(heads * channels, 0, 0, 0);
    const Rows none = {nullptr, 0, 0};
    const bool apart = terms == kOfXAndZ;
    VectorArgs vectors{terms,   nullptr, nullptr, nullptr,         none, none,
                       nullptr, nullptr, nullptr, partial.floats()};
    if (terms != kGiven)
        vectors = {terms,
                   u.floats(),
                   v.floats(),
                   half ? nullptr : bias.floats(),
                   apart ? rows(z, heads, channels) : none,
                   apart ? rows(grad_z, heads, channels) : none,
                   grad_u.floats(),
                   grad_v.floats(),
                   half ? nullptr : grad_bias.floats(),
                   partial.floats()};
    DropArgs drop{p, 77, heads, c.outputs, 0};
    const AffineForwardArgs forward{c.by_target.layout(), source.floats(), target.floats(), rows(x, heads, channels),
                                    rows(y, heads, channels), rows(y2, heads, channels), lse.floats(), mass.floats(),
                                    c.inputs, heads, channels, half, 2, 0.2, drop, vectors};
    CALL(affine_forward)(&forward);
    if (p == 0) expect(means(y, c, heads * channels), "affine means", heads, channels, half);
    drop.source_major = 1;
    const AffineBackwardArgs backward{c.by_target.layout(), c.by_source.layout(), source.floats(), target.floats(),
                                      lse.floats(), mass.floats(), rows(x, heads, channels), rows(y, heads, channels),
                                      rows(y2, heads, channels), rows(grad, heads, channels),
                                      rows(grad_x, heads, channels), grad_source.floats(), grad_target.floats(),
                                      packed.floats(), heads, channels, half, 2, 0.2, drop, vectors};
    CALL(affine_backward)(&backward);
    expect(grad_x.finite() && grad_source.finite() && grad_target.finite(), "affine gradients", heads, channels, half);
    expect(grad_z.finite() && grad_u.finite() && grad_v.finite() && grad_bias.finite(), "gradients of vectors", heads, channels, half);
}

void bilinear(const Case& c, int64_t heads, int64_t channels, int64_t depth, int half, double p) {
    const int64_t in = c.inputs * heads, out = c.outputs * heads;
    Block q(out * depth, half, -1, 1), k(in * depth, half, -1, 1), v(in * channels, half, 1, 1);
    Block y(out * channels, half, 0, 0), lse(out, 0, 0, 0), bias(heads * c.edges, 0, -1, 1);
    Block grad(out * channels, half, -1, 1);
    Block grad_q(out * depth, half, 0, 0), grad_k(in * depth, half, 0, 0), grad_v(in * channels, half, 0, 0);
    Block grad_bias(heads * c.edges, 0, 0, 0), packed(2 * out, 0, 0, 0);
    const DropArgs drop{p, 77, heads, c.outputs, 0};
    const BilinearForwardArgs forward{c.by_target.layout(), rows(q, heads, depth), rows(k, heads, depth),
                                      rows(v, heads, channels), rows(y, heads, channels), bias.floats(), lse.floats(),
                                      heads, depth, channels, half, 2, 0.3, drop};
    CALL(bilinear_forward)(&forward);
    if (p == 0) expect(means(y, c, heads * channels), "bilinear means", heads, channels, half);
    const BilinearBackwardArgs backward{c.by_target.layout(), c.by_source.layout(), rows(q, heads, depth),
                                        rows(k, heads, depth), rows(v, heads, channels),
                                        rows(y, heads, channels), rows(grad, heads, channels),
                                        rows(grad_q, heads, depth), rows(grad_k, heads, depth),
                                        rows(grad_v, heads, channels), bias.floats(), lse.floats(), grad_bias.floats(),
                                        packed.floats(), heads, depth, channels, half, 2, 0.3, drop};
    CALL(bilinear_backward)(&backward);
    expect(grad_q.finite() && grad_k.finite() && grad_v.finite() && grad_bias.finite(), "bilinear gradients", heads,
           channels, half);
}

// Along the edges, or over all pairs.
void additive(const Case& c, int64_t heads, int64_t channels, int64_t depth, int half, double p, int64_t activation,
              bool dense, int64_t causal) {
    const int64_t in = c.inputs * heads, out = c.outputs * heads;
    const float low = activation == 2 ? 0.1f : -1.0f;
    Block q(out * depth, half, low, 1), k(in * depth, half, low, 1), x(in * channels, half, 1, 1);
    Block y(out * channels, half, 0, 0), lse(out, 0, 0, 0), vector(heads * depth, 0, -1, 1);
    Block grad(out * channels, half, -1, 1), packed(2 * out, 0, 0, 0), partial(256 * heads * depth, 0, 0, 0);
    Block grad_q(out * depth, half, 0, 0), grad_k(in * depth, half, 0, 0), grad_x(in * channels, half, 0, 0);
    Block grad_vector(heads * depth, 0, 0, 0);
    std::vector<int32_t> all_inputs(c.inputs), all_outputs(c.outputs);
    for (int64_t m = 0; m < c.inputs; ++m) all_inputs[m] = static_cast<int32_t>(m);
    for (int64_t n = 0; n < c.outputs; ++n) all_outputs[n] = static_cast<int32_t>(n);
    const Layout by_target = dense ? Layout{nullptr, all_inputs.data(), nullptr, c.outputs, c.inputs}
                                   : c.by_target.layout();
    const Layout by_source = dense ? Layout{nullptr, all_outputs.data(), nullptr, c.inputs, c.outputs}
                                   : c.by_source.layout();
    const DropArgs drop{p, 77, heads, c.outputs, 0};
    const AdditiveForwardArgs forward{by_target, rows(q, heads, depth), rows(k, heads, depth),
                                      rows(x, heads, channels), rows(y, heads, channels), vector.floats(),
                                      lse.floats(), heads, depth, channels, activation, causal, half, 2, 0.2, drop};
    CALL(additive_forward)(&forward);
    if (p == 0) expect(dense || means(y, c, heads * channels), "additive means", heads, channels, half);
    const AdditiveBackwardArgs backward{by_target, by_source, rows(q, heads, depth), rows(k, heads, depth),
                                        rows(x, heads, channels), rows(y, heads, channels),
                                        rows(grad, heads, channels), rows(grad_q, heads, depth),
                                        rows(grad_k, heads, depth), rows(grad_x, heads, channels), vector.floats(),
                                        lse.floats(), grad_vector.floats(), packed.floats(), partial.floats(), heads,
                                        depth, channels, activation, causal, half, 2, 0.2, drop};
    CALL(additive_backward)(&backward);
    expect(y.finite() && grad_q.finite() && grad_k.finite() && grad_x.finite() && grad_vector.finite(),
           "additive gradients", heads, channels, half);
}

// Two steps, the second of which adds to what the first has left; `scale` of q makes factors that are normal or not.
void steps(int64_t outputs, int64_t inputs, int64_t heads, int64_t channels, int64_t depth, float scale, bool of_q,
           const uint8_t* keep) {
    const int64_t in = inputs * heads, out = outputs * heads;
    Block q(out * depth, 0, -scale, scale), k(in * depth, 0, -1, 1), factor(in * depth, 0, 0.1f, 7);
    Block x(in * channels, 0, 1, 1);
    Block y(out * channels, 0, 0, 0), weights(out * inputs, 0, 0, 0), vector(heads * depth, 0, -1, 1);
    Block grad(out * channels, 0, -1, 1), grad_q(out * depth, 0, 0, 0), grad_k(in * depth, 0, 0, 0);
    Block grad_vector(heads * depth, 0, 0, 0);
    const AdditiveStepArgs forward{rows(q, heads, depth), rows(k, heads, depth), rows(factor, heads, depth),
                                   rows(x, heads, channels), rows(y, heads, channels), vector.floats(),
                                   weights.floats(), keep, outputs, inputs, heads, depth, channels, 2, 2.0};
    CALL(additive_step)(&forward);
    bool means = true;
    for (int64_t i = 0; i < out * channels; ++i) means = means && std::fabs(y.floats()[i] - 1.0f) < 1e-4f;
    expect(means, "means of a step", heads, channels, 0);
    AdditiveStepBackwardArgs backward{rows(q, heads, depth), rows(k, heads, depth), rows(factor, heads, depth),
                                      rows(x, heads, channels), rows(grad, heads, channels), rows(grad_q, heads, depth),
                                      rows(grad_k, heads, depth), vector.floats(), weights.floats(),
                                      grad_vector.floats(), outputs, inputs, heads, depth, channels, 1, 2, 2.0};
    if (of_q) backward.grad_k.x = nullptr, backward.grad_vector = nullptr;
    CALL(additive_step_backward)(&backward);
    backward.first = 0;
    CALL(additive_step_backward)(&backward);
    expect(grad_q.finite() && grad_k.finite() && grad_vector.finite(), "gradients of a step", heads, channels, 0);
}

// Those into an output add up to one, whatever its scores; dropped ones are finite.
void weights(const Case& c, int64_t heads, int64_t depth, int half, double p, int64_t scores) {
    if (scores == kTerms) depth = 1, half = 0;
    Block q(c.outputs * heads * depth, half, -1, 1), k(c.inputs * heads * depth, half, -1, 1);
    Block bias(heads * c.edges, 0, -1, 1), vector(heads * depth, 0, -1, 1), found(heads * c.edges, 0, 0, 0);
    const EdgeWeightsArgs args{c.by_target.layout(), scores, rows(q, heads, depth), rows(k, heads, depth),
                               bias.floats(), vector.floats(), found.floats(), heads, depth, 0, half, 2, 0.3,
                               {p, 77, heads, c.outputs, 0}};
    CALL(edge_weights)(&args);
    bool holds = found.finite();
    for (int64_t n = 0; p == 0 && n < c.outputs; ++n)
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t from = c.by_target.indptr[n], to = c.by_target.indptr[n + 1];
            float sum = from == to ? 1.0f : 0.0f;
            for (int64_t slot = from; slot < to; ++slot) sum += found.get(c.by_target.order[slot] * heads + h);
            holds = holds && std::fabs(sum - 1.0f) < 1e-4f;
        }
    expect(holds, "weights of edges", heads, depth, half);
}

// A window of radius 1 over `lines` lines, and of `below` and `above` entries by `step` on a line.
void window(int64_t lines, int64_t size, int64_t step, int64_t below, int64_t above, int64_t heads, int64_t channels,
            int64_t depth, int half, double p) {
    std::vector<int32_t> indptr{0}, near, ahead, behind;
    for (int64_t line = 0; line < lines; ++line) {
        for (int64_t other = line ? line - 1 : 0; other < lines && other <= line + 1; ++other) {
            near.push_back(static_cast<int32_t>(other));
            ahead.push_back(static_cast<int32_t>(other - line + 1));
            behind.push_back(static_cast<int32_t>(line - other + 1));
        }
        indptr.push_back(static_cast<int32_t>(near.size()));
    }
    const int64_t entries = lines * size, width = below + above + 31, one = 3 * width, in = entries * heads;
    Block falling(heads * one, 0, -1, 1), rising(heads * one, 0, 0, 0);
    for (int64_t row = 0; row < 3 * heads; ++row)
        for (int64_t i = 0; i < width; ++i) {
            if (i < 15 || i >= width - 15) falling.set(row * width + i, -INFINITY);
            rising.set(row * width + width - 1 - i, falling.get(row * width + i));
        }
    Block q(in * depth, half, -1, 1), k(in * depth, half, -1, 1), v(in * channels, half, 1, 1);
    Block y(in * channels, half, 0, 0), grad(in * channels, half, -1, 1), lse(in, 0, 0, 0), delta(in, 0, 0, 0);
    Block grad_q(in * depth, half, 0, 0), grad_k(in * depth, half, 0, 0), grad_v(in * channels, half, 0, 0);
    const int64_t tasks = lines * step * ((size + 256 * step - 1) / (256 * step));
    Block grad_table(heads * tasks * one, 0, 0, 0);
    const WindowArgs shared{{indptr.data(), near.data(), ahead.data()}, {indptr.data(), near.data(), behind.data()},
                            rows(q, heads, depth), rows(k, heads, depth), rows(v, heads, channels), falling.floats(),
                            rising.floats(), nullptr, nullptr, one, one, lines, size, step, below, above, heads, depth, channels, half, 2,
                            0.3, {p, 77, heads, entries, 0}};
    const WindowForwardArgs forward{shared, rows(y, heads, channels), lse.floats()};
    CALL(window_forward)(&forward);
    for (int64_t i = 0; p == 0 && i < y.size(); ++i)
        expect(std::fabs(y.get(i) - 1.0f) <= 1e-2f, "window means", heads, channels, half);
    const WindowBackwardArgs backward{shared, rows(y, heads, channels), rows(grad, heads, channels),
                                      rows(grad_q, heads, depth), rows(grad_k, heads, depth),
                                      rows(grad_v, heads, channels), lse.floats(), delta.floats(), grad_table.floats()};
    CALL(window_backward)(&backward);
    expect(grad_q.finite() && grad_k.finite() && grad_v.finite() && grad_table.finite(), "window gradients", heads,
           channels, half);
}

// Sequences of these numbers of outputs and inputs, each seen whole.
void sequences(const std::vector<int64_t>& outputs, const std::vector<int64_t>& inputs, int64_t heads, int half) {
    const int64_t lines = static_cast<int64_t>(outputs.size()), depth = 5, channels = 7;
    std::vector<int64_t> to{0}, of{0};
    std::vector<int32_t> line, none(lines, 0);
    int64_t size = 0;
    for (int64_t i = 0; i < lines; ++i) {
        to.push_back(to.back() + outputs[i]);
        of.push_back(of.back() + inputs[i]);
        line.push_back(static_cast<int32_t>(i));
        size = std::max({size, outputs[i], inputs[i]});
    }
    line.push_back(static_cast<int32_t>(lines));
    const int64_t width = 2 * size - 1 + 30, out = to.back() * heads, in = of.back() * heads;
    Block table(width, 0, 0, 0);
    for (int64_t i = 0; i < width; ++i)
        if (i < 15 || i >= width - 15) table.set(i, -INFINITY);
    Block q(out * depth, half, -1, 1), k(in * depth, half, -1, 1), v(in * channels, half, 1, 1);
    Block y(out * channels, half, 0, 0), grad(out * channels, half, -1, 1), lse(out, 0, 0, 0), delta(out, 0, 0, 0);
    Block grad_q(out * depth, half, 0, 0), grad_k(in * depth, half, 0, 0), grad_v(in * channels, half, 0, 0);
    Block grad_table(heads * lines * ((size + 255) / 256) * width, 0, 0, 0);
    const WindowLines alone{line.data(), line.data(), none.data()};
    const WindowArgs shared{alone, alone, rows(q, heads, depth), rows(k, heads, depth), rows(v, heads, channels),
                            table.floats(), table.floats(), to.data(), of.data(), 0, width, lines, size, 1, size - 1,
                            size - 1, heads, depth, channels, half, 2, 0.3, {0.0, 77, heads, to.back(), 0}};
    const WindowForwardArgs forward{shared, rows(y, heads, channels), lse.floats()};
    CALL(window_forward)(&forward);
    for (int64_t i = 0; i < lines; ++i)
        for (int64_t at = to[i] * heads * channels; at < to[i + 1] * heads * channels; ++at)
            expect(std::fabs(y.get(at) - (inputs[i] ? 1.0f : 0.0f)) <= 1e-2f, "means of sequences", heads, i, half);
    const WindowBackwardArgs backward{shared, rows(y, heads, channels), rows(grad, heads, channels),
                                      rows(grad_q, heads, depth), rows(grad_k, heads, depth),
                                      rows(grad_v, heads, channels), lse.floats(), delta.floats(), grad_table.floats()};
    CALL(window_backward)(&backward);
    expect(grad_q.finite() && grad_k.finite() && grad_v.finite() && grad_table.finite(), "gradients of sequences",
           heads, lines, half);
}

void windows() {
    for (const int half : {0, 1})
        for (const int64_t heads : {1, 3}) {
            sequences({5, 0, 40, 1, 300}, {5, 0, 40, 1, 300}, heads, half);
            sequences({5, 7, 1, 30}, {0, 9, 33, 2}, heads, half);
        }
    const int64_t grids[][5] = {{1, 700, 1, 70, 70}, {3, 40, 1, 9, 9}, {2, 37, 3, 20, 0}, {4, 5, 2, 1, 3},
                                {2, 3, 7, 1, 1}};
    const int64_t shapes[][3] = {{2, 7, 5}, {1, 32, 32}, {1, 256, 1}, {1, 3, 256}};
    for (const auto& [lines, size, step, below, above] : grids)
        for (const auto& [heads, channels, depth] : shapes)
            for (int half = 0; half < 2; ++half)
                for (double p : {0.0, 0.5}) window(lines, size, step, below, above, heads, channels, depth, half, p);
}

// Tables whose rows lie `apart` further apart than they are long, so that the last one ends with its last number.
void dense(int64_t rows, int64_t inputs, int64_t columns, int64_t apart, int64_t parts) {
    const int64_t x_row = inputs + apart, g_row = columns + apart, filled = (columns + 31) / 32 * 32;
    Block x((rows - 1) * x_row + inputs, 0, -1, 1), g((rows - 1) * g_row + columns, 0, -1, 1);
    Block w(inputs * columns, 0, -1, 1), bias(columns, 0, -1, 1), held((rows - 1) * g_row + columns + 16, 0, 0, 0);
    float* y = held.floats() + (-reinterpret_cast<uintptr_t>(held.floats()) & 63) / sizeof(float);
    Block packed(inputs * filled, 0, 0, 0), product(inputs * columns, 0, 0, 0);
    Block partial(parts * inputs * filled, 0, 0, 0);
    for (const bool across : {false, true}) {
        const int64_t w_row = across ? 1 : columns, w_column = across ? inputs : 1;
        const ProjectArgs forward{x.floats(), w.floats(), across ? nullptr : bias.floats(), y,
                                  packed.floats(), rows, inputs, columns, x_row, w_row, w_column, g_row, 2};
        CALL(project)(&forward);
        for (int64_t row : {int64_t{0}, rows / 2, rows - 1})
            for (int64_t column : {int64_t{0}, columns / 2, columns - 1}) {
                double sum = across ? 0.0 : bias.get(column);
                for (int64_t k = 0; k < inputs; ++k)
                    sum += double{x.get(row * x_row + k)} * w.get(k * w_row + column * w_column);
                expect(std::fabs(y[row * g_row + column] - sum) <= 1e-3, "project", rows, inputs, 0);
            }
    }
    const OuterArgs outer{x.floats(), g.floats(), product.floats(), partial.floats(), rows, inputs, columns, x_row,
                          g_row, columns, 1, parts, 2};
    CALL(outer)(&outer);
    for (int64_t input : {int64_t{0}, inputs - 1})
        for (int64_t column : {int64_t{0}, columns / 2, columns - 1}) {
            double sum = 0.0;
            for (int64_t row = 0; row < rows; ++row)
                sum += double{x.get(row * x_row + input)} * g.get(row * g_row + column);
            expect(std::fabs(product.get(input * columns + column) - sum) <= 1e-3, "outer", rows, inputs, 0);
        }
}

void products_of_tables() {
    for (int64_t rows : {1, 11, 12, 300, 900})
        for (int64_t inputs : {1, 16, 75, 300})
            for (int64_t columns : {1, 7, 8, 16, 20, 31, 32, 33, 48, 65, 100})
                dense(rows, inputs, columns, columns % 3, rows > 256 ? 2 : 1);
    dense(30, 1024, 9, 0, 1);      // rows that collide in the cache are copied
    dense(200, 600, 300, 0, 1);    // more of w than is read for each tile
    dense(70'000, 4, 64, 0, 4);    // a result past the caches
}

// Dense weights of ones: what is kept is 1 / (1 - p), and so is the gradient, at the same pairs.
void dropped(int64_t heads, int64_t rows, int64_t columns, int64_t outputs, bool in_place) {
    const int64_t count = heads * rows * columns;
    Block weights(count, 0, 1, 1), apart(count, 0, 0, 0), gradient(count, 0, 1, 1);
    Block& to = in_place ? weights : apart;
    const DropBlockArgs args{weights.floats(), to.floats(), in_place ? nullptr : gradient.floats(), heads, rows,
                             columns, 1, outputs - 1, 2, {0.5, 77, 2, outputs, 0}};
    CALL(drop_block)(&args);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        kept += to.get(i) == 2.0f;
        expect(to.get(i) == 0.0f || to.get(i) == 2.0f, "dropped weights", heads, columns, 0);
        expect(in_place || to.get(i) == gradient.get(i), "dropped gradients", heads, columns, 0);
    }
    expect(count < 1000 || std::fabs(kept - 0.5 * count) < 0.1 * count, "how many are kept", heads, columns, 0);
}

void dropouts() {
    const int64_t shapes[][4] = {{1, 1, 1, 1}, {2, 3, 17, 5}, {3, 40, 300, 1000}, {1, 2, 40, int64_t{1} << 30}};
    for (const auto& [heads, rows, columns, outputs] : shapes)
        for (bool in_place : {false, true}) dropped(heads, rows, columns, outputs, in_place);
}

// Means of values that are all one, by whatever weights, and their mean over heads and channels.
void step(int64_t batch, int64_t heads, int64_t entries, int64_t inputs, int64_t depth, int64_t channels,
          int64_t outputs, bool made) {
    const int64_t given = made ? depth : inputs;
    Block x(batch * heads * (given > channels ? given : channels), 0, 1, 1), w(heads * depth * inputs, 0, -1, 1);
    Block keys(batch * heads * entries * depth, 0, -1, 1), values(batch * heads * entries * channels, 0, 1, 1);
    Block output(heads * channels * outputs, 0, 1, 1), bias(outputs, 0, 0, 0), y(batch * outputs, 0, 0, 0);
    Block queries(batch * heads * depth, 0, 0, 0), sums(batch * heads * channels, 0, 0, 0);
    const HeadsArgs projected{x.floats(), made ? nullptr : w.floats(), nullptr, given, depth};
    const AttentionStepArgs args{
        projected, projected, {x.floats(), nullptr, nullptr, channels, channels},
        {keys.floats(), heads * entries * depth, entries * depth, depth},
        {values.floats(), heads * entries * channels, entries * channels, channels}, output.floats(),
        made ? nullptr : bias.floats(), queries.floats(), sums.floats(), y.floats(), batch, heads, entries, outputs, 2, 0.3};
    CALL(attention_step)(&args);
    for (int64_t i = 0; i < batch * outputs; ++i)
        expect(std::fabs(y.get(i) - heads * channels) <= 1e-4 * heads * channels, "attention step", heads, channels, 0);
}

void steps() {
    for (int64_t batch : {1, 3, 4, 9})
        for (int64_t entries : {1, 5, 16, 515, 1030})
            for (bool made : {false, true}) {
                step(batch, 1, entries, 1, 1, 1, 1, made);
                step(batch, 3, entries, 17, 5, 7, 19, made);
                step(batch, 4, entries, 64, 16, 80, 300, made);
            }
    step(2, 8, 100, 512, 64, 64, 512, false);
}

// Edges as they come, sorted and weighed in one pass, their transpose, and maxima along them; edges that are wrong are
// found before anything is written by them.
void new_graph(int64_t inputs, int64_t outputs, int64_t edges, bool loops, int64_t normalize, bool weighted) {
    std::mt19937 random(2);
    std::vector<int64_t> index(2 * edges), starts = {0, inputs / 2, inputs};
    std::vector<int32_t> source, target;
    for (int64_t e = 0; e < edges; ++e) {
        source.push_back(static_cast<int32_t>(index[e] = static_cast<int64_t>(random() % inputs)));
        target.push_back(static_cast<int32_t>(index[edges + e] = static_cast<int64_t>(random() % outputs)));
    }
    for (int64_t n = 0; loops && n < outputs; ++n) {
        source.push_back(static_cast<int32_t>(n));
        target.push_back(static_cast<int32_t>(n));
    }
    const int64_t slots = static_cast<int64_t>(source.size()), channels = 5;
    const Side right = group(target, source, static_cast<int32_t>(outputs));
    const bool square = inputs == outputs, valued = weighted || normalize != kNone;
    Side found{std::vector<int32_t>(outputs + 1), std::vector<int32_t>(slots), std::vector<int32_t>(slots)};
    Side back{std::vector<int32_t>(inputs + 1), std::vector<int32_t>(slots), std::vector<int32_t>(slots)};
    std::vector<float> values(valued ? slots : 0), turned(values.size());
    std::vector<float> scales(valued ? outputs + (square ? 0 : inputs) : 0);
    Block weights(slots, 0, 0.5f, 1.5f);
    int64_t bad = -2;
    AdjacencyArgs args = {index.data(), edges, 1, 1, edges, inputs, outputs, loops, square, normalize,
                          weighted ? weights.floats() : nullptr, found.indptr.data(), found.index.data(),
                          found.order.data(), valued ? values.data() : nullptr, scales.data(), &bad};
    CALL(adjacency)(&args);
    const bool same = found.indptr == right.indptr && found.index == right.index && found.order == right.order;
    expect(bad == -1 && same, "edges that are sorted", outputs, slots, 0);
    bool finite = true;
    for (float value : values) finite = finite && std::isfinite(value);
    expect(finite, "edges that are weighed", outputs, slots, 0);
    const TransposeArgs transposed = {found.layout(), valued ? values.data() : nullptr, inputs, back.indptr.data(),
                                      back.index.data(), back.order.data(), turned.data()};
    CALL(transpose)(&transposed);
    expect(back.indptr == group(source, target, static_cast<int32_t>(inputs)).indptr, "edges that are turned", inputs,
           slots, 0);
    Block x(inputs * channels, 0, -1.0f, 1.0f), y(outputs * channels, 0, 0, 0), grad(outputs * channels, 0, 1.0f, 1.0f);
    Block shares(outputs * channels, 0, 0, 0), grad_x(inputs * channels, 0, 0, 0);
    const MaximaArgs maxima = {found.layout(), back.layout(), x.floats(), y.floats(), grad.floats(), shares.floats(),
                               grad_x.floats(), channels, 2};
    CALL(maxima)(&maxima);
    CALL(maxima_backward)(&maxima);
    double sum = 0.0, reached = 0.0;
    for (int64_t i = 0; i < grad_x.size(); ++i) sum += grad_x.get(i);
    for (int64_t n = 0; n < outputs; ++n) reached += found.indptr[n] < found.indptr[n + 1] ? channels : 0;
    expect(std::fabs(sum - reached) < 1e-3 * (1.0 + reached), "gradients of maxima", inputs, channels, 0);
    EdgesArgs checked = {index.data(), edges, 1, 1, edges, inputs, outputs, 0, nullptr, nullptr, &bad};
    CALL(edges)(&checked);
    expect(bad == -1, "edges that are right", inputs, outputs, 0);
    if (square && inputs > 1) {
        checked.samples = 2;
        checked.input_starts = checked.output_starts = starts.data();
        CALL(edges)(&checked);
        expect(bad >= 0, "edges between samples", inputs, outputs, 0);
    }
    std::vector<int32_t> first(3), rows(inputs);
    std::vector<float> shared(inputs);
    const GroupsArgs grouped = {starts.data(), 2, inputs, first.data(), rows.data(), shared.data(), &bad};
    CALL(groups)(&grouped);
    expect(bad == -1 && first[2] == inputs, "groups in order", inputs, 2, 0);
    for (int64_t wrong : {int64_t{-1}, inputs, int64_t{1} << 40}) {
        index[edges / 2] = wrong;
        CALL(adjacency)(&args);
        expect(bad == edges / 2, "an edge that is none", inputs, outputs, 0);
        starts[1] = wrong == inputs ? inputs + 1 : wrong;
        CALL(groups)(&grouped);
        expect(bad >= 0, "groups that are none", inputs, 2, 0);
    }
}

// Every kernel along edges once more, on long rows.
void hubs() {
    for (bool of_inputs : {false, true}) {
        const Case c = power_law(400, 130000, 100000, of_inputs);
        for (const auto& [heads, channels, depth] : {std::array<int64_t, 3>{3, 20, 12}, {2, 32, 32}})
            for (int half = 0; half < 2; ++half) {
                products(c, heads, channels, half);
                if (!half) conditioned(c, heads, channels);
                for (Terms terms : {kGiven, kOfX, kOfXAndZ}) affine(c, heads, channels, half, 0.0, terms);
                bilinear(c, heads, channels, depth, half, 0.0);
                additive(c, heads, channels, depth, half, 0.0, 0, false, 0);
            }
        affine(c, 4, 16, 0, 0.5, kGiven);
        bilinear(c, 4, 16, 16, 0, 0.5);
        additive(c, 4, 16, 16, 0, 0.5, 1, false, 0);
    }
    additive(power_law(1500, 1, 0, false), 2, 16, 16, 0, 0.5, 0, true, 1);
    window(1, 100000, 1, 300, 0, 1, 8, 8, 0, 0.0);
}

// Draws of neighbors of all nodes of a graph with a hub: each is an edge into its node; and the numbers of their sources.
void sampling(int64_t fanout, bool replace, bool weighted, bool ordered, bool wide) {
    const int32_t entries = 200;
    const Case c = make(entries, entries, 3000);
    const Side& side = c.by_target;
    const int64_t slots = static_cast<int64_t>(side.index.size());
    std::vector<double> weights(weighted ? slots : 0);
    for (size_t s = 0; s < weights.size(); ++s) weights[s] = static_cast<double>(s % 4);
    std::vector<int64_t> nodes(entries), groups(entries), first(entries), population(entries), offsets(entries + 1);
    for (int64_t n = 0; n < entries; ++n) nodes[n] = entries - 1 - n, groups[n] = n % 3;
    const InEdges edges = {side.indptr.data(), side.index.data(), ordered ? side.order.data() : nullptr, nullptr, nullptr,
                           weighted ? weights.data() : nullptr, 0, entries, slots, 0};
    int64_t bad = -2;
    const SampleBoundsArgs bounds = {edges, nodes.data(), nullptr, entries, fanout, replace, 0,
                                     first.data(), population.data(), offsets.data(), &bad};
    CALL(sample_bounds)(&bounds);
    expect(bad == -1, "rows are sound", fanout, replace, weighted);
    const int64_t drawn = offsets[entries];
    std::vector<int64_t> sources(drawn), numbers(drawn), targets(drawn);
    const SampleDrawArgs draw = {edges, nodes.data(), groups.data(), first.data(), population.data(), offsets.data(),
                                 entries, fanout, replace, 5, 1, 7, 2, sources.data(), numbers.data(), targets.data()};
    CALL(sample_draw)(&draw);
    bool inside = true;
    for (int64_t i = 0; i < entries; ++i)
        for (int64_t d = offsets[i]; d < offsets[i + 1]; ++d) {
            int64_t slot = numbers[d];
            if (ordered) slot = std::find(side.order.begin(), side.order.end(), slot) - side.order.begin();
            inside &= targets[d] == 7 + i && slot >= first[i] && slot < first[i] + population[i] &&
                      side.index[slot] == sources[d];
        }
    expect(inside, "drawn edges", fanout, replace, weighted);
    int64_t capacity = 64, added = 0;
    while (capacity < 2 * entries) capacity *= 2;
    std::vector<int64_t> table(capacity * (wide ? 2 : 1), -1), fresh(drawn), found(drawn);
    NumberArgs number = {table.data(), sources.data(), wide, capacity, drawn, 0, kAdd, found.data(), fresh.data(), &added};
    CALL(number)(&number);
    bool same = true;
    for (int64_t d = 0; d < drawn; ++d) same &= found[d] < added && fresh[found[d]] == sources[d];
    expect(same, "numbers of sources", fanout, replace, weighted);
}

}  // namespace

int main() {
    windows();
    products_of_tables();
    dropouts();
    steps();
    hubs();
    for (int64_t fanout : {-1, 0, 3, 60})
        for (int option = 0; option < 8; ++option)
            sampling(fanout, option & 1, option & 2, option & 4, option & 1);
    for (int64_t normalize : {kNone, kRow, kSymmetric})
        for (bool weighted : {false, true})
            for (const auto& [inputs, outputs, edges] : {std::array<int64_t, 3>{40, 40, 300}, {9, 9, 12}, {30, 7, 90},
                                                         {3, 50, 20}})
                for (bool loops : {false, true})
                    if (!loops || inputs == outputs) new_graph(inputs, outputs, edges, loops, normalize, weighted);
    const int64_t shapes[][3] = {{1, 7, 5}, {8, 8, 8}, {4, 32, 32}, {3, 20, 12}, {17, 8, 3}, {2, 64, 64}, {1, 300, 130},
                                 {5, 1, 1}, {0, 8, 8}, {2, 0, 4}};
    const Case nothing = {{{0}, {}, {}}, {{0}, {}, {}}, 0, 0, 0};
    const Case cases[] = {make(40, 30, 700), make(30, 30, 500), make(60, 20, 4000), make(5, 9, 12), make(4, 3, 0),
                          nothing};
    for (const Case& c : cases)
        for (const auto& [heads, channels, depth] : shapes)
            for (int half = 0; half < 2; ++half) {
                if (heads) products(c, heads, channels, half);
                if (heads && !half) conditioned(c, heads, channels);
                for (double p : {0.0, 0.5}) {
                    for (Terms terms : {kGiven, kOfX, kOfXAndZ})
                        if (terms != kOfX || c.inputs == c.outputs) affine(c, heads, channels, half, p, terms);
                    bilinear(c, heads, channels, depth, half, p);
                    for (int64_t scores : {kTerms, kProducts, kActivations}) weights(c, heads, depth, half, p, scores);
                    for (int64_t activation = 0; activation < 3; ++activation) {
                        additive(c, heads, channels, depth, half, p, activation, false, 0);
                        additive(c, heads, channels, depth, half, p, activation, true, activation % 2);
                    }
                }
            }
    for (const auto& [heads, channels, depth] : shapes)
        for (const auto& [outputs, inputs] : {std::array<int64_t, 2>{1, 1}, {1, 40}, {3, 17}, {8, 6}, {2, 4096}})
            for (float scale : {1.0f, 200.0f}) {
                std::vector<uint8_t> keep(heads * inputs, 0);
                for (int64_t i = 0; i < heads; ++i) keep[i * inputs + i % inputs] = 1;
                steps(outputs, inputs, heads, channels, depth, scale, inputs == 17, nullptr);
                steps(outputs, inputs, heads, channels, depth, scale, inputs == 17, keep.data());
            }
    std::printf("%s\n", failures ? "native kernels: FAILED" : "native kernels: all hold");
    return failures != 0;
}
