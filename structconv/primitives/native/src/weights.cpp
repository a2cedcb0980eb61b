// The weights of attention along the edges, one number an edge and head: softmax over the edges into n of
// leaky_relu(source_m + target_n), of scale <q_n, k_m> + bias_e, or of <v, act(q_n + k_m)>.
//
// The first pass over a row leaves its scores where its weights go, the second replaces them; what fits one chunk stays
// in between where it was computed.
#include "activations.h"
#include "api.h"
#include "dropout.h"
#include "parallel.h"
#include "softmax.h"

namespace structconv::SC_ISA {
namespace {

template <class T> Table table_at(const Rows& rows, int64_t head) {
    return {static_cast<const T*>(rows.x) + head * rows.head, rows.row, rows.head};
}

// The number of vectors of a chunk's scores; the last one is padded by -inf.
template <int HB> int filled(int64_t count, float* scores) {
    const int vectors = static_cast<int>((count * HB + 15) / 16);
    for (int64_t i = count * HB; i < vectors * 16; ++i) scores[i] = -INFINITY;
    return vectors;
}

// Scores of the edges of one row after the other: `open` it, then chunk by chunk from slot `at`.
template <class T, int HB> struct OfTerms {
    const EdgeWeightsArgs& a;
    int64_t head;
    v16 target{};

    OfTerms(const EdgeWeightsArgs& a, int64_t head) : a(a), head(head) {}

    void open(int64_t row) { target = tile<HB>(static_cast<const float*>(a.q.x) + row * a.q.row + head); }

    int chunk(const Edges& edges, int64_t, float* out) const {
        const float slope = static_cast<float>(a.parameter);
        const int vectors = gather_heads<HB>(edges, static_cast<const float*>(a.k.x) + head, a.k.row, 0.0f, out);
        for (int i = 0; i < vectors; ++i) {
            const v16 t = load<v16>(out + 16 * i) + target;
            store(out + 16 * i, choose(t > 0.0f, t, t * slope));
        }
        return filled<HB>(edges.count, out);
    }
};

template <class T, int HB> struct OfProducts {
    const EdgeWeightsArgs& a;
    int64_t head;
    Pieces deep;
    alignas(64) float query[kMaxChannels];

    OfProducts(const EdgeWeightsArgs& a, int64_t head) : a(a), head(head), deep(cut<T>(HB, a.depth)) {}

    void open(int64_t row) { load_row<T>(table_at<T>(a.q, head), row, HB, deep, query); }

    int chunk(const Edges& edges, int64_t at, float* out) const {
        dot_rows<T>(edges, table_at<T>(a.k, head), deep, HB, query, out);
        for (int64_t i = 0; i < edges.count * HB; ++i) out[i] *= static_cast<float>(a.parameter);
        if (a.bias)
            for (int64_t e = 0; e < edges.count; ++e)
                for (int h = 0; h < HB; ++h) out[e * HB + h] += a.bias[(head + h) * a.layout.slots + a.layout.order[at + e]];
        return filled<HB>(edges.count, out);
    }
};

template <class T, int HB> struct OfActivations {
    const EdgeWeightsArgs& a;
    int64_t head;
    Pieces deep;
    Activated loops[kMaxPieces];
    alignas(64) float own[kMaxChannels], vector[kMaxChannels];

    OfActivations(const EdgeWeightsArgs& a, int64_t head) : a(a), head(head), deep(cut<T>(HB, a.depth)) {
        for (int p = 0; p < deep.count; ++p) loops[p] = activated<T>(deep.items[p], a.activation);
        load_row<float>({a.vector + head * a.depth, 0, a.depth}, 0, HB, deep, vector);
    }

    void open(int64_t row) { load_row<T>(table_at<T>(a.q, head), row, HB, deep, own); }

    int chunk(const Edges& edges, int64_t, float* out) const {
        clear(out, edges.count * HB);
        for (int p = 0; p < deep.count; ++p) {
            const Piece& piece = deep.items[p];
            const int64_t at = piece.channel * HB;
            loops[p].score(edges, shifted<T>(table_at<T>(a.k, head), 0, piece.channel), piece.part, HB,
                           static_cast<float>(a.parameter), own + at, vector + at, out);
        }
        return filled<HB>(edges.count, out);
    }
};

template <int HB> struct Block {
    const EdgeWeightsArgs& a;
    int64_t head;
    Dropout dropout;

    template <class Scores> void run(Scores& scores, int64_t first, int64_t last) const {
        alignas(64) float w[kChunk * HB];
        alignas(64) float lse[16];
        const int32_t* indptr = a.layout.indptr;
        for (int64_t row = first; row < last; ++row) {
            const int64_t from = indptr[row], to = indptr[row + 1];
            if (from == to) continue;
            const bool whole = to - from <= kChunk;
            Online<HB> online;
            scores.open(row);
            for (int64_t at = from; at < to; at += kChunk) {
                const int64_t count = to - at < kChunk ? to - at : kChunk;
                const int vectors = scores.chunk({a.layout.index + at, count, indptr[last] - at}, at, w);
                v16 top = splat<v16>(-INFINITY);
                for (int i = 0; i < vectors; ++i) top = maximum(load<v16>(w + 16 * i), top);
                online.advance(top, at > from);
                for (int i = 0; i < vectors; ++i) online.sum += exponential(load<v16>(w + 16 * i) - online.base);
                if (!whole) put(w, at, count);
            }
            finish_softmax<HB>(online, lse);
            const v16 shift = tile<HB>(lse);
            for (int64_t at = from; at < to; at += kChunk) {
                const int64_t count = to - at < kChunk ? to - at : kChunk;
                if (!whole) get(w, at, count);
                weigh(w, row, at, count, shift);
                put(w, at, count);
            }
        }
    }

    void weigh(float* w, int64_t row, int64_t at, int64_t count, v16 shift) const {
        alignas(64) uint32_t drop[kChunk * HB];
        const int vectors = filled<HB>(count, w);
        if (dropout.on()) dropout.pairs(row, a.layout.index + at, count, drop);
        for (int i = 0; i < vectors; ++i) {
            const v16 p = exponential(load<v16>(w + 16 * i) - shift);
            store(w + 16 * i, dropout.on() ? p * dropout.factor(drop + 16 * i) : p);
        }
    }

    float* place(int64_t slot) const { return a.weights + a.layout.order[slot] * a.heads + head; }

    void put(const float* w, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) std::memcpy(place(at + e), w + e * HB, HB * sizeof(float));
    }

    void get(float* w, int64_t at, int64_t count) const {
        for (int64_t e = 0; e < count; ++e) std::memcpy(w + e * HB, place(at + e), HB * sizeof(float));
    }
};

template <template <class, int> class Scores, class T> void weights(const EdgeWeightsArgs& a) {
    for_head_blocks(a.heads, a.depth, [&](auto heads, int64_t head) {
        constexpr int HB = decltype(heads)::value;
        const Block<HB> block{a, head, Dropout(a.drop, head, HB)};
        parallel_rows(a.layout.indptr, a.layout.rows, HB * (a.depth + 2) * int64_t{sizeof(T)}, a.threads,
                      [&](int64_t first, int64_t last) {
                          Scores<T, HB> scores(a, head);
                          block.run(scores, first, last);
                      });
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(edge_weights)(const structconv::EdgeWeightsArgs* args) {
    using namespace structconv::SC_ISA;
    switch (args->scores) {
        case structconv::kTerms: weights<OfTerms, float>(*args); break;
        case structconv::kProducts:
            args->half ? weights<OfProducts, bfloat16>(*args) : weights<OfProducts, float>(*args);
            break;
        default: args->half ? weights<OfActivations, bfloat16>(*args) : weights<OfActivations, float>(*args);
    }
}
