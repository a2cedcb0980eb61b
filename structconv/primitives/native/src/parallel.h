// Rows of a CSR layout over threads: pieces of equal work, taken as threads become free. A row belongs to one thread,
// so the numbers do not depend on who computes it, nor on how many threads there are.
#pragma once

#include <cstdint>

#include "api.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace structconv::SC_ISA {

// First row r with indptr[r] + r >= work: what lies before it is `work` slots and rows.
inline int64_t row_at(const int32_t* indptr, int64_t rows, int64_t work) {
    int64_t low = 0, high = rows;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (indptr[middle] + middle < work) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The threads of a region. A single one is the caller itself, outside OpenMP, of which each region and each barrier would
// cost a call of the system.
struct Team {
    int size;

    // body(i) for all i < count, `chunk` at a time, as threads become free.
    template <class Body> void each(int64_t count, const Body& body, int64_t chunk = 1) const {
        if (size < 2) {
            for (int64_t i = 0; i < count; ++i) body(i);
            return;
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < count; ++i) body(i);
    }
};

// body(team) on each thread of a team.
template <class Body> void in_team(int64_t size, const Body& body) {
    const Team team{static_cast<int>(size)};
    if (size < 2) {
        body(team);
        return;
    }
#pragma omp parallel num_threads(team.size)
    body(team);
}

// body(i) for all i < count, on as many threads.
template <class Body> void for_each(int64_t count, int64_t threads, const Body& body, int64_t chunk = 1) {
    in_team(threads, [&](const Team& team) { team.each(count, body, chunk); });
}

// Bytes to move from which on threads are woken.
constexpr int64_t kWorthwhile = 1 << 20;

// body(first, last) over all rows; `bytes` is what one slot makes a thread move. Little work stays on one thread.
template <class Body>
void parallel_rows(const int32_t* indptr, int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t work = indptr[rows] + rows;
    if (threads < 2 || work * bytes < kWorthwhile) {
        body(int64_t{0}, rows);
        return;
    }
    const int64_t pieces = threads * 32;
    for_each(pieces, threads, [&](int64_t piece) {
        const int64_t first = row_at(indptr, rows, work * piece / pieces);
        const int64_t last = piece + 1 == pieces ? rows : row_at(indptr, rows, work * (piece + 1) / pieces);
        if (first < last) body(first, last);
    });
}

// body(table) for tables over one layout, where one is too little for all threads: false, and nothing is done, where
// it is not. A slot makes a thread move `bytes`.
template <class Body>
bool parallel_tables(int64_t tables, const Layout& layout, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t least = 64, moved = (layout.slots + layout.rows) * (bytes < least ? least : bytes);
    if (tables < 2 || moved >= kWorthwhile) return false;
    const int64_t team = threads > 1 && tables * moved >= kWorthwhile ? threads : 1;
    const int64_t pieces = tables < team * 8 ? tables : team * 8;
    for_each(pieces, team, [&](int64_t piece) {
        for (int64_t table = tables * piece / pieces; table < tables * (piece + 1) / pieces; ++table) body(table);
    });
    return true;
}

// body(piece, first, last) over all rows in pieces whose borders depend on the work alone, so that what is summed over
// a piece, and then over the pieces in their order, does not depend on threads; returns how many pieces there are.
template <class Body>
int64_t summed_pieces(const int32_t* indptr, int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t work = indptr[rows] + rows, worth = work * bytes >> 17;
    const int64_t pieces = worth < 1 ? 1 : worth < kSummedPieces ? worth : kSummedPieces;
    for_each(pieces, threads > 1 && worth >= 8 ? threads : 1, [&](int64_t piece) {
        const int64_t first = piece ? row_at(indptr, rows, work * piece / pieces) : 0;
        body(piece, first, piece + 1 == pieces ? rows : row_at(indptr, rows, work * (piece + 1) / pieces));
    });
    return pieces;
}

// body(first, last) over rows of `bytes` bytes each, which are read once in their order.
template <class Body> void stream_rows(int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t team = threads > 1 && rows * bytes >= 1 << 20 ? threads : 1;
    for_each(team, team, [&](int64_t part) { body(rows * part / team, rows * (part + 1) / team); });
}

// A large result is about to be written for the first time: ask for huge pages, as page faults cost more than the
// writes. Advice only; what the system refuses is no error.
inline void expect_writes([[maybe_unused]] void* start, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, from = (reinterpret_cast<uintptr_t>(start) + page - 1) & ~(page - 1);
    const uintptr_t to = (reinterpret_cast<uintptr_t>(start) + bytes) & ~(page - 1);
    if (bytes >= int64_t{4} << 20 && to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}

}  // namespace structconv::SC_ISA
