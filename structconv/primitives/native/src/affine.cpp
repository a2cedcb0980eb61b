// Attention along the edges with scores leaky_relu(source_m + target_n): softmax over the edges into n, then y_n.
//
// The forward also keeps y2_n = sum c p x_m, with c the slope of the activation (1 or `slope`), and mass_n = sum c p.
// With them the backward is one pass over the edges by source, and nothing has the size of the edges:
//     D_n = <g_n, y_n>,  grad target_n = <g_n, y2_n> - D_n mass_n,
//     grad x_m = sum p g_n,  grad source_m = <sum c p g_n, x_m> - sum c p D_n.
// Where source_m = <u, x_m> and target_n = <v, z_n>, the same passes add u grad source_m to grad x_m and v grad target_n
// to grad z_n, and sum up grad u = sum grad source_m x_m and grad v = sum grad target_n z_n, piece by piece. Where a bias
// was added to y, D_n is taken of y without it.
#include "dropout.h"
#include "parallel.h"
#include "strided_rows.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

inline v16 leaky(v16 t, float slope) { return choose(t > 0.0f, t, t * slope); }

// The vectors of a block of heads, as `load_row` lays out a row.
struct Vectors {
    alignas(64) float source[kMaxChannels], target[kMaxChannels], bias[kMaxChannels];

    Vectors(const VectorArgs& a, int64_t channels, int64_t head, int heads, const Pieces& pieces) {
        const auto load = [&](const float* from, float* to) {
            load_row<float>({from + head * channels, 0, channels}, 0, heads, pieces, to);
        };
        if (a.terms != kGiven) load(a.of_source, source);
        if (a.terms != kGiven) load(a.of_target, target);
        if (a.bias) load(a.bias, bias);
    }
};

// The terms of the scores, from the rows.
template <class T, int HB> struct Scores {
    const AffineForwardArgs& a;
    int64_t head;
    Pieces pieces;
    const Vectors& vectors;

    void compute() const {
        const bool square = a.vectors.terms == kOfX;
        const int64_t bytes = HB * a.channels * int64_t{sizeof(T)};
        stream_rows(a.inputs, bytes, a.threads, [&](int64_t first, int64_t last) {
            run(table_of<T>(a.x, head), first, last, vectors.source, a.source, square ? a.target : nullptr);
        });
        if (square) return;
        stream_rows(a.layout.rows, bytes, a.threads, [&](int64_t first, int64_t last) {
            run(table_of<T>(a.vectors.z, head), first, last, vectors.target, a.target, nullptr);
        });
    }

    void run(const Table& x, int64_t first, int64_t last, const float* vector, float* out, float* out_target) const {
        alignas(64) float entries[kMaxChannels];
        for (int64_t row = first; row < last; ++row) {
            load_row<T>(x, row, HB, pieces, entries);
            row_dots(entries, vector, HB, pieces, out + row * a.heads + head);
            if (out_target) row_dots(entries, vectors.target, HB, pieces, out_target + row * a.heads + head);
        }
    }
};

template <class T, int HB> struct Forward {
    const AffineForwardArgs& a;
    int64_t head;
    Pieces pieces;
    Dropout dropout;
    const Vectors& vectors;
    bool streamed;

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
        if (streamed) end_stream();
    }

    void chunk(int64_t row, const Edges& edges, bool later, Online<HB>& online, v16& mass, float* sums,
               float* sums2) const {
        alignas(64) float w[kChunk * HB], w2[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float slope = static_cast<float>(a.slope);
        const v16 target = tile<HB>(a.target + row * a.heads + head);
        const int vectors = gather_heads<HB>(edges, a.source + head, a.heads, 0, {0.0f}, {w});
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
            const v16 p = exponential(score - online.base), c = choose(score > 0.0f, splat<v16>(1.0f), splat<v16>(slope));
            const v16 kept = dropout.on() ? p * dropout.factor(drop + 16 * i) : p;
            online.sum += p;
            mass += c * p;
            store(w + 16 * i, kept);
            store(w2 + 16 * i, c * kept);
        }
        const Table x = table_of<T>(a.x, head);
        if (a.y2.x) accumulate_twice<T>(edges, x, pieces, HB, w, w2, sums, sums2);
        else accumulate_once<T>(edges, x, pieces, HB, w, sums);
    }

    void finish(int64_t row, const Online<HB>& online, v16 mass, float* sums, const float* sums2) const {
        float inverse[16];
        const v16 scale = finish_softmax<HB>(online, a.peaks + 2 * row * a.heads + head, a.heads);
        const v16 share = sum_lanes<HB>(mass) * scale;
        std::memcpy(a.mass + row * a.heads + head, &share, HB * sizeof(float));
        store(inverse, scale);
        if (a.y2.x) write_row<T>(sums2, inverse, HB, pieces, a.y2, row, head, streamed);
        if (a.vectors.bias) {
            rescale(scale, HB, pieces, sums);
            add_row(vectors.bias, Factors(1.0f).each, HB, pieces, sums);
            store(inverse, splat<v16>(1.0f));
        }
        write_row<T>(sums, inverse, HB, pieces, a.y, row, head, streamed);
    }
};

template <class T> void forward(const AffineForwardArgs& a) {
    const int64_t bytes = a.layout.rows * a.heads * a.channels * static_cast<int64_t>(sizeof(T));
    expect_writes(a.y.x, bytes);
    if (a.y2.x) expect_writes(a.y2.x, bytes);
    const bool streamed = streams<T>(a.y, bytes, a.channels) && (!a.y2.x || streams<T>(a.y2, bytes, a.channels));
    for_head_blocks(a.heads, a.channels, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pieces pieces = cut<T>(HB, a.channels);
        const Vectors vectors(a.vectors, a.channels, head, HB, pieces);
        if (a.vectors.terms != kGiven) Scores<T, HB>{a, head, pieces, vectors}.compute();
        const Forward<T, HB> block{a, head, pieces, Dropout(a.drop, head, HB), vectors, streamed};
        parallel_rows(a.layout.indptr, a.layout.rows, HB * (a.channels + 8) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

// The numbers of an output that the pass by source reads: target score, peak, D, and the log where scores are large; and
// grad target.
template <class T, int HB> struct Pack {
    const AffineBackwardArgs& a;
    int64_t head;
    Pieces pieces;
    const Vectors& vectors;
    bool large;

    // grad v of these rows goes to `sums_v`, where z has rows of its own; grad of the bias to `sums_b`.
    void run(int64_t first, int64_t last, float* sums_v, float* sums_b) const {
        alignas(64) float g[kMaxChannels], y[kMaxChannels];
        const Factors plus(1.0f);
        if (apart()) clear(sums_v, pieces.floats);
        if (a.vectors.bias) clear(sums_b, pieces.floats);
        for (int64_t row = first; row < last; ++row) {
            const bool used = a.by_target.indptr[row] < a.by_target.indptr[row + 1];
            if (used || a.vectors.bias) load_row<T>(table_of<T>(a.grad, head), row, HB, pieces, g);
            if (a.vectors.bias) add_row(g, plus.each, HB, pieces, sums_b);
            pack(row, used, g, y);
            if (apart()) finish(row, used, y, sums_v);
        }
    }

    void pack(int64_t row, bool used, const float* g, float* y) const {
        float d[16], d2[16];
        const int64_t at = row * a.heads + head;
        float *packed = a.packed + row * 4 * a.heads + head, *log = large ? packed + 3 * a.heads : nullptr;
        float* grad_target = a.grad_target + at;
        for (int h = 0; h < HB; ++h) grad_target[h] = 0.0f;
        if (!used) {
            for (int h = 0; h < HB; ++h) packed[h] = 0.0f;
            no_weights(packed + a.heads, packed + 2 * a.heads, log, HB);
            return;
        }
        load_row<T>(table_of<T>(a.y, head), row, HB, pieces, y);
        if (a.vectors.bias) add_row(vectors.bias, Factors(-1.0f).each, HB, pieces, y);
        row_dots(g, y, HB, pieces, d);
        load_row<T>(table_of<T>(a.y2, head), row, HB, pieces, y);
        row_dots(g, y, HB, pieces, d2);
        for (int h = 0; h < HB; ++h) {
            grad_target[h] = d2[h] - d[h] * a.mass[at + h];
            packed[h] = a.target[at + h];
            packed[2 * a.heads + h] = d[h];
        }
        put_peaks<HB>(a.peaks + 2 * row * a.heads + head, a.heads, packed + a.heads, log);
    }

    void finish(int64_t row, bool used, float* z, float* sums_v) const {
        const float* grad_target = a.grad_target + row * a.heads + head;
        if (used) {
            load_row<T>(table_of<T>(a.vectors.z, head), row, HB, pieces, z);
            add_row(z, grad_target, HB, pieces, sums_v);
        }
        clear(z, pieces.floats);
        if (used) add_row(vectors.target, grad_target, HB, pieces, z);
        const Rows& grad_z = a.vectors.grad_z;
        store_row(z, Factors(1.0f).each, HB, pieces, row_of<T>(grad_z, row, head), grad_z.head);
    }

    bool apart() const { return a.vectors.terms == kOfXAndZ; }
};

template <class T, int HB> struct Backward {
    const AffineBackwardArgs& a;
    int64_t head;
    Pieces pieces;
    Dropout dropout;
    const Vectors& vectors;
    bool streamed, large;

    // grad u of these rows goes to `sums_u`; and grad v to `sums_v`, where z is x.
    void run(int64_t first, int64_t last, float* sums_u, float* sums_v) const {
        alignas(64) float sums[kMaxChannels], sums2[kMaxChannels], x[kMaxChannels];
        const int32_t* indptr = a.by_source.indptr;
        if (a.vectors.terms != kGiven) clear(sums_u, pieces.floats);
        if (square()) clear(sums_v, pieces.floats);
        for (int64_t row = first; row < last; ++row) {
            v16 d{};
            clear(sums, pieces.floats);
            clear(sums2, pieces.floats);
            const bool hub = indptr[row + 1] - indptr[row] > kHub;
            double totals[16] = {};
            if (hub) load_row<T>(table_of<T>(a.x, head), row, HB, pieces, x);
            for (int64_t at = indptr[row]; at < indptr[row + 1]; at += kChunk) {
                const int64_t left = indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                chunk(row, {a.by_source.index + at, count, indptr[last] - at}, d, sums, sums2);
                if (hub) fold(d, sums2, x, totals);
            }
            finish(row, d, sums, sums2, totals, sums_u, sums_v);
        }
        if (streamed) end_stream();
    }

    // grad source of a row is <sums2, x> - d, which cancels: from this many edges on, it is added up chunk by chunk.
    static constexpr int64_t kHub = 1 << 12;

    void fold(v16& d, float* sums2, const float* x, double* totals) const {
        alignas(64) float dots[16], d_total[16];
        store(d_total, sum_lanes<HB>(d));
        row_dots(sums2, x, HB, pieces, dots);
        for (int h = 0; h < HB; ++h) totals[h] += dots[h] - d_total[h];
        d = v16{};
        clear(sums2, pieces.floats);
    }

    void chunk(int64_t row, const Edges& edges, v16& d, float* sums, float* sums2) const {
        alignas(64) float w[kChunk * HB], peaks[kChunk * HB], logs[kChunk * HB], w2[kChunk * HB];
        alignas(64) uint32_t drop[kChunk * HB];
        const float slope = static_cast<float>(a.slope);
        const v16 source = tile<HB>(a.source + row * a.heads + head);
        const float* packed = a.packed + head;
        const int count = large ? gather_heads<HB>(edges, packed, 4 * a.heads, a.heads, {0.0f, INFINITY, 0.0f, 0.0f},
                                                   {w, peaks, w2, logs})
                                : gather_heads<HB>(edges, packed, 4 * a.heads, a.heads, {0.0f, INFINITY, 0.0f}, {w, peaks, w2});
        if (dropout.on()) dropout.pairs(row, edges.index, edges.count, drop);
        for (int i = 0; i < count; ++i) {
            const v16 score = leaky(source + load<v16>(w + 16 * i), slope);
            const v16 below = score - load<v16>(peaks + 16 * i);
            const v16 p = exponential(large ? below - load<v16>(logs + 16 * i) : below);
            const v16 c = choose(score > 0.0f, splat<v16>(1.0f), splat<v16>(slope));
            const v16 kept = dropout.on() ? p * dropout.factor(drop + 16 * i) : p;
            d += c * p * load<v16>(w2 + 16 * i);
            store(w + 16 * i, kept);
            store(w2 + 16 * i, c * kept);
        }
        accumulate_twice<T>(edges, table_of<T>(a.grad, head), pieces, HB, w, w2, sums, sums2);
    }

    // Rows that no edge reads are not read here either: what is not finite in them stays there.
    void finish(int64_t row, v16 d, float* sums, const float* sums2, const double* totals, float* sums_u,
                float* sums_v) const {
        alignas(64) float x[kMaxChannels], dots[16], d_total[16];
        float* grad_source = a.grad_source + row * a.heads + head;
        const bool reads = filled(a.by_source, row), read = square() && filled(a.by_target, row);
        for (int h = 0; h < HB; ++h) grad_source[h] = 0.0f;
        if (reads || read) load_row<T>(table_of<T>(a.x, head), row, HB, pieces, x);
        if (reads) {
            store(d_total, sum_lanes<HB>(d));
            row_dots(sums2, x, HB, pieces, dots);
            for (int h = 0; h < HB; ++h) grad_source[h] = static_cast<float>(totals[h] + (dots[h] - d_total[h]));
        }
        if (reads && a.vectors.terms != kGiven) {
            add_row(vectors.source, grad_source, HB, pieces, sums);
            add_row(x, grad_source, HB, pieces, sums_u);
        }
        if (read) {
            const float* grad_target = a.grad_target + row * a.heads + head;
            add_row(vectors.target, grad_target, HB, pieces, sums);
            add_row(x, grad_target, HB, pieces, sums_v);
        }
        write_row<T>(sums, Factors(1.0f).each, HB, pieces, a.grad_x, row, head, streamed);
    }

    bool square() const { return a.vectors.terms == kOfX; }

    static bool filled(const Layout& layout, int64_t row) { return layout.indptr[row] < layout.indptr[row + 1]; }
};

// A block of heads of (heads, channels) from the sums of the pieces, `stride` floats apart.
inline void collect(const float* sums, int64_t pieces_of_rows, int64_t stride, int heads, const Pieces& pieces,
                    int64_t channels, float* out) {
    alignas(64) float total[kMaxChannels];
    const Factors one(1.0f);
    clear(total, pieces.floats);
    for (int64_t piece = 0; piece < pieces_of_rows; ++piece)
        add_row(sums + piece * stride, one.each, heads, pieces, total);
    store_row(total, one.each, heads, pieces, out, channels);
}

template <class T> void backward(const AffineBackwardArgs& a) {
    const int64_t size = a.heads * a.channels * int64_t{sizeof(T)};
    const VectorArgs& v = a.vectors;
    expect_writes(a.grad_x.x, a.by_source.rows * size);
    const bool streamed = streams<T>(a.grad_x, a.by_source.rows * size, a.channels);
    if (v.terms == kOfXAndZ) expect_writes(v.grad_z.x, a.by_target.rows * size);
    const bool large = are_large(a.peaks, a.by_target.rows, a.heads);
    for_head_blocks(a.heads, a.channels, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Pieces pieces = cut<T>(HB, a.channels);
        const Vectors vectors(v, a.channels, head, HB, pieces);
        const Pack<T, HB> pack{a, head, pieces, vectors, large};
        const Backward<T, HB> block{a, head, pieces, Dropout(a.drop, head, HB), vectors, streamed, large};
        const int64_t bytes = HB * (a.channels + 8) * int64_t{sizeof(T)}, stride = 3 * pieces.floats;
        float *sums_u = v.partial, *sums_v = sums_u + pieces.floats, *sums_b = sums_v + pieces.floats;
        const auto total = [&](const float* sums, int64_t count, float* out) {
            collect(sums, count, stride, HB, pieces, a.channels, out + head * a.channels);
        };
        int64_t count = summed_pieces(
            a.by_target.indptr, a.by_target.rows, bytes, a.threads, [&](int64_t piece, int64_t first, int64_t last) {
                pack.run(first, last, sums_v + piece * stride, sums_b + piece * stride);
            });
        if (v.terms == kOfXAndZ) total(sums_v, count, v.grad_target);
        if (v.bias) total(sums_b, count, v.grad_bias);
        count = summed_pieces(
            a.by_source.indptr, a.by_source.rows, bytes, a.threads, [&](int64_t piece, int64_t first, int64_t last) {
                block.run(first, last, sums_u + piece * stride, sums_v + piece * stride);
            });
        if (v.terms != kGiven) total(sums_u, count, v.grad_source);
        if (v.terms == kOfX) total(sums_v, count, v.grad_target);
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
