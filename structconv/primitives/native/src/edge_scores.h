// The scores of a row with the others of a chunk, for HB heads at once: scale <q_n, k_m> + bias_e, or <v, act(q_n + k_m)>,
// and the sums that their gradients need. Scores lie edge-major.
#pragma once

#include "activations.h"
#include "softmax.h"
#include "strided_rows.h"

namespace structconv::SC_ISA {

// The number of vectors of a chunk's scores; the last one is filled up with -inf.
template <int HB> int filled(int64_t count, float* scores) {
    const int vectors = static_cast<int>((count * HB + 15) / 16);
    for (int64_t i = count * HB; i < vectors * 16; ++i) scores[i] = -INFINITY;
    return vectors;
}

template <class T, int HB> struct Products {
    static constexpr int64_t step = kChunk, group = 1;
    static constexpr int kGroup = 1;
    static constexpr bool kHasVector = false;

    Pieces deep;
    const float* bias;  // (heads, slots) in the order of the edges, from this block of heads on; null: none
    float factor;

    Products(const EdgeAttentionArgs& a, int64_t head)
        : deep(cut<T>(HB, a.depth)), bias(a.bias ? a.bias + head * a.by_target.slots : nullptr),
          factor(static_cast<float>(a.parameter)) {}

    void open(const Rows& rows, int64_t row, int64_t head, float* own) const {
        load_row<T>(table_of<T>(rows, head), row, HB, deep, own);
    }

    // Of the edges in the slots from `at` on, filled up; returns how many vectors that is.
    int scores(const Edges& edges, const Layout& layout, int64_t at, const Table& others, const float* own,
               float* out) const {
        dot_rows<T>(edges, others, deep, HB, own, out);
        for (int64_t i = 0; i < edges.count * HB; ++i) out[i] *= factor;
        if (bias)
            for (int64_t e = 0; e < edges.count; ++e)
                for (int h = 0; h < HB; ++h) out[e * HB + h] += bias[h * layout.slots + layout.order[at + e]];
        return filled<HB>(edges.count, out);
    }

    void slopes(const Edges& edges, const Table& others, const float*, const float* ds, float* sums, float*) const {
        accumulate_once<T>(edges, others, deep, HB, ds, sums);
    }

    void finish(float*) const {}
};

template <class T, int HB> struct Activations {
    static constexpr int kGroup = 8;  // rows of a group, at most
    static constexpr bool kHasVector = true;

    Pieces deep;
    Activated loops[kMaxPieces];
    float parameter, factor;
    int64_t step, group;  // others of a chunk; rows that pass over them together
    alignas(64) float vector[kMaxChannels];

    Activations(const EdgeAttentionArgs& a, int64_t head)
        : deep(cut<T>(HB, a.depth)), parameter(static_cast<float>(a.parameter)),
          factor(a.activation == kPiecewise ? 1.0f : parameter) {
        for (int p = 0; p < deep.count; ++p) loops[p] = activated<T>(deep.items[p], a.activation);
        load_row<float>({a.vector + head * a.depth, 0, a.depth}, 0, HB, deep, vector);
        const int64_t wide = cut<T>(HB, a.channels).floats, floats = deep.floats > wide ? deep.floats : wide;
        const int64_t near = 32768 / ((deep.floats + wide + 1) * int64_t{sizeof(T)});
        step = near > kChunk ? kChunk : near < 16 ? 16 : near / 16 * 16;
        group = a.by_target.indptr || floats == 0 ? 1 : kMaxChannels / floats < kGroup ? kMaxChannels / floats : kGroup;
    }

    void open(const Rows& rows, int64_t row, int64_t head, float* own) const {
        load_row<T>(table_of<T>(rows, head), row, HB, deep, own);
    }

    int scores(const Edges& edges, const Layout&, int64_t, const Table& others, const float* own, float* out) const {
        clear(out, edges.count * HB);
        for (int p = 0; p < deep.count; ++p) {
            const Piece& piece = deep.items[p];
            const int64_t at = piece.channel * HB;
            loops[p].score(edges, shifted<T>(others, 0, piece.channel), piece.part, HB, parameter, own + at, vector + at,
                           out);
        }
        return filled<HB>(edges.count, out);
    }

    // The gradient of a row's own numbers but for `finish` and the factor, and that of the vector where `values` is given.
    void slopes(const Edges& edges, const Table& others, const float* own, const float* ds, float* sums,
                float* values) const {
        for (int p = 0; p < deep.count; ++p) {
            const Piece& piece = deep.items[p];
            const int64_t at = piece.channel * HB;
            loops[p].slopes(edges, shifted<T>(others, 0, piece.channel), piece.part, HB, parameter, own + at, ds, sums + at,
                            values ? values + at : nullptr);
        }
    }

    void finish(float* sums) const {
        for (int64_t c = 0; c < deep.floats; c += 8) store(sums + c, load<v8>(sums + c) * load<v8>(vector + c));
    }
};

}  // namespace structconv::SC_ISA
