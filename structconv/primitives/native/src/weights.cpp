// The weights of attention along the edges, one number an edge and head: softmax over the edges into n of
// leaky_relu(source_m + target_n), of scale <q_n, k_m> + bias_e, or of <v, act(q_n + k_m)>.
//
// The first pass over a row leaves its scores where its weights go, the second replaces them; what fits one chunk stays
// in between where it was computed.
#include "dropout.h"
#include "edge_scores.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

template <class T, int HB> struct Terms {
    float slope;

    Terms(const EdgeAttentionArgs& a, int64_t) : slope(static_cast<float>(a.parameter)) {}

    void open(const Rows& rows, int64_t row, int64_t head, float* own) const {
        std::memcpy(own, row_of<float>(rows, row, head), HB * sizeof(float));
    }

    int scores(const Edges& edges, const Layout&, int64_t, const Table& others, const float* own, float* out) const {
        const int vectors = gather_heads<HB>(edges, static_cast<const float*>(others.x), others.row, 0, {0.0f}, {out});
        const v16 target = tile<HB>(own);
        for (int i = 0; i < vectors; ++i) {
            const v16 t = load<v16>(out + 16 * i) + target;
            store(out + 16 * i, choose(t > 0.0f, t, t * slope));
        }
        return filled<HB>(edges.count, out);
    }
};

template <class Scores, class T, int HB> struct Block {
    const EdgeAttentionArgs& a;
    int64_t head;
    const Scores& scores;
    Dropout dropout;

    void run(int64_t first, int64_t last) const {
        alignas(64) float own[kMaxChannels], w[kChunk * HB];
        const int32_t* indptr = a.by_target.indptr;
        for (int64_t row = first; row < last; ++row) {
            const int64_t from = indptr[row], to = indptr[row + 1];
            if (from == to) continue;
            const bool whole = to - from <= kChunk;
            Online<HB> online;
            scores.open(a.q, row, head, own);
            for (int64_t at = from; at < to; at += kChunk) {
                const int64_t count = to - at < kChunk ? to - at : kChunk;
                const int vectors = scores.scores({a.by_target.index + at, count, indptr[last] - at}, a.by_target, at,
                                                  table_of<T>(a.k, head), own, w);
                v16 top = splat<v16>(-INFINITY);
                for (int i = 0; i < vectors; ++i) top = maximum(load<v16>(w + 16 * i), top);
                online.advance(top, at > from);
                for (int i = 0; i < vectors; ++i) online.sum += exponential(load<v16>(w + 16 * i) - online.base);
                if (!whole) put(w, at, count);
            }
            const v16 total = online.total(), inverse = choose(total == 0.0f, v16{}, 1.0f / total);
            for (int64_t at = from; at < to; at += kChunk) {
                const int64_t count = to - at < kChunk ? to - at : kChunk;
                if (!whole) get(w, at, count);
                weigh(w, row, at, count, online.base, inverse);
                put(w, at, count);
            }
        }
    }

    void weigh(float* w, int64_t row, int64_t at, int64_t count, v16 base, v16 inverse) const {
        alignas(64) uint32_t drop[kChunk * HB];
        const int vectors = filled<HB>(count, w);
        if (dropout.on()) dropout.pairs(row, a.by_target.index + at, count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - base) * inverse;
            store(w + 16 * i, dropout.on() ? p * dropout.factor(drop + 16 * i) : p);
        }
    }

    float* place(int64_t slot) const { return a.weights + a.by_target.order[slot] * a.heads + head; }

    void put(const float* w, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) std::memcpy(place(at + e), w + e * HB, HB * sizeof(float));
    }

    void get(float* w, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) std::memcpy(w + e * HB, place(at + e), HB * sizeof(float));
    }
};

template <template <class, int> class Scores, class T> void weights(const EdgeAttentionArgs& a) {
    for_head_blocks(a.heads, a.depth, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Scores<T, HB> scores(a, head);
        const Block<Scores<T, HB>, T, HB> block{a, head, scores, Dropout(a.drop, head, HB)};
        parallel_rows(a.by_target.indptr, a.by_target.rows, HB * (a.depth + 2) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) { block.run(first, last); });
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(edge_weights)(const structconv::EdgeAttentionArgs* args) {
    using namespace structconv::SC_ISA;
    switch (args->scores) {
        case structconv::kTerms: weights<Terms, float>(*args); break;
        case structconv::kProducts:
            args->half ? weights<Products, bfloat16>(*args) : weights<Products, float>(*args);
            break;
        default: args->half ? weights<Activations, bfloat16>(*args) : weights<Activations, float>(*args);
    }
}
