// s_e = <q_n, k_m> along the edges, in the order of the edges.
#include "api.h"
#include "gather.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

template <class T> void sweep(const SddmmArgs& a, int64_t v, const Pieces& pieces, int64_t first, int64_t last) {
    alignas(64) float query[kMaxChannels], products[kChunk];
    const Layout& layout = a.layout;
    const int64_t end = layout.indptr[last];
    T* q = const_cast<T*>(static_cast<const T*>(a.q)) + v / a.repeats_q * layout.rows * a.channels;
    const Table k{static_cast<const T*>(a.k) + v / a.repeats_k * a.k_rows * a.channels, a.channels, 0};
    T* s = static_cast<T*>(a.s) + v * layout.slots;
    for (int64_t row = first; row < last; ++row) {
        if (layout.indptr[row] == layout.indptr[row + 1]) continue;
        load_row<T>({q, a.channels, 0}, row, 1, pieces, query);
        for (int64_t at = layout.indptr[row]; at < layout.indptr[row + 1]; at += kChunk) {
            const int64_t left = layout.indptr[row + 1] - at, count = left < kChunk ? left : kChunk;
            dot_rows<T>({layout.index + at, count, end - at}, k, pieces, 1, query, products);
            for (int64_t e = 0; e < count; ++e) narrow(products[e], s + layout.order[at + e]);
        }
    }
}

template <class T> void sddmm(const SddmmArgs& a) {
    const Pieces pieces = cut<T>(1, a.channels);
    expect_writes(a.s, a.num_values * a.layout.slots * static_cast<int64_t>(sizeof(T)));
    const int64_t bytes = a.channels * int64_t{sizeof(T)};
    const auto whole = [&](int64_t v) { sweep<T>(a, v, pieces, 0, a.layout.rows); };
    if (parallel_tables(a.num_values, a.layout, bytes, a.threads, whole)) return;
    for (int64_t v = 0; v < a.num_values; ++v)
        parallel_rows(a.layout.indptr, a.layout.rows, bytes, a.threads,
                      [&](int64_t first, int64_t last) { sweep<T>(a, v, pieces, first, last); });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(sddmm)(const structconv::SddmmArgs* args) {
    using namespace structconv::SC_ISA;
    args->half ? sddmm<bfloat16>(*args) : sddmm<float>(*args);
}
