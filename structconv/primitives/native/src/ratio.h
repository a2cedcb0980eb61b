// The ratio in logistic activations.
#pragma once

#include "vectors.h"

namespace structconv::SC_ISA {

// r = 1 / (1 + u) with slope r (1 - r) = u r r, which is exact to rounding at both ends.
struct Ratio {
    template <class V> static V reciprocal(V x) {
#if defined(__AVX512F__)
        if constexpr (Lanes<V>::count == 16) {
            const V guess = reinterpret_cast<V>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(x)));
            return guess * (2.0f - x * guess);
        }
#endif
        return 1.0f / x;
    }

    // Beyond 2^100 the ratio is zero for every purpose, and products stay finite. NaN stays NaN.
    template <class V> static V bounded(V u) { return choose(u > 0x1p100f, splat<V>(0x1p100f), u); }

    template <class V> static void add_ratio(V u, V ds, V& slopes, V* values) {
        const V r = reciprocal(1.0f + u);
        slopes += ds * (u * r * r);
        if (values) *values += ds * (r - 0.5f);
    }
};

}  // namespace structconv::SC_ISA
