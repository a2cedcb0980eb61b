// Attention along the edges with scores leaky_relu(source_m + target_n): softmax over the edges into n, then y_n.
//
// The forward also keeps y2_n = sum c p x_m, with c the slope of the activation (1 or `slope`), and mass_n = sum c p.
// With them the backward is one pass over the edges by source, and nothing has the size of the edges:
//     D_n = <g_n, y_n>,  grad target_n = <g_n, y2_n> - D_n mass_n,
//     grad x_m = sum p g_n,  grad source_m = <sum c p g_n, x_m> - sum c p D_n.
#include "api.h"
#include "dropout.h"
#include "parallel.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

template <class T> T* row_of(const Rows& rows, int64_t row, int64_t head) {
    return static_cast<T*>(rows.x) + row * rows.row + head * rows.head;
}

inline v16 leaky(v16 t, float slope) { return t > 0.0f ? t : t * slope; }

template <class T, int HB> struct Forward {
    const AffineForwardArgs& a;
    int64_t head;
    Pieces pieces;
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float sums[kMaxChannels], sums2[kMaxChannels];
        const int32_t* indptr = a.layout.indptr;
        for (int64_t row = first; row < last; ++row) {
            Online<HB> online;
            v16 mass{};
            clear(sums, pieces.floats);
            if (a.y2.x) clear(sums2, pieces.floats);
            for (int64_t at = indptr[row]; at < indptr[row + 1]; at += kChunk) {
                const int64_t left = indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                const Edges edges = {a.layout.index + at, count, indptr[last] - at};
                chunk(row, edges, at > indptr[row], online, mass, sums, sums2);
            }
            finish(row, online, mass, sums, sums2);
        }
    }

    void chunk(int64_t row, const Edges& edges, bool later, Online<HB>& online, v16& mass, float* sums,
               float* sums2) const {
        alignas(64) float w[kChunk * HB], w2[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float slope = static_cast<float>(a.slope);
        const v16 target = tile<HB>(a.target + row * a.heads + head);
        const int vectors = gather_heads<HB>(edges, a.source + head, a.heads, 0.0f, w);
        v16 top = splat<v16>(-INFINITY);
        for (int i = 0; i < vectors; ++i) {
            const v16 score = leaky(load<v16>(w + 16 * i) + target, slope);
            store(w + 16 * i, score);
            if (i + 1 < vectors) top = maximum(score, top);
        }
        for (int64_t i = edges.count * HB; i < vectors * 16; ++i) w[i] = -INFINITY;
        const v16 scale = online.advance(maximum(load<v16>(w + 16 * (vectors - 1)), top), later);
        if (later) {
            mass *= scale;
            rescale(scale, HB, pieces, sums);
            if (a.y2.x) rescale(scale, HB, pieces, sums2);
        }
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 score = load<v16>(w + 16 * i);
            const v16 p = exponential(score - online.base), c = score > 0.0f ? splat<v16>(1.0f) : splat<v16>(slope);
            const v16 kept = dropout.on() ? p * dropout.factor(drop + 16 * i) : p;
            online.sum += p;
            mass += c * p;
            store(w + 16 * i, kept);
            store(w2 + 16 * i, c * kept);
        }
        const Table x = {row_of<T>(a.x, 0, head), a.x.row, a.x.head};
        if (a.y2.x) accumulate_twice<T>(edges, x, pieces, HB, w, w2, sums, sums2);
        else accumulate_once<T>(edges, x, pieces, HB, w, sums);
    }

    void finish(int64_t row, const Online<HB>& online, v16 mass, const float* sums, const float* sums2) const {
        float inverse[16];
        const v16 scale = finish_softmax<HB>(online, a.lse + row * a.heads + head);
        const v16 share = sum_lanes<HB>(mass) * scale;
        std::memcpy(a.mass + row * a.heads + head, &share, HB * sizeof(float));
        store(inverse, scale);
        store_row(sums, inverse, HB, pieces, row_of<T>(a.y, row, head), a.y.head);
        if (a.y2.x) store_row(sums2, inverse, HB, pieces, row_of<T>(a.y2, row, head), a.y2.head);
    }
};

template <class T> void forward(const AffineForwardArgs& a) {
    const int64_t bytes = a.layout.rows * a.heads * a.channels * static_cast<int64_t>(sizeof(T));
    expect_writes(a.y.x, bytes);
    if (a.y2.x) expect_writes(a.y2.x, bytes);
    for_head_blocks(a.heads, a.channels, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Forward<T, HB> block{a, head, cut<T>(HB, a.channels), Dropout(a.drop, head, HB)};
        parallel_rows(a.layout.indptr, a.layout.rows, HB * (a.channels + 8) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

// What the pass by source reads of an output: its target score, lse and D, side by side; and grad target.
template <class T, int HB> struct Pack {
    const AffineBackwardArgs& a;
    int64_t head;
    Pieces pieces;

    void run(int64_t first, int64_t last) const {
        alignas(64) float g[kMaxChannels], y[kMaxChannels], d[16], d2[16];
        for (int64_t row = first; row < last; ++row) {
            const int64_t at = row * a.heads + head;
            float* packed = a.packed + row * 3 * a.heads + head;
            const bool empty = a.by_target.indptr[row] == a.by_target.indptr[row + 1];
            if (empty) {
                for (int h = 0; h < HB; ++h) a.grad_target[at + h] = 0.0f;
                continue;
            }
            load_row<T>({row_of<T>(a.grad, 0, head), a.grad.row, a.grad.head}, row, HB, pieces, g);
            load_row<T>({row_of<T>(a.y, 0, head), a.y.row, a.y.head}, row, HB, pieces, y);
            row_dots(g, y, HB, pieces, d);
            load_row<T>({row_of<T>(a.y2, 0, head), a.y2.row, a.y2.head}, row, HB, pieces, y);
            row_dots(g, y, HB, pieces, d2);
            for (int h = 0; h < HB; ++h) {
                a.grad_target[at + h] = d2[h] - d[h] * a.mass[at + h];
                packed[h] = a.target[at + h];
                packed[a.heads + h] = a.lse[at + h];
                packed[2 * a.heads + h] = d[h];
            }
        }
    }
};

template <class T, int HB> struct Backward {
    const AffineBackwardArgs& a;
    int64_t head;
    Pieces pieces;
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float sums[kMaxChannels], sums2[kMaxChannels];
        const int32_t* indptr = a.by_source.indptr;
        for (int64_t row = first; row < last; ++row) {
            v16 d{};
            clear(sums, pieces.floats);
            clear(sums2, pieces.floats);
            for (int64_t at = indptr[row]; at < indptr[row + 1]; at += kChunk) {
                const int64_t left = indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                chunk(row, {a.by_source.index + at, count, indptr[last] - at}, d, sums, sums2);
            }
            finish(row, indptr[row] == indptr[row + 1], d, sums, sums2);
        }
    }

    void chunk(int64_t row, const Edges& edges, v16& d, float* sums, float* sums2) const {
        alignas(64) float w[kChunk * HB], lse[kChunk * HB], w2[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float slope = static_cast<float>(a.slope), *packed = a.packed + head;
        const v16 source = tile<HB>(a.source + row * a.heads + head);
        const int64_t stride = 3 * a.heads;
        const int vectors = gather_heads<HB>(edges, packed, stride, 0.0f, w);
        gather_heads<HB>(edges, packed + a.heads, stride, INFINITY, lse);
        gather_heads<HB>(edges, packed + 2 * a.heads, stride, 0.0f, w2);
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 score = leaky(source + load<v16>(w + 16 * i), slope);
            const v16 p = exponential(score - load<v16>(lse + 16 * i));
            const v16 c = score > 0.0f ? splat<v16>(1.0f) : splat<v16>(slope);
            const v16 kept = dropout.on() ? p * dropout.factor(drop + 16 * i) : p;
            d += c * p * load<v16>(w2 + 16 * i);
            store(w + 16 * i, kept);
            store(w2 + 16 * i, c * kept);
        }
        const Table grad = {row_of<T>(a.grad, 0, head), a.grad.row, a.grad.head};
        accumulate_twice<T>(edges, grad, pieces, HB, w, w2, sums, sums2);
    }

    void finish(int64_t row, bool empty, v16 d, const float* sums, const float* sums2) const {
        alignas(64) float x[kMaxChannels], dots[16], d_total[16], ones[16];
        store(ones, splat<v16>(1.0f));
        store_row(sums, ones, HB, pieces, row_of<T>(a.grad_x, row, head), a.grad_x.head);
        store(d_total, sum_lanes<HB>(d));
        load_row<T>({row_of<T>(a.x, 0, head), a.x.row, a.x.head}, row, HB, pieces, x);
        row_dots(sums2, x, HB, pieces, dots);
        for (int h = 0; h < HB; ++h) a.grad_source[row * a.heads + head + h] = empty ? 0.0f : dots[h] - d_total[h];
    }
};

template <class T> void backward(const AffineBackwardArgs& a) {
    const int64_t size = a.heads * a.channels * int64_t{sizeof(T)};
    expect_writes(a.grad_x.x, a.by_source.rows * size);
    for_head_blocks(a.heads, a.channels, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pack<T, HB> pack{a, head, cut<T>(HB, a.channels)};
        const Backward<T, HB> block{a, head, pack.pieces, Dropout(a.drop, head, HB)};
        const int64_t bytes = HB * (a.channels + 8) * int64_t{sizeof(T)};
        parallel_rows(a.by_target.indptr, a.by_target.rows, bytes, a.threads,
                      [&](int64_t first, int64_t last) { pack.run(first, last); });
        parallel_rows(a.by_source.indptr, a.by_source.rows, bytes, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(affine_forward)(const structconv::AffineForwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? forward<bfloat16>(*args) : forward<float>(*args);
}

SC_EXPORT(affine_backward)(const structconv::AffineBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? backward<bfloat16>(*args) : backward<float>(*args);
}
