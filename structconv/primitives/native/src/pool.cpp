// Rows of groups that lie one after the other: each group as one row, or its rows standardized; sixteen channels at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "api.h"
#include "lanes.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kLeastNumbers = 1 << 18;  // for a second thread
constexpr int64_t kChain = 256;             // terms that are added one after the other

// The rows of one group at sixteen channels.
struct Column {
    const float* x;
    int64_t rows, row;
    int part;

    v16 at(int64_t r) const { return lanes(x + r * row, part); }
    template <class Of> v16 sum(const Of& of) const {
        v16 found{};
        for (int64_t r = 0; r < rows;) {
            v16 some{};
            for (const int64_t end = r + kChain < rows ? r + kChain : rows; r < end; ++r) some += of(at(r));
            found += some;
        }
        return found;
    }
    v16 mean() const {
        return sum([](v16 v) { return v; }) / static_cast<float>(rows);
    }
    // The greatest of the rows by a factor; a NaN stays.
    v16 most(float factor) const {
        v16 found = at(0) * factor;
        for (int64_t r = 1; r < rows; ++r) {
            const v16 v = at(r) * factor;
            found = choose(v > found, v, choose(v == v, found, v));
        }
        return found;
    }
};

v16 pooled(const PoolArgs& a, const Column& x) {
    const float t = static_cast<float>(a.t);
    switch (a.kind) {
        case kMaxOf: return x.most(1.0f);
        case kMinOf: return x.most(-1.0f) * -1.0f;
        case kVarOf: {
            const v16 mean = x.mean();
            return x.sum([&](v16 v) { return (v - mean) * (v - mean); }) / static_cast<float>(x.rows);
        }
        case kSoftmaxOf: case kFixedSoftmaxOf: {
            const v16 most = x.most(t);
            v16 total{}, sum{};
            for (int64_t r = 0; r < x.rows; ++r) {
                const v16 v = x.at(r), weight = exponential(v * t - most);
                total += weight, sum += weight * v;
            }
            return sum / total;
        }
        default: return v16{};
    }
}

// put(row, the gradient of that row), from the result y of the group and its gradient.
template <class Put> void spread(const PoolArgs& a, const Column& x, v16 y, v16 grad, const Put& put) {
    const float count = static_cast<float>(x.rows), t = static_cast<float>(a.t);
    const auto each = [&](const auto& of) {
        for (int64_t r = 0; r < x.rows; ++r) put(r, of(r));
    };
    switch (a.kind) {
        case kMaxOf: case kMinOf: {  // equal ones share it evenly
            const v16 one = v16{} + 1.0f;
            const v16 alike = x.sum([&](v16 v) { return choose(v == y, one, v16{}); });
            const v16 share = grad / alike, others = choose(y == y, v16{}, y);  // a NaN is not hidden
            return each([&](int64_t r) { return choose(x.at(r) == y, share, others); });
        }
        case kVarOf: {
            const v16 mean = x.mean(), share = grad * (2.0f / count);
            return each([&](int64_t r) { return (x.at(r) - mean) * share; });
        }
        case kSoftmaxOf: case kFixedSoftmaxOf: {
            const v16 most = x.most(t), share = grad / x.sum([&](v16 v) { return exponential(v * t - most); });
            return each([&](int64_t r) {
                const v16 v = x.at(r), own = exponential(v * t - most) * share;
                return a.kind == kSoftmaxOf ? own * ((v - y) * t + 1.0f) : own;
            });
        }
        default: return;
    }
}

template <class Args> int team_of(const Args& a) {
    return a.threads > 1 && a.starts[a.groups] * a.channels >= kLeastNumbers ? static_cast<int>(a.threads) : 1;
}

// body(group) for all of them.
template <class Body> void for_groups(const PoolArgs& a, const Body& body) {
    for_each(a.groups, team_of(a), body, 64);
}

template <class Args> Column column(const Args& a, int64_t group, int64_t channel, int part) {
    const int64_t first = a.starts[group];
    return {a.x + first * a.channels + channel, a.starts[group + 1] - first, a.channels, part};
}

// A sum, or a mean, of up to 64 channels at a time: memory is read in longer pieces.
void add_up(const PoolArgs& a, int64_t group) {
    const int64_t first = a.starts[group], last = a.starts[group + 1];
    const float count = a.kind == kMeanOf && first < last ? static_cast<float>(last - first) : 1.0f;
    for_columns(a.channels, [&](auto vectors, int64_t c) {
        constexpr int n = decltype(vectors)::value;
        const int part = n == 1 && a.channels - c < 16 ? static_cast<int>(a.channels - c) : 16;
        v16 found[n] = {};
        for (int64_t r = first; r < last;) {
            v16 some[n] = {};
            for (const int64_t end = std::min(r + kChain, last); r < end; ++r)
                for (int v = 0; v < n; ++v) some[v] += lanes(a.x + r * a.channels + c + 16 * v, part);
            for (int v = 0; v < n; ++v) found[v] += some[v];
        }
        for (int v = 0; v < n; ++v) put(a.out + group * a.channels + c + 16 * v, found[v] / count, part);
    });
}

void forward(const PoolArgs& a) {
    for_groups(a, [&](int64_t g) {
        if (a.kind == kSumOf || a.kind == kMeanOf) return add_up(a, g);
        for_lanes(a.channels, [&](int64_t c, int part) {
            const Column x = column(a, g, c, part);
            put(a.out + g * a.channels + c, x.rows ? pooled(a, x) : v16{}, part);
        });
    });
}

// The gradient of a sum, or of a mean: equal rows.
void repeat(const PoolArgs& a, int64_t group) {
    const int64_t rows = a.starts[group + 1] - a.starts[group];
    if (!rows) return;
    const float share = a.kind == kMeanOf ? 1.0f / static_cast<float>(rows) : 1.0f;
    float* first = a.out + a.starts[group] * a.channels;
    for_lanes(a.channels, [&](int64_t c, int part) {
        put(first + c, lanes(a.grad + group * a.channels + c, part) * share, part);
    });
    for (int64_t r = 1; r < rows; ++r) std::copy_n(first, a.channels, first + r * a.channels);
}

void backward(const PoolArgs& a) {
    for_groups(a, [&](int64_t g) {
        if (a.kind == kSumOf || a.kind == kMeanOf) return repeat(a, g);
        for_lanes(a.channels, [&](int64_t c, int part) {
            const int64_t at = g * a.channels + c;
            spread(a, column(a, g, c, part), lanes(a.y + at, part), lanes(a.grad + at, part), [&](int64_t r, v16 v) {
                put(a.out + (a.starts[g] + r) * a.channels + c, v, part);
            });
        });
    });
}

// -- standardized rows ---------------------------------------------------------------------------------------------

// Numbers of one group, one for each channel.
class Standard {
  public:
    explicit Standard(const NormArgs& a)
        : a(a), numbers(6 * a.channels), mean(numbers.data()), scale(mean + a.channels), factor(scale + a.channels),
          pull(factor + a.channels), held(pull + a.channels), of_grad(held + a.channels) {}

    void forward(int64_t group) {
        if (!find(group)) return;
        for_lanes(a.channels, [&](int64_t c, int part) {
            const v16 m = shifted(c, part), k = lanes(factor + c, part), b = a.bias ? lanes(a.bias + c, part) : v16{};
            for (int64_t r = a.starts[group]; r < a.starts[group + 1]; ++r) {
                const int64_t at = r * a.channels + c;
                put(a.out + at, (lanes(a.x + at, part) - m) * k + b, part);
            }
        });
    }

    // With u = x - shift mean: the gradient of x is factor g - pull u - held.
    void backward(int64_t group, float* sums) {
        if (!find(group)) return;
        const float count = static_cast<float>(rows);
        for_lanes(a.channels, [&](int64_t c, int part) {
            const v16 m = shifted(c, part);
            v16 g{}, gu{};
            for (int64_t r = a.starts[group]; r < a.starts[group + 1];) {
                v16 some{}, some_u{};
                for (const int64_t end = std::min(r + kChain, a.starts[group + 1]); r < end; ++r) {
                    const v16 v = lanes(a.grad + r * a.channels + c, part);
                    some += v, some_u += v * (lanes(a.x + r * a.channels + c, part) - m);
                }
                g += some, gu += some_u;
            }
            put(of_grad + c, g, part), put(pull + c, gu, part);
        });
        for (int64_t c = 0; c < a.channels; ++c) {
            sums[a.channels + c] += static_cast<float>(a.gain) * scale[c] * pull[c];
            sums[2 * a.channels + c] += of_grad[c];
            pull[c] *= a.scale == kNoScale ? 0.0f : factor[c] * scale[c] * scale[c] / count;
        }
        if (a.scale == kWholeScale) average(pull);
        for (int64_t c = 0; c < a.channels; ++c) {
            const float shift = a.shift ? a.shift[c] : 1.0f;
            const float of_u = factor[c] * of_grad[c] - pull[c] * count * mean[c] * (1.0f - shift);
            sums[c] -= mean[c] * of_u;
            held[c] = shift * of_u / count;
        }
        if (a.center == kWholeMean) average(held);
        for_lanes(a.channels, [&](int64_t c, int part) {
            const v16 m = shifted(c, part), k = lanes(factor + c, part), p = lanes(pull + c, part), h = lanes(held + c, part);
            for (int64_t r = a.starts[group]; r < a.starts[group + 1]; ++r) {
                const int64_t at = r * a.channels + c;
                put(a.out + at, lanes(a.grad + at, part) * k - (lanes(a.x + at, part) - m) * p - h, part);
            }
        });
    }

  private:
    // The mean, the scale and gain weight scale; false for a group without rows.
    bool find(int64_t group) {
        rows = a.starts[group + 1] - a.starts[group];
        if (!rows) return false;
        const auto for_columns_of = [&](float* to, const auto& of) {
            for_lanes(a.channels, [&](int64_t c, int part) { put(to + c, of(column(a, group, c, part), c, part), part); });
        };
        for_columns_of(mean, [](const Column& x, int64_t, int) { return x.mean(); });
        if (a.center == kWholeMean) average(mean);
        if (a.scale != kNoScale)
            for_columns_of(scale, [&](const Column& x, int64_t c, int part) {
                const v16 m = shifted(c, part);
                return x.sum([&](v16 v) { return (v - m) * (v - m); }) / static_cast<float>(rows);
            });
        if (a.scale == kWholeScale) average(scale);
        const float eps = static_cast<float>(a.eps), gain = static_cast<float>(a.gain);
        for (int64_t c = 0; c < a.channels; ++c) {
            scale[c] = a.scale == kNoScale ? 1.0f : 1.0f / std::sqrt(scale[c] + eps);
            factor[c] = gain * scale[c] * (a.weight ? a.weight[c] : 1.0f);
        }
        return true;
    }
    v16 shifted(int64_t c, int part) const {
        const v16 m = lanes(mean + c, part);
        return a.shift ? m * lanes(a.shift + c, part) : m;
    }
    void average(float* of) const {
        float sum = 0.0f;
        for (int64_t c = 0; c < a.channels; ++c) sum += of[c];
        std::fill(of, of + a.channels, sum / static_cast<float>(a.channels));
    }

    const NormArgs& a;
    std::vector<float> numbers;
    float *mean, *scale, *factor, *pull, *held, *of_grad;
    int64_t rows = 0;
};

// body(standard, group, part) for all groups.
template <class Body> void standardize(const NormArgs& a, const Body& body) {
    const int64_t parts = a.parts();
    in_team(team_of(a), [&](const Team& threads) {
        Standard standard(a);
        threads.each(parts, [&](int64_t part) {
            for (int64_t g = a.groups * part / parts; g < a.groups * (part + 1) / parts; ++g) body(standard, g, part);
        });
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(pool)(const structconv::PoolArgs* args) { structconv::SC_ISA::forward(*args); }

SC_EXPORT(pool_backward)(const structconv::PoolArgs* args) { structconv::SC_ISA::backward(*args); }

SC_EXPORT(norm)(const structconv::NormArgs* args) {
    structconv::SC_ISA::standardize(*args, [](auto& standard, int64_t group, int64_t) { standard.forward(group); });
}

SC_EXPORT(norm_backward)(const structconv::NormArgs* args) {
    const auto sums = [&](int64_t part) { return args->sums + part * 3 * args->channels; };
    structconv::SC_ISA::standardize(*args, [&](auto& standard, int64_t group, int64_t part) {
        standard.backward(group, sums(part));
    });
}
