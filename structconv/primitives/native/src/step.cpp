// A step of decoding by attention: one more entry is projected and kept, and one output sees all that are kept.
//
// Weights are read once, in the order in which they lie; of few elements of a batch that is all the time it takes. Every
// number is computed by one thread in one order, so that it does not depend on how many there are.
#include <type_traits>

#include "api.h"
#include "lanes.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kChunk = 512, kWide = 64;

// y_i = <x, w_i> + bias_i for so many rows of w, for each x of a batch: found(element, first row, how many, numbers).
template <class T, class Found>
void rows_of(const float* x, int64_t batch, const T* w, int64_t inputs, int64_t rows, const T* bias, const Found& found) {
    for (int64_t first = 0; first < rows; first += 4)
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t count = rows - first < 4 ? rows - first : 4;
            float y[4];
            dots_of(x + b * inputs, [&](int64_t i) { return w + (first + i) * inputs; }, count, inputs, y);
            for (int64_t i = 0; bias && i < count; ++i) y[i] += widen(bias[first + i]);
            found(b, first, count, y);
        }
}

// Turn the pairs of channels of a row.
template <class T> void turn(const HeadsArgs& a, T* y) {
    const int64_t next = a.halves ? 1 : 2, other = a.halves ? a.pairs : 1;
    for (int64_t j = 0; j < a.pairs; ++j) {
        T &first = y[j * next], &second = y[j * next + other];
        const float cosine = a.turn[j], sine = a.turn[a.pairs + j], before = widen(first), beside = widen(second);
        narrow(before * cosine - beside * sine, &first);
        narrow(beside * cosine + before * sine, &second);
    }
}

// One head of (batch, heads, depth) -> (batch, ., depth) with rows `y_row` apart; x is what the matrices multiply.
template <class T, class Y> void project(const HeadsArgs& a, const float* x, int64_t batch, int64_t head, Y* y, int64_t y_row) {
    const auto at = [&](const void* t, int64_t number) { return static_cast<const T*>(t) + number; };
    if (a.weight)
        rows_of(x, batch, at(a.weight, head * a.depth * a.inputs), a.inputs, a.depth,
                a.bias ? at(a.bias, head * a.depth) : nullptr, [&](int64_t b, int64_t first, int64_t count, const float* found) {
                    for (int64_t i = 0; i < count; ++i) narrow(found[i], y + b * y_row + first + i);
                });
    for (int64_t b = 0; b < batch; ++b) {
        const T* own = at(a.x, (b * a.heads + head) * a.depth);
        for (int64_t i = 0; !a.weight && i < a.depth; ++i) narrow(widen(own[i]), y + b * y_row + i);
        if (a.turn) turn(a, y + b * y_row);
    }
}

// x of a matrix in float32.
template <class T> const float* wide(const HeadsArgs& a, int64_t batch, float* room) {
    if constexpr (std::is_same_v<T, float>) return static_cast<const float*>(a.x);
    for (int64_t i = 0; a.weight && i < batch * a.inputs; ++i) room[i] = widen(static_cast<const T*>(a.x)[i]);
    return room;
}

// y (channels) = sum_m softmax_m(scale <query, key_m>) value_m, a chunk of entries after the other.
template <class T> void attend(const AttentionStepArgs& a, int64_t b, int64_t head) {
    alignas(64) float scores[kChunk];
    const int64_t depth = a.query.depth, channels = a.value.depth, heads = a.query.heads;
    const float* query = a.queries + (b * heads + head) * depth;
    const T* key = static_cast<const T*>(a.keys.entries) + b * a.keys.batch + head * a.key.heads / heads * a.keys.head;
    const T* value = static_cast<const T*>(a.values.entries) + b * a.values.batch + head * a.value.heads / heads * a.values.head;
    float *y = a.sums + (b * heads + head) * channels, base = -INFINITY, whole = 0;
    for (int64_t first = 0; first < a.entries; first += kChunk) {
        const int64_t count = a.entries - first < kChunk ? a.entries - first : kChunk;
        dots_of(query, [&](int64_t m) { return key + (first + m) * a.keys.row; }, count, depth, scores);
        for (int64_t m = 0; m < count; ++m) scores[m] *= static_cast<float>(a.scale);
        const float* added = a.added + head * a.added_row + first;
        for (int64_t m = 0; a.added && m < count; ++m) scores[m] += added[m];
        fill_up(scores, count);
        const float top = greatest(scores, count), next = top > base ? top : base;
        const float before = base == -INFINITY ? 0.0f : std::exp(base - next);
        whole = whole * before + weights_of(scores, count, next);
        base = next;
        for_columns(channels, [&](auto vectors, int64_t c) {
            const auto from = [&](int64_t v, const auto& vector) { return first ? vector(y + c + v) * before : v16{}; };
            sums_at<decltype(vectors)::value>(scores, value + first * a.values.row + c, a.values.row, count, channels - c,
                                              from, y + c);
        });
    }
    const float inverse = whole == 0.0f ? 0.0f : 1.0f / whole;  // if all scores are -inf, y is zero
    for_lanes(channels, [&](int64_t c, int part) { put(y + c, lanes(y + c, part) * inverse, part); });
}

template <class T> T* last(const KeptArgs& kept, int64_t head, int64_t entries) {
    return static_cast<T*>(kept.entries) + head * kept.head + (entries - 1) * kept.row;
}

template <class T> void step_of(const AttentionStepArgs& a) {
    const int64_t heads = a.query.heads, channels = heads * a.value.depth, blocks = (a.outputs + kWide - 1) / kWide;
    const int64_t numbers = heads * a.query.depth * a.query.inputs + a.key.heads * a.key.depth * a.key.inputs +
                            a.value.heads * a.value.depth * a.value.inputs + channels * a.outputs +
                            a.batch * heads * a.entries * (a.query.depth + a.value.depth);
    const int team = a.threads > 1 && numbers >= 1 << 16 ? static_cast<int>(a.threads) : 1;
    float* room = a.x;
    const float* xs[3];
    int64_t number = 0;
    for (const HeadsArgs* part : {&a.query, &a.key, &a.value}) {
        const bool known = number && a.query.weight && part->x == a.query.x;
        xs[number] = known ? xs[0] : wide<T>(*part, a.batch, room);
        if (!known && part->weight) room += a.batch * part->inputs;
        ++number;
    }
    in_team(team, [&](const Team& threads) {
        threads.each(heads + a.key.heads + a.value.heads, [&](int64_t task) {
            const int64_t key = task - heads, value = key - a.key.heads;
            if (key < 0)
                project<T>(a.query, xs[0], a.batch, task, a.queries + task * a.query.depth, heads * a.query.depth);
            else if (value < 0)
                project<T>(a.key, xs[1], a.batch, key, last<T>(a.keys, key, a.entries), a.keys.batch);
            else
                project<T>(a.value, xs[2], a.batch, value, last<T>(a.values, value, a.entries), a.values.batch);
        });
        threads.each(a.batch * heads, [&](int64_t task) { attend<T>(a, task / heads, task % heads); });
        threads.each(blocks, [&](int64_t block) {
            const int64_t c = block * kWide, rows = a.outputs - c < kWide ? a.outputs - c : kWide;
            const T* bias = a.bias ? static_cast<const T*>(a.bias) + c : nullptr;
            rows_of(a.sums, a.batch, static_cast<const T*>(a.output) + c * channels, channels, rows, bias,
                    [&](int64_t b, int64_t first, int64_t count, const float* found) {
                        T* y = static_cast<T*>(a.y) + b * a.outputs + c + first;
                        for (int64_t i = 0; i < count; ++i) narrow(found[i], y + i);
                    });
        });
    });
}

void step(const AttentionStepArgs& a) { a.half ? step_of<bfloat16>(a) : step_of<float>(a); }

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(attention_step)(const structconv::AttentionStepArgs* args) { structconv::SC_ISA::step(*args); }
