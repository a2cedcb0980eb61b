// A step of decoding by attention: one more entry is projected and kept, and one output sees all that are kept.
//
// Weights are read once, in the order in which they lie; of few elements of a batch that is all the time it takes. Every
// number is computed by one thread in one order, so that it does not depend on how many there are.
#include <type_traits>

#include "api.h"
#include "vectors.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kChunk = 512, kWide = 256;

inline v16 lanes(const float* from, int64_t left) {
    return left >= 16 ? load<v16>(from) : load_part<v16>(from, static_cast<int>(left));
}

inline void put(float* to, v16 v, int64_t left) {
    left >= 16 ? store(to, v) : store_part(to, v, static_cast<int>(left));
}

// <x, row> of four rows, `apart` numbers from one to the next.
inline v4 dots(const float* x, const float* rows, int64_t apart, int64_t channels) {
    v16 sums[4] = {};
    int64_t c = 0;
    for (; c + 16 <= channels; c += 16) {
        const v16 own = load<v16>(x + c);
        for (int i = 0; i < 4; ++i) sums[i] += own * load<v16>(rows + i * apart + c);
    }
    if (c < channels) {
        const v16 own = lanes(x + c, channels - c);
        for (int i = 0; i < 4; ++i) sums[i] += own * lanes(rows + i * apart + c, channels - c);
    }
    return totals(sums[0], sums[1], sums[2], sums[3]);
}

inline float dot(const float* x, const float* row, int64_t channels) {
    v16 sum{};
    for (int64_t c = 0; c < channels; c += 16) sum += lanes(x + c, channels - c) * lanes(row + c, channels - c);
    return total(sum);
}

// y_c = sum_j x_j w_jc at NV vectors of columns, which are whole if they are several, for RB rows of x, `x_row` and
// `y_row` numbers apart, on top of what `from` gives.
template <int NV, int RB, class From>
void sums_at(const float* x, int64_t x_row, const float* w, int64_t w_row, int64_t terms, int64_t columns,
             const From& from, float* y, int64_t y_row) {
    const auto vector = [&](const float* at) { return NV > 1 ? load<v16>(at) : lanes(at, columns); };
    v16 found[RB][NV];
    for (int r = 0; r < RB; ++r)
        for (int v = 0; v < NV; ++v) found[r][v] = from(r, 16 * v, vector);
    for (int64_t j = 0; j < terms; ++j)
        for (int v = 0; v < NV; ++v) {
            const v16 own = vector(w + j * w_row + 16 * v);
            for (int r = 0; r < RB; ++r) found[r][v] += own * x[r * x_row + j];
        }
    for (int r = 0; r < RB; ++r)
        for (int v = 0; v < NV; ++v)
            NV > 1 ? store(y + r * y_row + 16 * v, found[r][v]) : put(y + r * y_row, found[r][v], columns);
}

// visit(NV, column) over all columns, as many vectors at a time as fit, of at most `most`.
template <class Visit> void for_columns(int64_t columns, int most, const Visit& visit) {
    int64_t c = 0;
    for (; most >= 16 && c + 256 <= columns; c += 256) visit(std::integral_constant<int, 16>(), c);
    for (; c + 64 <= columns; c += 64) visit(std::integral_constant<int, 4>(), c);
    for (; c < columns; c += 16) visit(std::integral_constant<int, 1>(), c);
}

// y = x w + bias for all rows of x and so many columns of w.
inline void sums_of(const float* x, int64_t x_row, const float* w, int64_t w_row, int64_t terms, int64_t columns,
                    const float* bias, float* y, int64_t y_row, int64_t rows) {
    for_columns(columns, rows < 4 ? 16 : 4, [&](auto vectors, int64_t c) {
        constexpr int NV = decltype(vectors)::value;
        const auto from = [&](int, int64_t v, const auto& vector) { return bias ? vector(bias + c + v) : v16{}; };
        int64_t r = 0;
        for (; NV <= 4 && r + 4 <= rows; r += 4)
            sums_at<NV, 4>(x + r * x_row, x_row, w + c, w_row, terms, columns - c, from, y + r * y_row + c, y_row);
        for (; r < rows; ++r)
            sums_at<NV, 1>(x + r * x_row, x_row, w + c, w_row, terms, columns - c, from, y + r * y_row + c, y_row);
    });
}

// One head of (batch, heads, depth) -> (batch, ., depth) with rows `y_row` apart.
inline void project(const HeadsArgs& a, int64_t heads, int64_t batch, int64_t head, float* y, int64_t y_row) {
    const float* bias = a.bias ? a.bias + head * a.depth : nullptr;
    if (!a.weight) {
        for (int64_t b = 0; b < batch; ++b)
            std::memcpy(y + b * y_row, a.x + (b * heads + head) * a.depth, a.depth * sizeof(float));
        return;
    }
    const float* w = a.weight + head * a.depth * a.inputs;
    if (!a.by_rows) {
        sums_of(a.x, a.inputs, w, a.depth, a.inputs, a.depth, bias, y, y_row, batch);
        return;
    }
    for (int64_t d = 0; d < a.depth; d += 4)
        for (int64_t b = 0; b < batch; ++b) {
            const float* x = a.x + b * a.inputs;
            float* to = y + b * y_row + d;
            if (d + 4 <= a.depth) {
                const v4 found = dots(x, w + d * a.inputs, a.inputs, a.inputs);
                for (int i = 0; i < 4; ++i) to[i] = found[i] + (bias ? bias[d + i] : 0.0f);
            } else {
                for (int64_t i = d; i < a.depth; ++i)
                    to[i - d] = dot(x, w + i * a.inputs, a.inputs) + (bias ? bias[i] : 0.0f);
            }
        }
}

// scale <query, key_m> for so many keys, filled up with -inf to a multiple of 16; returns the greatest, NaN or not.
inline float scores_of(const float* query, const float* key, int64_t row, int64_t count, int64_t depth, float scale,
                       float* scores) {
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) {
        const v4 found = dots(query, key + m * row, row, depth);
        for (int i = 0; i < 4; ++i) scores[m + i] = found[i] * scale;
    }
    for (; m < count; ++m) scores[m] = dot(query, key + m * row, depth) * scale;
    for (; m % 16; ++m) scores[m] = -INFINITY;
    v16 top = load<v16>(scores);
    for (int64_t i = 16; i < m; i += 16) top = maximum(top, load<v16>(scores + i));
    float greatest = top[0];
    for (int lane = 1; lane < 16; ++lane) greatest = top[lane] > greatest ? top[lane] : greatest;
    return greatest;
}

// y (channels) = sum_m softmax_m(scale <query, key_m>) value_m, a chunk of entries after the other.
inline void attend(const AttentionStepArgs& a, int64_t b, int64_t head) {
    alignas(64) float scores[kChunk];
    const int64_t depth = a.query.depth, channels = a.value.depth;
    const float* query = a.queries + (b * a.heads + head) * depth;
    const float* key = a.keys.entries + b * a.keys.batch + head * a.keys.head;
    const float* value = a.values.entries + b * a.values.batch + head * a.values.head;
    float *y = a.sums + (b * a.heads + head) * channels, base = -INFINITY, whole = 0;
    for (int64_t first = 0; first < a.entries; first += kChunk) {
        const int64_t count = a.entries - first < kChunk ? a.entries - first : kChunk;
        const float top = scores_of(query, key + first * a.keys.row, a.keys.row, count, depth,
                                    static_cast<float>(a.scale), scores);
        const float next = top > base ? top : base, before = first ? std::exp(base - next) : 0.0f;
        v16 sum{};
        for (int64_t m = 0; m < count; m += 16) {
            const v16 p = exponential(load<v16>(scores + m) - next);
            sum += p;
            store(scores + m, p);
        }
        whole = whole * before + total(sum);
        base = next;
        for_columns(channels, 4, [&](auto vectors, int64_t c) {
            const auto from = [&](int, int64_t v, const auto& vector) {
                return first ? vector(y + c + v) * before : v16{};
            };
            sums_at<decltype(vectors)::value, 1>(scores, 0, value + first * a.values.row + c, a.values.row, count,
                                                 channels - c, from, y + c, 0);
        });
    }
    const float inverse = 1.0f / whole;
    for (int64_t c = 0; c < channels; c += 16) put(y + c, lanes(y + c, channels - c) * inverse, channels - c);
}

float* last(const KeptArgs& kept, int64_t head, int64_t entries) {
    return kept.entries + head * kept.head + (entries - 1) * kept.row;
}

void step(const AttentionStepArgs& a) {
    const int64_t channels = a.heads * a.value.depth, blocks = (a.outputs + kWide - 1) / kWide;
    const int64_t numbers = a.heads * (a.query.depth * a.query.inputs + a.key.depth * a.key.inputs) +
                            channels * (a.value.inputs + a.outputs) +
                            a.batch * a.heads * a.entries * (a.query.depth + a.value.depth);
    const int team = a.threads > 1 && numbers >= 1 << 16 ? static_cast<int>(a.threads) : 1;
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < 3 * a.heads; ++task) {
            const int64_t head = task / 3;
            if (task % 3 == 0)
                project(a.query, a.heads, a.batch, head, a.queries + head * a.query.depth, a.heads * a.query.depth);
            else if (task % 3 == 1)
                project(a.key, a.heads, a.batch, head, last(a.keys, head, a.entries), a.keys.batch);
            else
                project(a.value, a.heads, a.batch, head, last(a.values, head, a.entries), a.values.batch);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a.batch * a.heads; ++task) attend(a, task / a.heads, task % a.heads);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t c = block * kWide, columns = a.outputs - c < kWide ? a.outputs - c : kWide;
            sums_of(a.sums, channels, a.output + c, a.outputs, channels, columns, a.bias ? a.bias + c : nullptr, a.y + c,
                    a.outputs, a.batch);
        }
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(attention_step)(const structconv::AttentionStepArgs* args) { structconv::SC_ISA::step(*args); }
