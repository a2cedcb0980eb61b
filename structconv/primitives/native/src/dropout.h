// Dropout by a counter-based hash: the numbers of structconv.primitives.hashing.hash_uniform(seed, batch,
// head, m * num_outputs + n) >= p, so that every path drops the same weights.
#pragma once

#include "api.h"
#include "gather.h"

namespace structconv::SC_ISA {

constexpr uint32_t kFirst = 0x21F0AAAD, kSecond = 0x735A2D97, kGolden = 0x1E3779B9;

template <class U> inline U mix(U state, U key) {
    state = (state ^ (state >> 16)) * kFirst;
    state = state ^ key;
    state = (state ^ (state >> 15)) * kSecond;
    return state ^ (state >> 15);
}

inline uint32_t fold(uint64_t index) {
    return static_cast<uint32_t>(index) ^ static_cast<uint32_t>(index >> 32) * kFirst;
}

// One more index: the state and the key that all numbers of this index share.
inline void enter(uint32_t index, uint32_t* state, uint32_t* key) {
    const uint32_t mixed = mix(*state ^ index, *key);
    *key = mix(*key ^ index ^ kGolden, *state);
    *state = mixed;
}

// The generator for a block of heads: 16 lanes of an edge-major chunk, lane l being head l % heads.
class Dropout {
public:
    Dropout(const DropArgs& args, int64_t first_head, int heads) : args_(args), heads_(heads) {
        for (int lane = 0; lane < 16; ++lane) {
            const uint64_t head = first_head + lane % heads, seed = args.seed;
            const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
            uint32_t state = mix(low, high), key = mix(high ^ kGolden, low);
            enter(fold(head / args.heads_per_batch), &state, &key);
            enter(fold(head % args.heads_per_batch), &state, &key);
            set_lane(state_, lane, state);
            set_lane(key_, lane, key);
        }
    }

    bool on() const { return args_.p > 0; }

    // The pairs of `row` with the entries index[0 .. count), one number for each of them and its heads.
    void pairs(int64_t row, const int32_t* index, int64_t count, uint32_t* out) const {
        for (int64_t e = 0; e < count; ++e) {
            const int64_t m = args_.source_major ? row : index[e], n = args_.source_major ? index[e] : row;
            const uint32_t pair = fold(static_cast<uint64_t>(m * args_.num_outputs + n));
            for (int h = 0; h < heads_; ++h) out[e * heads_ + h] = pair;
        }
    }

    // The factors of 16 weights: 0 or 1 / (1 - p).
    v16 factor(const uint32_t* pairs) const {
        u16 pair;
        std::memcpy(&pair, pairs, sizeof pair);
        return factor(pair);
    }

    v16 factor(u16 pair) const {
        const u16 random = mix(state_ ^ pair, key_) >> 8;
        const v16 uniform = to_floats(bits_as<i16>(random)) * 0x1p-24f;
        const v16 kept = splat<v16>(static_cast<float>(1.0 / (1.0 - args_.p)));
        return choose(uniform >= static_cast<float>(args_.p), kept, v16{});
    }

private:
    const DropArgs& args_;
    int heads_;
    u16 state_, key_;
};

}  // namespace structconv::SC_ISA
