// Products of tall matrices with small ones, y = x w + bias and y = x^T g. A tile of y, `kHeight` rows of two vectors,
// stays in registers while the sum runs; the small operand stays in the second-level cache, and the rows that come next
// are prefetched during the current ones.
//
// Every number is the sum, in their order, of what blocks of at most 256 terms give: its error grows with the number of
// blocks rather than of terms, and it does not depend on how many threads there are.
#include <type_traits>

#include "api.h"
#include "parallel.h"
#include "tile.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kCached = 1 << 17;      // numbers that the second-level cache holds besides what streams through it
constexpr int64_t kLeastFlops = 1 << 20;  // for a second thread
constexpr int64_t kPieces = 16;            // of the rows, for each thread, at most
constexpr int64_t kChain = 256;           // terms that are added one after the other
constexpr int64_t kHuge = 4 << 20;        // bytes of a result from which it is held on huge pages
constexpr int64_t kStreamed = 16 << 20;   // bytes of a result that is not worth keeping in the caches

inline void expect_write([[maybe_unused]] float* at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*at));
#endif
}

// -- y = x w + bias ------------------------------------------------------------------------------------------------

// Rows of x: from where, how far apart, and how many there are.
struct Source {
    const float* x;
    int64_t row, rows;
};

template <class Columns, int R>
__attribute__((noinline)) void project_tile(const ProjectArgs& a, Source from, Source ahead, int64_t row,
                                            int64_t column, const float* panel, bool past_caches) {
    typedef typename Columns::Vector V;
    Tile<V, R, Columns::vectors> tile;
    const int64_t left = a.columns - column, x_row = from.row, depth = a.inputs;
    float* y = a.y + row * a.y_row + column;
    if (!past_caches)
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int at = 0; at < Columns::width; at += 16) expect_write(y + r * a.y_row + at);
    tile.fill(a.bias ? a.bias + column : nullptr, left);
    const float* third[(R + 2) / 3];  // every third row, so that all have addresses of few registers
    for (int g = 0; g < (R + 2) / 3; ++g) {
        third[g] = from.x + 3 * g * x_row;
        asm("" : "+r"(third[g]));
    }
    const auto step = [&](int64_t k) {
        tile.add([&](int r) { return third[r / 3][k + r % 3 * x_row]; }, panel + k * Columns::width);
    };
    alignas(64) float sums[R * Columns::width];
    for (int64_t k = 0;;) {
        const int64_t end = k + kChain < depth ? k + kChain : depth, start = k;
        for (; k + 16 <= end; k += 16) {
#pragma GCC unroll 1
            for (int64_t r = 0; r < ahead.rows; ++r) __builtin_prefetch(ahead.x + r * ahead.row + k);
#pragma GCC unroll 1
            for (int64_t at = k; at < k + 16; at += 4) step(at), step(at + 1), step(at + 2), step(at + 3);
        }
#pragma GCC unroll 1
        for (; k < end; ++k) step(k);
        if (start) tile.join(sums);
        if (end == depth) break;
        tile.put([&](int r, int n, V v) { store(sums + r * Columns::width + n, v); });
        tile.fill(nullptr, 0);
    }
    if (past_caches) tile.put([&](int r, int n, V v) { stream(y + r * a.y_row + n, v); });
    else if (left >= Columns::width) tile.put([&](int r, int n, V v) { store(y + r * a.y_row + n, v); });
    else
        tile.put([&](int r, int n, V v) {
            const int64_t part = left - n < Lanes<V>::count ? left - n : Lanes<V>::count;
            if (part > 0) store_part(y + r * a.y_row + n, v, static_cast<int>(part));
        });
}

// The columns of w from `column` on, row after row, padded by zeros.
void pack(const ProjectArgs& a, int64_t column, int64_t width, float* to) {
    const int64_t there = a.columns - column < width ? a.columns - column : width;
    const float* w = a.w + column * a.w_column;
    if (a.w_column == 1) {
        for (int64_t k = 0; k < a.inputs; ++k) std::memcpy(to + k * width, w + k * a.w_row, there * sizeof(float));
    } else {
        for (int64_t c = 0; c < there; ++c)
            for (int64_t k = 0; k < a.inputs; ++k) to[k * width + c] = w[c * a.w_column + k * a.w_row];
    }
    for (int64_t k = 0; k < a.inputs; ++k)
        for (int64_t c = there; c < width; ++c) to[k * width + c] = 0.0f;
}

// Rows whose distance is a multiple of what maps to one place of the first-level cache drive each other out of it.
constexpr int64_t kCollide = 1024, kCopied = 2048;

// Rows [first, last): all columns of one tile's rows, or of eight tiles' where w is too large to be read for each.
void project_rows(const ProjectArgs& a, int64_t first, int64_t last, bool past_caches) {
    alignas(64) float copy[kHeight * (kCopied + 16)];
    const bool copied = a.x_row % kCollide == 0 && a.inputs > kCollide / 2 && a.inputs <= kCopied;
    const int64_t apart = a.inputs + 16;  // where copied
    const int64_t block = copied || a.inputs * a.columns <= kCached ? kHeight : 8 * kHeight;
    for (int64_t start = first; start < last; start += block) {
        const int64_t end = start + block < last ? start + block : last;
        if (copied)
            for (int64_t row = start; row < end; ++row)
                std::memcpy(copy + (row - start) * apart, a.x + row * a.x_row, a.inputs * sizeof(float));
        for (int64_t column = 0; column < a.columns;) {
            const float* panel = a.packed + a.inputs * column;
            column += next_columns(a.columns - column, [&](auto columns) {
                for (int64_t row = start; row < end;)
                    row += next_rows(end - row, [&](auto height) {
                        const int64_t next = row + block, left = column ? 0 : last - next;
                        const Source ahead{a.x + next * a.x_row, a.x_row, left < height ? left : height};
                        const Source from = copied ? Source{copy + (row - start) * apart, apart, height}
                                                   : Source{a.x + row * a.x_row, a.x_row, height};
                        project_tile<decltype(columns), height>(a, from, ahead, row, column, panel, past_caches);
                    });
            });
        }
    }
}

// The same number of pieces for each thread, of at least four tiles, and of a large result of four megabytes: two
// threads that meet a huge page at the same time both clear it.
int64_t pieces_of(int64_t tiles, int64_t bytes, int64_t team) {
    const int64_t each = tiles / (4 * team), large = bytes / (kHuge * team);
    const int64_t most = bytes < 2 * kHuge ? kPieces : large < 2 ? 2 : large;
    return team * (each < 1 ? 1 : each < most ? each : most);
}

void project(const ProjectArgs& a) {
    const int64_t bytes = ((a.rows - 1) * a.y_row + a.columns) * int64_t{sizeof(float)};
    const bool aligned = reinterpret_cast<uintptr_t>(a.y) % 64 == 0 && a.y_row % 16 == 0 && a.columns % kFill == 0;
    const bool past_caches = aligned && a.rows * a.columns * int64_t{sizeof(float)} >= kStreamed;
    expect_writes(a.y, bytes);
    const int64_t tiles = (a.rows + kHeight - 1) / kHeight, panels = (a.columns + 2 * kLanes - 1) / (2 * kLanes);
    const bool alone = a.threads < 2 || 2 * a.rows * a.inputs * a.columns < kLeastFlops;
    const int team = alone ? 1 : static_cast<int>(a.threads);
    const int64_t pieces = alone ? 1 : pieces_of(tiles, bytes, team);
    in_team(team, [&](const Team& threads) {
        threads.each(panels, [&](int64_t panel) {
            const int64_t column = panel * 2 * kLanes;
            pack(a, column, width_of(a.columns - column), a.packed + a.inputs * column);
        });
        threads.each(pieces, [&](int64_t piece) {
            const int64_t end = tiles * (piece + 1) / pieces * kHeight;
            project_rows(a, tiles * piece / pieces * kHeight, end < a.rows ? end : a.rows, past_caches);
        });
        if (past_caches) end_stream();
    });
}

// -- y = x^T g -----------------------------------------------------------------------------------------------------

// Rows of x and g: x^T g over them is added to a part of the result, or is its first value.
struct Block {
    const float *x, *g;
    int64_t rows, g_row;
    bool first;
};

// A number in each of the block's rows, to be read ahead.
struct Line {
    const float* at;
    int64_t step;
};

template <class Columns, int R>
__attribute__((noinline)) void outer_tile(const Block& block, int64_t x_row, Line line, float* y, int64_t y_row) {
    typedef typename Columns::Vector V;
    Tile<V, R, Columns::vectors> tile;
    tile.fill(nullptr, 0);
    const float *x = block.x, *g = block.g, *ahead = line.at;
#pragma GCC unroll 4
    for (int64_t row = 0; row < block.rows; ++row, x += x_row, g += block.g_row, ahead += line.step) {
        __builtin_prefetch(ahead);
        tile.add([&](int r) { return x[r]; }, g);
    }
    if (block.first) tile.put([&](int r, int n, V v) { store(y + r * y_row + n, v); });
    else tile.put([&](int r, int n, V v) { store(y + r * y_row + n, load<V>(y + r * y_row + n) + v); });
}

constexpr int64_t kOuterRows = 256;

inline int64_t filled(int64_t columns) { return (columns + kFill - 1) / kFill * kFill; }

// The last columns of g, padded by zeros to a tile.
void fill_columns(const float* g, int64_t g_row, int64_t rows, int64_t there, int64_t width, float* to) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t at = 0; at < width; at += 8) {
            const int64_t part = there - at;
            const float* from = g + row * g_row + at;
            store(to + row * width + at, part >= 8  ? load<v8>(from)
                                         : part > 0 ? load_part<v8>(from, static_cast<int>(part))
                                                    : v8{});
        }
}

// What the tiles of one block ask for, of the next block's x and g: as many lines as the block has rows, one behind the
// other where nothing lies between the rows, else one in each row.
class Lines {
  public:
    Lines(int64_t rows, bool wanted) : rows_(rows), wanted_(wanted) {}

    void expect(const float* from, int64_t row, int64_t columns) {
        if (wanted_) tables_[count_++] = {from, row, columns, (columns + 15) / 16};
    }

    Line next(const float* none) {
        if (at_ < count_ && taken_ == tables_[at_].tiles) ++at_, taken_ = 0;
        if (at_ == count_) return {none, 0};
        const Table& table = tables_[at_];
        const int64_t line = 16 * taken_++;
        return table.row == table.columns ? Line{table.x + line * rows_, 16} : Line{table.x + line, table.row};
    }

  private:
    struct Table {
        const float* x;
        int64_t row, columns, tiles;
    };
    Table tables_[2];
    int64_t rows_, count_ = 0, at_ = 0, taken_ = 0;
    bool wanted_;
};

// Adds rows [first, last) to the columns [start, end) of one part.
void outer_rows(const OuterArgs& a, int64_t first, int64_t last, int64_t start, int64_t end, float* part) {
    alignas(64) float buffer[kOuterRows * kFill];
    const int64_t fitting = kCached / 2 / (a.inputs + end - start) / 8 * 8, y_row = filled(a.columns);
    const int64_t rows = fitting > kOuterRows ? kOuterRows : fitting < 16 ? 16 : fitting;
    for (int64_t row = first; row < last || row == first; row += rows) {
        const int64_t here = row + rows < last ? rows : last - row, next = row + here;
        Lines lines(here, last - next >= here);
        lines.expect(a.x + next * a.x_row, a.x_row, a.inputs);
        lines.expect(a.g + next * a.g_row + start, a.g_row, end - start);
        for (int64_t column = start; column < end;) {
            const int64_t left = a.columns - column, width = width_of(left);
            Block block{a.x + row * a.x_row, a.g + row * a.g_row + column, here, a.g_row, row == first};
            if (left < width) {
                fill_columns(block.g, a.g_row, here, left, width, buffer);
                block.g = buffer, block.g_row = width;
            }
            next_columns(left, [&](auto columns) {
                for (int64_t input = 0; input < a.inputs;) {
                    float* y = part + input * y_row + column;
                    const int64_t height = next_rows(a.inputs - input, [&](auto height) {
                        outer_tile<decltype(columns), height>(block, a.x_row, lines.next(block.g), y, y_row);
                    });
                    input += height, block.x += height;
                }
            });
            column += width;
        }
    }
}

void sum_parts(const OuterArgs& a, int64_t input) {
    const int64_t y_row = filled(a.columns), size = a.inputs * y_row;
    float* y = a.y + input * a.y_row;
    const float* from = a.partial + input * y_row;
    for (int64_t column = 0; column < a.columns; ++column) {
        float sum = from[column];
        for (int64_t part = 1; part < a.parts; ++part) sum += from[part * size + column];
        y[column * a.y_column] = sum;
    }
}

void outer(const OuterArgs& a) {
    const int64_t size = a.inputs * filled(a.columns);
    const int64_t fitting = kCached / a.inputs / kFill * kFill, group = fitting < kFill ? kFill : fitting;
    const int64_t groups = (a.columns + group - 1) / group;
    const int team = a.threads < 2 || 2 * a.rows * a.inputs * a.columns < kLeastFlops ? 1 : static_cast<int>(a.threads);
    in_team(team, [&](const Team& threads) {
        threads.each(a.parts * groups, [&](int64_t task) {
            const int64_t part = task / groups, start = task % groups * group, end = start + group;
            outer_rows(a, a.rows * part / a.parts, a.rows * (part + 1) / a.parts, start,
                       end < a.columns ? end : a.columns, a.partial + part * size);
        });
        threads.each(a.inputs, [&](int64_t input) { sum_parts(a, input); }, 1 + a.inputs / (4 * team));
    });
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(project)(const structconv::ProjectArgs* args) { structconv::SC_ISA::project(*args); }

SC_EXPORT(outer)(const structconv::OuterArgs* args) { structconv::SC_ISA::outer(*args); }
