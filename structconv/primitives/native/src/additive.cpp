// Attention with additive scores <v, act(q_n + k_m)>: softmax over the entries of n, then y_n = sum p x_m; along edges,
// or over all pairs, where a group of rows passes over the others together, so that these come from the first caches.
//
// Backward, without anything held for a pair: a pass by target computes scores and weights again, with
//     ds = p (<g_n, x_m> - D_n), D_n = <g_n, y_n>,
// and adds up grad q_n and grad v, and a pass by source does so for grad k_m and grad x_m.
#include "activations.h"
#include "dropout.h"
#include "additive_decode.h"
#include "parallel.h"
#include "strided_rows.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kGroup = 8;  // rows that pass over the others together

// The positions of a row's entries in `index`.
struct Side {
    Layout layout;
    bool causal, by_target;

    bool dense() const { return layout.indptr == nullptr; }

    int64_t begin(int64_t row) const {
        if (!dense()) return layout.indptr[row];
        return causal && !by_target && row < layout.slots ? row : causal && !by_target ? layout.slots : 0;
    }

    int64_t end(int64_t row) const {
        if (!dense()) return layout.indptr[row + 1];
        return causal && by_target && row + 1 < layout.slots ? row + 1 : layout.slots;
    }

    bool empty(int64_t row) const { return begin(row) == end(row); }

    // The last index that rows before `last` may read.
    int64_t limit(int64_t last) const { return dense() ? layout.slots : layout.indptr[last]; }
};

// Entries and rows that a pass goes through.
int64_t work_of(const Side& side) {
    const int64_t rows = side.layout.rows;
    return side.dense() ? rows * (side.layout.slots + 1) : side.layout.slots + rows;
}

// The first row of a range: of a number of ranges of equal work that no number of threads changes.
int64_t range_start(const Side& side, int64_t range) {
    const int64_t rows = side.layout.rows;
    if (side.dense()) return rows * range / kRanges;
    return range == kRanges ? rows : row_at(side.layout.indptr, rows, work_of(side) * range / kRanges);
}

// body(range, first row, last row) over the ranges that have rows.
template <class Body> void for_ranges(const Side& side, int64_t bytes, int64_t threads, const Body& body) {
    for_each(kRanges, threads > 1 && work_of(side) * bytes >= 1 << 20 ? threads : 1, [&](int64_t range) {
        const int64_t first = range_start(side, range), last = range_start(side, range + 1);
        if (first < last) body(range, first, last);
    });
}

// visit(row, first slot, count) for rows [first, last), chunk by chunk.
template <class Visit> void for_chunks(const Side& side, int64_t first, int64_t last, int64_t step, const Visit& visit) {
    int64_t from = side.begin(first), to = side.end(first);
    for (int64_t row = first + 1; row < last; ++row) {
        if (side.begin(row) < from) from = side.begin(row);
        if (side.end(row) > to) to = side.end(row);
    }
    for (int64_t at = from; at < to; at += step)
        for (int64_t row = first; row < last; ++row) {
            const int64_t start = side.begin(row) > at ? side.begin(row) : at;
            const int64_t stop = side.end(row) < at + step ? side.end(row) : at + step;
            if (start < stop) visit(row, start, stop - start);
        }
}

// The channels of a block of heads: `deep` of q, k and v, `wide` of x and y.
template <class T> struct Channels {
    Pieces deep, wide;
    Activated loops[kMaxPieces];
    int heads;
    float parameter;
    int64_t step, group;

    Channels(int heads, int64_t depth, int64_t channels, int64_t activation, double parameter, bool dense)
        : deep(cut<T>(heads, depth)), wide(cut<T>(heads, channels)), heads(heads),
          parameter(static_cast<float>(parameter)) {
        for (int p = 0; p < deep.count; ++p) loops[p] = activated<T>(deep.items[p], activation);
        const int64_t floats = deep.floats > wide.floats ? deep.floats : wide.floats;
        const int64_t near = 32768 / ((deep.floats + wide.floats + 1) * int64_t{sizeof(T)});
        step = near > kChunk ? kChunk : near < 16 ? 16 : near / 16 * 16;
        group = !dense || floats == 0 ? 1 : kMaxChannels / floats < kGroup ? kMaxChannels / floats : kGroup;
    }

    // Scores of a chunk, filled up with -inf; returns how many vectors that is.
    int scores(const Edges& edges, const Table& others, const float* own, const float* vector, float* out) const {
        const int64_t used = edges.count * heads;
        const int vectors = static_cast<int>((used + 15) / 16);
        for (int64_t i = 0; i < used; ++i) out[i] = 0.0f;
        for (int64_t i = used; i < vectors * 16; ++i) out[i] = -INFINITY;
        for (int p = 0; p < deep.count; ++p) {
            const Piece& piece = deep.items[p];
            const int64_t at = piece.channel * heads;
            loops[p].score(edges, shifted<T>(others, 0, piece.channel), piece.part, heads, parameter, own + at,
                           vector + at, out);
        }
        return vectors;
    }

    void slopes(const Edges& edges, const Table& others, const float* own, const float* ds, float* sums,
                float* values) const {
        for (int p = 0; p < deep.count; ++p) {
            const Piece& piece = deep.items[p];
            const int64_t at = piece.channel * heads;
            loops[p].slopes(edges, shifted<T>(others, 0, piece.channel), piece.part, heads, parameter, own + at, ds,
                            sums + at, values ? values + at : nullptr);
        }
    }
};

template <class T, int HB> struct Forward {
    const AdditiveForwardArgs& a;
    int64_t head;
    const Channels<T>& channels;
    Side side;
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float own[kMaxChannels], sums[kMaxChannels], vector[kMaxChannels];
        float inverse[16];
        const Pieces &deep = channels.deep, &wide = channels.wide;
        load_row<float>({a.vector + head * a.depth, 0, a.depth}, 0, HB, deep, vector);
        for (int64_t start = first; start < last; start += channels.group) {
            const int64_t stop = start + channels.group < last ? start + channels.group : last;
            Online<HB> online[kGroup];
            for (int64_t row = start; row < stop; ++row)
                if (!side.empty(row)) load_row<T>(table_of<T>(a.q, head), row, HB, deep, own + (row - start) * deep.floats);
            clear(sums, (stop - start) * wide.floats);
            for_chunks(side, start, stop, channels.step, [&](int64_t row, int64_t at, int64_t count) {
                const int64_t i = row - start;
                chunk(row, at, {a.layout.index + at, count, side.limit(last) - at}, own + i * deep.floats, vector,
                      online[i], sums + i * wide.floats);
            });
            for (int64_t row = start; row < stop; ++row) {
                store(inverse, finish_softmax<HB>(online[row - start], a.lse + row * a.heads + head));
                store_row(sums + (row - start) * wide.floats, inverse, HB, wide, row_of<T>(a.y, row, head), a.y.head);
            }
        }
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, const float* own, const float* vector, Online<HB>& online,
               float* sums) const {
        alignas(64) float w[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const int vectors = channels.scores(edges, table_of<T>(a.k, head), own, vector, w);
        v16 top = splat<v16>(-INFINITY);
        for (int i = 0; i < vectors; ++i) top = maximum(load<v16>(w + 16 * i), top);
        const bool later = at > side.begin(row);
        const v16 scale = online.advance(top, later);
        if (later) rescale(scale, HB, channels.wide, sums);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - online.base);
            online.sum += p;
            store(w + 16 * i, dropout.on() ? p * dropout.factor(drop + 16 * i) : p);
        }
        accumulate_once<T>(edges, table_of<T>(a.x, head), channels.wide, HB, w, sums);
    }
};

template <class T> void forward(const AdditiveForwardArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels;
    const Side side = {a.layout, a.causal != 0, true};
    expect_writes(a.y.x, a.layout.rows * a.heads * a.channels * static_cast<int64_t>(sizeof(T)));
    if (side.dense() && decodes(a, a.layout.rows, a.layout.slots)) {
        const int64_t bytes = a.heads * a.layout.slots * (a.depth + a.channels) * int64_t{sizeof(T)};
        for_heads(a.heads, bytes, a.threads, [&](int64_t head) { decode_forward(a, head); });
        return;
    }
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Channels<T> channels(HB, a.depth, a.channels, a.activation, a.parameter, side.dense());
        const Forward<T, HB> block{a, head, channels, side, Dropout(a.drop, head, HB)};
        for_ranges(side, HB * (a.depth + a.channels) * int64_t{sizeof(T)}, a.threads,
                   [&](int64_t, int64_t first, int64_t last) { block.run(first, last); });
    });
}

// One pass of the backward, by target or by source. A row's own numbers are q and g, or k and x; the others' are k and
// x, or q and g.
template <class T, int HB, bool TARGET> struct Pass {
    const AdditiveBackwardArgs& a;
    int64_t head;
    const Channels<T>& channels;
    Side side;
    Dropout dropout;

    const Rows& own_deep() const { return TARGET ? a.q : a.k; }
    const Rows& own_wide() const { return TARGET ? a.grad : a.x; }
    const Rows& other_deep() const { return TARGET ? a.k : a.q; }
    const Rows& other_wide() const { return TARGET ? a.x : a.grad; }

    struct State {
        alignas(64) float deep[kMaxChannels], wide[kMaxChannels], slopes[kMaxChannels], sums[kMaxChannels];
        alignas(64) float vector[kMaxChannels], values[kMaxChannels];
    };

    void run(int64_t range, int64_t first, int64_t last) const {
        State s;
        const Pieces &deep = channels.deep, &wide = channels.wide;
        load_row<float>({a.vector + head * a.depth, 0, a.depth}, 0, HB, deep, s.vector);
        clear(s.values, deep.floats);
        for (int64_t start = first; start < last; start += channels.group) {
            const int64_t stop = start + channels.group < last ? start + channels.group : last;
            clear(s.slopes, (stop - start) * deep.floats);
            if constexpr (!TARGET) clear(s.sums, (stop - start) * wide.floats);
            for (int64_t row = start; row < stop; ++row)
                if (!side.empty(row)) {
                    open(row, row - start, s);
                } else if constexpr (TARGET) {
                    float* packed = a.packed + row * 2 * a.heads + head;
                    no_weights(packed, packed + a.heads, HB);
                }
            for_chunks(side, start, stop, channels.step, [&](int64_t row, int64_t at, int64_t count) {
                chunk(row, row - start, {side.layout.index + at, count, side.limit(last) - at}, s);
            });
            for (int64_t row = start; row < stop; ++row) close(row, row - start, s);
        }
        if constexpr (TARGET) {
            float ones[16];
            store(ones, splat<v16>(1.0f));
            store_row(s.values, ones, HB, deep, a.partial + (range * a.heads + head) * a.depth, a.depth);
        }
    }

    // Load a row; by target, leave what the pass by source needs of it.
    void open(int64_t row, int64_t i, State& s) const {
        const Pieces& wide = channels.wide;
        load_row<T>(table_of<T>(own_deep(), head), row, HB, channels.deep, s.deep + i * channels.deep.floats);
        load_row<T>(table_of<T>(own_wide(), head), row, HB, wide, s.wide + i * wide.floats);
        if constexpr (TARGET) {
            float* packed = a.packed + row * 2 * a.heads + head;
            load_row<T>(table_of<T>(a.y, head), row, HB, wide, s.sums);
            row_dots(s.wide + i * wide.floats, s.sums, HB, wide, packed + a.heads);
            std::memcpy(packed, a.lse + row * a.heads + head, HB * sizeof(float));
        }
    }

    void chunk(int64_t row, int64_t i, const Edges& edges, State& s) const {
        alignas(64) float w[kChunk * HB], ds[kChunk * HB], lse[kChunk * HB], shift[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const Pieces &deep = channels.deep, &wide = channels.wide;
        const Table other = table_of<T>(other_deep(), head), gathered = table_of<T>(other_wide(), head);
        const int vectors = channels.scores(edges, other, s.deep + i * deep.floats, s.vector, w);
        for (int j = static_cast<int>(edges.count) * HB; j < vectors * 16; ++j) ds[j] = 0.0f;
        dot_rows<T>(edges, gathered, wide, HB, s.wide + i * wide.floats, ds);
        if constexpr (!TARGET) {
            gather_heads<HB>(edges, a.packed + head, 2 * a.heads, INFINITY, lse);
            gather_heads<HB>(edges, a.packed + a.heads + head, 2 * a.heads, 0.0f, shift);
        }
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        const float* packed = a.packed + row * 2 * a.heads + head;
        const v16 own_lse = TARGET ? tile<HB>(packed) : v16{}, own_shift = TARGET ? tile<HB>(packed + a.heads) : v16{};
        for (int j = 0; j < vectors; ++j) {
            const v16 p = exponential(load<v16>(w + 16 * j) - (TARGET ? own_lse : load<v16>(lse + 16 * j)));
            const v16 factor = dropout.on() ? dropout.factor(drop + 16 * j) : splat<v16>(1.0f);
            store(w + 16 * j, p * factor);
            store(ds + 16 * j, p * (factor * load<v16>(ds + 16 * j) - (TARGET ? own_shift : load<v16>(shift + 16 * j))));
        }
        channels.slopes(edges, other, s.deep + i * deep.floats, ds, s.slopes + i * deep.floats,
                        TARGET ? s.values : nullptr);
        if constexpr (!TARGET) accumulate_once<T>(edges, gathered, wide, HB, w, s.sums + i * wide.floats);
    }

    void close(int64_t row, int64_t i, State& s) const {
        const Pieces &deep = channels.deep, &wide = channels.wide;
        const Rows& to = TARGET ? a.grad_q : a.grad_k;
        float scale[16], ones[16];
        store(scale, splat<v16>(a.activation == kPiecewise ? 1.0f : channels.parameter));
        store(ones, splat<v16>(1.0f));
        float* slopes = s.slopes + i * deep.floats;
        for (int64_t c = 0; c < deep.floats; c += 8) store(slopes + c, load<v8>(slopes + c) * load<v8>(s.vector + c));
        store_row(slopes, scale, HB, deep, row_of<T>(to, row, head), to.head);
        if constexpr (!TARGET)
            store_row(s.sums + i * wide.floats, ones, HB, wide, row_of<T>(a.grad_x, row, head), a.grad_x.head);
    }
};

template <class T> void backward(const AdditiveBackwardArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels, inputs = a.by_source.rows;
    const int64_t size = a.heads * int64_t{sizeof(T)};
    const Side by_target = {a.by_target, a.causal != 0, true}, by_source = {a.by_source, a.causal != 0, false};
    DropArgs by_target_drop = a.drop, by_source_drop = a.drop;
    by_target_drop.source_major = 0;
    by_source_drop.source_major = 1;
    expect_writes(a.grad_q.x, a.by_target.rows * size * a.depth);
    expect_writes(a.grad_k.x, inputs * size * a.depth);
    expect_writes(a.grad_x.x, inputs * size * a.channels);
    if (by_target.dense() && decodes(a, a.by_target.rows, a.by_target.slots)) {
        for_heads(a.heads, inputs * size * (a.depth + a.channels), a.threads,
                  [&](int64_t head) { decode_backward(a, head); });
        return;
    }
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Channels<T> channels(HB, a.depth, a.channels, a.activation, a.parameter, by_target.dense());
        const int64_t bytes = HB * (a.depth + a.channels) * int64_t{sizeof(T)};
        const Pass<T, HB, true> target{a, head, channels, by_target, Dropout(by_target_drop, head, HB)};
        const Pass<T, HB, false> source{a, head, channels, by_source, Dropout(by_source_drop, head, HB)};
        for_ranges(by_target, bytes, a.threads,
                   [&](int64_t range, int64_t first, int64_t last) { target.run(range, first, last); });
        for_ranges(by_source, bytes, a.threads,
                   [&](int64_t range, int64_t first, int64_t last) { source.run(range, first, last); });
    });
    int64_t ranges[kRanges], count = 0;
    for (int64_t range = 0; range < kRanges; ++range)
        if (range_start(by_target, range) < range_start(by_target, range + 1)) ranges[count++] = range;
    for (int64_t c = 0; c < a.heads * a.depth; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += a.partial[ranges[i] * a.heads * a.depth + c];
        a.grad_vector[c] = static_cast<float>(sum);
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(additive_forward)(const structconv::AdditiveForwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? forward<bfloat16>(*args) : forward<float>(*args);
}

SC_EXPORT(additive_backward)(const structconv::AdditiveBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? backward<bfloat16>(*args) : backward<float>(*args);
}

SC_EXPORT(additive_step)(const structconv::AdditiveStepArgs* args) {
    using namespace structconv::SC_ISA;
    const int64_t bytes = args->heads * args->inputs * (args->depth + args->channels) * int64_t{sizeof(float)};
    for_heads(args->heads, bytes, args->threads, [&](int64_t head) { step_forward(*args, head); });
}

SC_EXPORT(additive_step_backward)(const structconv::AdditiveStepBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    const int64_t bytes = args->heads * args->inputs * (args->depth + args->channels) * int64_t{sizeof(float)};
    for_heads(args->heads, bytes, args->threads, [&](int64_t head) { step_backward(*args, head); });
}
