// Rows of groups in any order: each group as one row, or the softmax of each channel over the rows of its group.
#include <cmath>
#include <vector>

#include "api.h"
#include "lanes.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kLeastNumbers = 1 << 18;  // for a second thread
constexpr int64_t kLeastChannels = 32;      // each thread has channels of its own, so that groups are added up in order

class Scatter {
  public:
    explicit Scatter(const ScatterArgs& a)
        : a(a), counts(a.kind == kMeanOf || a.kind == kMaxOf || a.kind == kMinOf ? a.groups : 0) {
        for (int64_t r = 0; r < (counts.empty() ? 0 : a.rows); ++r) counts[a.index[r]] += 1.0f;
    }

    void forward() {
        const bool soft = a.kind == kSoftmaxOf, least = a.kind == kMinOf;
        std::vector<float> peaks(soft ? a.groups * a.channels : 0);
        numbers.resize(peaks.size());
        float* const found = soft ? peaks.data() : a.out;
        split([&](int64_t from, int64_t to) {
            if (a.kind == kSumOf || a.kind == kMeanOf) {
                fill(found, 0.0f, from, to);
                add_to(found, from, to, [&](int64_t at, int64_t, int part) { return lanes(a.x + at, part); });
                if (a.kind == kMeanOf) each_group(from, to, [&](int64_t g, int64_t at, int part) {
                    put(found + at, lanes(found + at, part) / std::fmax(counts[g], 1.0f), part);
                });
                return;
            }
            fill(found, least ? INFINITY : -INFINITY, from, to);
            each_row(from, to, [&](int64_t at, int64_t to_group, int part) {  // a NaN stays
                const v16 v = lanes(a.x + at, part), best = lanes(found + to_group, part);
                put(found + to_group, choose(least ? v < best : v > best, v, choose(v == v, best, v)), part);
            });
            if (!soft) return each_group(from, to, [&](int64_t g, int64_t at, int part) {
                if (counts[g] == 0.0f) put(found + at, v16{}, part);
            });
            each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
                const v16 peak = lanes(found + to_group, part), none = v16{} - INFINITY;
                const v16 power = exponential(lanes(a.x + at, part) - choose(peak == none, v16{}, peak));
                put(a.out + at, power, part);
                put(&numbers[to_group], lanes(&numbers[to_group], part) + power, part);
            });
            each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
                const v16 total = lanes(&numbers[to_group], part);
                put(a.out + at, lanes(a.out + at, part) / choose(total == v16{}, v16{} + 1.0f, total), part);
            });
        });
    }

    // The gradient of x.
    void backward() {
        const bool even = a.kind == kSumOf || a.kind == kMeanOf;
        numbers.resize(even ? 0 : a.groups * a.channels);
        split([&](int64_t from, int64_t to) {
            const v16 one = v16{} + 1.0f;
            if (even)
                return each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
                    const float share = a.kind == kMeanOf ? 1.0f / counts[to_group / a.channels] : 1.0f;
                    put(a.out + at, lanes(a.grad + to_group, part) * share, part);
                });
            if (a.kind == kSoftmaxOf) {  // p (g - <p, g>), zero where p is
                const auto product = [&](int64_t at, int64_t, int part) {
                    const v16 p = lanes(a.y + at, part);
                    return choose(p == v16{}, v16{}, p * lanes(a.grad + at, part));
                };
                add_to(numbers.data(), from, to, product);
                return each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
                    const v16 p = lanes(a.y + at, part), g = lanes(a.grad + at, part) - lanes(&numbers[to_group], part);
                    put(a.out + at, choose(p == v16{}, v16{}, p * g), part);
                });
            }
            add_to(numbers.data(), from, to, [&](int64_t at, int64_t to_group, int part) {  // equal ones share it evenly
                return choose(lanes(a.x + at, part) == lanes(a.y + to_group, part), one, v16{});
            });
            each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
                const v16 y = lanes(a.y + to_group, part), share = lanes(a.grad + to_group, part) / lanes(&numbers[to_group], part);
                put(a.out + at, choose(lanes(a.x + at, part) == y, share, choose(y == y, v16{}, y)), part);
            });
        });
    }

  private:
    // body(from, to) for channels that one thread computes.
    template <class Body> void split(const Body& body) const {
        const bool large = a.threads > 1 && a.channels >= kLeastChannels && a.rows * a.channels >= kLeastNumbers;
        const int64_t blocks = (a.channels + 15) / 16, parts = large ? std::min(a.threads, blocks) : 1;
        for_each(parts, parts, [&](int64_t part) {
            body(blocks * part / parts * 16, std::min(blocks * (part + 1) / parts * 16, a.channels));
        });
    }
    // visit(number of x, number of its group, how many of 16) for these channels of all rows.
    template <class Visit> void each_row(int64_t from, int64_t to, const Visit& visit) const {
        for (int64_t r = 0; r < a.rows; ++r)
            for_lanes(to, [&](int64_t c, int part) { visit(r * a.channels + c, a.index[r] * a.channels + c, part); }, from);
    }
    // visit(group, its number, how many of 16).
    template <class Visit> void each_group(int64_t from, int64_t to, const Visit& visit) const {
        for (int64_t g = 0; g < a.groups; ++g)
            for_lanes(to, [&](int64_t c, int part) { visit(g, g * a.channels + c, part); }, from);
    }
    void fill(float* of, float value, int64_t from, int64_t to) const {
        each_group(from, to, [&](int64_t, int64_t at, int part) { put(of + at, v16{} + value, part); });
    }
    template <class Of> void add_to(float* sums, int64_t from, int64_t to, const Of& of) const {
        each_row(from, to, [&](int64_t at, int64_t to_group, int part) {
            put(sums + to_group, lanes(sums + to_group, part) + of(at, to_group, part), part);
        });
    }

    const ScatterArgs& a;
    std::vector<float> numbers;  // of each channel of each group, from zero
    std::vector<float> counts;   // rows of each group
};

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(scatter)(const structconv::ScatterArgs* args) { structconv::SC_ISA::Scatter(*args).forward(); }

SC_EXPORT(scatter_backward)(const structconv::ScatterArgs* args) { structconv::SC_ISA::Scatter(*args).backward(); }
