// Edge lists into layouts, by counting: two passes over the edges a side, the first of which looks at every index before
// any is used as a place in memory. And the same care for layouts that were built elsewhere.
#include "api.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kLeast = 1 << 16;  // edges from which the two sides go to two threads

// One row of an index, of any stride.
template <class I> struct Line {
    const I* first;
    int64_t stride;
    I operator[](int64_t e) const { return first[e * stride]; }
};

template <class I> Line<I> line(const void* index, int64_t row, int64_t column, int64_t number) {
    return {static_cast<const I*>(index) + number * row, column};
}

template <class I> bool outside(I value, int64_t size) {
    return static_cast<uint64_t>(static_cast<int64_t>(value)) >= static_cast<uint64_t>(size);
}

template <class I> int64_t first_outside(Line<I> line, int64_t count, int64_t size) {
    for (int64_t e = 0; e < count; ++e)
        if (outside(line[e], size)) return e;
    return -1;
}

// One layout, grouped by `rows`. While slots are given out, indptr[r + 1] is where row r goes on: it ends up where the
// next one begins.
template <class I> struct Side {
    Line<I> rows, columns;
    int64_t edges, count;
    int32_t *indptr, *index, *order;

    // Counts the edges of each row, shifted by two; returns the first edge whose row does not exist, or -1.
    int64_t number() const {
        for (int64_t r = 0; r <= count; ++r) indptr[r] = 0;
        for (int64_t e = 0; e < edges; ++e) {
            const I row = rows[e];
            if (outside(row, count)) return e;
            if (row + 2 <= count) ++indptr[row + 2];
        }
        return -1;
    }

    void place() const {
        for (int64_t r = 1; r <= count; ++r) indptr[r] += indptr[r - 1];
        for (int64_t e = 0; e < edges; ++e) {
            const int32_t slot = indptr[rows[e] + 1]++;
            index[slot] = static_cast<int32_t>(columns[e]);
            order[slot] = static_cast<int32_t>(e);
        }
    }
};

template <class I> void build(const LayoutsArgs& a) {
    const Line<I> source = line<I>(a.index, a.row, a.column, 0), target = line<I>(a.index, a.row, a.column, 1);
    const Side<I> sides[2] = {
        {target, source, a.edges, a.outputs, a.indptr_target, a.index_target, a.order_target},
        {source, target, a.edges, a.inputs, a.indptr_source, a.index_source, a.order_source},
    };
    int64_t bad[2];
    const int64_t team = a.threads > 1 && a.edges >= kLeast ? 2 : 1;
    for_each(2, team, [&](int64_t side) { bad[side] = sides[side].number(); });
    *a.bad = bad[1] < 0 ? bad[0] : bad[1];
    if (*a.bad >= 0) return;
    for_each(2, team, [&](int64_t side) { sides[side].place(); });
}

template <class I> int64_t find(const OutsideArgs& a) {
    int64_t bad = -1;
    for (int64_t r = 0; r < a.rows && bad < 0; ++r)
        bad = first_outside(line<I>(a.index, a.row, a.column, r), a.columns, a.sizes[r]);
    return bad;
}

struct Range {
    int32_t low, high;
};

Range range(const int32_t* numbers, int64_t count) {
    Range found = {INT32_MAX, INT32_MIN};
    for (int64_t i = 0; i < count; ++i) {
        found.low = numbers[i] < found.low ? numbers[i] : found.low;
        found.high = numbers[i] > found.high ? numbers[i] : found.high;
    }
    return found;
}

bool rises(const int32_t* indptr, int64_t rows, int64_t slots) {
    int32_t falls = indptr[0] != 0 || indptr[rows] != slots;
    for (int64_t r = 0; r < rows; ++r) falls |= indptr[r + 1] < indptr[r];
    return !falls;
}

bool each_once(const int32_t* order, int64_t slots, uint8_t* met) {
    for (int64_t i = 0; i < slots; ++i) {
        if (outside(order[i], slots) || met[order[i]]) return false;
        met[order[i]] = 1;
    }
    return true;
}

Wrong verify(const VerifyArgs& a) {
    const Layout& layout = a.layout;
    *a.columns = 0;
    if (!rises(layout.indptr, layout.rows, layout.slots)) return kIndptr;
    if (!layout.slots) return kNothing;
    const Range index = range(layout.index, layout.slots);
    *a.columns = int64_t{index.high} + 1;
    if (index.low < 0) return kIndex;
    return each_once(layout.order, layout.slots, a.met) ? kNothing : kOrder;
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(layouts)(const structconv::LayoutsArgs* args) {
    using namespace structconv::SC_ISA;
    args->wide ? build<int64_t>(*args) : build<int32_t>(*args);
}

SC_EXPORT(outside)(const structconv::OutsideArgs* args) {
    using namespace structconv::SC_ISA;
    *args->bad = args->wide ? find<int64_t>(*args) : find<int32_t>(*args);
}

SC_EXPORT(verify)(const structconv::VerifyArgs* args) {
    *args->wrong = structconv::SC_ISA::verify(*args);
}
