// Rows of tensors with a stride a row and a head, as the interface gives them.
#pragma once

#include "api.h"
#include "gather.h"

namespace structconv::SC_ISA {

template <class T> T* row_of(const Rows& rows, int64_t row, int64_t head) {
    return static_cast<T*>(rows.x) + row * rows.row + head * rows.head;
}

template <class T> Table table_of(const Rows& rows, int64_t head) {
    return {row_of<T>(rows, 0, head), rows.row, rows.head};
}

// One factor for all heads.
struct Factors {
    float each[kMaxHeads];
    explicit Factors(float factor) { store(each, splat<v16>(factor)); }
};

// True if whole vectors of a large result can be written past the caches.
template <class T> bool streams(const Rows& rows, int64_t bytes, int64_t channels) {
    const uint64_t offsets = reinterpret_cast<uintptr_t>(rows.x) | (rows.row | rows.head) * sizeof(T);
    return sizeof(T) == sizeof(float) && bytes >= 1 << 24 && offsets % sizeof(v8) == 0 && channels % 8 == 0;
}

// `store_row`, or the same past the caches.
template <class T>
void write_row(const float* sums, const float* scale, int heads, const Pieces& pieces, const Rows& rows, int64_t row,
               int64_t head, bool streamed) {
    T* to = row_of<T>(rows, row, head);
    if constexpr (sizeof(T) == sizeof(float)) {
        if (streamed) {
            for (int p = 0; p < pieces.count; ++p)
                for (int h = 0; h < heads; ++h, sums += pieces.items[p].width) {
                    T* out = to + h * rows.head + pieces.items[p].channel;
                    for (int c = 0; c < pieces.items[p].width; c += 8) stream(out + c, load<v8>(sums + c) * scale[h]);
                }
            return;
        }
    }
    store_row(sums, scale, heads, pieces, to, rows.head);
}

}  // namespace structconv::SC_ISA
