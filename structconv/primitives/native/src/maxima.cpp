// y[n][c] = the largest x[m][c] over the edges m -> n, zero without any; equal ones share the gradient evenly.
#include "api.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

void forward(const MaximaArgs& a) {
    const int64_t channels = a.channels;
    parallel_rows(a.by_target.indptr, a.by_target.rows, 4 * channels, a.threads, [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
            float* y = a.y + n * channels;
            const int64_t start = a.by_target.indptr[n], stop = a.by_target.indptr[n + 1];
            const float* row = start < stop ? a.x + a.by_target.index[start] * channels : nullptr;
            for (int64_t c = 0; c < channels; ++c) y[c] = row ? row[c] : 0.0f;
            for (int64_t slot = start + 1; slot < stop; ++slot) {
                const float* x = a.x + a.by_target.index[slot] * channels;
                for (int64_t c = 0; c < channels; ++c) y[c] = (x[c] > y[c] || x[c] != x[c]) ? x[c] : y[c];
            }
        }
    });
}

// The gradient of y by the number of inputs that reach it, then for each input its shares.
void backward(const MaximaArgs& a) {
    const int64_t channels = a.channels;
    parallel_rows(a.by_target.indptr, a.by_target.rows, 4 * channels, a.threads, [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n) {
            const float *y = a.y + n * channels, *grad = a.grad + n * channels;
            float* share = a.shares + n * channels;
            for (int64_t c = 0; c < channels; ++c) share[c] = 0.0f;
            for (int64_t slot = a.by_target.indptr[n]; slot < a.by_target.indptr[n + 1]; ++slot) {
                const float* x = a.x + a.by_target.index[slot] * channels;
                for (int64_t c = 0; c < channels; ++c) share[c] += x[c] == y[c] ? 1.0f : 0.0f;
            }
            for (int64_t c = 0; c < channels; ++c) share[c] = share[c] > 0.0f ? grad[c] / share[c] : 0.0f;
        }
    });
    parallel_rows(a.by_source.indptr, a.by_source.rows, 4 * channels, a.threads, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m) {
            const float* x = a.x + m * channels;
            float* grad = a.grad_x + m * channels;
            for (int64_t c = 0; c < channels; ++c) grad[c] = 0.0f;
            for (int64_t slot = a.by_source.indptr[m]; slot < a.by_source.indptr[m + 1]; ++slot) {
                const int64_t n = a.by_source.index[slot];
                const float *y = a.y + n * channels, *share = a.shares + n * channels;
                for (int64_t c = 0; c < channels; ++c) grad[c] += x[c] == y[c] ? share[c] : y[c] == y[c] ? 0.0f : y[c];  // a NaN is not hidden
            }
        }
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(maxima)(const structconv::MaximaArgs* args) { structconv::SC_ISA::forward(*args); }

SC_EXPORT(maxima_backward)(const structconv::MaximaArgs* args) { structconv::SC_ISA::backward(*args); }
