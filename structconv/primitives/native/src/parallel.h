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
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(threads))
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t first = row_at(indptr, rows, work * piece / pieces);
        const int64_t last = piece + 1 == pieces ? rows : row_at(indptr, rows, work * (piece + 1) / pieces);
        if (first < last) body(first, last);
    }
}

// body(table) for tables over one layout, where one is too little for all threads: false, and nothing is done, where
// it is not. A slot makes a thread move `bytes`.
template <class Body>
bool parallel_tables(int64_t tables, const Layout& layout, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t least = 64, moved = (layout.slots + layout.rows) * (bytes < least ? least : bytes);
    if (tables < 2 || moved >= kWorthwhile) return false;
    const int team = threads > 1 && tables * moved >= kWorthwhile ? static_cast<int>(threads) : 1;
    const int64_t pieces = tables < team * 8 ? tables : team * 8;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t piece = 0; piece < pieces; ++piece)
        for (int64_t table = tables * piece / pieces; table < tables * (piece + 1) / pieces; ++table) body(table);
    return true;
}

// body(piece, first, last) over all rows in pieces whose borders depend on the work alone, so that what is summed over
// a piece, and then over the pieces in their order, does not depend on threads; returns how many pieces there are.
template <class Body>
int64_t summed_pieces(const int32_t* indptr, int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int64_t work = indptr[rows] + rows, worth = work * bytes >> 17;
    const int64_t pieces = worth < 1 ? 1 : worth < kSummedPieces ? worth : kSummedPieces;
    const int team = threads > 1 && worth >= 8 ? static_cast<int>(threads) : 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const int64_t first = piece ? row_at(indptr, rows, work * piece / pieces) : 0;
        body(piece, first, piece + 1 == pieces ? rows : row_at(indptr, rows, work * (piece + 1) / pieces));
    }
    return pieces;
}

// body(first, last) over rows of `bytes` bytes each, which are read once in their order.
template <class Body> void stream_rows(int64_t rows, int64_t bytes, int64_t threads, const Body& body) {
    const int team = threads > 1 && rows * bytes >= 1 << 20 ? static_cast<int>(threads) : 1;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t part = 0; part < team; ++part) body(rows * part / team, rows * (part + 1) / team);
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
