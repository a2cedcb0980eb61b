// Rows of groups that lie one after the other, each group as one row: channel by channel, sixteen at a time.
#include "api.h"
#include "lanes.h"

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
        case kMeanOf: return x.mean();
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
        default: return x.sum([](v16 v) { return v; });
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

// body(group) for all of them.
template <class Body> void for_groups(const PoolArgs& a, const Body& body) {
    const int team = a.threads > 1 && a.starts[a.groups] * a.channels >= kLeastNumbers ? static_cast<int>(a.threads) : 1;
#pragma omp parallel for schedule(dynamic, 64) num_threads(team) if (team > 1)
    for (int64_t g = 0; g < a.groups; ++g) body(g);
}

Column column(const PoolArgs& a, int64_t group, int64_t channel, int part) {
    const int64_t first = a.starts[group];
    return {a.x + first * a.channels + channel, a.starts[group + 1] - first, a.channels, part};
}

void forward(const PoolArgs& a) {
    for_groups(a, [&](int64_t g) {
        for_lanes(a.channels, [&](int64_t c, int part) {
            const Column x = column(a, g, c, part);
            put(a.out + g * a.channels + c, x.rows ? pooled(a, x) : v16{}, part);
        });
    });
}

// The gradient of a sum, or of a mean, as it is, row by row.
void repeat(const PoolArgs& a, int64_t group) {
    const int64_t rows = a.starts[group + 1] - a.starts[group];
    const float share = a.kind == kMeanOf ? 1.0f / static_cast<float>(rows) : 1.0f;
    for (int64_t r = a.starts[group]; r < a.starts[group + 1]; ++r)
        for_lanes(a.channels, [&](int64_t c, int part) {
            put(a.out + r * a.channels + c, lanes(a.grad + group * a.channels + c, part) * share, part);
        });
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

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(pool)(const structconv::PoolArgs* args) { structconv::SC_ISA::forward(*args); }

SC_EXPORT(pool_backward)(const structconv::PoolArgs* args) { structconv::SC_ISA::backward(*args); }
