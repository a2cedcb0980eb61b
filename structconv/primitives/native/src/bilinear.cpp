// Attention along the edges with scores scale <q_n, k_m> + bias_e: softmax over the edges into n, then y_n = sum p v_m.
//
// Backward, without anything held for an edge: a pass by target and one by source compute scores and weights again,
// with the gradient of each score,
//     ds = p (<g_n, v_m> - D_n), D_n = <g_n, y_n>;
// by target they add up grad q_n, by source grad k_m and grad v_m, for which the rows q_n and g_n are at hand anyway.
#include "dropout.h"
#include "parallel.h"
#include "strided_rows.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

// body(row, at, edges) for the edges of the rows, chunk by chunk, between open(row) and close(row).
template <class Open, class Body, class Close>
void for_chunks(const Layout& layout, int64_t first, int64_t last, const Open& open, const Body& body,
                const Close& close) {
    for (int64_t row = first; row < last; ++row) {
        open(row);
        const int64_t end = layout.indptr[row + 1];
        for (int64_t at = layout.indptr[row]; at < end; at += kChunk)
            body(row, at, Edges{layout.index + at, end - at < kChunk ? end - at : kChunk, layout.indptr[last] - at});
        close(row);
    }
}

// Bias of a block of heads: (heads, slots) in the order of the edges.
struct Bias {
    const float* values;  // null: none
    int64_t slots;
    const int32_t* order;

    template <int HB> void add(int64_t at, int64_t count, float* scores) const {
        if (!values) return;
        for (int64_t e = 0; e < count; ++e)
            for (int h = 0; h < HB; ++h) scores[e * HB + h] += values[h * slots + order[at + e]];
    }
};

// scale <own, other> + bias of a chunk, filled up with `pad`; returns how many vectors that is.
template <class T, int HB>
int scores(const Edges& edges, int64_t at, const Table& others, const Pieces& pieces, const float* own, float scale,
           const Bias& bias, float pad, float* out) {
    dot_rows<T>(edges, others, pieces, HB, own, out);
    const int64_t used = edges.count * HB;
    const int vectors = static_cast<int>((used + 15) / 16);
    for (int64_t i = used; i < vectors * 16; ++i) out[i] = 0.0f;
    for (int i = 0; i < vectors; ++i) store(out + 16 * i, load<v16>(out + 16 * i) * scale);
    for (int64_t i = used; i < vectors * 16; ++i) out[i] = pad;
    bias.add<HB>(at, edges.count, out);
    return vectors;
}

template <class T, int HB> struct Forward {
    const BilinearForwardArgs& a;
    int64_t head;
    const Pieces &deep, &wide;  // of q and k; of v and y
    Dropout dropout;
    bool streamed;

    void run(int64_t first, int64_t last) const {
        alignas(64) float query[kMaxChannels], sums[kMaxChannels];
        Online<HB> online;
        for_chunks(
            a.layout, first, last,
            [&](int64_t row) {
                online = Online<HB>();
                clear(sums, wide.floats);
                if (a.layout.indptr[row] < a.layout.indptr[row + 1])
                    load_row<T>(table_of<T>(a.q, head), row, HB, deep, query);
            },
            [&](int64_t row, int64_t at, const Edges& edges) { chunk(row, at, edges, query, online, sums); },
            [&](int64_t row) {
                float inverse[16];
                store(inverse, finish_softmax<HB>(online, a.lse + row * a.heads + head));
                write_row<T>(sums, inverse, HB, wide, a.y, row, head, streamed);
            });
        if (streamed) end_stream();
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, const float* query, Online<HB>& online, float* sums) const {
        alignas(64) float w[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const Bias bias = {a.bias ? a.bias + head * a.layout.slots : nullptr, a.layout.slots, a.layout.order};
        const int vectors = scores<T, HB>(edges, at, table_of<T>(a.k, head), deep, query, static_cast<float>(a.scale),
                                          bias, -INFINITY, w);
        v16 top = splat<v16>(-INFINITY);
        for (int i = 0; i < vectors; ++i) top = maximum(load<v16>(w + 16 * i), top);
        const bool later = at > a.layout.indptr[row];
        const v16 scale = online.advance(top, later);
        if (later) rescale(scale, HB, wide, sums);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - online.base);
            online.sum += p;
            store(w + 16 * i, dropout.on() ? p * dropout.factor(drop + 16 * i) : p);
        }
        accumulate_once<T>(edges, table_of<T>(a.v, head), wide, HB, w, sums);
    }
};

template <class T> void forward(const BilinearForwardArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels;
    const int64_t bytes = a.layout.rows * a.heads * a.channels * int64_t{sizeof(T)};
    expect_writes(a.y.x, bytes);
    const bool streamed = streams<T>(a.y, bytes, a.channels);
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pieces deep = cut<T>(HB, a.depth), wide = cut<T>(HB, a.channels);
        const Forward<T, HB> block{a, head, deep, wide, Dropout(a.drop, head, HB), streamed};
        parallel_rows(a.layout.indptr, a.layout.rows, HB * (a.depth + a.channels) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

// One pass of the backward, by target or by source. A row's own numbers are q and g, or k and v; the others' are k and
// v, or q and g. By target it leaves lse and D, side by side, to the pass by source.
template <class T, int HB, bool TARGET> struct Pass {
    const BilinearBackwardArgs& a;
    int64_t head;
    const Pieces &deep, &wide;
    Dropout dropout;
    bool streamed;

    const Layout& layout() const { return TARGET ? a.by_target : a.by_source; }
    const Rows& own_deep() const { return TARGET ? a.q : a.k; }
    const Rows& own_wide() const { return TARGET ? a.grad : a.v; }
    const Rows& other_deep() const { return TARGET ? a.k : a.q; }
    const Rows& other_wide() const { return TARGET ? a.v : a.grad; }

    struct State {
        alignas(64) float deep[kMaxChannels], wide[kMaxChannels], deep_sums[kMaxChannels], wide_sums[kMaxChannels];
    };

    void run(int64_t first, int64_t last) const {
        State s;
        float scale[16], ones[16];
        store(scale, splat<v16>(static_cast<float>(a.scale)));
        store(ones, splat<v16>(1.0f));
        for_chunks(
            layout(), first, last, [&](int64_t row) { open(row, s); },
            [&](int64_t row, int64_t at, const Edges& edges) { chunk(row, at, edges, s); },
            [&](int64_t row) {
                write_row<T>(s.deep_sums, scale, HB, deep, TARGET ? a.grad_q : a.grad_k, row, head, streamed);
                if constexpr (!TARGET) write_row<T>(s.wide_sums, ones, HB, wide, a.grad_v, row, head, streamed);
            });
        if (streamed) end_stream();
    }

    void open(int64_t row, State& s) const {
        clear(s.deep_sums, deep.floats);
        if constexpr (!TARGET) clear(s.wide_sums, wide.floats);
        [[maybe_unused]] float* packed = a.packed + row * 2 * a.heads + head;  // by target
        if (layout().indptr[row] == layout().indptr[row + 1]) {
            if constexpr (TARGET) no_weights(packed, packed + a.heads, HB);
            return;
        }
        load_row<T>(table_of<T>(own_deep(), head), row, HB, deep, s.deep);
        load_row<T>(table_of<T>(own_wide(), head), row, HB, wide, s.wide);
        if constexpr (TARGET) {
            load_row<T>(table_of<T>(a.y, head), row, HB, wide, s.wide_sums);
            row_dots(s.wide, s.wide_sums, HB, wide, packed + a.heads);
            std::memcpy(packed, a.lse + row * a.heads + head, HB * sizeof(float));
        }
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, State& s) const {
        alignas(64) float w[kChunk * HB], ds[kChunk * HB], lse[kChunk * HB], shift[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const Bias bias = {a.bias ? a.bias + head * layout().slots : nullptr, layout().slots, layout().order};
        const Table others = table_of<T>(other_deep(), head), gathered = table_of<T>(other_wide(), head);
        const int vectors = scores<T, HB>(edges, at, others, deep, s.deep, static_cast<float>(a.scale), bias,
                                          TARGET ? -INFINITY : 0.0f, w);
        store(ds + 16 * (vectors - 1), v16{});
        dot_rows<T>(edges, gathered, wide, HB, s.wide, ds);
        const float* packed = a.packed + head;
        if constexpr (TARGET) packed += row * 2 * a.heads;
        else unpack(edges, packed, vectors, lse, shift);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        const v16 own_lse = TARGET ? tile<HB>(packed) : v16{}, own_shift = TARGET ? tile<HB>(packed + a.heads) : v16{};
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - (TARGET ? own_lse : load<v16>(lse + 16 * i)));
            const v16 factor = dropout.on() ? dropout.factor(drop + 16 * i) : splat<v16>(1.0f);
            store(w + 16 * i, p * factor);
            const v16 d = TARGET ? own_shift : load<v16>(shift + 16 * i);
            store(ds + 16 * i, p * (factor * load<v16>(ds + 16 * i) - d));
        }
        if (TARGET && a.grad_bias) keep_bias(at, edges.count, ds);
        const Edges again = {edges.index, edges.count, 0};
        if constexpr (!TARGET) accumulate_once<T>(again, gathered, wide, HB, w, s.wide_sums);
        accumulate_once<T>(again, others, deep, HB, ds, s.deep_sums);
    }

    // lse and D of the outputs of a chunk, edge-major.
    void unpack(const Edges& edges, const float* packed, int vectors, float* lse, float* shift) const {
        const int64_t stride = 2 * a.heads, distance = 64;
        store(lse + 16 * (vectors - 1), splat<v16>(INFINITY));
        store(shift + 16 * (vectors - 1), v16{});
        for (int64_t e = 0; e < edges.count; ++e) {
            if (e + distance < edges.ahead) __builtin_prefetch(packed + edges.index[e + distance] * stride);
            const float* from = packed + edges.index[e] * stride;
            std::memcpy(lse + e * HB, from, HB * sizeof(float));
            std::memcpy(shift + e * HB, from + a.heads, HB * sizeof(float));
        }
    }

    void keep_bias(int64_t at, int64_t count, const float* ds) const {
        const int32_t* order = a.by_target.order + at;
        for (int64_t e = 0; e < count; ++e)
            for (int h = 0; h < HB; ++h) a.grad_bias[(head + h) * a.by_target.slots + order[e]] = ds[e * HB + h];
    }
};

template <class T> void backward(const BilinearBackwardArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels, outputs = a.by_target.rows;
    const int64_t inputs = a.by_source.rows, size = a.heads * int64_t{sizeof(T)};
    DropArgs by_target = a.drop, by_source = a.drop;
    by_target.source_major = 0;
    by_source.source_major = 1;
    expect_writes(a.grad_q.x, outputs * size * a.depth);
    expect_writes(a.grad_k.x, inputs * size * a.depth);
    expect_writes(a.grad_v.x, inputs * size * a.channels);
    const bool streamed_q = streams<T>(a.grad_q, outputs * size * a.depth, a.depth);
    const bool streamed_kv = streams<T>(a.grad_k, inputs * size * a.depth, a.depth) &&
                             streams<T>(a.grad_v, inputs * size * a.channels, a.channels);
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pieces deep = cut<T>(HB, a.depth), wide = cut<T>(HB, a.channels);
        const int64_t bytes = HB * (a.depth + a.channels) * int64_t{sizeof(T)};
        const Pass<T, HB, true> target{a, head, deep, wide, Dropout(by_target, head, HB), streamed_q};
        const Pass<T, HB, false> source{a, head, deep, wide, Dropout(by_source, head, HB), streamed_kv};
        parallel_rows(a.by_target.indptr, outputs, bytes, a.threads,
                      [&](int64_t first, int64_t last) { target.run(first, last); });
        parallel_rows(a.by_source.indptr, inputs, bytes, a.threads,
                      [&](int64_t first, int64_t last) { source.run(first, last); });
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(bilinear_forward)(const structconv::BilinearForwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? forward<bfloat16>(*args) : forward<float>(*args);
}

SC_EXPORT(bilinear_backward)(const structconv::BilinearBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? backward<bfloat16>(*args) : backward<float>(*args);
}
