// Rows of any number of channels, sixteen at a time: their products, and the softmax of scores.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace structconv::SC_ISA {

// visit(first channel, how many of 16) over channels from the first on.
template <class Visit> void for_lanes(int64_t channels, const Visit& visit, int64_t first = 0) {
    for (int64_t c = first; c < channels; c += 16) visit(c, static_cast<int>(channels - c < 16 ? channels - c : 16));
}

template <class T> inline v16 lanes(const T* from, int part) {
    return part == 16 ? load<v16>(from) : load_part<v16>(from, part);
}

inline void put(float* to, v16 v, int part) { part == 16 ? store(to, v) : store_part(to, v, part); }

template <class T> inline float dot(const float* a, const T* b, int64_t channels) {
    v16 sum{};
    for_lanes(channels, [&](int64_t c, int part) { sum += lanes(a + c, part) * lanes(b + c, part); });
    return total(sum);
}

// <x, row> of four rows.
template <class T> inline v4 dots(const float* x, const T* const (&rows)[4], int64_t channels) {
    v16 sums[4] = {};
    int64_t c = 0;
    for (; c + 16 <= channels; c += 16) {
        const v16 own = load<v16>(x + c);
        for (int i = 0; i < 4; ++i) sums[i] += own * load<v16>(rows[i] + c);
    }
    if (c < channels) {
        const int part = static_cast<int>(channels - c);
        const v16 own = load_part<v16>(x + c, part);
        for (int i = 0; i < 4; ++i) sums[i] += own * load_part<v16>(rows[i] + c, part);
    }
    return totals(sums[0], sums[1], sums[2], sums[3]);
}

// <x, row(m)> for so many rows, four at a time.
template <class Row> void dots_of(const float* x, const Row& row, int64_t count, int64_t channels, float* out) {
    typedef std::remove_const_t<std::remove_reference_t<decltype(*row(0))>> Number;
    int64_t m = 0;
    for (; m + 4 <= count; m += 4) {
        const Number* const rows[] = {row(m), row(m + 1), row(m + 2), row(m + 3)};
        const v4 found = dots(x, rows, channels);
        for (int i = 0; i < 4; ++i) out[m + i] = found[i];
    }
    for (; m < count; ++m) out[m] = dot(x, row(m), channels);
}

// Scores are filled up with -inf to a multiple of 16.
inline void fill_up(float* scores, int64_t count) {
    for (int64_t m = count; m % 16; ++m) scores[m] = -INFINITY;
}

// The greatest of scores that are filled up.
inline float greatest(const float* scores, int64_t count) {
    v16 top = load<v16>(scores);
    for (int64_t m = 16; m < count; m += 16) top = maximum(top, load<v16>(scores + m));
    float each[16];
    store(each, top);
    float found = each[0];
    for (const float score : each) found = score > found ? score : found;
    return found;
}

// exp(score - base) in the place of scores that are filled up; returns their sum. If all are -inf, so is base: zeros.
inline float weights_of(float* scores, int64_t count, float base) {
    v16 sum{};
    if (base == -INFINITY) base = 0.0f;
    for (int64_t m = 0; m < count; m += 16) {
        const v16 p = exponential(load<v16>(scores + m) - base);
        sum += p;
        store(scores + m, p);
    }
    return total(sum);
}

// y_c = sum_j x_j w_jc at NV vectors of columns, which are whole if they are several, on top of what `from` gives.
template <int NV, class T, class From>
inline void sums_at(const float* x, const T* w, int64_t w_row, int64_t terms, int64_t columns, const From& from, float* y) {
    const int part = NV == 1 && columns < 16 ? static_cast<int>(columns) : 16;
    const auto vector = [&](const auto* at) { return NV > 1 ? load<v16>(at) : lanes(at, part); };
    v16 found[NV];
    for (int v = 0; v < NV; ++v) found[v] = from(16 * v, vector);
    for (int64_t j = 0; j < terms; ++j)
        for (int v = 0; v < NV; ++v) found[v] += vector(w + j * w_row + 16 * v) * x[j];
    for (int v = 0; v < NV; ++v) put(y + 16 * v, found[v], part);
}

// visit(NV, column) over all columns, as many vectors at a time as fit.
template <class Visit> void for_columns(int64_t columns, const Visit& visit) {
    int64_t c = 0;
    for (; c + 64 <= columns; c += 64) visit(std::integral_constant<int, 4>(), c);
    for (; c < columns; c += 16) visit(std::integral_constant<int, 1>(), c);
}

}  // namespace structconv::SC_ISA
