// Convolutions of images with kernels of few numbers. What the entries of a kernel read is copied into a panel, a row for
// each channel and entry, a column for each output; then tiles of y, or of the gradient of w, are products with it.
#include <type_traits>
#include <vector>

#include "api.h"
#include "lanes.h"
#include "parallel.h"
#include "tile.h"

namespace structconv::SC_ISA {
namespace {

constexpr int kColumns = 256;             // outputs whose panel the gradient of w reads at a time
constexpr int64_t kLeastWork = 1 << 21;  // products of numbers for a second thread

int64_t numbers(const int64_t (&sizes)[3]) { return sizes[0] * sizes[1] * sizes[2]; }

// Where an entry of the kernel reads for 16 outputs: lanes of `mask`, which lie in a row from `first` on if `alike`.
struct Sixteen {
    uint32_t mask;
    bool alike;
    int32_t first, at[16];
};

// What the entries of the kernel read for consecutive outputs.
class Reader {
  public:
    explicit Reader(const ImageArgs& a, int vectors) : a(a), vectors(vectors), entries(numbers(a.kernel)),
                                                     in_rows(a.multiple[2] == 1 && a.divisor[2] == 1) {
        places.resize(entries * vectors);
        for (int axis = 0; axis < 3; ++axis) {
            positions[axis].resize(a.kernel[axis] * a.to[axis]);
            for (int64_t k = 0, at = 0; k < a.kernel[axis]; ++k)
                for (int64_t o = 0; o < a.to[axis]; ++o, ++at) {
                    const int64_t place = o * a.multiple[axis] + k * a.step[axis] + a.shift[axis];
                    const bool exists = place >= 0 && place % a.divisor[axis] == 0 && place / a.divisor[axis] < a.from[axis];
                    positions[axis][at] = exists ? static_cast<int32_t>(place / a.divisor[axis]) : -1;
                }
        }
    }

    // Outputs from this one on.
    void move(int64_t output) {
        const int64_t all = numbers(a.to), end = output + 16 * vectors < all ? output + 16 * vectors : all;
        for (Sixteen& s : places) s.mask = 0, s.alike = true, s.first = 0;
        for (int64_t o = output; o < end;) {  // the rest of a row
            const int64_t row = o / a.to[2], o2 = o % a.to[2], o1 = row % a.to[1], o0 = row / a.to[1];
            const int64_t last = o + a.to[2] - o2 < end ? o + a.to[2] - o2 : end;
            Sixteen* s = places.data();
            for (int64_t k0 = 0; k0 < a.kernel[0]; ++k0)
                for (int64_t k1 = 0; k1 < a.kernel[1]; ++k1) {
                    const int32_t p0 = positions[0][k0 * a.to[0] + o0], p1 = positions[1][k1 * a.to[1] + o1];
                    if (p0 < 0 || p1 < 0) {
                        s += a.kernel[2] * vectors;
                        continue;
                    }
                    const int32_t base = static_cast<int32_t>((p0 * a.from[1] + p1) * a.from[2]);
                    for (int64_t k2 = 0; k2 < a.kernel[2]; ++k2, s += vectors)
                        enter(s, base, positions[2].data() + k2 * a.to[2] + o2, static_cast<int>(o - output),
                              static_cast<int>(last - output));
                }
            o = last;
        }
    }

    // What the entries read of a channel, in rows of the panel `row` apart.
    void copy(const float* x, float* panel, int64_t row) const {
        const Sixteen* s = places.data();
        for (int64_t k = 0; k < entries; ++k)
            for (int v = 0; v < vectors; ++v, ++s) {
                float* to = panel + k * row + 16 * v;
                if (s->alike) store(to, load_lanes(x + s->first, s->mask));
                else
                    for (int lane = 0; lane < 16; ++lane) to[lane] = s->mask >> lane & 1 ? x[s->at[lane]] : 0.0f;
            }
    }

  private:
    // Lanes of the rest of a row, which read at `base` plus these positions along the last axis.
    void enter(Sixteen* s, int32_t base, const int32_t* position, int lane, int last) const {
        while (lane < last && *position < 0) ++lane, ++position;
        while (lane < last && position[last - lane - 1] < 0) --last;
        while (lane < last) {
            const int begin = lane & 15, count = last - lane < 16 - begin ? last - lane : 16 - begin;
            enter_sixteen(s[lane >> 4], base, position, begin, count);
            lane += count, position += count;
        }
    }

    void enter_sixteen(Sixteen& s, int32_t base, const int32_t* position, int lane, int count) const {
        const int32_t first = base + *position - lane;
        if (!s.mask) s.first = first;
        if (s.alike && in_rows && s.first == first) {
            s.mask |= ((1u << count) - 1) << lane;
            return;
        }
        if (s.alike)
            for (int i = 0; i < 16; ++i) s.at[i] = s.first + i;
        s.alike = false;
        for (int i = lane; i < lane + count; ++i, ++position)
            if (*position >= 0) s.at[i] = base + *position, s.mask |= 1u << i;
    }

    const ImageArgs& a;
    int vectors;
    int64_t entries;
    bool in_rows;  // neighbors along the last axis read neighbors
    std::vector<Sixteen> places;
    std::vector<int32_t> positions[3];
};

// w as tiles read it: for the rows of a tile, next to each other, all terms.
std::vector<float> packed(const ImageArgs& a) {
    const int64_t entries = numbers(a.kernel);
    std::vector<float> all(a.groups * a.outputs * a.inputs * entries);
    float* to = all.data();
    for (int64_t group = 0; group < a.groups; ++group)
        for (int64_t d = 0; d < a.outputs;)
            d += next_rows(a.outputs - d, [&](auto height) {
                for (int64_t c = 0; c < a.inputs; ++c)
                    for (int64_t k = 0; k < entries; ++k)
                        for (int r = 0; r < height(); ++r)
                            *to++ = a.w[group * a.w_group + (d + r) * a.w_output + c * a.w_input + k];
            });
    return all;
}

// The outputs of all channels and images at these columns.
template <class Columns>
void forward_block(const ImageArgs& a, Columns, const Reader& reader, int64_t column, const float* w, float* panel) {
    typedef typename Columns::Vector V;
    const int64_t entries = numbers(a.kernel), terms = a.inputs * entries, from = numbers(a.from), to = numbers(a.to);
    const int64_t left = to - column;
    for (int64_t batch = 0; batch < a.batch; ++batch)
        for (int64_t group = 0; group < a.groups; ++group) {
            const float *x = a.x + (batch * a.groups + group) * a.inputs * from, *rows = w + group * a.outputs * terms;
            float* y = a.y + (batch * a.groups + group) * a.outputs * to + column;
            for (int64_t c = 0; c < a.inputs; ++c) reader.copy(x + c * from, panel + c * entries * 2 * kLanes, 2 * kLanes);
            for (int64_t d = 0; d < a.outputs;)
                d += next_rows(a.outputs - d, [&](auto height) {
                    constexpr int R = height();
                    Tile<V, R, Columns::vectors> tile;
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r)
                        for (int n = 0; n < Columns::vectors; ++n)
                            tile.at[r][n] = splat<V>(a.bias ? a.bias[group * a.outputs + d + r] : 0.0f);
                    for (int64_t j = 0; j < terms; ++j, rows += R)
                        tile.add([&](int r) { return rows[r]; }, panel + j * 2 * kLanes);
                    tile.put([&](int r, int n, V v) {
                        const int64_t part = left - n < Lanes<V>::count ? left - n : Lanes<V>::count;
                        if (part == Lanes<V>::count) store(y + (d + r) * to + n, v);
                        else if (part > 0) store_part(y + (d + r) * to + n, v, static_cast<int>(part));
                    });
                });
        }
}

void forward(const ImageArgs& a) {
    *a.finite = all_finite(a.w, a.groups * a.outputs * a.inputs * numbers(a.kernel));
    if (!*a.finite) return;
    const int64_t terms = a.inputs * numbers(a.kernel), to = numbers(a.to), width = 2 * kLanes;
    const int64_t blocks = (to + width - 1) / width;
    const std::vector<float> w = packed(a);
    const int team = a.threads > 1 && a.batch * a.groups * a.outputs * terms * to >= kLeastWork ? static_cast<int>(a.threads) : 1;
    in_team(team, [&](const Team& threads) {
        Reader reader(a, static_cast<int>(width / 16));
        std::vector<float> panel(terms * width);
        threads.each(blocks, [&](int64_t block) {
            reader.move(block * width);
            next_columns(to - block * width, [&](auto columns) {
                forward_block(a, columns, reader, block * width, w.data(), panel.data());
            });
        });
    });
}

// Four entries of R rows of the gradient of w, from `count` columns of the gradient of y and of the panel.
template <int R>
void weight_tile(const float* const (&grad)[R], const float* panel, int64_t row, int count, v4 (&sums)[R]) {
    v16 at[R][4] = {};
    const auto step = [&](int column, int part) {
        v16 own[4];
        for (int j = 0; j < 4; ++j) own[j] = load<v16>(panel + j * row + column);
        for (int r = 0; r < R; ++r) {
            const v16 g = lanes(grad[r] + column, part);
            for (int j = 0; j < 4; ++j) at[r][j] += g * own[j];
        }
    };
    int column = 0;
    for (; column + 16 <= count; column += 16) step(column, 16);
    if (column < count) step(column, count - column);
    for (int r = 0; r < R; ++r) sums[r] = totals(at[r][0], at[r][1], at[r][2], at[r][3]);
}

// The gradient of w for input channels [first, last) of each group.
void weight_part(const ImageWeightArgs& w, int64_t first, int64_t last) {
    constexpr int R = kLanes > 8 ? 4 : 2;
    const ImageArgs& a = w.image;
    const int64_t entries = numbers(a.kernel), from = numbers(a.from), to = numbers(a.to), terms = (last - first) * entries;
    const int64_t columns = to < kColumns ? (to + 15) / 16 * 16 : kColumns;
    Reader reader(a, static_cast<int>(columns / 16));
    std::vector<float> panel((terms + 3) / 4 * 4 * columns);
    for (int64_t column = 0; column < to; column += columns) {
        const int count = static_cast<int>(to - column < columns ? to - column : columns);
        reader.move(column);
        for (int64_t batch = 0; batch < a.batch; ++batch)
            for (int64_t group = 0; group < a.groups; ++group) {
                const int64_t image = batch * a.groups + group;
                for (int64_t c = first; c < last; ++c)
                    reader.copy(a.x + (image * a.inputs + c) * from, panel.data() + (c - first) * entries * columns, columns);
                for (int64_t d = 0; d < a.outputs; d += R) {
                    const float* rows[R];
                    for (int r = 0; r < R; ++r)
                        rows[r] = w.grad + (image * a.outputs + (d + r < a.outputs ? d + r : d)) * to + column;
                    for (int64_t j = 0; j < terms; j += 4) {
                        v4 sums[R];
                        weight_tile<R>(rows, panel.data() + j * columns, columns, count, sums);
                        for (int r = 0; r < R && d + r < a.outputs; ++r) {
                            float* y = w.grad_w + ((group * a.outputs + d + r) * a.inputs + first) * entries + j;
                            for (int i = 0; i < 4 && j + i < terms; ++i) y[i] += sums[r][i];
                        }
                    }
                }
            }
    }
}

void backward(const ImageWeightArgs& w) {
    const ImageArgs& a = w.image;
    const int64_t to = numbers(a.to), outputs = a.groups * a.outputs;
    *a.finite = all_finite(w.grad, a.batch * outputs * to);
    if (!*a.finite) return;
    const int team = a.threads > 1 && a.batch * outputs * a.inputs * numbers(a.kernel) * to >= kLeastWork
                         ? static_cast<int>(a.threads < a.inputs ? a.threads : a.inputs) : 1;
    for_each(team, team, [&](int64_t part) { weight_part(w, a.inputs * part / team, a.inputs * (part + 1) / team); });
    if (!w.grad_bias) return;
    for (int64_t batch = 0; batch < a.batch; ++batch)
        for (int64_t d = 0; d < outputs; ++d) {
            v16 sum{};
            for_lanes(to, [&](int64_t o, int part) { sum += lanes(w.grad + (batch * outputs + d) * to + o, part); });
            w.grad_bias[d] += total(sum);
        }
}

// -- means over windows -------------------------------------------------------------------------------------------------

// Entries of the window of output o that lie within the image: [first, last).
struct Span {
    int64_t first, last;

    Span(const MeansArgs& a, int axis, int64_t o) {
        const int64_t start = o * a.stride[axis] - a.padding[axis];
        first = start > 0 ? start : 0, last = start + a.size[axis] < a.from[axis] ? start + a.size[axis] : a.from[axis];
    }
    int64_t count() const { return last - first; }
};

// body(stride) with the usual ones as constants, so that loops over outputs become vectors.
template <class Body> void by_stride(int64_t stride, const Body& body) {
    if (stride == 1) body(std::integral_constant<int64_t, 1>());
    else if (stride == 2) body(std::integral_constant<int64_t, 2>());
    else body(stride);
}

// Some processors do not foresee reads of parts of vectors: they are asked for so many numbers ahead.
constexpr int64_t kAhead = 1024;

inline v8 some(const float* from, int part) { return part == 8 ? load<v8>(from) : load_part<v8>(from, part); }
inline void put_some(float* to, v8 v, int part) { part == 8 ? store(to, v) : store_part(to, v, part); }

// The sums of so many pairs of neighbors, and numbers twice each.
inline v8 sums_of_pairs(const float* from, int pairs) {
    __builtin_prefetch(from + kAhead);
    const v8 a = some(from, pairs < 4 ? 2 * pairs : 8), b = pairs > 4 ? some(from + 8, 2 * (pairs - 4)) : v8{};
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}

inline void add_twice(float* to, v8 v, int pairs) {
    const auto add = [&](float* at, v8 twice, int part) { put_some(at, some(at, part) + twice, part); };
    add(to, __builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3), 2 * (pairs < 4 ? pairs : 4));
    if (pairs > 4) add(to + 8, __builtin_shufflevector(v, v, 4, 4, 5, 5, 6, 6, 7, 7), 2 * (pairs - 4));
}

// One plane. Rows are added up over the other axes; `row` has zeros for what lies beyond the image.
template <bool backward> void means_of_plane(const MeansArgs& a, const float* x, float* y, float* row, const float* shares) {
    const int64_t width = (a.to[2] - 1) * a.stride[2] + a.size[2], inner = width - a.padding[2];
    const int64_t filled = inner < a.from[2] ? inner : a.from[2];
    const bool in_pairs = a.size[2] == 2 && a.stride[2] == 2 && !a.padding[2];
    float* own = row + a.padding[2];
    for (int64_t o0 = 0; o0 < a.to[0]; ++o0)
        for (int64_t o1 = 0; o1 < a.to[1]; ++o1) {
            const Span s0(a, 0, o0), s1(a, 1, o1);
            const int64_t at = (o0 * a.to[1] + o1) * a.to[2];
            const float share = 1.0f / static_cast<float>(a.all_count ? a.size[0] * a.size[1] : s0.count() * s1.count());
            const auto rows = [&](const auto& visit) {
                for (int64_t i0 = s0.first; i0 < s0.last; ++i0)
                    for (int64_t i1 = s1.first; i1 < s1.last; ++i1) visit((i0 * a.from[1] + i1) * a.from[2]);
            };
            if (in_pairs) {
                for (int64_t o = 0; o < a.to[2]; o += 8) {
                    const int part = static_cast<int>(a.to[2] - o < 8 ? a.to[2] - o : 8);
                    if constexpr (!backward) {
                        v8 sum{};
                        rows([&](int64_t from) { sum += sums_of_pairs(x + from + 2 * o, part); });
                        put_some(y + at + o, sum * (0.5f * share), part);
                    } else {
                        const v8 grad = some(x + at + o, part) * (0.5f * share);
                        rows([&](int64_t to) { add_twice(y + to + 2 * o, grad, part); });
                    }
                }
                continue;
            }
            by_stride(a.stride[2], [&](auto step) {
                const int64_t stride = step;
                if constexpr (!backward) {
                    for (int64_t c = 0; c < filled; ++c) own[c] = 0.0f;
                    rows([&](int64_t from) {
                        for (int64_t c = 0; c < filled; ++c) own[c] += x[from + c];
                    });
                    float* sums = y + at;
                    for (int64_t o = 0; o < a.to[2]; ++o) sums[o] = row[o * stride];
                    for (int64_t i = 1; i < a.size[2]; ++i)
                        for (int64_t o = 0; o < a.to[2]; ++o) sums[o] += row[o * stride + i];
                    for (int64_t o = 0; o < a.to[2]; ++o) sums[o] *= share * shares[o];
                } else {
                    const float* grad = x + at;
                    for (int64_t c = 0; c < width; ++c) row[c] = 0.0f;
                    for (int64_t i = 0; i < a.size[2]; ++i)
                        for (int64_t o = 0; o < a.to[2]; ++o) row[o * stride + i] += share * shares[o] * grad[o];
                    rows([&](int64_t to) {
                        for (int64_t c = 0; c < filled; ++c) y[to + c] += own[c];
                    });
                }
            });
        }
}

template <bool backward> void means(const MeansArgs& a) {
    const int64_t from = numbers(a.from), to = numbers(a.to);
    std::vector<float> shares(a.to[2]);
    for (int64_t o = 0; o < a.to[2]; ++o) shares[o] = 1.0f / static_cast<float>(a.all_count ? a.size[2] : Span(a, 2, o).count());
    const int team = a.threads > 1 && a.planes * (from + to * numbers(a.size)) >= kLeastWork ? static_cast<int>(a.threads) : 1;
    in_team(team, [&](const Team& threads) {
        std::vector<float> row((a.to[2] - 1) * a.stride[2] + a.size[2]);
        threads.each(a.planes, [&](int64_t plane) {
            means_of_plane<backward>(a, a.x + plane * (backward ? to : from), a.y + plane * (backward ? from : to), row.data(),
                                 shares.data());
        }, 1 + a.planes / (8 * team));
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(window_means)(const structconv::MeansArgs* args) { structconv::SC_ISA::means<false>(*args); }

SC_EXPORT(window_means_backward)(const structconv::MeansArgs* args) { structconv::SC_ISA::means<true>(*args); }

SC_EXPORT(images)(const structconv::ImageArgs* args) { structconv::SC_ISA::forward(*args); }

SC_EXPORT(images_backward)(const structconv::ImageWeightArgs* args) { structconv::SC_ISA::backward(*args); }
