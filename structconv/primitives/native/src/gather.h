// The two inner loops of every kernel, over a chunk of edges that share an entry: weighted sums of gathered rows, and
// dot products with gathered rows. A row's heads are taken HB at a time and its channels in pieces whose sums fit
// the registers; weights and products lie edge-major, [edge][head].
#pragma once

#include "api.h"
#include "vectors.h"

namespace structconv::SC_ISA {

constexpr int kChunk = 128;       // edges
constexpr int kMaxHeads = 16;     // heads of a block
constexpr int kMaxPieces = 64;    // of one head's channels; a wider row is refused by the caller
static_assert(kMaxChannels == (kMaxPieces - 8) * kBlock, "pieces");

// Rows to read: row i of head h starts at x + i * row + h * head.
struct Table {
    const void* x;
    int64_t row, head;
};

struct Edges {
    const int32_t* index;  // rows of the table
    int64_t count;         // of this chunk
    int64_t ahead;         // indices that may be read from `index` on, for prefetching
};

// sums[h][c] += sum_e weights[e][h] x[index_e][h][c]; a second set with its own weights where `second` is given.
using Accumulate = void (*)(const Edges&, const Table&, int part, const float* weights, const float* second,
                            float* sums, float* second_sums);
// products[e][h] = <query[h], x[index_e][h]>, or += where there are `more` pieces before this one.
using Dot = void (*)(const Edges&, const Table&, int part, const float* query, bool more, float* products);

// A range of channels of every head of a block; `width` floats are stored for each head, the first `part` of them in use.
struct Piece {
    int64_t channel;
    int width, part;
    Accumulate once, twice;
    Dot dot;
};

// The number of rows by which to prefetch: enough for the latency of memory. Short rows take less time each.
constexpr int distance(int bytes) { return bytes <= 128 ? 64 : 28; }

// Into the second cache: it takes more requests at a time than the first one, whose few are left to the loads.
template <class T, int HB, int BYTES> inline void prefetch(const T* row, int64_t head) {
    constexpr int step = BYTES >= 64 ? 1 : 64 / BYTES;  // short heads usually share a line
#pragma GCC unroll 16
    for (int h = 0; h < HB; h += step)
#pragma GCC unroll 16
        for (int byte = 0; byte < BYTES; byte += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(row + h * head) + byte, 0, 2);
}

template <class V, bool PART, class T> inline V read(const T* from, int part) {
    if constexpr (PART) return load_part<V>(from, part);
    else return load<V>(from);
}

// The split of the channels of `heads` heads. `heads` is a power of two with heads * channels <= 128, or 1.
struct Pieces {
    int count = 0;
    int64_t floats = 0;  // of one set of sums
    Piece items[kMaxPieces];
};

template <class T> Pieces cut(int heads, int64_t channels);

// The largest power of two of heads that a block takes.
inline int block_heads(int64_t left, int64_t channels) {
    int heads = 1;
    const int64_t padded = (channels + 7) / 8 * 8;
    const int most = channels <= 8 ? kMaxHeads : kMaxHeads / 2;
    while (2 * heads <= left && 2 * heads <= most && 2 * heads * padded <= kBlock) heads *= 2;
    return heads;
}

template <class T> inline Table shifted(const Table& t, int64_t head, int64_t channel) {
    return {static_cast<const T*>(t.x) + head * t.head + channel, t.row, t.head};
}

inline void clear(float* sums, int64_t floats) { std::memset(sums, 0, floats * sizeof(float)); }

// The heads of one row as floats, piece by piece, as `Dot` reads its query and `Accumulate` keeps its sums.
template <class T> void load_row(const Table& t, int64_t row, int heads, const Pieces& pieces, float* out) {
    for (int p = 0; p < pieces.count; ++p) {
        const Piece& piece = pieces.items[p];
        for (int h = 0; h < heads; ++h, out += piece.width) {
            const T* from = static_cast<const T*>(t.x) + row * t.row + h * t.head + piece.channel;
            if (piece.part == piece.width) {
                for (int c = 0; c < piece.width; c += 8) store(out + c, load<v8>(from + c));
            } else {
                store(out, load_part<v8>(from, piece.part));
            }
        }
    }
}

// Scaled sums into one row, head h scaled by scale[h].
template <class T>
void store_row(const float* sums, const float* scale, int heads, const Pieces& pieces, T* to, int64_t head_stride) {
    for (int p = 0; p < pieces.count; ++p) {
        const Piece& piece = pieces.items[p];
        for (int h = 0; h < heads; ++h, sums += piece.width) {
            T* out = to + h * head_stride + piece.channel;
            if (piece.part == piece.width) {
                for (int c = 0; c < piece.width; c += 8) store(out + c, load<v8>(sums + c) * scale[h]);
            } else {
                for (int c = 0; c < piece.part; ++c) narrow(sums[c] * scale[h], out + c);
            }
        }
    }
}

// out[h] = <a[h], b[h]> of two rows in pieces, rounded as `dot_rows` rounds them.
inline void row_dots(const float* a, const float* b, int heads, const Pieces& pieces, float* out) {
    for (int h = 0; h < heads; ++h) out[h] = 0.0f;
    for (int p = 0; p < pieces.count; ++p) {
        const int width = pieces.items[p].width;
        for (int h = 0; h < heads; ++h, a += width, b += width) {
            if (width == 8) {
                v8 sum{};
                sum += load<v8>(a) * load<v8>(b);
                out[h] += totals(sum, sum, sum, sum)[0];
                continue;
            }
            v16 sum{};
            for (int c = 0; c < width; c += 16) sum += load<v16>(a + c) * load<v16>(b + c);
            out[h] += totals(sum, sum, sum, sum)[0];
        }
    }
}

// sums[h][c] += scale[h] row[h][c] of two rows in pieces.
inline void add_row(const float* row, const float* scale, int heads, const Pieces& pieces, float* sums) {
    for (int p = 0; p < pieces.count; ++p) {
        const int width = pieces.items[p].width;
        for (int h = 0; h < heads; ++h, row += width, sums += width)
            for (int c = 0; c < width; c += 8) store(sums + c, load<v8>(sums + c) + load<v8>(row + c) * scale[h]);
    }
}

template <class T>
inline void accumulate_once(const Edges& e, const Table& t, const Pieces& pieces, int heads, const float* w,
                            float* sums) {
    for (int p = 0; p < pieces.count; ++p) {
        const Piece& piece = pieces.items[p];
        piece.once(e, shifted<T>(t, 0, piece.channel), piece.part, w, nullptr, sums, nullptr);
        sums += heads * piece.width;
    }
}

template <class T>
inline void accumulate_twice(const Edges& e, const Table& t, const Pieces& pieces, int heads, const float* w,
                             const float* w2, float* sums, float* sums2) {
    for (int p = 0; p < pieces.count; ++p) {
        const Piece& piece = pieces.items[p];
        piece.twice(e, shifted<T>(t, 0, piece.channel), piece.part, w, w2, sums, sums2);
        sums += heads * piece.width;
        sums2 += heads * piece.width;
    }
}

template <class T>
inline void dot_rows(const Edges& e, const Table& t, const Pieces& pieces, int heads, const float* query,
                     float* products) {
    if (!pieces.count) clear(products, e.count * heads);
    for (int p = 0; p < pieces.count; ++p) {
        const Piece& piece = pieces.items[p];
        piece.dot(e, shifted<T>(t, 0, piece.channel), piece.part, query, p > 0, products);
        query += heads * piece.width;
    }
}

}  // namespace structconv::SC_ISA
