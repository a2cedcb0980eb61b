// Instances of the loops over additive scores, and the choice among them.
#include "activations.h"
#include "ratio.h"

namespace structconv::SC_ISA {
namespace {

constexpr int kAhead = 28;  // rows to prefetch, as for weighted sums

struct Piecewise {
    template <class V> static V value(V own, V other, float slope) {
        const V x = own + other;
        return choose(x > 0.0f, x, x * slope);
    }

    template <class V> static void add(V own, V other, float slope, V ds, V scaled, V& slopes, V* values) {
        const V x = own + other, part = choose(x > 0.0f, ds, scaled);
        slopes += part;
        if (values) *values += part * x;
    }
};

struct Logistic : Ratio {
    template <class V> static V power(V own, V other, float rate) {
        const V x = (own + other) * -rate;
        return exponential(choose(x > 69.0f, splat<V>(69.0f), x));
    }

    template <class V> static V value(V own, V other, float rate) {
        return reciprocal(1.0f + power(own, other, rate));
    }

    template <class V> static void add(V own, V other, float rate, V ds, V, V& slopes, V* values) {
        add_ratio(power(own, other, rate), ds, slopes, values);
    }
};

struct Product : Ratio {
    template <class V> static V value(V own, V other, float) { return reciprocal(1.0f + bounded(own * other)); }

    template <class V> static void add(V own, V other, float, V ds, V, V& slopes, V* values) {
        add_ratio(bounded(own * other), ds, slopes, values);
    }
};

template <class Act, class T, class V, int NV, bool PART>
void score(const Edges& edges, const Table& table, int part, int heads, float parameter, const float* own,
           const float* vector, float* products) {
    constexpr int lanes = Lanes<V>::count, bytes = NV * lanes * static_cast<int>(sizeof(T));
    const int64_t stride = table.row, count = edges.count, ahead = edges.ahead;
    const int32_t* index = edges.index;
    for (int h = 0; h < heads; ++h) {
        const T* x = static_cast<const T*>(table.x) + h * table.head;
        V a[NV], v[NV];
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) {
            a[i] = load<V>(own + (h * NV + i) * lanes);
            v[i] = load<V>(vector + (h * NV + i) * lanes);
        }
        for (int64_t e = 0; e < count; ++e) {
            if (e + kAhead < ahead)
#pragma GCC unroll 16
                for (int byte = 0; byte < bytes; byte += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(x + index[e + kAhead] * stride) + byte);
            const T* row = x + index[e] * stride;
            V sum = v[0] * Act::value(a[0], read<V, PART>(row, part), parameter);
#pragma GCC unroll 8
            for (int i = 1; i < NV; ++i)
                sum += v[i] * Act::value(a[i], read<V, PART>(row + i * lanes, part), parameter);
            products[e * heads + h] += total(sum);
        }
    }
}

template <class Act, class T, class V, int NV, bool PART, bool VALUES>
void slopes_of(const Edges& edges, const Table& table, int part, int heads, float parameter, const float* own,
               const float* ds, float* slopes, float* values) {
    constexpr int lanes = Lanes<V>::count;
    const int64_t stride = table.row, count = edges.count;
    const int32_t* index = edges.index;
    for (int h = 0; h < heads; ++h) {
        const T* x = static_cast<const T*>(table.x) + h * table.head;
        V a[NV], s[NV], y[VALUES ? NV : 1];
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) {
            a[i] = load<V>(own + (h * NV + i) * lanes);
            s[i] = load<V>(slopes + (h * NV + i) * lanes);
            if constexpr (VALUES) y[i] = load<V>(values + (h * NV + i) * lanes);
        }
        for (int64_t e = 0; e < count; ++e) {
            const T* row = x + index[e] * stride;
            const V d = splat<V>(ds[e * heads + h]), scaled = d * parameter;
#pragma GCC unroll 8
            for (int i = 0; i < NV; ++i)
                Act::add(a[i], read<V, PART>(row + i * lanes, part), parameter, d, scaled, s[i],
                         VALUES ? &y[VALUES ? i : 0] : nullptr);
        }
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i) {
            store(slopes + (h * NV + i) * lanes, s[i]);
            if constexpr (VALUES) store(values + (h * NV + i) * lanes, y[i]);
        }
    }
}

template <class Act, class T, class V, int NV, bool PART>
void slopes(const Edges& edges, const Table& table, int part, int heads, float parameter, const float* own,
            const float* ds, float* slopes, float* values) {
    const auto loop = values ? slopes_of<Act, T, V, NV, PART, true> : slopes_of<Act, T, V, NV, PART, false>;
    loop(edges, table, part, heads, parameter, own, ds, slopes, values);
}

template <class Act, class T, class V, int NV, bool PART> Activated pair() {
    return {score<Act, T, V, NV, PART>, slopes<Act, T, V, NV, PART>};
}

template <class Act, class T> Activated loops_for(const Piece& piece) {
    switch (piece.width) {
        case 8: return piece.part == 8 ? pair<Act, T, v8, 1, false>() : pair<Act, T, v8, 1, true>();
        case 16: return pair<Act, T, v16, 1, false>();
        case 32: return pair<Act, T, v16, 2, false>();
        case 64: return pair<Act, T, v16, 4, false>();
        default: return pair<Act, T, v16, 8, false>();
    }
}

}  // namespace

template <class T> Activated activated(const Piece& piece, int64_t activation) {
    switch (activation) {
        case kPiecewise: return loops_for<Piecewise, T>(piece);
        case kLogistic: return loops_for<Logistic, T>(piece);
        default: return loops_for<Product, T>(piece);
    }
}

template Activated activated<float>(const Piece&, int64_t);
template Activated activated<bfloat16>(const Piece&, int64_t);

}  // namespace structconv::SC_ISA
