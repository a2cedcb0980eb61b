// A tile of a product in registers: some rows of one to two vectors, to which one term of the sums is added at a time.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace structconv::SC_ISA {

#if defined(__AVX512F__)
typedef v16 Wide;
constexpr int kHeight = 12;
#elif defined(__AVX2__)
typedef v8 Wide;
constexpr int kHeight = 6;
#else
typedef v8 Wide;
constexpr int kHeight = 2;
#endif
constexpr int64_t kLanes = Lanes<Wide>::count;

// Columns of one tile: N vectors V.
template <class V, int N> struct Columns {
    typedef V Vector;
    static constexpr int vectors = N, width = N * Lanes<V>::count;
};

// body(Columns) for the columns of the next tile where so many are left: two vectors, one, or a short one.
template <class Body> inline int64_t next_columns(int64_t left, const Body& body) {
    if (left > kLanes) return body(Columns<Wide, 2>{}), 2 * kLanes;
    if constexpr (kLanes > 8)
        if (left > 8) return body(Columns<Wide, 1>{}), kLanes;
    return body(Columns<v8, 1>{}), 8;
}

inline int64_t width_of(int64_t left) {
    return next_columns(left, [](auto) {});
}

constexpr int lower(int height) { return height > 8 ? 8 : height > 4 ? 4 : height / 2; }

// body(height) for the rows of the next tile where so many are left.
template <int R = kHeight, class Body> inline int64_t next_rows(int64_t left, const Body& body) {
    if constexpr (R > 1)
        if (left < R) return next_rows<lower(R)>(left, body);
    body(std::integral_constant<int, R>{});
    return R;
}

template <class V, int R, int N> struct Tile {
    static constexpr int lanes = Lanes<V>::count;
    V at[R][N];

    void fill(const float* bias, int64_t columns) {
        V start[N];
        for (int n = 0; n < N; ++n) {
            const int64_t left = columns - n * lanes;
            start[n] = !bias || left <= 0 ? V{}
                       : left < lanes     ? load_part<V>(bias + n * lanes, static_cast<int>(left))
                                          : load<V>(bias + n * lanes);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) at[r][n] = start[n];
    }

    // One term of the sums: left(r) times the row at `right`.
    template <class Left> void add(const Left& left, const float* right) {
        V row[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) row[n] = load<V>(right + n * lanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const V factor = splat<V>(left(r));
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) at[r][n] += factor * row[n];
        }
    }

    void join(const float* sums) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) at[r][n] = load<V>(sums + (r * N + n) * lanes) + at[r][n];
    }

    template <class Put> void put(const Put& put) const {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) put(r, n * lanes, at[r][n]);
    }
};

}  // namespace structconv::SC_ISA
