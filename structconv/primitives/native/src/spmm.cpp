// y = alpha A x + beta z in one pass over A. Heads of values that share x are taken several at a time; those that
// are summed into one y are added up row by row, before anything is written.
#include "api.h"
#include "gather.h"
#include "parallel.h"

#include <type_traits>

namespace structconv::SC_ISA {
namespace {

// One piece of the channels and several rows of values: `heads` rows of values into y + h * y_head from one table, or `group` rows into one y.
template <class T> struct Sweep {
    const SpmmArgs& a;
    int64_t first, group;  // rows of values
    int heads;
    int64_t y_head;
    Piece piece;

    Table table(int64_t v) const {
        const T* x = static_cast<const T*>(a.x) + v / a.repeats_x * a.x_rows * a.channels;
        return {x + piece.channel, a.channels, 0};
    }

    // The weights of a chunk, edge-major: gathered from edge order, or as they lie in slot order.
    void weights(int64_t v, int64_t at, int64_t count, int64_t left, float* w) const {
        const float alpha = static_cast<float>(a.alpha);
        const T* values = static_cast<const T*>(a.values) + v / a.repeats_values * a.values_stride;
        if (!a.layout.order) {
            for (int64_t e = 0; e < count; ++e)
                for (int h = 0; h < heads; ++h) w[e * heads + h] = alpha * widen(values[h * a.layout.slots + at + e]);
            return;
        }
        const int32_t* order = a.layout.order + at;
        const int64_t far = 64;
        for (int64_t e = 0; e < count; ++e) {
            const bool more = e + far < left;
            for (int h = 0; h < heads; ++h) {
                const T* row = values + h * a.layout.slots;
                if (more) __builtin_prefetch(row + order[e + far]);
                w[e * heads + h] = alpha * widen(row[order[e]]);
            }
        }
    }

    void run(int64_t first_row, int64_t last_row) const {
        alignas(64) float w[kChunk * kMaxHeads], sums[kBlock];
        const Layout& layout = a.layout;
        const int64_t end = layout.indptr[last_row];
        for (float& weight : w) weight = static_cast<float>(a.alpha);
        for (int64_t row = first_row; row < last_row; ++row) {
            start(row, sums);
            for (int64_t v = first; v < first + group; ++v)
                for (int64_t at = layout.indptr[row]; at < layout.indptr[row + 1]; at += kChunk) {
                    const int64_t left = layout.indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
                    if (a.values) weights(v, at, count, end - at, w);
                    piece.once({layout.index + at, count, end - at}, table(v), piece.part, w, nullptr, sums, nullptr);
                }
            finish(row, sums);
        }
    }

    int64_t place(int h, int64_t row) const {
        return (first / a.repeats_y + h) * y_head + row * a.channels + piece.channel;
    }

    void start(int64_t row, float* sums) const {
        clear(sums, heads * piece.width);
        if (!a.z) return;
        for (int h = 0; h < heads; ++h, sums += piece.width) {
            const T* z = static_cast<const T*>(a.z) + place(h, row);
            for (int c = 0; c < piece.part; ++c) sums[c] = static_cast<float>(a.beta) * widen(z[c]);
        }
    }

    void finish(int64_t row, const float* sums) const {
        for (int h = 0; h < heads; ++h, sums += piece.width) {
            T* out = static_cast<T*>(a.y) + place(h, row);
            if (piece.part == piece.width)
                for (int c = 0; c < piece.width; c += 8) store(out + c, load<v8>(sums + c));
            else
                for (int c = 0; c < piece.part; ++c) narrow(sums[c], out + c);
        }
    }
};

// The weights of one row of values, slot by slot: as they lie, or through a buffer of a chunk that spans rows.
template <class T> class Weights {
public:
    Weights(const SpmmArgs& a, int64_t v, int64_t end)
        : values_(a.values ? static_cast<const T*>(a.values) + v / a.repeats_values * a.values_stride : nullptr),
          order_(a.layout.order), alpha_(static_cast<float>(a.alpha)), end_(end) {
        if (!values_)
            for (float& weight : buffer_) weight = alpha_;
        if constexpr (std::is_same_v<T, float>) direct_ = values_ && !order_ && alpha_ == 1.0f;
    }

    // Weights from slot `at` on, and up to where there are any; later calls ask for later slots.
    const float* from(int64_t at, int64_t* stop) {
        if constexpr (std::is_same_v<T, float>)
            if (direct_) {
                *stop = end_;
                return values_ + at;
            }
        if (at >= filled_ || at < base_) {
            base_ = at;
            filled_ = end_ - at < kChunk ? end_ : at + kChunk;
            if (values_) fill();
        }
        *stop = filled_;
        return buffer_ + (at - base_);
    }

private:
    void fill() {
        const int64_t count = filled_ - base_;
        if (!order_) {
            for (int64_t e = 0; e < count; ++e) buffer_[e] = alpha_ * widen(values_[base_ + e]);
            return;
        }
        const int64_t far = 64;
        for (int64_t e = base_; e < filled_; ++e) {
            if (e + far < end_) __builtin_prefetch(values_ + order_[e + far]);
            buffer_[e - base_] = alpha_ * widen(values_[order_[e]]);
        }
    }

    alignas(64) float buffer_[kChunk];
    const T* values_;
    const int32_t* order_;
    float alpha_;
    int64_t end_, base_ = 0, filled_ = 0;
    bool direct_ = false;
};

// One row of values into one y, the sums of a row in registers from its start to its end.
template <class T, class V, int NV, bool PART>
void sweep_rows(const SpmmArgs& a, int64_t v, const Piece& piece, int64_t first, int64_t last) {
    constexpr int lanes = Lanes<V>::count, bytes = NV * lanes * static_cast<int>(sizeof(T)), far = distance(bytes);
    const int32_t *indptr = a.layout.indptr, *index = a.layout.index;
    const int64_t channels = a.channels, end = indptr[last];
    const T* x = static_cast<const T*>(a.x) + v / a.repeats_x * a.x_rows * channels + piece.channel;
    const int64_t size = a.layout.rows * channels, skip = v / a.repeats_y * size + piece.channel;
    const T* z = a.z ? static_cast<const T*>(a.z) + skip : nullptr;
    T* y = static_cast<T*>(a.y) + skip;
    const float beta = static_cast<float>(a.beta);
    const int part = piece.part;
    Weights<T> weights(a, v, end);
    for (int64_t row = first; row < last; ++row) {
        V sums[NV] = {};
        if (z)
#pragma GCC unroll 8
            for (int i = 0; i < NV; ++i) sums[i] = beta * read<V, PART>(z + row * channels + i * lanes, part);
        const int64_t stop = indptr[row + 1];
        for (int64_t at = indptr[row]; at < stop;) {
            int64_t until;
            const float* w = weights.from(at, &until);
            until = until < stop ? until : stop;
            for (; at < until; ++at, ++w) {
                if (at + far < end) prefetch<T, 1, bytes>(x + index[at + far] * channels, 0);
                const T* from = x + index[at] * channels;
#pragma GCC unroll 8
                for (int i = 0; i < NV; ++i) sums[i] += *w * read<V, PART>(from + i * lanes, part);
            }
        }
        T* to = y + row * channels;
        if constexpr (PART) {
            for (int c = 0; c < part; ++c) narrow(sums[0][c], to + c);
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < NV; ++i) store(to + i * lanes, sums[i]);
        }
    }
}

template <class T> void sweep(const SpmmArgs& a, int64_t v, const Piece& piece, int64_t first, int64_t last) {
    switch (piece.width) {
        case 16: return sweep_rows<T, v16, 1, false>(a, v, piece, first, last);
        case 32: return sweep_rows<T, v16, 2, false>(a, v, piece, first, last);
        case 64: return sweep_rows<T, v16, 4, false>(a, v, piece, first, last);
        case 128: return sweep_rows<T, v16, 8, false>(a, v, piece, first, last);
        default: break;
    }
    piece.part == piece.width ? sweep_rows<T, v8, 1, false>(a, v, piece, first, last)
                              : sweep_rows<T, v8, 1, true>(a, v, piece, first, last);
}

// Some rows of a piece of the channels, of the values from row v on that are summed or share x.
template <class T>
void sweep(const SpmmArgs& a, int64_t v, int heads, const Piece& piece, int64_t first, int64_t last) {
    if (heads * a.repeats_y == 1) sweep<T>(a, v, piece, first, last);
    else Sweep<T>{a, v, a.repeats_y, heads, a.layout.rows * a.channels, piece}.run(first, last);
}

template <class T> void spmm(const SpmmArgs& a) {
    const int64_t size = a.layout.rows * a.channels, group = a.repeats_y, rows = a.layout.rows;
    const bool shared = a.repeats_x == a.num_values && group == 1 && a.values_stride && a.repeats_values == 1;
    expect_writes(a.y, a.num_values / group * size * static_cast<int64_t>(sizeof(T)));
    if (!shared) {
        const Pieces pieces = cut<T>(1, a.channels);
        const auto whole = [&](int64_t table) {
            for (int p = 0; p < pieces.count; ++p) sweep<T>(a, table * group, 1, pieces.items[p], 0, rows);
        };
        const int64_t bytes = group * a.channels * int64_t{sizeof(T)};
        if (parallel_tables(a.num_values / group, a.layout, bytes, a.threads, whole)) return;
    }
    for (int64_t v = 0; v < a.num_values;) {
        const int heads = shared ? block_heads(a.num_values - v, a.channels) : 1;
        const Pieces pieces = cut<T>(heads, a.channels);
        for (int p = 0; p < pieces.count; ++p) {
            const Piece& piece = pieces.items[p];
            const int64_t bytes = heads * group * piece.width * int64_t{sizeof(T)};
            parallel_rows(a.layout.indptr, rows, bytes, a.threads,
                          [&](int64_t first, int64_t last) { sweep<T>(a, v, heads, piece, first, last); });
        }
        v += heads * group;
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(spmm)(const structconv::SpmmArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? spmm<bfloat16>(*args) : spmm<float>(*args);
}
