// Attention of all pairs, or of those that a mask leaves: y_n = sum_m p_nm v_m, p = softmax_m of scale <q_n, k_m> + mask.
//
// A vector holds one number for each of 16 outputs, so that scores, softmax and sums need no work across lanes, and keys
// and values are read as they lie; up to kMost vectors are computed at a time. Scores are made for a block of keys, and none
// are kept: the backward makes them again, and adds to the gradients of keys and values what each group of outputs gives.
#include "api.h"
#include "dropout.h"
#include "lanes.h"
#include "parallel.h"
#include "tile.h"

namespace structconv::SC_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMost = 2;
#else
constexpr int kMost = 1;
#endif
constexpr int kKeys = 64;                // of a block
constexpr int kHeldKeys = 512;           // up to which the weights of a tile stay until they are known
constexpr int kTogether = 4;             // heads whose one output is computed from the same keys
alignas(64) constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int64_t kLeastWork = 1 << 20;  // products of numbers for a second thread

const float* at(const Planes& p, int64_t batch, int64_t head, int64_t row) {
    return p.x + batch * p.batch + head * p.head + row * p.row;
}

// Where the numbers of an output lie; see `peaks` of the arguments.
template <class F> F* peaks_of(const AttentionArgs& a, F* peaks, int64_t batch, int64_t head, int64_t row) {
    return peaks + (batch * a.heads + head) * a.outputs + row;
}

template <class F> F* inverses_of(const AttentionArgs& a, F* peaks, int64_t batch, int64_t head, int64_t row) {
    return peaks_of(a, peaks + a.batch * a.heads * a.outputs, batch, head, row);
}

// Columns of 8 by 8 numbers as rows.
inline void transpose(const v8 (&r)[8], v8 (&t)[8]) {
    v8 s[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            u[i + j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            u[i + j + 2] = __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; ++i) {
        t[i] = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        t[i + 4] = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

// Outputs [first, first + lanes) of one head, L vectors of them. Numbers by channel lie as [channel][L][16].
template <int L> struct Outputs {
    static constexpr int width = 16 * L, vectors = width / kLanes;
    const AttentionArgs& a;
    int64_t batch, head, first;
    int lanes;

    int64_t lane(int i) const { return first + (i < lanes ? i : lanes - 1); }

    // to[c][lane] = factor row_lane[c]; the last row again in lanes without an output
    void load_lanes(const Planes& rows, int64_t channels, float factor, float* to) const {
        for (int i = 0; i < width; i += 8) {
            const float* from[8];
            for (int r = 0; r < 8; ++r) from[r] = at(rows, batch, head, lane(i + r));
            int64_t c = 0;
            for (; c + 8 <= channels; c += 8) {
                v8 read[8], turned[8];
                for (int r = 0; r < 8; ++r) read[r] = load<v8>(from[r] + c) * factor;
                transpose(read, turned);
                for (int r = 0; r < 8; ++r) store(to + (c + r) * width + i, turned[r]);
            }
            for (; c < channels; ++c)
                for (int r = 0; r < 8; ++r) to[c * width + i + r] = from[r][c] * factor;
        }
    }

    // row_lane[c] = factor[lane] sums[c][lane]
    void store_lanes(const float* sums, int64_t channels, const float* factor, const Planes& rows) const {
        for (int i = 0; i < lanes; i += 8) {
            const int count = lanes - i < 8 ? lanes - i : 8;
            float* to[8];
            for (int r = 0; r < 8; ++r) to[r] = const_cast<float*>(at(rows, batch, head, lane(i + r)));
            int64_t c = 0;
            for (; c + 8 <= channels; c += 8) {
                v8 read[8], turned[8];
                for (int r = 0; r < 8; ++r) read[r] = load<v8>(sums + (c + r) * width + i);
                transpose(read, turned);
                for (int r = 0; r < count; ++r) store(to[r] + c, turned[r] * factor[i + r]);
            }
            for (; c < channels; ++c)
                for (int r = 0; r < count; ++r) to[r][c] = sums[c * width + i + r] * factor[i + r];
        }
    }

    float* weights_of(int i, int64_t start, float* weights) const {
        return weights + ((batch * a.heads + head) * a.outputs + first + i) * a.inputs + start;
    }

    void clear_weights(int64_t start, int count, float* weights) const {
        for (int i = 0; i < lanes; ++i) std::memset(weights_of(i, start, weights), 0, count * sizeof(float));
    }

    // weights (batch, heads, outputs, inputs) = factor[lane] w[key][lane], for so many keys from `start` on
    void store_weights(const float* w, int64_t start, int count, const float* factor, float* weights) const {
        for (int i = 0; i < lanes; i += 8) {
            const int rows = lanes - i < 8 ? lanes - i : 8;
            const v8 own = load<v8>(factor + i);
            for (int j = 0; j < count; j += 8) {
                v8 read[8], turned[8];
                const int part = count - j < 8 ? count - j : 8;
                for (int r = 0; r < 8; ++r) read[r] = load<v8>(w + (r < part ? j + r : j) * width + i) * own;
                transpose(read, turned);
                for (int r = 0; r < rows; ++r) {
                    float* to = weights_of(i + r, start + j, weights);
                    if (part == 8) store(to, turned[r]);
                    else store_part(to, turned[r], part);
                }
            }
        }
    }

    // The inputs that may reach one of these outputs.
    int64_t inputs() const {
        const int64_t last = first + lanes;
        return a.causal && last < a.inputs ? last : a.inputs;
    }
};

// Consecutive keys, and what is added to the scores of their pairs with outputs: -inf for no pair.
template <int L> struct Block {
    int count;
    bool masked, missing, alike;              // something is added; -inf, too; the same for all outputs
    alignas(64) float added[kKeys * 16 * L];  // [key][lane], or [key] where alike

    v16 of(int j, int lane) const { return alike ? splat<v16>(added[j]) : load<v16>(added + j * 16 * L + lane); }
    bool exists(int j, int lane) const { return added[alike ? j : j * 16 * L + lane] != -INFINITY; }
};

// `count` numbers of the mask from (row, column) on.
inline void read_mask(const AttentionArgs& a, int64_t batch, int64_t head, int64_t row, int64_t column, int count, float* to) {
    const int64_t start = batch * a.mask_batch + head * a.mask_head + row * a.mask_row + column * a.mask_column;
    if (a.mask_is_bool) {
        const uint8_t* from = static_cast<const uint8_t*>(a.mask) + start;
        for (int j = 0; j < count; ++j) to[j] = from[j * a.mask_column] ? 0.0f : -INFINITY;
    } else {
        const float* from = static_cast<const float*>(a.mask) + start;
        for (int j = 0; j < count; ++j) to[j] = from[j * a.mask_column];
    }
}

// Fills the block of up to kKeys keys from `start`; false if none of them has a pair with the outputs.
template <int L> bool open_block(const Outputs<L>& outputs, int64_t start, int64_t end, Block<L>& block) {
    const AttentionArgs& a = outputs.a;
    const int count = block.count = static_cast<int>(end - start < kKeys ? end - start : kKeys);
    const bool diagonal = a.causal && start + count - 1 > outputs.first;
    block.masked = a.mask || diagonal, block.missing = diagonal, block.alike = a.mask && !a.mask_row && !diagonal;
    if (!block.masked) return true;
    bool any = !a.mask;
    const auto look = [&](const float* row) {
        for (int j = 0; j < count; ++j) any |= row[j] != -INFINITY, block.missing |= row[j] == -INFINITY;
    };
    if (block.alike) {
        read_mask(a, outputs.batch, outputs.head, 0, start, count, block.added);
        look(block.added);
        return any;
    }
    if (a.mask) {
        alignas(64) float rows[8][kKeys] = {};
        for (int i = 0; i < outputs.width; i += 8) {
            for (int r = 0; r < 8; ++r) {
                read_mask(a, outputs.batch, outputs.head, outputs.lane(i + r), start, count, rows[r]);
                look(rows[r]);
            }
            for (int j = 0; j < count; j += 8) {
                v8 read[8], turned[8];
                for (int r = 0; r < 8; ++r) read[r] = load<v8>(rows[r] + j);
                transpose(read, turned);
                for (int r = 0; r < 8; ++r) store(block.added + (j + r) * outputs.width + i, turned[r]);
            }
        }
    }
    for (int j = 0; diagonal && j < count; ++j) {  // outputs before the key
        const v16 before = splat<v16>(static_cast<float>(start + j - outputs.first));
        for (int l = 0; l < outputs.width; l += 16) {
            float* own = block.added + j * outputs.width + l;
            store(own, choose(load<v16>(kNumbers) + static_cast<float>(l) < before, splat<v16>(-INFINITY),
                              a.mask ? load<v16>(own) : v16{}));
        }
    }
    return any;
}

// out[j][lane] = sum_c lanes[c][lane] row_j[c] of rows `step` apart
template <int L>
void dots(const float* first, int64_t step, int count, const float* lanes, int64_t channels, float* out) {
    constexpr int width = Outputs<L>::width;
    for (int64_t j = 0; j < count;)
        j += next_rows(count - j, [&](auto height) {
            Tile<Wide, height, Outputs<L>::vectors> tile;
            tile.fill(nullptr, 0);
            const float* rows = first + j * step;
            for (int64_t c = 0; c < channels; ++c)
                tile.add([&](int r) { return rows[r * step + c]; }, lanes + c * width);
            tile.put([&](int r, int n, Wide v) { store(out + (j + r) * width + n, v); });
        });
}

// Whether numbers of so many rows are all finite.
bool finite(const float* first, int64_t step, int count, int64_t channels) {
    bool all = true;
    for (int j = 0; j < count; ++j) all &= all_finite(first + j * step, channels);
    return all;
}

// sums[c][lane] += weight[j][lane] row_j[c]
template <int L>
void collect(const float* first, int64_t step, const Block<L>& block, const float* weight, int64_t channels, float* sums) {
    constexpr int width = Outputs<L>::width;
    if (block.missing && !finite(first, step, block.count, channels)) {  // what has no pair may be anything
        for (int j = 0; j < block.count; ++j)
            for (int64_t c = 0; c < channels; ++c)
                for (int lane = 0; lane < width; ++lane)
                    if (block.exists(j, lane)) sums[c * width + lane] += weight[j * width + lane] * first[j * step + c];
        return;
    }
    for (int64_t c = 0; c < channels;)
        c += next_rows(channels - c, [&](auto height) {
            Tile<Wide, height, Outputs<L>::vectors> tile;
            tile.fill(nullptr, 0);
            for (int j = 0; j < block.count; ++j) {
                const float* row = first + j * step + c;
                tile.add([&](int r) { return row[r]; }, weight + j * width);
            }
            tile.join(sums + c * width);
            tile.put([&](int r, int n, Wide v) { store(sums + (c + r) * width + n, v); });
        });
}

// scores + mask of a block
template <int L> void add_mask(const Block<L>& block, float* scores) {
    if (!block.masked) return;
    for (int j = 0; j < block.count; ++j)
        for (int l = 0; l < 16 * L; l += 16) {
            float* score = scores + j * 16 * L + l;
            const v16 more = block.of(j, l);
            store(score, choose(more == -INFINITY, more, load<v16>(score) + more));
        }
}

// The factors of dropout of 16 pairs of one key, from output `first` on.
inline v16 kept(const Dropout& dropout, const AttentionArgs& a, int64_t key, int64_t first) {
    alignas(64) uint32_t pairs[16];
    const uint64_t pair = static_cast<uint64_t>(key * a.outputs + first);
    for (uint32_t i = 0; i < 16; ++i) pairs[i] = static_cast<uint32_t>(pair) + i;
    for (int i = 0; pair + 16 > 0xffffffff && i < 16; ++i) pairs[i] = fold(pair + i);
    return dropout.factor(pairs);
}

template <int L> void drop(const Dropout& dropout, const Outputs<L>& outputs, int64_t start, int count, float* w) {
    for (int j = 0; j < count; ++j)
        for (int lane = 0; lane < outputs.width; lane += 16) {
            float* own = w + j * outputs.width + lane;
            store(own, load<v16>(own) * kept(dropout, outputs.a, start + j, outputs.first + lane));
        }
}

template <int L> void forward_tile(const AttentionForwardArgs& f, int64_t batch, int64_t head, int64_t first, int lanes) {
    constexpr int width = Outputs<L>::width;
    const AttentionArgs& a = f.attention;
    const Outputs<L> outputs{a, batch, head, first, lanes};
    const int64_t shared = head / a.shared, depth = a.depth, channels = a.channels;
    const Dropout dropout(a.drop, batch * a.heads + head, 1);
    alignas(64) float query[width * kAttentionChannels], sums[width * kAttentionChannels], held[kHeldKeys * width];
    const bool holds = f.weights && a.inputs <= kHeldKeys;  // all blocks, each with the base that it had
    v16 peak[L], base[L], sum[L], bases[kHeldKeys / kKeys][L];
    for (int l = 0; l < L; ++l) peak[l] = splat<v16>(-INFINITY), base[l] = v16{}, sum[l] = v16{};
    outputs.load_lanes(a.q, depth, static_cast<float>(a.scale), query);
    std::memset(sums, 0, sizeof(float) * width * channels);
    Block<L> block;
    bool later = false;
    for (int64_t start = 0, end = outputs.inputs(); start < end; start += kKeys) {
        float* w = holds ? held + start * width : held;
        if (!open_block(outputs, start, end, block)) {
            if (holds) std::memset(w, 0, sizeof(float) * block.count * width);
            for (int l = 0; holds && l < L; ++l) bases[start / kKeys][l] = base[l];
            continue;
        }
        dots<L>(at(a.k, batch, shared, start), a.k.row, block.count, query, depth, w);
        add_mask(block, w);
        for (int l = 0; l < L; ++l) {
            float* own = w + 16 * l;
            v16 top = peak[l];
            for (int j = 0; j < block.count; ++j) top = maximum(load<v16>(own + j * width), top);
            const v16 before = base[l];
            peak[l] = top, base[l] = choose(top == -INFINITY, v16{}, top);
            if (later) {
                const v16 scale = exponential(choose(before < base[l], before - base[l], v16{}));
                sum[l] *= scale;
                for (int64_t c = 0; c < channels; ++c) {
                    float* number = sums + c * width + 16 * l;
                    store(number, load<v16>(number) * scale);
                }
            }
            v16 part{};
            for (int j = 0; j < block.count; ++j) {
                const v16 weight = exponential(load<v16>(own + j * width) - base[l]);
                store(own + j * width, weight);
                part += weight;
            }
            sum[l] += part;
            if (holds) bases[start / kKeys][l] = base[l];
        }
        if (dropout.on()) drop(dropout, outputs, start, block.count, w);
        collect(at(a.v, batch, shared, start), a.v.row, block, w, channels, sums);
        later = true;
    }
    alignas(64) float inverse[width], peaks[width];
    for (int l = 0; l < L; ++l) {
        store(inverse + 16 * l, choose(sum[l] == 0.0f, v16{}, 1.0f / sum[l]));
        store(peaks + 16 * l, base[l]);
    }
    outputs.store_lanes(sums, channels, inverse, f.y);
    for (int64_t start = 0, end = outputs.inputs(); f.weights && start < a.inputs; start += kKeys) {
        const int count = static_cast<int>(a.inputs - start < kKeys ? a.inputs - start : kKeys);
        float* w = holds ? held + start * width : held;
        alignas(64) float factor[width];
        for (int l = 0; l < L; ++l) {
            v16 own = load<v16>(inverse + 16 * l);
            if (holds && start < end) {
                const v16 before = bases[start / kKeys][l];
                own *= exponential(choose(before < base[l], before - base[l], v16{}));
            }
            store(factor + 16 * l, own);
        }
        if (start >= end || (!holds && !open_block(outputs, start, end, block))) {
            outputs.clear_weights(start, count, f.weights);
            continue;
        }
        if (!holds) {
            dots<L>(at(a.k, batch, shared, start), a.k.row, block.count, query, depth, w);
            add_mask(block, w);
            for (int l = 0; l < L; ++l)
                for (int j = 16 * l; j < block.count * width; j += width)
                    store(w + j, exponential(load<v16>(w + j) - base[l]));
            if (dropout.on()) drop(dropout, outputs, start, block.count, w);
        }
        const int64_t known = end - start < count ? end - start : count;
        if (known < count) std::memset(w + known * width, 0, sizeof(float) * (count - known) * width);
        outputs.store_weights(w, start, count, factor, f.weights);
    }
    if (!f.peaks) return;
    std::memcpy(peaks_of(a, f.peaks, batch, head, first), peaks, lanes * sizeof(float));
    std::memcpy(inverses_of(a, f.peaks, batch, head, first), inverse, lanes * sizeof(float));
}

bool is_one(const AttentionArgs& a) { return a.outputs == 1 && !(a.drop.p > 0); }

// Scores + mask of the one output and `count` keys from `first` on, and the mask; returns whether a pair does not exist. Both
// passes call it: scores that round differently give weights that do not sum to one, and gradients that large keys multiply.
__attribute__((noinline)) bool scores_of_one(const AttentionArgs& a, int64_t batch, int64_t head, int64_t first, int count,
                                             float* scores, float* added) {
    const float* key = at(a.k, batch, head / a.shared, first);
    dots_of(at(a.q, batch, head, 0), [&](int64_t m) { return key + m * a.k.row; }, count, a.depth, scores);
    if (a.mask) read_mask(a, batch, head, 0, first, count, added);
    bool missing = false;
    for (int m = 0; m < count; ++m) {
        const float score = scores[m] * static_cast<float>(a.scale), more = a.mask ? added[m] : 0.0f;
        scores[m] = more == -INFINITY ? more : score + more;
        missing |= more == -INFINITY;
    }
    return missing;
}

// The one output of each of so many heads that share keys and values, which are rows of 16 numbers at a time.
void forward_one(const AttentionForwardArgs& f, int64_t batch, int64_t first_head, int heads) {
    constexpr int64_t chunk = 512;
    const AttentionArgs& a = f.attention;
    const int64_t shared = first_head / a.shared, channels = a.channels, inputs = a.causal && a.inputs ? 1 : a.inputs;
    float base[kTogether], whole[kTogether] = {};
    for (float& number : base) number = -INFINITY;
    alignas(64) float scores[chunk], added[chunk];
    for (int64_t first = 0; first < inputs; first += chunk) {
        const int count = static_cast<int>(inputs - first < chunk ? inputs - first : chunk);
        const float* value = at(a.v, batch, shared, first);
        for (int h = 0; h < heads; ++h) {
            const int64_t head = first_head + h;
            float* y = const_cast<float*>(at(f.y, batch, head, 0));
            const bool missing = scores_of_one(a, batch, head, first, count, scores, added);
            fill_up(scores, count);
            if (f.weights) std::memcpy(f.weights + (batch * a.heads + head) * a.inputs + first, scores, count * sizeof(float));
            const float top = greatest(scores, count), next = top > base[h] ? top : base[h];
            const float before = base[h] == -INFINITY ? 0.0f : std::exp(base[h] - next);
            whole[h] = whole[h] * before + weights_of(scores, count, next);
            base[h] = next;
            const bool apart = missing && !finite(value, a.v.row, count, channels);  // what has no pair may be anything
            for_columns(channels, [&](auto vectors, int64_t c) {
                const auto from = [&](int64_t v, const auto& vector) { return first ? vector(y + c + v) * before : v16{}; };
                if (!apart)
                    return sums_at<decltype(vectors)::value>(scores, value + c, a.v.row, count, channels - c, from, y + c);
                for (int64_t i = c; i < c + 16 * vectors && i < channels; ++i) {
                    y[i] = first ? y[i] * before : 0.0f;
                    for (int m = 0; m < count; ++m)
                        if (added[m] != -INFINITY) y[i] += scores[m] * value[m * a.v.row + i];
                }
            });
        }
    }
    for (int h = 0; h < heads; ++h) {
        const int64_t head = batch * a.heads + first_head + h;
        const float inverse = whole[h] == 0.0f ? 0.0f : 1.0f / whole[h];
        float* y = const_cast<float*>(at(f.y, batch, first_head + h, 0));
        for_lanes(channels, [&](int64_t c, int part) { put(y + c, inputs ? lanes(y + c, part) * inverse : v16{}, part); });
        if (f.peaks) {
            *peaks_of(a, f.peaks, batch, first_head + h, 0) = base[h] == -INFINITY ? 0.0f : base[h];
            *inverses_of(a, f.peaks, batch, first_head + h, 0) = inverse;
        }
        float* table = f.weights + head * a.inputs;
        for (int64_t m = 0; f.weights && m < a.inputs; ++m)
            table[m] = m < inputs && whole[h] != 0.0f ? std::exp(table[m] - base[h]) * inverse : 0.0f;
    }
}

// The rows of a block += the weights times rows of the outputs.
template <int L>
void spread(const Block<L>& block, const float* weight, const float* from, int64_t from_row, int lanes, int64_t channels,
            float* rows, int64_t row) {
    constexpr int width = Outputs<L>::width;
    if (block.missing && !finite(from, from_row, lanes, channels)) {  // what has no pair may be anything
        for (int j = 0; j < block.count; ++j)
            for (int lane = 0; lane < lanes; ++lane)
                for (int64_t c = 0; c < channels && block.exists(j, lane); ++c)
                    rows[j * row + c] += weight[j * width + lane] * from[lane * from_row + c];
        return;
    }
    alignas(64) float last[width * 2 * kLanes];  // columns that fill no vector
    for (int64_t c = 0; c < channels;)
        c += next_columns(channels - c, [&](auto columns) {
            typedef typename decltype(columns)::Vector V;
            const int64_t left = channels - c;
            const float* x = from + c;
            int64_t x_row = from_row;
            if (left < columns.width) {
                for (int lane = 0; lane < lanes; ++lane) {
                    std::memset(last + lane * columns.width, 0, columns.width * sizeof(float));
                    std::memcpy(last + lane * columns.width, x + lane * from_row, left * sizeof(float));
                }
                x = last, x_row = columns.width;
            }
            for (int64_t j = 0; j < block.count;)
                j += next_rows(block.count - j, [&](auto height) {
                    Tile<V, height, columns.vectors> tile;
                    tile.fill(nullptr, 0);
                    const float* own = weight + j * width;
                    for (int lane = 0; lane < lanes; ++lane)
                        tile.add([&](int r) { return own[r * width + lane]; }, x + lane * x_row);
                    tile.put([&](int r, int n, V v) {
                        float* to = rows + (j + r) * row + c + n;
                        const int64_t there = left - n;
                        if (there >= Lanes<V>::count) store(to, load<V>(to) + v);
                        else if (there > 0)
                            store_part(to, load_part<V>(to, static_cast<int>(there)) + v, static_cast<int>(there));
                    });
                });
        });
}

// The gradient of the mask += that of the scores, which is summed over the axes that the mask lacks.
template <int L>
void add_to_mask(const AttentionBackwardArgs& b, const Outputs<L>& outputs, int64_t start, int count, const float* ds) {
    float* to = b.grad_mask + outputs.batch * b.of_batch + outputs.head * b.of_head + outputs.first * b.of_row + start * b.of_column;
    for (int i = 0; i < outputs.lanes; i += 8) {
        const int rows = outputs.lanes - i < 8 ? outputs.lanes - i : 8;
        for (int j = 0; j < count; j += 8) {
            v8 read[8], turned[8];
            const int part = count - j < 8 ? count - j : 8;
            for (int r = 0; r < 8; ++r) read[r] = load<v8>(ds + (r < part ? j + r : j) * outputs.width + i);
            transpose(read, turned);
            for (int r = 0; r < rows; ++r) {
                float* row = to + (i + r) * b.of_row + j * b.of_column;
                if (part == 8 && b.of_column) store(row, load<v8>(row) + turned[r]);
                else
                    for (int c = 0; c < part; ++c) row[c * b.of_column] += turned[r][c];
            }
        }
    }
}

template <int L> void backward_tile(const AttentionBackwardArgs& b, int64_t batch, int64_t head, int64_t first, int lanes) {
    constexpr int width = Outputs<L>::width;
    const AttentionArgs& a = b.attention;
    const Outputs<L> outputs{a, batch, head, first, lanes};
    const int64_t shared = head / a.shared, depth = a.depth, channels = a.channels;
    const float *query_row = at(a.q, batch, head, first), *grad_row = at(b.grad, batch, head, first);
    alignas(64) float query[width * kAttentionChannels], grad[width * kAttentionChannels], sums[width * kAttentionChannels];
    alignas(64) float peaks[width], inverse[width], delta[width], p[kKeys * width], ds[kKeys * width], w[kKeys * width];
    const bool whole = a.inputs <= kKeys;  // one block has all pairs: the mean of ds by the weights is as exact as ds is
    const Dropout dropout(a.drop, batch * a.heads + head, 1);
    for (int i = 0; i < width; ++i) {  // outputs that do not exist have no weights
        peaks[i] = i < lanes ? *peaks_of(a, b.peaks, batch, head, first + i) : INFINITY;
        inverse[i] = i < lanes ? *inverses_of(a, b.peaks, batch, head, first + i) : 0.0f;
        delta[i] = 0.0f;
    }
    outputs.load_lanes(a.q, depth, static_cast<float>(a.scale), query);
    outputs.load_lanes(b.grad, channels, 1.0f, grad);
    if (!whole) {  // added up as `dots` adds up ds: where one weight is 1, both are the same number
        outputs.load_lanes(b.y, channels, 1.0f, sums);
        for (int l = 0; l < width; l += 16) {
            v16 sum{};
            for (int64_t c = 0; c < channels; ++c) sum += load<v16>(sums + c * width + l) * load<v16>(grad + c * width + l);
            store(delta + l, sum);
        }
    }
    std::memset(sums, 0, sizeof(float) * width * depth);
    Block<L> block;
    for (int64_t start = 0, end = outputs.inputs(); start < end; start += kKeys) {
        if (!open_block(outputs, start, end, block)) continue;
        const float *key = at(a.k, batch, shared, start), *value = at(a.v, batch, shared, start);
        dots<L>(value, a.v.row, block.count, grad, channels, ds);
        if (is_one(a)) {
            alignas(64) float scores[kKeys], added[kKeys];
            scores_of_one(a, batch, head, start, block.count, scores, added);
            for (int j = 0; j < block.count; ++j)
                for (int l = 0; l < width; l += 16) store(p + j * width + l, splat<v16>(scores[j]));
        } else {
            dots<L>(key, a.k.row, block.count, query, depth, p);
            add_mask(block, p);
        }
        for (int l = 0; l < width; l += 16) {
            const v16 own = load<v16>(peaks + l), share = load<v16>(inverse + l);
            v16 shift = load<v16>(delta + l);
            for (int j = l; j < block.count * width; j += width) {
                const v16 score = load<v16>(p + j), weight = choose(score == -INFINITY, v16{}, exponential(score - own) * share);
                const v16 factor = dropout.on() ? kept(dropout, a, start + j / width, first + l) : splat<v16>(1.0f);
                const v16 d = choose(score == -INFINITY, v16{}, load<v16>(ds + j) * factor);
                if (whole) shift += weight * d;
                store(p + j, choose(score == -INFINITY, v16{}, weight * factor));
                store(w + j, weight), store(ds + j, d);
            }
            for (int j = l; j < block.count * width; j += width)
                store(ds + j, load<v16>(w + j) * (load<v16>(ds + j) - shift));
        }
        if (b.grad_mask) add_to_mask(b, outputs, start, block.count, ds);
        for (int j = 0; j < block.count * width; j += 16) store(ds + j, load<v16>(ds + j) * static_cast<float>(a.scale));
        collect(key, a.k.row, block, ds, depth, sums);
        spread(block, p, grad_row, b.grad.row, lanes, channels, const_cast<float*>(at(b.grad_v, batch, shared, start)),
               b.grad_v.row);
        spread(block, ds, query_row, a.q.row, lanes, depth, const_cast<float*>(at(b.grad_k, batch, shared, start)), b.grad_k.row);
    }
    alignas(64) float ones[width];
    for (float& factor : ones) factor = 1.0f;
    outputs.store_lanes(sums, depth, ones, b.grad_q);
}

// body(vectors, first output, how many) for all outputs of a head.
template <class Body> void tiles_of(int64_t first, int64_t end, const Body& body) {
    for (; first < end; first += 16 * kMost) {
        const int lanes = static_cast<int>(end - first < 16 * kMost ? end - first : 16 * kMost);
        if (kMost > 1 && lanes > 16) body(std::integral_constant<int, kMost>(), first, lanes);
        else body(std::integral_constant<int, 1>(), first, lanes);
    }
}

int team_of(const AttentionArgs& a) {
    const int64_t work = a.batch * a.heads * a.outputs * a.inputs * (a.depth + a.channels);
    return a.threads > 1 && work >= kLeastWork ? static_cast<int>(a.threads) : 1;
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(attention_forward)(const structconv::AttentionForwardArgs* args) {
    using namespace structconv::SC_ISA;
    const structconv::AttentionArgs& a = args->attention;
    const int team = team_of(a);
    if (is_one(a)) {
        const int64_t pieces = (a.shared + kTogether - 1) / kTogether, tasks = a.batch * (a.heads / a.shared) * pieces;
        for_each(tasks, team, [&](int64_t task) {
            const int64_t group = task / pieces, first = task % pieces * kTogether, left = a.shared - first;
            const int64_t head = group % (a.heads / a.shared) * a.shared + first;
            forward_one(*args, group / (a.heads / a.shared), head, static_cast<int>(left < kTogether ? left : kTogether));
        });
        return;
    }
    constexpr int64_t span = 64;
    const int64_t spans = (a.outputs + span - 1) / span, tasks = a.batch * a.heads * spans;
    for_each(tasks, team, [&](int64_t task) {
        const int64_t pair = task / spans, start = task % spans * span, end = start + span;
        tiles_of(start, end < a.outputs ? end : a.outputs, [&](auto vectors, int64_t first, int lanes) {
            forward_tile<decltype(vectors)::value>(*args, pair / a.heads, pair % a.heads, first, lanes);
        });
    });
}

// The gradients of a key and a value, and those of a number of the mask, belong to one thread.
SC_EXPORT(attention_backward)(const structconv::AttentionBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    const structconv::AttentionArgs& a = args->attention;
    const int64_t groups = a.heads / a.shared;
    const int64_t batches = args->grad_mask && !args->of_batch ? 1 : a.batch, parts = args->grad_mask && !args->of_head ? 1 : groups;
    for_each(batches * parts, team_of(a), [&](int64_t task) {
        const int64_t each = a.batch / batches, own = groups / parts;
        for (int64_t pair = 0; pair < each * own; ++pair) {
            const int64_t batch = task / parts * each + pair / own, group = task % parts * own + pair % own;
            for (int64_t m = 0; m < a.inputs; ++m) {
                std::memset(const_cast<float*>(at(args->grad_k, batch, group, m)), 0, a.depth * sizeof(float));
                std::memset(const_cast<float*>(at(args->grad_v, batch, group, m)), 0, a.channels * sizeof(float));
            }
            for (int64_t head = group * a.shared; head < (group + 1) * a.shared; ++head)
                tiles_of(0, a.outputs, [&](auto vectors, int64_t first, int lanes) {
                    backward_tile<decltype(vectors)::value>(*args, batch, head, first, lanes);
                });
        }
    });
}
