// Dropout of a block of dense weights, and of their gradients in the same pass: the block (heads, rows, columns) holds
// the pairs of the input m = column and the output n = last_row - row, outputs in falling order.
#include "dropout.h"

#include "api.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

struct NumbersOfPairs {
    u16 steps;  // lane * num_outputs
    uint64_t outputs;

    explicit NumbersOfPairs(int64_t num_outputs) : outputs(static_cast<uint64_t>(num_outputs)) {
        for (int lane = 0; lane < 16; ++lane) set_lane(steps, lane, static_cast<uint32_t>(lane * outputs));
    }

    // fold(m num_outputs + n) for 16 inputs m in a row, from the first pair's number on.
    u16 from(uint64_t first) const {
        const uint64_t last = first + 15 * outputs;
        if (first >> 32 == last >> 32)
            return (static_cast<uint32_t>(first) + steps) ^ static_cast<uint32_t>(first >> 32) * kFirst;
        u16 found;
        for (int lane = 0; lane < 16; ++lane) set_lane(found, lane, fold(first + lane * outputs));
        return found;
    }
};

v16 load_some(const float* from, int64_t lanes) {
    if (lanes == 16) return load<v16>(from);
    v16 v{};
    std::memcpy(&v, from, static_cast<size_t>(lanes) * sizeof(float));
    return v;
}

void store_some(float* to, v16 v, int64_t lanes) {
    if (lanes == 16) store(to, v);
    else std::memcpy(to, &v, static_cast<size_t>(lanes) * sizeof(float));
}

void drop_row(const DropBlockArgs& a, const Dropout& dropout, const NumbersOfPairs& numbers, int64_t row, int64_t at) {
    const uint64_t output = static_cast<uint64_t>(a.last_row - row);
    for (int64_t m = 0; m < a.columns; m += 16) {
        const int64_t lanes = a.columns - m < 16 ? a.columns - m : 16;
        const v16 factor = dropout.factor(numbers.from(static_cast<uint64_t>(m) * numbers.outputs + output));
        store_some(a.dropped + at + m, load_some(a.weights + at + m, lanes) * factor, lanes);
        if (a.gradient) store_some(a.gradient + at + m, load_some(a.gradient + at + m, lanes) * factor, lanes);
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(drop_block)(const structconv::DropBlockArgs* args) {
    using namespace structconv::SC_ISA;
    const structconv::DropBlockArgs& a = *args;
    const NumbersOfPairs numbers(a.drop.num_outputs);
    const int64_t rows = a.heads * a.rows, team = rows * a.columns >= 1 << 15 ? a.threads : 1;
    for_each(rows, team, [&](int64_t i) {
        drop_row(a, Dropout(a.drop, a.first_head + i / a.rows, 1), numbers, i % a.rows, i * a.columns);
    }, 1 + rows / (8 * team));
}
