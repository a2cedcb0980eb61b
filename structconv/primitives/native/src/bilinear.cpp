// Attention along the edges with scores scale <q_n, k_m> + bias_e: softmax over the edges into n, then y_n = sum p v_m.
//
// Backward: a pass by target computes the weights again, with the gradient of each score,
//     ds = p (<g_n, v_m> - D_n), D_n = <g_n, y_n>,
// adds up grad q_n, and leaves (p, ds) for the pass by source, which adds up grad k_m and grad v_m.
#include "api.h"
#include "dropout.h"
#include "parallel.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

template <class T> T* row_of(const Rows& rows, int64_t row, int64_t head) {
    return static_cast<T*>(rows.x) + row * rows.row + head * rows.head;
}

template <class T> Table table_of(const Rows& rows, int64_t head) {
    return {row_of<T>(rows, 0, head), rows.row, rows.head};
}

// scale <q, k> + bias of a chunk, filled up with -inf; returns how many vectors that is.
template <class T, int HB>
int scores(const Edges& edges, const Table& k, const Pieces& pieces, const float* query, float scale, const float* bias,
           int64_t bias_head, const int32_t* order, float* out) {
    dot_rows<T>(edges, k, pieces, HB, query, out);
    const int64_t used = edges.count * HB;
    const int vectors = static_cast<int>((used + 15) / 16);
    for (int64_t i = 0; i < used; ++i) out[i] *= scale;
    for (int64_t i = used; i < vectors * 16; ++i) out[i] = -INFINITY;
    if (bias)
        for (int64_t e = 0; e < edges.count; ++e)
            for (int h = 0; h < HB; ++h) out[e * HB + h] += bias[h * bias_head + order[e]];
    return vectors;
}

template <class T, int HB> struct Forward {
    const BilinearForwardArgs& a;
    int64_t head;
    Pieces deep, wide;  // of q and k; of v and y
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float query[kMaxChannels], sums[kMaxChannels];
        float inverse[16];
        const int32_t* indptr = a.layout.indptr;
        for (int64_t row = first; row < last; ++row) {
            Online<HB> online;
            clear(sums, wide.floats);
            if (indptr[row] < indptr[row + 1]) load_row<T>(table_of<T>(a.q, head), row, HB, deep, query);
            for (int64_t at = indptr[row]; at < indptr[row + 1]; at += kChunk) {
                const int64_t left = indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                chunk(row, at, {a.layout.index + at, count, indptr[last] - at}, query, online, sums);
            }
            store(inverse, finish_softmax<HB>(online, a.lse + row * a.heads + head));
            store_row(sums, inverse, HB, wide, row_of<T>(a.y, row, head), a.y.head);
        }
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, const float* query, Online<HB>& online, float* sums) const {
        alignas(64) float w[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float* bias = a.bias ? a.bias + head * a.layout.slots : nullptr;
        const int vectors = scores<T, HB>(edges, table_of<T>(a.k, head), deep, query, static_cast<float>(a.scale), bias,
                                          a.layout.slots, a.layout.order + at, w);
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
    expect_writes(a.y.x, a.layout.rows * a.heads * a.channels * static_cast<int64_t>(sizeof(T)));
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Forward<T, HB> block{a, head, cut<T>(HB, a.depth), cut<T>(HB, a.channels), Dropout(a.drop, head, HB)};
        parallel_rows(a.layout.indptr, a.layout.rows, HB * (a.depth + a.channels) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

template <class T, int HB> struct ByTarget {
    const BilinearBackwardArgs& a;
    int64_t head;
    Pieces deep, wide;
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float query[kMaxChannels], grad[kMaxChannels], y[kMaxChannels], sums[kMaxChannels];
        float d[16] = {}, ones[16];
        store(ones, splat<v16>(1.0f));
        const int32_t* indptr = a.by_target.indptr;
        for (int64_t row = first; row < last; ++row) {
            clear(sums, deep.floats);
            if (indptr[row] < indptr[row + 1]) {
                load_row<T>(table_of<T>(a.q, head), row, HB, deep, query);
                load_row<T>(table_of<T>(a.grad, head), row, HB, wide, grad);
                load_row<T>(table_of<T>(a.y, head), row, HB, wide, y);
                row_dots(grad, y, HB, wide, d);
            }
            for (int64_t at = indptr[row]; at < indptr[row + 1]; at += kChunk) {
                const int64_t left = indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                chunk(row, at, {a.by_target.index + at, count, indptr[last] - at}, query, grad, d, sums);
            }
            store_row(sums, ones, HB, deep, row_of<T>(a.grad_q, row, head), a.grad_q.head);
        }
    }

    void chunk(int64_t row, int64_t at, const Edges& edges, const float* query, const float* grad, const float* d,
               float* sums) const {
        alignas(64) float w[kChunk * HB], ds[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float scale = static_cast<float>(a.scale), *bias = a.bias ? a.bias + head * a.by_target.slots : nullptr;
        const int32_t* order = a.by_target.order + at;
        const int vectors = scores<T, HB>(edges, table_of<T>(a.k, head), deep, query, scale, bias, a.by_target.slots,
                                          order, w);
        for (int i = static_cast<int>(edges.count) * HB; i < vectors * 16; ++i) ds[i] = 0.0f;
        dot_rows<T>(edges, table_of<T>(a.v, head), wide, HB, grad, ds);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        const v16 lse = tile<HB>(a.lse + row * a.heads + head), shift = tile<HB>(d);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - lse);
            const v16 factor = dropout.on() ? dropout.factor(drop + 16 * i) : splat<v16>(1.0f);
            store(w + 16 * i, p * factor);
            store(ds + 16 * i, p * (factor * load<v16>(ds + 16 * i) - shift));
        }
        if (a.grad_bias)
            for (int64_t e = 0; e < edges.count; ++e)
                for (int h = 0; h < HB; ++h) a.grad_bias[(head + h) * a.by_target.slots + order[e]] = ds[e * HB + h];
        for (int i = 0; i < vectors; ++i) store(ds + 16 * i, load<v16>(ds + 16 * i) * scale);
        for (int64_t e = 0; e < edges.count; ++e) {
            float* pair = a.pairs + (at + e) * 2 * a.heads + head;
            std::memcpy(pair, w + e * HB, HB * sizeof(float));
            std::memcpy(pair + a.heads, ds + e * HB, HB * sizeof(float));
        }
        accumulate_once<T>(edges, table_of<T>(a.k, head), deep, HB, ds, sums);
    }
};

template <class T, int HB> struct BySource {
    const BilinearBackwardArgs& a;
    int64_t head;
    Pieces deep, wide;

    void run(int64_t first, int64_t last) const {
        alignas(64) float w[kChunk * HB], ds[kChunk * HB], keys[kMaxChannels], values[kMaxChannels];
        float ones[16];
        store(ones, splat<v16>(1.0f));
        const Layout& layout = a.by_source;
        for (int64_t row = first; row < last; ++row) {
            clear(keys, deep.floats);
            clear(values, wide.floats);
            for (int64_t at = layout.indptr[row]; at < layout.indptr[row + 1]; at += kChunk) {
                const int64_t left = layout.indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                const Edges edges = {layout.index + at, count, layout.indptr[last] - at};
                pairs(at, count, edges.ahead, w, ds);
                accumulate_once<T>(edges, table_of<T>(a.grad, head), wide, HB, w, values);
                accumulate_once<T>(edges, table_of<T>(a.q, head), deep, HB, ds, keys);
            }
            store_row(keys, ones, HB, deep, row_of<T>(a.grad_k, row, head), a.grad_k.head);
            store_row(values, ones, HB, wide, row_of<T>(a.grad_v, row, head), a.grad_v.head);
        }
    }

    void pairs(int64_t at, int64_t count, int64_t ahead, float* w, float* ds) const {
        const int64_t stride = 2 * a.heads, distance = 32;
        const int32_t* position = a.position + at;
        for (int64_t e = 0; e < count; ++e) {
            if (e + distance < ahead) __builtin_prefetch(a.pairs + position[e + distance] * stride + head);
            const float* pair = a.pairs + position[e] * stride + head;
            std::memcpy(w + e * HB, pair, HB * sizeof(float));
            std::memcpy(ds + e * HB, pair + a.heads, HB * sizeof(float));
        }
    }
};

template <class T> void backward(const BilinearBackwardArgs& a) {
    const int64_t width = a.depth > a.channels ? a.depth : a.channels, inputs = a.by_source.rows;
    const int64_t size = a.heads * int64_t{sizeof(T)};
    expect_writes(a.pairs, a.by_target.slots * 2 * a.heads * int64_t{sizeof(float)});
    expect_writes(a.grad_q.x, a.by_target.rows * size * a.depth);
    expect_writes(a.grad_k.x, inputs * size * a.depth);
    expect_writes(a.grad_v.x, inputs * size * a.channels);
    for_head_blocks(a.heads, width, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pieces deep = cut<T>(HB, a.depth), wide = cut<T>(HB, a.channels);
        const int64_t bytes = HB * (a.depth + a.channels) * int64_t{sizeof(T)};
        const ByTarget<T, HB> by_target{a, head, deep, wide, Dropout(a.drop, head, HB)};
        parallel_rows(a.by_target.indptr, a.by_target.rows, bytes, a.threads,
                      [&](int64_t first, int64_t last) { by_target.run(first, last); });
        const BySource<T, HB> by_source{a, head, deep, wide};
        parallel_rows(a.by_source.indptr, a.by_source.rows, bytes, a.threads,
                      [&](int64_t first, int64_t last) { by_source.run(first, last); });
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
