// Softmax over a row's edges, chunk by chunk, for HB heads at once. Scores lie edge-major, so that lane l of a vector
// belongs to head l % HB; a vector in "tile" form holds one number a head, repeated in all its lanes.
#pragma once

#include "gather.h"

namespace structconv::SC_ISA {

template <int HB> inline v16 tile(const float* heads) {
    if constexpr (HB == 1) {
        return splat<v16>(heads[0]);
    } else if constexpr (HB == 16) {
        return load<v16>(heads);
    } else {
        typedef float Few __attribute__((vector_size(HB * 4)));
        Few f;
        std::memcpy(&f, heads, sizeof f);
        constexpr int m = HB - 1;
#if defined(__AVX512F__)
        return __builtin_shufflevector(f, f, 0, 1 & m, 2 & m, 3 & m, 4 & m, 5 & m, 6 & m, 7 & m, 8 & m, 9 & m, 10 & m,
                                       11 & m, 12 & m, 13 & m, 14 & m, 15 & m);
#else
        const v8 half = __builtin_shufflevector(f, f, 0, 1 & m, 2 & m, 3 & m, 4 & m, 5 & m, 6 & m, 7 & m);
        return {half, half};
#endif
    }
}

template <int S> inline v16 rotate(v16 v) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(v, v, S, 1 + S, 2 + S, 3 + S, 4 + S, 5 + S, 6 + S, 7 + S, (8 + S) % 16,
                                   (9 + S) % 16, (10 + S) % 16, (11 + S) % 16, (12 + S) % 16, (13 + S) % 16,
                                   (14 + S) % 16, (15 + S) % 16);
#else
    if constexpr (S == 8) return {v.high, v.low};
    else return {__builtin_shufflevector(v.low, v.high, S, 1 + S, 2 + S, 3 + S, 4 + S, 5 + S, 6 + S, 7 + S),
                 __builtin_shufflevector(v.high, v.low, S, 1 + S, 2 + S, 3 + S, 4 + S, 5 + S, 6 + S, 7 + S)};
#endif
}

// Combine the lanes of each head; the result is a tile.
template <int HB, class Op> inline v16 fold_lanes(v16 v, Op op) {
    if constexpr (HB <= 8) v = op(v, rotate<8>(v));
    if constexpr (HB <= 4) v = op(v, rotate<4>(v));
    if constexpr (HB <= 2) v = op(v, rotate<2>(v));
    if constexpr (HB <= 1) v = op(v, rotate<1>(v));
    return v;
}

template <int HB> inline v16 sum_lanes(v16 v) {
    return fold_lanes<HB>(v, [](v16 a, v16 b) { return a + b; });
}

// N times HB numbers of every edge of a chunk, gathered from rows of `stride` floats, in which each times begins `apart`
// after the one before; the last vectors are filled up with `pads`.
template <int HB, int N>
inline int gather_heads(const Edges& edges, const float* rows, int64_t stride, int64_t apart, const float (&pads)[N],
                        float* const (&out)[N]) {
    const int64_t count = edges.count, distance = 64;
    const int vectors = static_cast<int>((count * HB + 15) / 16);
    for (int i = 0; i < N; ++i) store(out[i] + 16 * (vectors - 1), splat<v16>(pads[i]));
    for (int64_t e = 0; e < count; ++e) {
        if (e + distance < edges.ahead) __builtin_prefetch(rows + edges.index[e + distance] * stride);
        const float* from = rows + edges.index[e] * stride;
        for (int i = 0; i < N; ++i) std::memcpy(out[i] + e * HB, from + i * apart, HB * sizeof(float));
    }
    return vectors;
}

// The running maximum and sum of a row. A row whose scores are all -inf has weights of exactly zero.
template <int HB> struct Online {
    v16 peak = splat<v16>(-INFINITY), base{}, sum{};

    // Take in the largest scores of a chunk; returns what earlier sums, if any, must be multiplied by (a tile).
    v16 advance(v16 top, bool later) {
        const v16 last = peak, before = base;
        peak = maximum(peak, fold_lanes<HB>(top, maximum));
        base = choose(peak == -INFINITY, v16{}, peak);
        if (!later) return v16{};
        const v16 scale = choose(last == -INFINITY, v16{}, exponential(before - base));
        sum *= scale;
        return scale;
    }

    v16 total() const { return sum_lanes<HB>(sum); }
};

// 1 / total (a tile, zero for a total of zero); of HB of the heads the largest score, and behind those of all log(total),
// infinite for a total of zero. A weight is exp((score - peak) - log): their sum, rounded, would lose what large scores differ by.
template <int HB> inline v16 finish_softmax(const Online<HB>& online, float* peaks, int64_t heads) {
    const v16 total = online.total(), logs = choose(total == 0.0f, splat<v16>(INFINITY), logarithm(total));
    std::memcpy(peaks, &online.base, HB * sizeof(float));
    std::memcpy(peaks + heads, &logs, HB * sizeof(float));
    return choose(total == 0.0f, v16{}, 1.0f / total);
}

// sums[h][c] *= scale[h] over all pieces of a block.
inline void rescale(v16 scale, int heads, const Pieces& pieces, float* sums) {
    float each[16];
    store(each, scale);
    for (int p = 0; p < pieces.count; ++p)
        for (int h = 0; h < heads; ++h, sums += pieces.items[p].width)
            for (int c = 0; c < pieces.items[p].width; c += 8) store(sums + c, load<v8>(sums + c) * each[h]);
}

template <int N> struct Constant {
    static constexpr int value = N;
};

// body(Constant<HB>, first head) for the blocks of heads.
template <class Body> void for_head_blocks(int64_t heads, int64_t channels, const Body& body) {
    for (int64_t head = 0; head < heads;) {
        const int block = block_heads(heads - head, channels);
        switch (block) {
            case 1: body(Constant<1>{}, head); break;
            case 2: body(Constant<2>{}, head); break;
            case 4: body(Constant<4>{}, head); break;
            case 8: body(Constant<8>{}, head); break;
            default: body(Constant<16>{}, head); break;
        }
        head += block;
    }
}

// What the pass by source reads of an output without edges, should an edge there lead to it all the same: the two layouts
// come from outside, and nobody has compared their edges.
inline void no_weights(float* peak, float* shift, float* log, int heads) {
    for (int h = 0; h < heads; ++h) {
        peak[h] = INFINITY, shift[h] = 0.0f;
        if (log) log[h] = 0.0f;
    }
}

// Whether the sum of a peak and its log, one number less to gather, would round weights by more than 2^-20.
inline bool are_large(const float* peaks, int64_t rows, int64_t heads) {
    for (int64_t row = 0; row < rows; ++row, peaks += 2 * heads)
        for (int64_t h = 0; h < heads; ++h)
            if (std::fabs(peaks[h]) > 16.0f) return true;
    return false;
}

// The peaks of HB of the heads to `peak`, and their logs to `log`, or added to them where that is null.
template <int HB> inline void put_peaks(const float* peaks, int64_t heads, float* peak, float* log) {
    for (int h = 0; h < HB; ++h) {
        peak[h] = log ? peaks[h] : peaks[h] + peaks[heads + h];
        if (log) log[h] = peaks[heads + h];
    }
}

}  // namespace structconv::SC_ISA
