// y = alpha A x + beta z in one pass over A. Heads of values that share x are taken several at a time; those that
// are summed into one y are added up row by row, before anything is written.
#include "api.h"
#include "gather.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

// One piece of the channels: `heads` rows of values into y + h * y_head from one table, or `group` rows into one y.
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
        const T* values = static_cast<const T*>(a.values) + v * a.values_stride;
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

template <class T> void spmm(const SpmmArgs& a) {
    const int64_t size = a.layout.rows * a.channels, group = a.repeats_y;
    const bool shared = a.repeats_x == a.num_values && group == 1 && a.values_stride;
    expect_writes(a.y, a.num_values / group * size * static_cast<int64_t>(sizeof(T)));
    for (int64_t v = 0; v < a.num_values;) {
        const int heads = shared ? block_heads(a.num_values - v, a.channels) : 1;
        const Pieces pieces = cut<T>(heads, a.channels);
        for (int p = 0; p < pieces.count; ++p) {
            const Sweep<T> sweep{a, v, group, heads, size, pieces.items[p]};
            const int64_t bytes = heads * group * sweep.piece.width * int64_t{sizeof(T)};
            parallel_rows(a.layout.indptr, a.layout.rows, bytes, a.threads,
                          [&](int64_t first, int64_t last) { sweep.run(first, last); });
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

SC_EXPORT(expect_writes)(const structconv::Span* span) {
    structconv::SC_ISA::expect_writes(span->start, span->bytes);
}
