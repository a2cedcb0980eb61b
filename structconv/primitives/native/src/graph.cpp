// Edges for one layer on a new graph: what the layer reads, in one pass. One side with its loops, degrees and values in
// the order of the slots; the other side from the first.
#include <algorithm>
#include <cmath>

#include "api.h"

namespace structconv::SC_ISA {
namespace {

template <class I> bool outside(I value, int64_t size) {
    return static_cast<uint64_t>(static_cast<int64_t>(value)) >= static_cast<uint64_t>(size);
}

// The sample of an entry of [0, starts[count]).
int64_t sample_of(const int64_t* starts, int64_t count, int64_t entry) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle] <= entry) low = middle;
        else high = middle;
    }
    return low;
}

template <class I> int64_t first_wrong(const EdgesArgs& a) {
    const I *source = static_cast<const I*>(a.index), *target = source + a.row;
    const int64_t *in = a.input_starts, *out = a.output_starts;
    int64_t sample = -1, first_in = 0, last_in = a.samples ? 0 : a.inputs, first_out = 0, last_out = a.outputs;
    for (int64_t e = 0; e < a.edges; ++e, source += a.column, target += a.column) {
        const int64_t m = *source, n = *target;
        if (first_in <= m && m < last_in && first_out <= n && n < last_out) continue;  // in the sample of the edge before
        if (!a.samples || outside(m, a.inputs) || outside(n, a.outputs)) return e;
        const bool next = ++sample < a.samples && in[sample] <= m && m < in[sample + 1];
        if (!next) sample = sample_of(in, a.samples, m);
        first_in = in[sample], last_in = std::min(in[sample + 1], a.inputs);
        first_out = out[sample], last_out = std::min(out[sample + 1], a.outputs);
        if (m < first_in || m >= last_in || n < first_out || n >= last_out) return e;
        first_in = std::max<int64_t>(first_in, 0), first_out = std::max<int64_t>(first_out, 0);
    }
    return -1;
}

// Slots of the edges into each output. While slots are given out, indptr[r + 1] is where row r goes on.
template <class I> int64_t build(const AdjacencyArgs& a) {
    const I *source = static_cast<const I*>(a.index), *target = source + a.row;
    const int64_t rows = a.outputs, step = a.column;
    int32_t *indptr = a.indptr, *index = a.columns, *order = a.order;
    for (int64_t r = 0; r <= rows; ++r) indptr[r] = 0;
    for (int64_t e = 0; e < a.edges; ++e) {
        const I m = source[e * step], n = target[e * step];
        if (outside(m, a.inputs) || outside(n, rows)) return e;
        if (n + 2 <= rows) ++indptr[n + 2];
    }
    for (int64_t r = 1; r <= rows; ++r) indptr[r] += indptr[r - 1] + (a.loops && r >= 2);
    for (int64_t e = 0; e < a.edges; ++e) {
        const int32_t slot = indptr[target[e * step] + 1]++;
        index[slot] = static_cast<int32_t>(source[e * step]);
        if (order) order[slot] = static_cast<int32_t>(e);
    }
    for (int64_t n = 0; a.loops && n < rows; ++n) {
        const int32_t slot = indptr[n + 1]++;
        index[slot] = static_cast<int32_t>(n);
        if (order) order[slot] = static_cast<int32_t>(a.edges + n);
    }
    return -1;
}

float inverse(float degree) { return degree == 0.0f ? 0.0f : 1.0f / degree; }

float inverse_root(float degree) { return degree == 0.0f ? 0.0f : 1.0f / std::sqrt(degree); }

// The weights of the edges divided by the degrees, in the order of the slots.
void weigh(const AdjacencyArgs& a) {
    const int32_t *indptr = a.indptr, *index = a.columns;
    const auto weight = [&](int64_t slot) { return a.weights ? a.weights[a.order[slot]] : 1.0f; };
    const bool square = a.square;
    float *in = a.scales, *out = square ? in : in + a.outputs;
    if (a.normalize == kSymmetric && !square)
        for (int64_t m = 0; m < a.inputs; ++m) out[m] = 0.0f;
    for (int64_t n = 0; n < a.outputs; ++n) {
        float degree = a.weights ? 0.0f : static_cast<float>(indptr[n + 1] - indptr[n]);
        if (a.weights)
            for (int64_t slot = indptr[n]; slot < indptr[n + 1]; ++slot) degree += weight(slot);
        if (a.normalize == kSymmetric && !square)
            for (int64_t slot = indptr[n]; slot < indptr[n + 1]; ++slot) out[index[slot]] += weight(slot);
        in[n] = a.normalize == kSymmetric ? inverse_root(degree) : inverse(degree);
    }
    if (a.normalize == kSymmetric && !square)
        for (int64_t m = 0; m < a.inputs; ++m) out[m] = inverse_root(out[m]);
    for (int64_t n = 0; n < a.outputs; ++n)
        for (int64_t slot = indptr[n]; slot < indptr[n + 1]; ++slot) {
            const float of_source = a.normalize == kSymmetric ? out[index[slot]] : 1.0f;
            const float of_target = a.normalize == kNone ? 1.0f : in[n];
            a.values[slot] = of_source * weight(slot) * of_target;
        }
}

// Sorts the edges by source; the slots of a row are in the order of their targets.
void transpose(const TransposeArgs& a) {
    const Layout& from = a.layout;
    int32_t* indptr = a.indptr;
    for (int64_t r = 0; r <= a.rows; ++r) indptr[r] = 0;
    for (int64_t slot = 0; slot < from.slots; ++slot)
        if (from.index[slot] + 2 <= a.rows) ++indptr[from.index[slot] + 2];
    for (int64_t r = 1; r <= a.rows; ++r) indptr[r] += indptr[r - 1];
    for (int64_t n = 0; n < from.rows; ++n)
        for (int64_t slot = from.indptr[n]; slot < from.indptr[n + 1]; ++slot) {
            const int32_t to = indptr[from.index[slot] + 1]++;
            a.columns[to] = static_cast<int32_t>(n);
            if (a.order) a.order[to] = from.order[slot];
            if (a.values) a.values_T[to] = a.values[slot];
        }
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(edges)(const structconv::EdgesArgs* args) {
    using namespace structconv::SC_ISA;
    *args->bad = args->wide ? first_wrong<int64_t>(*args) : first_wrong<int32_t>(*args);
}

SC_EXPORT(adjacency)(const structconv::AdjacencyArgs* args) {
    using namespace structconv::SC_ISA;
    *args->bad = args->wide ? build<int64_t>(*args) : build<int32_t>(*args);
    if (*args->bad < 0 && args->values) weigh(*args);
}

SC_EXPORT(transpose)(const structconv::TransposeArgs* args) { structconv::SC_ISA::transpose(*args); }
