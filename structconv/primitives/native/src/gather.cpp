// Instances of the two inner loops, and the choice among them.
#include "gather.h"

namespace structconv::SC_ISA {
namespace {

template <class T, class V, int HB, int NV, bool PART, bool TWO>
void accumulate(const Edges& edges, const Table& table, int part, const float* w, const float* w2, float* sums,
                float* sums2) {
    constexpr int lanes = Lanes<V>::count, bytes = NV * lanes * static_cast<int>(sizeof(T));
    constexpr int far = distance(HB * bytes);
    const T* x = static_cast<const T*>(table.x);
    const int64_t stride = table.row, head = table.head, count = edges.count, ahead = edges.ahead;
    const int32_t* index = edges.index;
    V a[HB][NV], b[TWO ? HB : 1][NV];
#pragma GCC unroll 16
    for (int h = 0; h < HB; ++h)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
            a[h][v] = load<V>(sums + (h * NV + v) * lanes);
            if constexpr (TWO) b[h][v] = load<V>(sums2 + (h * NV + v) * lanes);
        }
    for (int64_t e = 0; e < count; ++e) {
        if (e + far < ahead) prefetch<T, HB, bytes>(x + index[e + far] * stride, head);
        const T* row = x + index[e] * stride;
#pragma GCC unroll 16
        for (int h = 0; h < HB; ++h)
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) {
                const V value = read<V, PART>(row + h * head + v * lanes, part);
                a[h][v] += w[e * HB + h] * value;
                if constexpr (TWO) b[h][v] += w2[e * HB + h] * value;
            }
    }
#pragma GCC unroll 16
    for (int h = 0; h < HB; ++h)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
            store(sums + (h * NV + v) * lanes, a[h][v]);
            if constexpr (TWO) store(sums2 + (h * NV + v) * lanes, b[h][v]);
        }
}

// Four products at a time, so that their lanes are summed together; the last ones too, so that a product has the same bits
// wherever its edge stands: in both passes, and of each of several edges between two rows.
template <class T, class V, int HB, int NV, bool PART>
void dot(const Edges& edges, const Table& table, int part, const float* query, bool more, float* products) {
    constexpr int lanes = Lanes<V>::count, bytes = NV * lanes * static_cast<int>(sizeof(T));
    constexpr int far = distance(HB * bytes), step = HB < 4 ? 4 / HB : 1;
    const T* x = static_cast<const T*>(table.x);
    const int64_t stride = table.row, head = table.head, count = edges.count, ahead = edges.ahead;
    const int32_t* index = edges.index;
    V q[HB][NV];
#pragma GCC unroll 16
    for (int h = 0; h < HB; ++h)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) q[h][v] = load<V>(query + (h * NV + v) * lanes);
    const auto product = [&](int64_t e, int h) {
        const T* row = x + index[e] * stride + h * head;
        V sum{};  // from zero, so that each product is fused with the sum before it, as in `row_dots`
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) sum += q[h][v] * read<V, PART>(row + v * lanes, part);
        return sum;
    };
    int64_t e = 0;
    for (; e + step <= count; e += step) {
#pragma GCC unroll 4
        for (int i = 0; i < step; ++i)
            if (e + i + far < ahead) prefetch<T, HB, bytes>(x + index[e + i + far] * stride, head);
#pragma GCC unroll 4
        for (int i = 0; i < step * HB; i += 4) {
            const v4 sums = totals(product(e + i / HB, i % HB), product(e + (i + 1) / HB, (i + 1) % HB),
                                   product(e + (i + 2) / HB, (i + 2) % HB), product(e + (i + 3) / HB, (i + 3) % HB));
            float* to = products + e * HB + i;
            store(to, more ? load<v4>(to) + sums : sums);
        }
    }
    if constexpr (step > 1)
        if (e < count) {
            V last[4] = {};
            const int64_t rest = (count - e) * HB;
            for (int64_t i = 0; i < rest; ++i) {
                if (e + i / HB + far < ahead) prefetch<T, HB, bytes>(x + index[e + i / HB + far] * stride, head);
                last[i] = product(e + i / HB, static_cast<int>(i % HB));
            }
            const v4 sums = totals(last[0], last[1], last[2], last[3]);
            for (int64_t i = 0; i < rest; ++i) products[e * HB + i] = sums[i] + (more ? products[e * HB + i] : 0.0f);
        }
}

template <class T, class V, int HB, int NV, bool PART> void fill(Piece& piece) {
    piece.once = accumulate<T, V, HB, NV, PART, false>;
    piece.twice = accumulate<T, V, HB, NV, PART, true>;
    piece.dot = dot<T, V, HB, NV, PART>;
}

template <class T, int HB> void fill_heads(Piece& piece) {
    if (piece.width == 8) {
        if (piece.part == 8) fill<T, v8, HB, 1, false>(piece);
        else fill<T, v8, HB, 1, true>(piece);
        return;
    }
    if constexpr (HB <= 8)
        if (piece.width == 16) fill<T, v16, HB, 1, false>(piece);
    if constexpr (HB <= 4)
        if (piece.width == 32) fill<T, v16, HB, 2, false>(piece);
    if constexpr (HB <= 2)
        if (piece.width == 64) fill<T, v16, HB, 4, false>(piece);
    if constexpr (HB <= 1)
        if (piece.width == 128) fill<T, v16, HB, 8, false>(piece);
}

template <class T> void choose_loops(Piece& piece, int heads) {
    switch (heads) {
        case 1: return fill_heads<T, 1>(piece);
        case 2: return fill_heads<T, 2>(piece);
        case 4: return fill_heads<T, 4>(piece);
        case 8: return fill_heads<T, 8>(piece);
        default: return fill_heads<T, 16>(piece);
    }
}

}  // namespace

template <class T> Pieces cut(int heads, int64_t channels) {
    Pieces pieces;
    int64_t channel = 0;
    int width = static_cast<int>(kBlock);
    while (channel < channels) {
        while (width > 8 && channel + width > channels) width /= 2;
        const int64_t left = channels - channel;
        Piece& piece = pieces.items[pieces.count++];
        piece.channel = channel;
        piece.width = width;
        piece.part = left < width ? static_cast<int>(left) : width;
        choose_loops<T>(piece, heads);
        pieces.floats += heads * width;
        channel += width;
    }
    return pieces;
}

template Pieces cut<float>(int, int64_t);
template Pieces cut<bfloat16>(int, int64_t);

}  // namespace structconv::SC_ISA
