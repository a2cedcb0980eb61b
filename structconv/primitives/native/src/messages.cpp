// y[n] = sum over the edges e from m to n of relu(x[m] + a[e]): no message is stored, and the backward makes them again.
#include "api.h"
#include "lanes.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

template <class Body> void for_slots(const Layout& layout, int64_t row, const Body& body) {
    for (int64_t slot = layout.indptr[row]; slot < layout.indptr[row + 1]; ++slot)
        body(layout.index[slot], layout.order ? layout.order[slot] : slot);
}

void forward(const MessagesArgs& a) {
    const int64_t channels = a.channels;
    parallel_rows(a.by_target.indptr, a.by_target.rows, 8 * channels, a.threads, [&](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; ++n)
            for_lanes(channels, [&](int64_t c, int part) {
                v16 sum{};
                for_slots(a.by_target, n, [&](int64_t m, int64_t e) {
                    const v16 message = lanes(a.x + m * channels + c, part) + lanes(a.attributes + e * channels + c, part);
                    sum += choose(message <= 0.0f, v16{}, message);
                });
                put(a.y + n * channels + c, sum, part);
            });
    });
}

// The gradient of an attribute is that of y, or zero; that of x sums them over the edges from it.
void backward(const MessagesArgs& a) {
    const int64_t channels = a.channels;
    const auto passed = [&](int64_t m, int64_t n, int64_t e, int64_t c, int part) {
        const v16 message = lanes(a.x + m * channels + c, part) + lanes(a.attributes + e * channels + c, part);
        return choose(message <= 0.0f, v16{}, lanes(a.grad + n * channels + c, part));
    };
    if (a.grad_attributes)
        parallel_rows(a.by_target.indptr, a.by_target.rows, 8 * channels, a.threads, [&](int64_t first, int64_t last) {
            for (int64_t n = first; n < last; ++n)
                for_slots(a.by_target, n, [&](int64_t m, int64_t e) {
                    for_lanes(channels, [&](int64_t c, int part) {
                        put(a.grad_attributes + e * channels + c, passed(m, n, e, c, part), part);
                    });
                });
        });
    if (a.grad_x)
        parallel_rows(a.by_source.indptr, a.by_source.rows, 8 * channels, a.threads, [&](int64_t first, int64_t last) {
            for (int64_t m = first; m < last; ++m)
                for_lanes(channels, [&](int64_t c, int part) {
                    v16 sum{};
                    for_slots(a.by_source, m, [&](int64_t n, int64_t e) {
                        sum += a.grad_attributes ? lanes(a.grad_attributes + e * channels + c, part) : passed(m, n, e, c, part);
                    });
                    put(a.grad_x + m * channels + c, sum, part);
                });
        });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(messages)(const structconv::MessagesArgs* args) { structconv::SC_ISA::forward(*args); }

SC_EXPORT(messages_backward)(const structconv::MessagesArgs* args) { structconv::SC_ISA::backward(*args); }
