// Attention with scores scale <q_n, k_m> + bias_e, or <v, act(q_n + k_m)>: softmax over the entries of n, then
// y_n = sum p x_m; along edges, or, with an activation, over all pairs, where a group of rows passes over the others
// together, so that these come from the first caches.
//
// Backward, without anything held for a pair: a pass by target computes scores and weights again, with
//     ds = p (<g_n, x_m> - D_n), D_n = <g_n, y_n>,
// and adds up grad q_n and grad v, and a pass by source does so for grad k_m and grad x_m.
#include "additive_decode.h"
#include "dropout.h"
#include "edge_scores.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

// The positions of a row's entries in `index`.
template <bool MAY_BE_DENSE> struct Side {
    Layout layout;
    bool causal, by_target;

    bool dense() const { return MAY_BE_DENSE && layout.indptr == nullptr; }

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
template <bool DENSE> int64_t work_of(const Side<DENSE>& side) {
    const int64_t rows = side.layout.rows;
    return side.dense() ? rows * (side.layout.slots + 1) : side.layout.slots + rows;
}

// The first row of a range: of a number of ranges of equal work that no number of threads changes.
template <bool DENSE> int64_t range_start(const Side<DENSE>& side, int64_t range) {
    const int64_t rows = side.layout.rows;
    if (side.dense()) return rows * range / kRanges;
    return range == kRanges ? rows : row_at(side.layout.indptr, rows, work_of(side) * range / kRanges);
}

// body(range, first row, last row) over the ranges that have rows; over other pieces, as number 0, where nothing is
// `summed` over the rows of a range.
template <bool DENSE, class Body>
void for_ranges(const Side<DENSE>& side, bool summed, int64_t bytes, int64_t threads, const Body& body) {
    if (!side.dense() && !summed) {
        parallel_rows(side.layout.indptr, side.layout.rows, bytes, threads,
                      [&](int64_t first, int64_t last) { body(int64_t{0}, first, last); });
        return;
    }
    for_each(kRanges, threads > 1 && work_of(side) * bytes >= kWorthwhile ? threads : 1, [&](int64_t range) {
        const int64_t first = range_start(side, range), last = range_start(side, range + 1);
        if (first < last) body(range, first, last);
    });
}

// visit(row, first slot, edges) for rows [start, stop) of those before `last`, chunk by chunk.
template <bool DENSE, class Visit>
void for_chunks(const Side<DENSE>& side, int64_t start, int64_t stop, int64_t last, int64_t step, const Visit& visit) {
    int64_t from = side.begin(start), to = side.end(start);
    for (int64_t row = start + 1; row < stop; ++row) {
        if (side.begin(row) < from) from = side.begin(row);
        if (side.end(row) > to) to = side.end(row);
    }
    for (int64_t at = from; at < to; at += step)
        for (int64_t row = start; row < stop; ++row) {
            const int64_t first = side.begin(row) > at ? side.begin(row) : at;
            const int64_t end = side.end(row) < at + step ? side.end(row) : at + step;
            if (first < end) visit(row, first, Edges{side.layout.index + first, end - first, side.limit(last) - first});
        }
}

template <class Scores, class T, int HB> struct Forward {
    const EdgeAttentionArgs& a;
    int64_t head;
    const Scores& scores;
    const Pieces& wide;  // of x and y
    Side<Scores::kHasVector> side;
    Dropout dropout;
    bool streamed;

    void run(int64_t first, int64_t last) const {
        alignas(64) float own[kMaxChannels], sums[kMaxChannels];
        float inverse[16];
        const int64_t deep = scores.deep.floats;
        for (int64_t start = first; start < last; start += scores.group) {
            const int64_t stop = start + scores.group < last ? start + scores.group : last;
            Online<HB> online[Scores::kGroup];
            for (int64_t row = start; row < stop; ++row)
                if (!side.empty(row)) scores.open(a.q, row, head, own + (row - start) * deep);
            clear(sums, (stop - start) * wide.floats);
            for_chunks(side, start, stop, last, scores.step, [&](int64_t row, int64_t at, const Edges& edges) {
                const int64_t i = row - start;
                chunk(row, at, edges, own + i * deep, online[i], sums + i * wide.floats);
            });
            for (int64_t row = start; row < stop; ++row) {
                store(inverse, finish_softmax<HB>(online[row - start], a.peaks + 2 * row * a.heads + head, a.heads));
                write_row<T>(sums + (row - start) * wide.floats, inverse, HB, wide, a.y, row, head, streamed);
            }
        }
        if (streamed) end_stream();
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, const float* own, Online<HB>& online, float* sums) const {
        alignas(64) float w[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const int vectors = scores.scores(edges, side.layout, at, table_of<T>(a.k, head), own, w);
        v16 top = splat<v16>(-INFINITY);
        for (int i = 0; i < vectors; ++i) top = maximum(load<v16>(w + 16 * i), top);
        const bool later = at > side.begin(row);
        const v16 scale = online.advance(top, later);
        if (later) rescale(scale, HB, wide, sums);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - online.base);
            online.sum += p;
            store(w + 16 * i, dropout.on() ? p * dropout.factor(drop + 16 * i) : p);
        }
        accumulate_once<T>(edges, table_of<T>(a.x, head), wide, HB, w, sums);
    }
};

template <template <class, int> class Scores, class T> void forward(const EdgeAttentionArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels, rows = a.by_target.rows;
    const int64_t size = rows * a.heads * a.channels * int64_t{sizeof(T)};
    const Side<Scores<T, 1>::kHasVector> side = {a.by_target, a.causal != 0, true};
    expect_writes(a.y.x, size);
    if (side.dense() && decodes(a, rows, a.by_target.slots)) {
        const int64_t bytes = a.heads * a.by_target.slots * (a.depth + a.channels) * int64_t{sizeof(T)};
        for_heads(a.heads, bytes, a.threads, [&](int64_t head) { decode_forward(a, head); });
        return;
    }
    const bool streamed = streams<T>(a.y, size, a.channels);
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Scores<T, HB> scores(a, head);
        const Pieces wide = cut<T>(HB, a.channels);
        const Forward<Scores<T, HB>, T, HB> block{a, head, scores, wide, side, Dropout(a.drop, head, HB), streamed};
        for_ranges(side, false, HB * (a.depth + a.channels) * int64_t{sizeof(T)}, a.threads,
                   [&](int64_t, int64_t first, int64_t last) { block.run(first, last); });
    });
}

// One pass of the backward, by target or by source. A row's own numbers are q and g, or k and x; the others' are k and
// x, or q and g. By target it leaves peak, D and, where scores are large, log, side by side, to the pass by source.
template <class Scores, class T, int HB, bool TARGET> struct Pass {
    const EdgeAttentionArgs& a;
    int64_t head;
    const Scores& scores;
    const Pieces& wide;
    Side<Scores::kHasVector> side;
    Dropout dropout;
    bool streamed, large;
    Factors factor{scores.factor}, one{1.0f};

    struct State {
        alignas(64) float deep[kMaxChannels], wide[kMaxChannels], slopes[kMaxChannels], sums[kMaxChannels];
        alignas(64) float values[kMaxChannels];
    };

    void run(int64_t range, int64_t first, int64_t last) const {
        constexpr bool summed = TARGET && Scores::kHasVector;
        State s;
        const Pieces& deep = scores.deep;
        if constexpr (summed) clear(s.values, deep.floats);
        for (int64_t start = first; start < last; start += scores.group) {
            const int64_t stop = start + scores.group < last ? start + scores.group : last;
            clear(s.slopes, (stop - start) * deep.floats);
            if constexpr (!TARGET) clear(s.sums, (stop - start) * wide.floats);
            for (int64_t row = start; row < stop; ++row)
                if (!side.empty(row)) {
                    open(row, row - start, s);
                } else if constexpr (TARGET) {
                    float* packed = a.packed + row * packs() * a.heads + head;
                    no_weights(packed, packed + a.heads, large ? packed + 2 * a.heads : nullptr, HB);
                }
            for_chunks(side, start, stop, last, scores.step, [&](int64_t row, int64_t at, const Edges& edges) {
                chunk(row, row - start, at, edges, s);
            });
            for (int64_t row = start; row < stop; ++row) close(row, row - start, s);
        }
        if (streamed) end_stream();
        if constexpr (summed)
            store_row(s.values, one.each, HB, deep, a.partial + (range * a.heads + head) * a.depth, a.depth);
    }

    int64_t packs() const { return large ? 3 : 2; }

    // Load a row; by target, leave what the pass by source needs of it.
    void open(int64_t row, int64_t i, State& s) const {
        scores.open(TARGET ? a.q : a.k, row, head, s.deep + i * scores.deep.floats);
        load_row<T>(table_of<T>(TARGET ? a.grad : a.x, head), row, HB, wide, s.wide + i * wide.floats);
        if constexpr (TARGET) {
            float* packed = a.packed + row * packs() * a.heads + head;
            load_row<T>(table_of<T>(a.y, head), row, HB, wide, s.sums);
            row_dots(s.wide + i * wide.floats, s.sums, HB, wide, packed + a.heads);
            put_peaks<HB>(a.peaks + 2 * row * a.heads + head, a.heads, packed, large ? packed + 2 * a.heads : nullptr);
        }
    }

    void chunk(int64_t row, int64_t i, int64_t at, const Edges& edges, State& s) const {
        alignas(64) float w[kChunk * HB], ds[kChunk * HB], peaks[kChunk * HB], logs[kChunk * HB], shifts[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float* own = s.deep + i * scores.deep.floats;
        const Table others = table_of<T>(TARGET ? a.k : a.q, head), gathered = table_of<T>(TARGET ? a.x : a.grad, head);
        const int vectors = scores.scores(edges, side.layout, at, others, own, w);
        store(ds + 16 * (vectors - 1), v16{});
        dot_rows<T>(edges, gathered, wide, HB, s.wide + i * wide.floats, ds);
        const float* packed = a.packed + head;
        if constexpr (TARGET) packed += row * packs() * a.heads;
        else if (large) gather_heads<HB>(edges, packed, packs() * a.heads, a.heads, {INFINITY, 0.0f, 0.0f}, {peaks, shifts, logs});
        else gather_heads<HB>(edges, packed, packs() * a.heads, a.heads, {INFINITY, 0.0f}, {peaks, shifts});
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        v16 peak{}, log{}, shift{};
        if constexpr (TARGET) peak = tile<HB>(packed), shift = tile<HB>(packed + a.heads);
        if (TARGET && large) log = tile<HB>(packed + 2 * a.heads);
        for (int j = 0; j < vectors; ++j) {
            if constexpr (!TARGET) peak = load<v16>(peaks + 16 * j), shift = load<v16>(shifts + 16 * j);
            if (!TARGET && large) log = load<v16>(logs + 16 * j);
            const v16 p = exponential((load<v16>(w + 16 * j) - peak) - log);
            const v16 factor = dropout.on() ? dropout.factor(drop + 16 * j) : splat<v16>(1.0f);
            store(w + 16 * j, p * factor);
            store(ds + 16 * j, p * (factor * load<v16>(ds + 16 * j) - shift));
        }
        if (TARGET && a.grad_bias) keep_bias(at, edges.count, ds);
        const Edges again = {edges.index, edges.count, 0};
        if constexpr (!TARGET) accumulate_once<T>(again, gathered, wide, HB, w, s.sums + i * wide.floats);
        scores.slopes(again, others, own, ds, s.slopes + i * scores.deep.floats, TARGET ? s.values : nullptr);
    }

    void keep_bias(int64_t at, int64_t count, const float* ds) const {
        const int32_t* order = a.by_target.order + at;
        for (int64_t e = 0; e < count; ++e)
            for (int h = 0; h < HB; ++h) a.grad_bias[(head + h) * a.by_target.slots + order[e]] = ds[e * HB + h];
    }

    void close(int64_t row, int64_t i, State& s) const {
        float* slopes = s.slopes + i * scores.deep.floats;
        scores.finish(slopes);
        write_row<T>(slopes, factor.each, HB, scores.deep, TARGET ? a.grad_q : a.grad_k, row, head, streamed);
        if constexpr (!TARGET)
            write_row<T>(s.sums + i * wide.floats, one.each, HB, wide, a.grad_x, row, head, streamed);
    }
};

template <template <class, int> class Scores, class T> void backward(const EdgeAttentionArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels, outputs = a.by_target.rows;
    const int64_t inputs = a.by_source.rows, size = a.heads * int64_t{sizeof(T)};
    const Side<Scores<T, 1>::kHasVector> by_target = {a.by_target, a.causal != 0, true};
    const Side<Scores<T, 1>::kHasVector> by_source = {a.by_source, a.causal != 0, false};
    DropArgs by_target_drop = a.drop, by_source_drop = a.drop;
    by_target_drop.source_major = 0;
    by_source_drop.source_major = 1;
    expect_writes(a.grad_q.x, outputs * size * a.depth);
    expect_writes(a.grad_k.x, inputs * size * a.depth);
    expect_writes(a.grad_x.x, inputs * size * a.channels);
    if (by_target.dense() && decodes(a, outputs, a.by_target.slots)) {
        for_heads(a.heads, inputs * size * (a.depth + a.channels), a.threads,
                  [&](int64_t head) { decode_backward(a, head); });
        return;
    }
    const bool large = are_large(a.peaks, outputs, a.heads), streamed_q = streams<T>(a.grad_q, outputs * size * a.depth, a.depth);
    const bool streamed_kx = streams<T>(a.grad_k, inputs * size * a.depth, a.depth) &&
                             streams<T>(a.grad_x, inputs * size * a.channels, a.channels);
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        using Block = Scores<T, HB>;
        const Block scores(a, head);
        const Pieces wide = cut<T>(HB, a.channels);
        const int64_t bytes = HB * (a.depth + a.channels) * int64_t{sizeof(T)};
        const Pass<Block, T, HB, true> target{a, head, scores, wide, by_target, Dropout(by_target_drop, head, HB), streamed_q, large};
        const Pass<Block, T, HB, false> source{a, head, scores, wide, by_source, Dropout(by_source_drop, head, HB), streamed_kx, large};
        for_ranges(by_target, Block::kHasVector, bytes, a.threads,
                   [&](int64_t range, int64_t first, int64_t last) { target.run(range, first, last); });
        for_ranges(by_source, false, bytes, a.threads,
                   [&](int64_t range, int64_t first, int64_t last) { source.run(range, first, last); });
    });
    if (!a.vector) return;
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

SC_EXPORT(edge_attention)(const structconv::EdgeAttentionArgs* args) {
    using namespace structconv::SC_ISA;
    if (args->scores == structconv::kProducts)
        args->half ? forward<Products, bfloat16>(*args) : forward<Products, float>(*args);
    else
        args->half ? forward<Activations, bfloat16>(*args) : forward<Activations, float>(*args);
}

SC_EXPORT(edge_attention_backward)(const structconv::EdgeAttentionArgs* args) {
    using namespace structconv::SC_ISA;
    if (args->scores == structconv::kProducts)
        args->half ? backward<Products, bfloat16>(*args) : backward<Products, float>(*args);
    else
        args->half ? backward<Activations, bfloat16>(*args) : backward<Activations, float>(*args);
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
