// A step of decoding by attention: one more entry is projected and kept, and one output sees all that are kept.
//
// Weights are read once, in the order in which they lie; of few elements of a batch that is all the time it takes. Every
// number is computed by one thread in one order, so that it does not depend on how many there are.
#include <type_traits>

#include "api.h"
#include "lanes.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kChunk = 512, kWide = 64;

// y_c = sum_j x_j w_jc at NV vectors of columns, which are whole if they are several, on top of what `from` gives.
template <int NV, class From>
void sums_at(const float* x, const float* w, int64_t w_row, int64_t terms, int64_t columns, const From& from, float* y) {
    const int part = NV == 1 && columns < 16 ? static_cast<int>(columns) : 16;
    const auto vector = [&](const float* at) { return NV > 1 ? load<v16>(at) : lanes(at, part); };
    v16 found[NV];
    for (int v = 0; v < NV; ++v) found[v] = from(16 * v, vector);
    for (int64_t j = 0; j < terms; ++j)
        for (int v = 0; v < NV; ++v) found[v] += vector(w + j * w_row + 16 * v) * x[j];
    for (int v = 0; v < NV; ++v) put(y + 16 * v, found[v], part);
}

// visit(NV, column) over all columns, as many vectors at a time as fit.
template <class Visit> void for_columns(int64_t columns, const Visit& visit) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) visit(std::integral_constant<int, 4>(), c);
    for (; c < columns; c += 16) visit(std::integral_constant<int, 1>(), c);
}

// y_i = <x, w_i> + bias_i for so many rows of w, for each x of a batch; those of y are `y_row` numbers apart.
inline void rows_of(const float* x, int64_t batch, const float* w, int64_t inputs, int64_t rows, const float* bias,
                    float* y, int64_t y_row) {
    for (int64_t first = 0; first < rows; first += 4)
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t count = rows - first < 4 ? rows - first : 4;
            float* to = y + b * y_row + first;
            dots_of(x + b * inputs, [&](int64_t i) { return w + (first + i) * inputs; }, count, inputs, to);
            for (int64_t i = 0; bias && i < count; ++i) to[i] += bias[first + i];
        }
}

// Turn the pairs of channels of a row.
inline void turn(const HeadsArgs& a, float* y) {
    const int64_t next = a.halves ? 1 : 2, other = a.halves ? a.pairs : 1;
    for (int64_t j = 0; j < a.pairs; ++j) {
        float &first = y[j * next], &second = y[j * next + other];
        const float cosine = a.turn[j], sine = a.turn[a.pairs + j], before = first;
        first = before * cosine - second * sine;
        second = second * cosine + before * sine;
    }
}

// One head of (batch, heads, depth) -> (batch, ., depth) with rows `y_row` apart.
inline void project(const HeadsArgs& a, int64_t batch, int64_t head, float* y, int64_t y_row) {
    if (a.weight)
        rows_of(a.x, batch, a.weight + head * a.depth * a.inputs, a.inputs, a.depth,
                a.bias ? a.bias + head * a.depth : nullptr, y, y_row);
    for (int64_t b = 0; b < batch; ++b) {
        if (!a.weight) std::memcpy(y + b * y_row, a.x + (b * a.heads + head) * a.depth, a.depth * sizeof(float));
        if (a.turn) turn(a, y + b * y_row);
    }
}

// y (channels) = sum_m softmax_m(scale <query, key_m>) value_m, a chunk of entries after the other.
inline void attend(const AttentionStepArgs& a, int64_t b, int64_t head) {
    alignas(64) float scores[kChunk];
    const int64_t depth = a.query.depth, channels = a.value.depth, heads = a.query.heads;
    const float* query = a.queries + (b * heads + head) * depth;
    const float* key = a.keys.entries + b * a.keys.batch + head * a.key.heads / heads * a.keys.head;
    const float* value = a.values.entries + b * a.values.batch + head * a.value.heads / heads * a.values.head;
    float *y = a.sums + (b * heads + head) * channels, base = -INFINITY, whole = 0;
    for (int64_t first = 0; first < a.entries; first += kChunk) {
        const int64_t count = a.entries - first < kChunk ? a.entries - first : kChunk;
        dots_of(query, [&](int64_t m) { return key + (first + m) * a.keys.row; }, count, depth, scores);
        for (int64_t m = 0; m < count; ++m) scores[m] *= static_cast<float>(a.scale);
        const float* added = a.added + head * a.added_row + first;
        for (int64_t m = 0; a.added && m < count; ++m) scores[m] += added[m];
        fill_up(scores, count);
        const float top = greatest(scores, count), next = top > base ? top : base;
        const float before = first ? std::exp(base - next) : 0.0f;
        whole = whole * before + weights_of(scores, count, next);
        base = next;
        for_columns(channels, [&](auto vectors, int64_t c) {
            const auto from = [&](int64_t v, const auto& vector) { return first ? vector(y + c + v) * before : v16{}; };
            sums_at<decltype(vectors)::value>(scores, value + first * a.values.row + c, a.values.row, count, channels - c,
                                              from, y + c);
        });
    }
    const float inverse = 1.0f / whole;
    for_lanes(channels, [&](int64_t c, int part) { put(y + c, lanes(y + c, part) * inverse, part); });
}

float* last(const KeptArgs& kept, int64_t head, int64_t entries) {
    return kept.entries + head * kept.head + (entries - 1) * kept.row;
}

void step(const AttentionStepArgs& a) {
    const int64_t heads = a.query.heads, channels = heads * a.value.depth, blocks = (a.outputs + kWide - 1) / kWide;
    const int64_t numbers = heads * a.query.depth * a.query.inputs + a.key.heads * a.key.depth * a.key.inputs +
                            a.value.heads * a.value.depth * a.value.inputs + channels * a.outputs +
                            a.batch * heads * a.entries * (a.query.depth + a.value.depth);
    const int team = a.threads > 1 && numbers >= 1 << 16 ? static_cast<int>(a.threads) : 1;
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < heads + a.key.heads + a.value.heads; ++task) {
            const int64_t key = task - heads, value = key - a.key.heads;
            if (key < 0)
                project(a.query, a.batch, task, a.queries + task * a.query.depth, heads * a.query.depth);
            else if (value < 0)
                project(a.key, a.batch, key, last(a.keys, key, a.entries), a.keys.batch);
            else
                project(a.value, a.batch, value, last(a.values, value, a.entries), a.values.batch);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.batch * heads; ++task) attend(a, task / heads, task % heads);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t c = block * kWide, rows = a.outputs - c < kWide ? a.outputs - c : kWide;
            rows_of(a.sums, a.batch, a.output + c * channels, channels, rows, a.bias ? a.bias + c : nullptr, a.y + c,
                    a.outputs);
        }
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(attention_step)(const structconv::AttentionStepArgs* args) { structconv::SC_ISA::step(*args); }
