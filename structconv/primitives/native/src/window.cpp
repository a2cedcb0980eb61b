// Attention within a window of a grid, without a list of pairs: y_n = sum p v_m over the m that lie at one of the
// offsets of a table from n, p = softmax of scale <q_n, k_m> + table[m - n]; -inf in the table is no pair.
//
// A vector holds one number for each of 16 neighbors on the last axis, 16 outputs (or, in the second pass of the
// backward, 16 inputs), so that scores, softmax and sums need no work across lanes; the other side of each pair goes
// by one row at a time. Along the last axis the offsets of 16 neighbors are 16 neighbors in the table, which
// therefore is bias and mask in one: it lies padded with -inf, once by falling and once by rising offset.
#include "api.h"
#include "dropout.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int kRows = 64;  // rows of the other side that are held at a time
#if defined(__AVX512F__)
constexpr int kGroup = 8;
#else
constexpr int kGroup = 4;
#endif

// Rows of the other side as float32, and which entries they are.
struct Others {
    const float* row[kRows];
    int64_t entry[kRows];
    int count;
};

template <class T> const T* at(const Rows& rows, int64_t entry, int64_t head) {
    return static_cast<const T*>(rows.x) + entry * rows.row + head * rows.head;
}

template <class T> void fetch(const Rows& rows, int64_t head, int64_t channels, float* space, Others& others) {
    for (int j = 0; j < others.count; ++j) {
        const T* from = at<T>(rows, others.entry[j], head);
        if constexpr (sizeof(T) == 4) {
            others.row[j] = from;
        } else {
            others.row[j] = space + j * channels;
            for (int64_t c = 0; c < channels; ++c) space[j * channels + c] = widen(from[c]);
        }
    }
}

// out[j][lane] = scale sum_c lanes[c][lane] row_j[c]
void dots(const Others& others, const float* lanes, int64_t channels, double scale, v16* out) {
    for (int j = 0; j < others.count; j += kGroup) {
        const float* row[kGroup];
        v16 sums[kGroup];
        for (int i = 0; i < kGroup; ++i) {
            row[i] = others.row[j + i < others.count ? j + i : others.count - 1];
            sums[i] = v16{};
        }
        for (int64_t c = 0; c < channels; ++c) {
            const v16 lane = load<v16>(lanes + 16 * c);
            for (int i = 0; i < kGroup; ++i) sums[i] += lane * row[i][c];
        }
        for (int i = 0; i < kGroup && j + i < others.count; ++i) out[j + i] = sums[i] * static_cast<float>(scale);
    }
}

void clear_lanes(float* lanes, int64_t channels) { std::memset(lanes, 0, 16 * channels * sizeof(float)); }

// The number of entries first + step t in a line.
int64_t entries_of(const WindowArgs& a, const int64_t* starts, int64_t line, int64_t first) {
    const int64_t size = starts ? starts[line + 1] - starts[line] : a.size;
    return size > first ? (size - first + a.step - 1) / a.step : 0;
}

// The entries first + step t of a line, t from `begin` on, in as many lanes, and the windows around them.
template <class T> struct Tile {
    const WindowArgs& a;
    const int64_t *own, *others;  // where the lines of the lanes begin, and those of the other side
    int64_t head, line, first, step, begin;
    int lanes;
    i16 present;

    int64_t entry(const int64_t* starts, int64_t on_line, int64_t t) const {
        return (starts ? starts[on_line] : on_line * a.size) + first + step * t;
    }
    int64_t lane(int i) const { return entry(own, line, begin + i); }

    // to[c][lane] = factor row_lane[c], zero in lanes without an entry
    void load_lanes(const Rows& rows, int64_t channels, float* to) const {
        if (lanes < 16) clear_lanes(to, channels);
        for (int i = 0; i < lanes; ++i) {
            const T* from = at<T>(rows, lane(i), head);
            for (int64_t c = 0; c < channels; ++c) to[16 * c + i] = widen(from[c]);
        }
    }

    void store_lanes(const float* sums, int64_t channels, v16 factor, const Rows& rows) const {
        float each[16];
        store(each, factor);
        for (int i = 0; i < lanes; ++i) {
            T* to = const_cast<T*>(at<T>(rows, lane(i), head));
            for (int64_t c = 0; c < channels; ++c) narrow(sums[16 * c + i] * each[i], to + c);
        }
    }

    // Numbers of the outputs, whose rows are so many heads.
    v16 load_numbers(const float* numbers, int64_t row, float absent) const {
        v16 found = splat<v16>(absent);
        for (int i = 0; i < lanes; ++i) set_lane(found, i, numbers[lane(i) * row + head]);
        return found;
    }

    void store_numbers(v16 from, float* numbers, int64_t row) const {
        for (int i = 0; i < lanes; ++i) numbers[lane(i) * row + head] = from[i];
    }

    // body(others, shifts, table row of the offsets): `before` and `after` entries around the tile on each near line
    template <class Body> void around(const WindowLines& lines_of, int64_t before, int64_t after, const float* table,
                                      const Body& body) const {
        const int64_t length = entries_of(a, others, line, first), width = before + after + 1 + 2 * kWindowBorder;
        const int64_t low = begin < before ? 0 : begin - before;
        const int64_t last = begin + lanes + after, high = last < length ? last : length;
        Others rows;
        bool later = false;
        for (int64_t slot = lines_of.indptr[line]; slot < lines_of.indptr[line + 1]; ++slot) {
            const int64_t combination = lines_of.combination[slot];
            for (int64_t t = low; t < high; t += kRows, later = true) {
                rows.count = static_cast<int>(high - t < kRows ? high - t : kRows);
                for (int j = 0; j < rows.count; ++j) rows.entry[j] = entry(others, lines_of.line[slot], t + j);
                const int64_t start = combination * width + after + kWindowBorder - (t - begin);
                body(rows, start, table + head * a.table_head + start, later);
            }
        }
    }

    // The bias of one row's pairs with the lanes, -inf where there is no pair.
    v16 bias(const float* table, int j) const {
        return choose(present, load<v16>(table - j), splat<v16>(-INFINITY));
    }

    // The dropout factors of the weights of one row's pairs.
    v16 kept(const Dropout& dropout, int64_t other, bool lanes_are_inputs) const {
        alignas(64) uint32_t pairs[16];
        for (int i = 0; i < 16; ++i) {
            const int64_t m = lanes_are_inputs ? lane(i) : other;
            pairs[i] = fold(static_cast<uint64_t>(m * a.drop.num_outputs + (lanes_are_inputs ? other : lane(i))));
        }
        return dropout.factor(pairs);
    }
};

bool finite(const Others& others, int64_t channels) {
    bool all = true;
    for (int j = 0; j < others.count; ++j) all &= all_finite(others.row[j], channels);
    return all;
}

// sums[c][lane] += weight[j][lane] row_j[c]; lanes that are no pair are left out where a row might hold anything.
template <class T, int G, bool kFinite>
void collect_group(const Tile<T>& tile, const float* table, const Others& others, const v16* weight, int64_t c,
                   float* sums) {
    v16 held[G];
    for (int i = 0; i < G; ++i) held[i] = load<v16>(sums + 16 * (c + i));
    for (int j = 0; j < others.count; ++j) {
        const v16 w = weight[j];
        const float* row = others.row[j] + c;
        for (int i = 0; i < G; ++i) {
            if constexpr (kFinite) held[i] += w * row[i];
            else held[i] += choose(tile.bias(table, j) == -INFINITY, v16{}, w * row[i]);
        }
    }
    for (int i = 0; i < G; ++i) store(sums + 16 * (c + i), held[i]);
}

template <bool kFinite, class T>
void collect_all(const Tile<T>& tile, const float* table, const Others& others, const v16* weight, int64_t channels,
                 float* sums) {
    int64_t c = 0;
    for (; c + kGroup <= channels; c += kGroup)
        collect_group<T, kGroup, kFinite>(tile, table, others, weight, c, sums);
    for (; c < channels; ++c) collect_group<T, 1, kFinite>(tile, table, others, weight, c, sums);
}

template <class T>
void collect(const Tile<T>& tile, const float* table, const Others& others, const v16* weight, int64_t channels,
             float* sums) {
    if (finite(others, channels)) collect_all<true>(tile, table, others, weight, channels, sums);
    else collect_all<false>(tile, table, others, weight, channels, sums);
}

template <class T> void forward_tile(const Tile<T>& tile, const WindowForwardArgs& f, const Dropout& dropout) {
    const WindowArgs& a = f.window;
    alignas(64) float query[16 * kWindowChannels], sums[16 * kWindowChannels], space[kRows * kWindowChannels];
    v16 w[kRows], peak = splat<v16>(-INFINITY), base{}, sum{};
    tile.load_lanes(a.q, a.depth, query);
    clear_lanes(sums, a.channels);
    tile.around(a.by_target, a.below, a.above, a.falling, [&](Others& others, int64_t, const float* table, bool later) {
        fetch<T>(a.k, tile.head, a.depth, space, others);
        dots(others, query, a.depth, a.scale, w);
        v16 top = peak;
        for (int j = 0; j < others.count; ++j) {
            const v16 bias = tile.bias(table, j);
            w[j] = choose(bias == -INFINITY, bias, w[j] + bias);
            top = maximum(w[j], top);
        }
        const v16 before = base;
        peak = top;
        base = choose(peak == -INFINITY, v16{}, peak);
        if (later) {
            const v16 scale = exponential(choose(before < base, before - base, v16{}));
            sum *= scale;
            for (int64_t c = 0; c < a.channels; ++c) store(sums + 16 * c, load<v16>(sums + 16 * c) * scale);
        }
        for (int j = 0; j < others.count; ++j) {
            const v16 p = exponential(w[j] - base);
            sum += p;
            w[j] = dropout.on() ? p * tile.kept(dropout, others.entry[j], false) : p;
        }
        fetch<T>(a.v, tile.head, a.channels, space, others);
        collect(tile, table, others, w, a.channels, sums);
    });
    tile.store_lanes(sums, a.channels, choose(sum == 0.0f, v16{}, 1.0f / sum), f.y);
    tile.store_numbers(base, f.peaks, 2 * a.heads);
    tile.store_numbers(choose(sum == 0.0f, splat<v16>(INFINITY), logarithm(sum)), f.peaks + a.heads, 2 * a.heads);
}

// Gradients of 16 queries, and of the table; leaves D_n = <g_n, y_n> for the other pass.
template <class T>
void query_tile(const Tile<T>& tile, const WindowBackwardArgs& b, const Dropout& dropout, float* grad_table) {
    const WindowArgs& a = b.window;
    alignas(64) float query[16 * kWindowChannels], grad[16 * kWindowChannels], sums[16 * kWindowChannels];
    alignas(64) float space[kRows * kWindowChannels];
    v16 p[kRows], ds[kRows], delta{};
    tile.load_lanes(b.y, a.channels, sums);
    tile.load_lanes(b.grad, a.channels, grad);
    for (int64_t c = 0; c < a.channels; ++c) delta += load<v16>(sums + 16 * c) * load<v16>(grad + 16 * c);
    tile.store_numbers(delta, b.delta, a.heads);
    const v16 peak = tile.load_numbers(b.peaks, 2 * a.heads, 0.0f);
    const v16 log = tile.load_numbers(b.peaks + a.heads, 2 * a.heads, INFINITY);
    tile.load_lanes(a.q, a.depth, query);
    clear_lanes(sums, a.depth);
    tile.around(a.by_target, a.below, a.above, a.falling, [&](Others& others, int64_t start, const float* table, bool) {
        fetch<T>(a.v, tile.head, a.channels, space, others);
        dots(others, grad, a.channels, 1.0, ds);
        fetch<T>(a.k, tile.head, a.depth, space, others);
        dots(others, query, a.depth, a.scale, p);
        for (int j = 0; j < others.count; ++j) {
            const v16 bias = tile.bias(table, j), weight = exponential((p[j] + bias - peak) - log);
            const v16 through = dropout.on() ? ds[j] * tile.kept(dropout, others.entry[j], false) : ds[j];
            ds[j] = choose(bias == -INFINITY, v16{}, weight * (through - delta));
            if (grad_table) store(grad_table + start - j, load<v16>(grad_table + start - j) + ds[j]);
        }
        collect(tile, table, others, ds, a.depth, sums);
    });
    tile.store_lanes(sums, a.depth, splat<v16>(static_cast<float>(a.scale)), b.grad_q);
}

// Gradients of 16 keys and values.
template <class T> void key_tile(const Tile<T>& tile, const WindowBackwardArgs& b, const Dropout& dropout) {
    const WindowArgs& a = b.window;
    alignas(64) float key[16 * kWindowChannels], value[16 * kWindowChannels];
    alignas(64) float grad_k[16 * kWindowChannels], grad_v[16 * kWindowChannels], space[kRows * kWindowChannels];
    v16 p[kRows], ds[kRows];
    tile.load_lanes(a.k, a.depth, key);
    tile.load_lanes(a.v, a.channels, value);
    clear_lanes(grad_k, a.depth);
    clear_lanes(grad_v, a.channels);
    tile.around(a.by_source, a.above, a.below, a.rising, [&](Others& others, int64_t, const float* table, bool) {
        fetch<T>(a.q, tile.head, a.depth, space, others);
        dots(others, key, a.depth, a.scale, p);
        fetch<T>(b.grad, tile.head, a.channels, space, others);
        dots(others, value, a.channels, 1.0, ds);
        for (int j = 0; j < others.count; ++j) {
            const int64_t at = others.entry[j] * a.heads + tile.head;
            const float* peak = b.peaks + at + others.entry[j] * a.heads;
            const v16 bias = tile.bias(table, j), weight = exponential((p[j] + bias - peak[0]) - peak[a.heads]);
            const v16 factor = dropout.on() ? tile.kept(dropout, others.entry[j], true) : splat<v16>(1.0f);
            p[j] = choose(bias == -INFINITY, v16{}, weight * factor);
            ds[j] = choose(bias == -INFINITY, v16{}, weight * (factor * ds[j] - b.delta[at]));
        }
        collect(tile, table, others, p, a.channels, grad_v);
        fetch<T>(a.q, tile.head, a.depth, space, others);
        collect(tile, table, others, ds, a.depth, grad_k);
    });
    tile.store_lanes(grad_k, a.depth, splat<v16>(static_cast<float>(a.scale)), b.grad_k);
    tile.store_lanes(grad_v, a.channels, splat<v16>(1.0f), b.grad_v);
}

// body(tile, dropout, task) over all tiles; a task's tiles stay on one thread, and tasks do not depend on threads.
template <class T, class Body>
void for_tiles(const WindowArgs& a, const int64_t* own, const int64_t* others, const Body& body) {
    const int64_t spans = (a.size + kWindowSpan * a.step - 1) / (kWindowSpan * a.step), tasks = a.lines * a.step * spans;
    for_each(tasks * a.heads, a.threads, [&](int64_t task) {
        const int64_t head = task / tasks, span = task % spans, line = task % tasks / spans;
        const int64_t first = line % a.step, length = entries_of(a, own, line / a.step, first);
        const int64_t end = (span + 1) * kWindowSpan < length ? (span + 1) * kWindowSpan : length;
        const Dropout dropout(a.drop, head, 1);
        for (int64_t t = span * kWindowSpan; t < end; t += 16) {
            const int lanes = static_cast<int>(end - t < 16 ? end - t : 16);
            i16 present{};
            for (int i = 0; i < lanes; ++i) set_lane(present, i, -1);
            body(Tile<T>{a, own, others, head, line / a.step, first, a.step, t, lanes, present}, dropout, task);
        }
    });
}

template <class T> void forward(const WindowForwardArgs& f) {
    for_tiles<T>(f.window, f.window.outputs, f.window.inputs, [&](const Tile<T>& tile, const Dropout& dropout, int64_t) {
        forward_tile<T>(tile, f, dropout);
    });
}

template <class T> void backward(const WindowBackwardArgs& b) {
    const WindowArgs& a = b.window;
    for_tiles<T>(a, a.outputs, a.inputs, [&](const Tile<T>& tile, const Dropout& dropout, int64_t task) {
        query_tile<T>(tile, b, dropout, b.grad_table ? b.grad_table + task * a.table_size : nullptr);
    });
    for_tiles<T>(a, a.inputs, a.outputs, [&](const Tile<T>& tile, const Dropout& dropout, int64_t) {
        key_tile<T>(tile, b, dropout);
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(window_forward)(const structconv::WindowForwardArgs* args) {
    using namespace structconv::SC_ISA;
    if (args->window.half) forward<bfloat16>(*args);
    else forward<float>(*args);
}

SC_EXPORT(window_backward)(const structconv::WindowBackwardArgs* args) {
    using namespace structconv::SC_ISA;
    if (args->window.half) backward<bfloat16>(*args);
    else backward<float>(*args);
}
