// Sums over edges with a number for each of several heads, and their adjoint, for a block of heads that stays within the
// cache while it is multiplied with its filters.
#include "api.h"
#include "lanes.h"
#include "parallel.h"


namespace structconv::SC_ISA {
namespace {

// to += w from, over one row of channels.
inline void add(float* to, float w, const float* from, int64_t channels) {
    for_lanes(channels, [&](int64_t c, int part) { put(to + c, lanes(to + c, part) + w * lanes(from + c, part), part); });
}

void sums(const ConditionedArgs& a, int64_t first, int64_t last) {
    const int64_t wide = a.heads * a.channels;
    if (wide == 0) return;
    for (int64_t row = first; row < last; ++row) {
        float* to = a.sums + row * wide;
        std::memset(to, 0, wide * sizeof(float));
        for (int64_t slot = a.layout.indptr[row]; slot < a.layout.indptr[row + 1]; ++slot) {
            const float* values = a.values + a.layout.order[slot] * a.values_row;
            const float* x = a.x + a.layout.index[slot] * a.channels;
            for (int64_t head = 0; head < a.heads; ++head) add(to + head * a.channels, values[head], x, a.channels);
        }
    }
}

// Rows are inputs here, and an input's edges lead to the outputs whose gradients they read.
void adjoint(const ConditionedArgs& a, int64_t first, int64_t last) {
    const int64_t wide = a.heads * a.channels;
    for (int64_t row = first; row < last; ++row) {
        const float* x = a.x + row * a.channels;
        for (int64_t slot = a.layout.indptr[row]; slot < a.layout.indptr[row + 1]; ++slot) {
            const int64_t edge = a.layout.order[slot] * a.values_row;
            const float* grad = a.sums + a.layout.index[slot] * wide;
            for (int64_t head = 0; head < a.heads; ++head, grad += a.channels) {
                if (a.grad_values) a.grad_values[edge + head] = dot(x, grad, a.channels);
                if (a.grad_x) add(a.grad_x + row * a.channels, a.values[edge + head], grad, a.channels);
            }
        }
    }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(conditioned_sums)(const structconv::ConditionedArgs* args) {
    using namespace structconv::SC_ISA;
    const structconv::ConditionedArgs& a = *args;
    parallel_rows(a.layout.indptr, a.layout.rows, a.heads * a.channels * int64_t{sizeof(float)}, a.threads,
                  [&](int64_t first, int64_t last) { sums(a, first, last); });
}

SC_EXPORT(conditioned_adjoint)(const structconv::ConditionedArgs* args) {
    using namespace structconv::SC_ISA;
    const structconv::ConditionedArgs& a = *args;
    parallel_rows(a.layout.indptr, a.layout.rows, a.heads * a.channels * int64_t{sizeof(float)}, a.threads,
                  [&](int64_t first, int64_t last) { adjoint(a, first, last); });
}
