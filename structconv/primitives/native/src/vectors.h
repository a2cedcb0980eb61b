// Portable vectors: 8 and 16 floats by the compiler's vector extension, loaded from float32 or bfloat16 storage.
//
// Compilers keep vectors that are wider than the registers in memory, which costs several times as much: where registers
// have 8 floats, 16 are a `Pair` of these.
//
// Every translation unit is compiled once for each instruction set, so everything here lives in a namespace named
// after it (SC_ISA): no inline function of one set can be linked into another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace structconv::SC_ISA {

typedef float v4 __attribute__((vector_size(16)));
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));

// Two vectors as one.
template <class V> struct Pair {
    typedef std::remove_reference_t<decltype(std::declval<V&>()[0])> Number;
    V low, high;

    Number operator[](int lane) const {
        Number all[2 * sizeof(V) / sizeof(Number)];
        std::memcpy(all, this, sizeof all);
        return all[lane];
    }
    void set(int lane, Number value) {
        Number all[2 * sizeof(V) / sizeof(Number)];
        std::memcpy(all, this, sizeof all);
        all[lane] = value;
        std::memcpy(this, all, sizeof all);
    }
};

#define SC_PAIRED(op)                                                                                                 \
    template <class V> inline auto operator op(const Pair<V>& a, const Pair<V>& b) {                                  \
        return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};                                      \
    }                                                                                                                 \
    template <class V> inline auto operator op(const Pair<V>& a, typename Pair<V>::Number b) {                        \
        return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                                                   \
    }                                                                                                                 \
    template <class V> inline auto operator op(typename Pair<V>::Number a, const Pair<V>& b) {                        \
        return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                                                   \
    }
#define SC_ASSIGNED(op)                                                                                               \
    template <class V, class W> inline Pair<V>& operator op##=(Pair<V>& a, const W& b) { return a = a op b; }
SC_PAIRED(+) SC_PAIRED(-) SC_PAIRED(*) SC_PAIRED(/) SC_PAIRED(&) SC_PAIRED(|) SC_PAIRED(^) SC_PAIRED(<<) SC_PAIRED(>>)
SC_PAIRED(<) SC_PAIRED(>) SC_PAIRED(<=) SC_PAIRED(>=) SC_PAIRED(==) SC_PAIRED(!=)
SC_ASSIGNED(+) SC_ASSIGNED(-) SC_ASSIGNED(*) SC_ASSIGNED(&)
#undef SC_PAIRED
#undef SC_ASSIGNED

#if defined(__AVX512F__)
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
#else
typedef Pair<v8> v16;
typedef Pair<i8> i16;
typedef Pair<u8> u16;
#endif

struct bfloat16 {
    uint16_t bits;
};

template <class V> struct Lanes;
template <> struct Lanes<v8> {
    static constexpr int count = 8;
    typedef u8 Bits;
    typedef uint16_t Half __attribute__((vector_size(16)));
};
template <> struct Lanes<v16> {
    static constexpr int count = 16;
    typedef u16 Bits;
    typedef uint16_t Half __attribute__((vector_size(32)));
};

template <class V> inline V splat(float value) { return value - V{}; }

// Lane by lane a where the mask holds, else b.
template <class M, class V> inline V choose(M mask, V a, V b) { return mask ? a : b; }

template <class M, class V> inline Pair<V> choose(const Pair<M>& mask, const Pair<V>& a, const Pair<V>& b) {
    return {choose(mask.low, a.low, b.low), choose(mask.high, a.high, b.high)};
}

// The bits of a vector as those of another.
template <class To, class From> inline To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "as many bits");
    if constexpr (std::is_class_v<To>) {
        to.low = reinterpret_cast<decltype(to.low)>(from.low);
        to.high = reinterpret_cast<decltype(to.high)>(from.high);
        return to;
    } else {
        return reinterpret_cast<To>(from);
    }
}

#if defined(__AVX512F__)
inline v16 to_floats(i16 from) { return __builtin_convertvector(from, v16); }
inline v8 low_half(v16 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline v8 high_half(v16 v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
template <class V, class N> inline void set_lane(V& v, int lane, N value) { v[lane] = value; }
#else
inline v16 to_floats(const i16& from) {
    return {__builtin_convertvector(from.low, v8), __builtin_convertvector(from.high, v8)};
}
inline v8 low_half(const v16& v) { return v.low; }
inline v8 high_half(const v16& v) { return v.high; }
template <class V, class N> inline void set_lane(V& v, int lane, N value) {
    if constexpr (std::is_class_v<V>) v.set(lane, value);
    else v[lane] = value;
}
#endif

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void narrow(float value, float* out) { *out = value; }

// Round to nearest, ties to even; a NaN stays one.
inline void narrow(float value, bfloat16* out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    out->bits = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class V> inline V load(const float* from) {
    if constexpr (std::is_class_v<V>) {
        return {load<v8>(from), load<v8>(from + 8)};
    } else {
        V v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
}

template <class V> inline V load(const bfloat16* from) {
    if constexpr (std::is_class_v<V>) {
        return {load<v8>(from), load<v8>(from + 8)};
    } else {
        typename Lanes<V>::Half half;
        std::memcpy(&half, from, sizeof half);
        return reinterpret_cast<V>(__builtin_convertvector(half, typename Lanes<V>::Bits) << 16);
    }
}

// The first `part` lanes, then zeros; never reads beyond them.
template <class V, class T> inline V load_part(const T* from, int part) {
    if constexpr (std::is_class_v<V>) {
        return {load_part<v8>(from, part < 8 ? part : 8), part > 8 ? load_part<v8>(from + 8, part - 8) : v8{}};
    } else {
        V v{};
        for (int lane = 0; lane < part; ++lane) v[lane] = widen(from[lane]);
        return v;
    }
}

#if defined(__AVX2__)
template <> inline v8 load_part<v8, float>(const float* from, int part) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return reinterpret_cast<v8>(_mm256_maskload_ps(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(part), lanes)));
}
#endif

#if defined(__AVX512F__)
template <> inline v16 load_part<v16, float>(const float* from, int part) {
    return reinterpret_cast<v16>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << part) - 1), from));
}
#endif

// The lanes of a mask, zeros elsewhere; never reads those.
inline v16 load_lanes(const float* from, uint32_t mask) {
#if defined(__AVX512F__)
    return reinterpret_cast<v16>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const auto half = [&](const float* at, uint32_t lanes) {
        const __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bits);
        return reinterpret_cast<v8>(_mm256_maskload_ps(at, _mm256_cmpeq_epi32(own, bits)));
    };
    return {half(from, mask), half(from + 8, mask >> 8)};
#else
    v16 v{};
    for (int lane = 0; lane < 16; ++lane)
        if (mask >> lane & 1) set_lane(v, lane, from[lane]);
    return v;
#endif
}

template <class V> inline void store(float* to, V v) {
    if constexpr (std::is_class_v<V>) store(to, v.low), store(to + 8, v.high);
    else std::memcpy(to, &v, sizeof v);
}

// The first `part` lanes: never writes beyond them.
template <class V> inline void store_part(float* to, V v, int part) {
    float all[Lanes<V>::count];
    store(all, v);
    for (int lane = 0; lane < part; ++lane) to[lane] = all[lane];
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline void store_part(float* to, v8 v, int part) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(part), lanes), reinterpret_cast<__m256>(v));
}

inline void store_part(float* to, const v16& v, int part) {
    store_part(to, v.low, part);
    if (part > 8) store_part(to + 8, v.high, part - 8);
}
#endif

#if defined(__AVX512F__)
inline void store_part(float* to, v16 v, int part) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << part) - 1), reinterpret_cast<__m512>(v));
}

inline void store_part(float* to, v8 v, int part) {
    _mm256_mask_storeu_ps(to, static_cast<__mmask8>((1u << part) - 1), reinterpret_cast<__m256>(v));
}
#endif

// Past the caches, for what is read again only after they have been filled with other things: `to` is a multiple of 32.
inline void stream(float* to, v8 v) {
#if defined(__AVX2__)
    _mm256_stream_ps(to, reinterpret_cast<__m256>(v));
#else
    store(to, v);
#endif
}

inline void stream(float* to, v16 v) {
    stream(to, low_half(v));
    stream(to + 8, high_half(v));
}

// Before another thread may read what was streamed.
inline void end_stream() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

template <class V> inline void store(bfloat16* to, V v) {
    if constexpr (std::is_class_v<V>) {
        store(to, v.low), store(to + 8, v.high);
    } else {
        typedef typename Lanes<V>::Bits Bits;
        const Bits bits = reinterpret_cast<Bits>(v);
        Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        rounded = v != v ? Bits{} + 0x7fc0u : rounded;
        const typename Lanes<V>::Half half = __builtin_convertvector(rounded, typename Lanes<V>::Half);
        std::memcpy(to, &half, sizeof half);
    }
}

inline float total(v8 v) {
    const v4 low = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    const v4 pairs = low + __builtin_shufflevector(low, low, 2, 3, 0, 1);
    return pairs[0] + pairs[1];
}

inline float total(v16 v) {
    return total(low_half(v) + high_half(v));
}

// The sums of the lanes of four vectors.
inline v4 totals(v8 a, v8 b, v8 c, v8 d) {
    const v8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const v8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const v8 sums = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                    __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
}

#if defined(__AVX512F__)
inline v4 totals(v16 a, v16 b, v16 c, v16 d) {
    const v16 ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                   __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const v16 cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                   __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const v16 sums = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                     __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const v8 halves = low_half(sums) + high_half(sums);
    return __builtin_shufflevector(halves, halves, 0, 1, 2, 3) + __builtin_shufflevector(halves, halves, 4, 5, 6, 7);
}
#else
inline v4 totals(const v16& a, const v16& b, const v16& c, const v16& d) {
    return totals(a.low + a.high, b.low + b.high, c.low + c.high, d.low + d.high);
}
#endif

inline bool all_finite(const float* numbers, int64_t count) {
    uint32_t odd = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, numbers + i, sizeof bits);
        odd |= (bits & 0x7fffffff) >= 0x7f800000;
    }
    return !odd;
}

inline v16 maximum(v16 a, v16 b) { return choose(a > b, a, b); }

// exp(x) for x <= 88, exactly zero below -87: 2^n e^f with n = round(x / ln 2) and a polynomial of degree 6 on
// |f| <= ln(2) / 2; relative error below 2^-22. NaN stays NaN.
template <class V> inline V exponential(V x) {
    typedef typename Lanes<V>::Bits Bits;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds, and leaves n in the low bits
    const V shifted = x * 1.44269504088896341f + shift;
    const V n = shifted - shift;
    const V f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V poly = f * 1.3888889e-3f + 8.3333333e-3f;
    poly = poly * f + 4.1666667e-2f;
    poly = poly * f + 1.6666667e-1f;
    poly = poly * f + 5.0e-1f;
    poly = poly * f + 1.0f;
    poly = poly * f + 1.0f;
    const V result = bits_as<V>(bits_as<Bits>(poly) + (bits_as<Bits>(shifted) << 23));
    return choose(x >= -87.0f, result, choose(x < -87.0f, V{}, x));  // the bits of a NaN are not added to
}

// log(x) for normal x > 0: x = 2^n m with m in [sqrt(1/2), sqrt(2)), and the series of atanh in (m - 1) / (m + 1);
// relative error of exp(log(x)) below 2^-21. NaN and infinity stay themselves.
inline v16 logarithm(v16 x) {
    const i16 bits = bits_as<i16>(x), shifted = bits - 0x3f3504f3;
    const v16 n = to_floats(shifted >> 23);
    const v16 m = bits_as<v16>((shifted & 0x7fffff) + 0x3f3504f3);
    const v16 t = (m - 1.0f) / (m + 1.0f), square = t * t;
    v16 series = square * 0.22222222f + 0.28571429f;
    series = series * square + 0.4f;
    series = series * square + 0.66666667f;
    series = series * square + 2.0f;
    const v16 result = n * 2.12194440e-4f * -1.0f + (series * t + n * 0.693359375f);
    return choose(x < INFINITY, result, x);
}

}  // namespace structconv::SC_ISA
