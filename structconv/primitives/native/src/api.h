// The arguments of the kernels: one plain struct a call, which operators.cpp fills after it has checked them.
//
// Layouts are CSR with int32 indices: row r owns the slots indptr[r] to indptr[r + 1]. `order` says to which edge a
// slot belongs; null where values lie in slot order. Strides count elements; channels are contiguous. `half` is 1 for
// bfloat16 storage, 0 for float32; sums are always float32. Kernels check nothing: sizes and indices are
// the caller's word.
#pragma once

#include <cstdint>

#define SC_JOIN_(name, isa) structconv_##name##_##isa
#define SC_JOIN(name, isa) SC_JOIN_(name, isa)
#define SC_EXPORT(name) extern "C" __attribute__((visibility("default"))) void SC_JOIN(name, SC_ISA)

namespace structconv {

constexpr int64_t kMaxChannels = 7168;   // of a head, that are gathered
constexpr int64_t kBlock = 128;          // floats of a block of heads, where one head is not longer
constexpr int64_t kSummedPieces = 256;   // of rows, with their own part of a gradient that rows share
constexpr int64_t kRanges = 256;         // the same for additive scores
constexpr int64_t kDecodeOutputs = 8;    // that additive scores compute one by one
constexpr int64_t kDecodeInputs = 4096;  // for which they do so
constexpr int64_t kWindowChannels = 256; // of a head in a window
constexpr int64_t kAttentionChannels = 256; // of a head of all pairs
constexpr int64_t kWindowSpan = 256;     // entries of an axis that one task computes
constexpr int64_t kWindowBorder = 15;    // numbers -inf on either side of a table's row
constexpr int64_t kFill = 32;            // columns of scratch are filled up to multiples of this

struct Layout {
    const int32_t *indptr, *index, *order;
    int64_t rows, slots;
};

struct Rows {
    void* x;
    int64_t row, head;
};

// Both layouts of `edges` edges m -> n, m in the first row of `index` and n in the second, int32 or, `wide`, int64, of any
// strides. Slots of a row keep the order of the edges. `bad` is the first edge with m out of range, else with n, or -1;
// else nothing of the layouts is to be read.
struct LayoutsArgs {
    const void* index;
    int64_t row, column, wide, edges, inputs, outputs, threads;
    int32_t *indptr_target, *index_target, *order_target;
    int32_t *indptr_source, *index_source, *order_source;
    int64_t* bad;
};

// The first column of the first row r of `index` (rows, columns) that is not in [0, sizes[r]), or -1.
struct OutsideArgs {
    const void* index;
    int64_t row, column, wide, rows, columns;
    const int64_t* sizes;
    int64_t* bad;
};

// Returns the fault of a layout, and a lower bound of its columns. Only this reads a layout that was not built here.
enum Wrong : int64_t { kNothing, kIndptr, kIndex, kOrder };

struct VerifyArgs {
    Layout layout;
    uint8_t* met;  // (slots), zeros: scratch
    int64_t *wrong, *columns;
};

// The first of `edges` edges m -> n that is out of range, or joins two of `samples` samples (0: none are given), whose
// first inputs and outputs, and the number of all, are `input_starts` and `output_starts`; or -1.
struct EdgesArgs {
    const void* index;
    int64_t row, column, wide, edges, inputs, outputs, samples;
    const int64_t *input_starts, *output_starts;
    int64_t* bad;
};

// By what the weights of the edges into an output are divided.
enum Normalization : int64_t { kNone, kRow, kSymmetric };

// The edges by target, with `loops` after them a loop at each output, and what they weigh in the order of the slots;
// `bad` as in LayoutsArgs. `weights` in the order of the edges, then of the loops, need `order`; both may be null, and so may `values`.
// `scales` is scratch: (outputs), and (inputs) more unless the outputs are the inputs, `square`.
struct AdjacencyArgs {
    const void* index;
    int64_t row, column, wide, edges, inputs, outputs, loops, square, normalize;
    const float* weights;
    int32_t *indptr, *columns, *order;
    float *values, *scales;
    int64_t* bad;
};

// Rows x (starts[groups], channels) of groups, of which group g has the rows from starts[g] to starts[g + 1], each group as
// one row of `out`; t is the factor of the scores of a softmax. Backward, y is that result, and `out` the gradient of x.
enum Pooling : int64_t { kSumOf, kMeanOf, kMaxOf, kMinOf, kVarOf, kSoftmaxOf, kFixedSoftmaxOf };
struct PoolArgs {
    const int64_t* starts;
    int64_t groups, channels, kind, threads;
    double t;
    const float *x, *y, *grad;
    float* out;
};

// Rows x (rows, channels) of the groups `index`, in any order. `out` (groups, channels) are their sums, means, maxima or minima, or, of
// kSoftmaxOf, (rows, channels) the weights of each row. Backward, y is that result, and `out` the gradient of x.
struct ScatterArgs {
    const int64_t* index;
    int64_t rows, groups, channels, kind, threads;
    const float *x, *y, *grad;
    float* out;
};

// The rows of each of those groups, standardized: y = gain weight (x - shift mean) scale + bias, channel by channel. The
// mean is that of the channel, or of all channels; the scale is one, or 1 / sqrt(the mean of the squares of x - shift mean +
// eps), of the channel or of all. What is null is one, or zero for bias. Backward, `out` is the
// gradient of x and `sums` (parts, 3, channels), zeros, takes those of shift, weight and bias, to be added up.
enum Center : int64_t { kChannelMean, kWholeMean };
enum Scale : int64_t { kNoScale, kChannelScale, kWholeScale };
struct NormArgs {
    const int64_t* starts;
    int64_t groups, channels, center, scale, threads;
    double eps, gain;
    const float *x, *shift, *weight, *bias, *grad;
    float *out, *sums;

    int64_t parts() const { return groups < 64 ? groups : 64; }  // for any number of threads
};

// A layout that is known to be sound, its values or null, with rows for columns. `order` may be null.
struct TransposeArgs {
    Layout layout;
    const float* values;
    int64_t rows;
    int32_t *indptr, *columns, *order;
    float* values_T;
};

// Edges of one relation by target, int32 or, `wide`, int64: node n owns the slots indptr[n] to indptr[n + 1], slot s begins at
// index[s] and is edge order[s]. `edge_times` (slots) or `node_times` (sources): of the edges of a node, in rising order.
// All except indptr and index may be null. No edge that begins beyond `sources` has a time of its node.
struct InEdges {
    const void *indptr, *index, *order;
    const int64_t *edge_times, *node_times;
    const double* weights;
    int64_t wide, nodes, slots, sources;
};

// For each of `count` nodes the first slot that may be drawn, how many follow, and where its draws begin among all. With
// `limits` no edge is later than the limit of its node; with `last` only the last `fanout` may be drawn. fanout < 0: all.
// `bad`: the first node without a sound row of fewer than 2^31 slots, or -1.
struct SampleBoundsArgs {
    InEdges edges;
    const int64_t *nodes, *limits;
    int64_t count, fanout, replace, last;
    int64_t *first, *population, *offsets, *bad;
};

// The draws: where an edge begins, its number, and `base` plus the position of the node that it leads to. They are a function
// of (seed, relation, group, node, draw), as structconv.primitives.hashing has it; groups may be null.
struct SampleDrawArgs {
    InEdges edges;
    const int64_t *nodes, *groups, *first, *population, *offsets;
    int64_t count, fanout, replace, seed, relation, base, threads;
    int64_t *sources, *numbers, *targets;
};

// Numbers of keys, in the order in which they are met. kEnter: key i has the number next + i, unless it has one. kAdd: keys
// without a number get the next ones and are listed in `fresh`. kFind: they get -1. `table` has `capacity` entries: of kDirect
// an int32 for each key, its number; else a power of two and twice the keys at least, of kNarrow (key << 32 | number), of
// kWide, for keys from 2^31 on, a key and a number. -1: none.
enum Numbering : int64_t { kEnter, kAdd, kFind };
enum Table : int64_t { kDirect, kNarrow, kWide };

struct NumberArgs {
    void* table;
    const int64_t* keys;
    int64_t kind, capacity, count, next, numbering;
    int64_t *numbers, *fresh, *added;
};

// y[v / repeats_y] (+)= alpha A x[v / repeats_x], A of values[v / repeats_values], plus beta z once; tables are
// contiguous, (., rows, channels).
struct SpmmArgs {
    Layout layout;
    const void *values, *x, *z;  // values, one row a `values_stride` (0: one for all), or null; z or null
    void* y;
    int64_t x_rows, channels, num_values, values_stride, repeats_values, repeats_x, repeats_y, half, threads;
    double alpha, beta;
};

// y[n][c] = max over the edges m -> n of x[m][c], 0 without any. Backward, of y and its gradient: `shares` is scratch of the
// size of y, and the forward reads neither them nor `by_source`. All float32 and contiguous.
struct MaximaArgs {
    Layout by_target, by_source;
    const float* x;
    float* y;
    const float* grad;
    float *shares, *grad_x;
    int64_t channels, threads;
};

// y[n] = sum of relu(x[m] + attributes[e]) over the edges e from m to n, numbered by `order`. Backward: of the gradient of y,
// where they are not null; the forward reads neither them nor `by_source`. All float32 and contiguous.
struct MessagesArgs {
    Layout by_target, by_source;
    const float *x, *attributes;
    float* y;
    const float* grad;
    float *grad_x, *grad_attributes;
    int64_t channels, threads;
};

// s[v][edge] = <q[v / repeats_q][n], k[v / repeats_k][m]>
struct SddmmArgs {
    Layout layout;
    const void *q, *k;
    void* s;
    int64_t k_rows, channels, num_values, repeats_q, repeats_k, half, threads;
};

// sums[n][h] = sum over the edges into n of values[edge][h] x[m], for a block of heads; `values` begins at its first. By
// target; and its adjoint, by source: of the gradients `sums`, of values and x (added to), where they are not null.
struct ConditionedArgs {
    Layout layout;
    const float *values, *x;
    float *sums, *grad_values, *grad_x;
    int64_t values_row, heads, channels, threads;
};

// Drops weights as a function of (seed, batch, head, m * num_outputs + n), like structconv.primitives.hashing.
struct DropArgs {
    double p;  // 0: none
    int64_t seed, heads_per_batch, num_outputs, source_major;
};

// The terms of a score: <of_source, x_m> and <of_target, z_n>, or given.
enum Terms : int64_t { kGiven, kOfX, kOfXAndZ };  // kOfX: z is x, and grad_z a part of grad_x

struct VectorArgs {
    int64_t terms;
    const float *of_source, *of_target, *bias;  // (heads, channels); bias is added to y, null: none
    Rows z, grad_z;
    float *grad_source, *grad_target, *grad_bias;  // (heads, channels)
    float* partial;  // scratch of every backward: kSummedPieces times 3 times the larger of kBlock and channels filled to 8s
};

struct AffineForwardArgs {
    Layout layout;  // by target
    float *source, *target;  // (inputs, heads), (outputs, heads); written where there are vectors
    Rows x, y, y2;  // y2.x null: nothing is saved
    float *peaks, *mass;  // (outputs, 2, heads), see finish_softmax in softmax.h; (outputs, heads)
    int64_t inputs, heads, channels, half, threads;
    double slope;
    DropArgs drop;
    VectorArgs vectors;
};

struct AffineBackwardArgs {
    Layout by_target, by_source;
    const float *source, *target, *peaks, *mass;
    Rows x, y, y2, grad, grad_x;
    float *grad_source, *grad_target, *packed;  // packed: (outputs, 4, heads), scratch
    int64_t heads, channels, half, threads;
    double slope;
    DropArgs drop;
    VectorArgs vectors;
};

// An activation as a function of a and b; its parameter is the slope, or the rate.
enum Activation : int64_t {
    kPiecewise,  // x > 0 ? x : slope x, with x = a + b
    kLogistic,   // 1 / (1 + exp(-rate x))
    kProduct,    // 1 / (1 + a b): the same of factors a = exp(-rate a'), b = exp(-rate b')
};

// leaky_relu(q_n + k_m) of one float32 a head, scale <q_n, k_m> + bias_e, or <vector, act(q_n + k_m)>.
enum Scores : int64_t { kTerms, kProducts, kActivations };

// Attention of x, its gradients and, by another kernel, its weights; each reads what it needs. Scores with an activation may
// have layouts without `indptr`, which are dense: `index` holds 0, 1, ..., slots - 1, and every row has all of them as its
// entries, or with `causal` those inputs m and outputs n with m <= n. Only weights have scores of terms.
struct EdgeAttentionArgs {
    int64_t scores, heads, depth, channels, activation, causal, half, threads;
    double parameter;  // the slope, the scale, or what the activation takes
    DropArgs drop;
    Layout by_target, by_source;
    Rows q, k, x, y;
    const float *bias, *vector;  // (heads, slots) in edge order or null; (heads, depth)
    float *peaks, *weights;      // (outputs, 2, heads), see finish_softmax; (slots, heads) in edge order
    Rows grad, grad_q, grad_k, grad_x;
    float *grad_bias, *grad_vector;  // grad_bias null: not wanted
    float *packed, *partial;         // (outputs, 3, heads), and with a vector (kRanges, heads, depth): scratch
};

// A step: few outputs over inputs with precomputed factors exp(-rate k). Scores are <v, 1 / (1 + exp(-rate (q + k)))>.
// Inputs with `keep` = 0 have weight zero, also if it is 0 for all inputs.
struct AdditiveStepArgs {
    Rows q, k, factor, x, y;
    const float* vector;  // (heads, depth)
    float* weights;       // (heads, outputs, inputs)
    const uint8_t* keep;  // (heads, inputs), or null: all
    int64_t outputs, inputs, heads, depth, channels, threads;
    double rate;
};

// Gradients of k and v are added to what is there, unless it is the first step; null: they are not wanted.
struct AdditiveStepBackwardArgs {
    Rows q, k, factor, x, grad, grad_q, grad_k;
    const float *vector, *weights;
    float* grad_vector;
    int64_t outputs, inputs, heads, depth, channels, first, threads;
    double rate;
};

// dropped = weights times 0 or 1 / (1 - p), in place where they are the same, and so the gradient, or null: blocks
// (heads, rows, columns) of float32, of the heads from first_head on, row i being output last_row - i.
struct DropBlockArgs {
    const float* weights;
    float *dropped, *gradient;
    int64_t heads, rows, columns, first_head, last_row, threads;
    DropArgs drop;
};

// The lines of a grid (its entries along the last axis) near each line, and at which offset: its row in the table.
struct WindowLines {
    const int32_t *indptr, *line, *combination;
};

// Output n and input m are a pair where the table, at the offset m - n, is not -inf. `falling` and `rising` hold it for
// each head and combination of offsets on the leading axes, by falling and by rising offset on the last one, between
// kWindowBorder numbers -inf on either side; below and above count the offsets, by `step` entries, before and behind zero.
// Lines have `size` entries, or each its own number of outputs and of inputs, at most `size`: `outputs` and `inputs` then
// hold the first of each line and the number of all; `step` is 1, and each line is near itself alone.
struct WindowArgs {
    WindowLines by_target, by_source;
    Rows q, k, v;
    const float *falling, *rising;
    const int64_t *outputs, *inputs;
    int64_t table_head, table_size;  // numbers from head to head (0: all alike); of one head
    int64_t lines, size, step, below, above, heads, depth, channels, half, threads;
    double scale;
    DropArgs drop;
};

struct WindowForwardArgs {
    WindowArgs window;
    Rows y;
    float* peaks;  // (outputs, 2, heads), see finish_softmax in softmax.h
};

struct WindowBackwardArgs {
    WindowArgs window;
    Rows y, grad, grad_q, grad_k, grad_v;
    const float* peaks;
    float *delta, *grad_table;  // (outputs, heads), scratch; (heads, tasks a head, table_size), zero, by falling offset
};

// (batch, heads, rows, channels), channels contiguous.
struct Planes {
    const float* x;
    int64_t batch, head, row;
};

// `shared` consecutive heads of queries read one of keys and values. The mask, or null, has a number to add or, with
// `mask_is_bool`, a byte, 0 for no pair, for (batch, heads, outputs, inputs); strides may be 0. `causal` leaves m <= n.
struct AttentionArgs {
    Planes q, k, v;
    const void* mask;
    int64_t mask_batch, mask_head, mask_row, mask_column, mask_is_bool;
    int64_t batch, heads, shared, outputs, inputs, depth, channels, causal, threads;
    double scale;
    DropArgs drop;
};

struct AttentionForwardArgs {
    AttentionArgs attention;
    Planes y;
    // (2, batch, heads, outputs), the greatest score and one over the sum of the exponentials from there, apart because one
    // number loses the sum beside large scores; and (batch, heads, outputs, inputs). Or null.
    float *peaks, *weights;
};

struct AttentionBackwardArgs {
    AttentionArgs attention;
    Planes y, grad, grad_q, grad_k, grad_v;
    const float* peaks;
    float* grad_mask;  // or null: zero, with strides of its own, 0 where an axis is broadcast
    int64_t of_batch, of_head, of_row, of_column;
};

// Convolutions of images of up to three axes: y_d = bias_d + sum over channels c and entries k of the kernel of w_dck times
// what k reads of x_c, which for output o along an axis is position (o multiple + k step + shift) / divisor, and zero where
// that is no whole number or beyond the image. x (batch, groups inputs, *from), y (batch, groups outputs, *to).
struct ImageArgs {
    int64_t batch, groups, inputs, outputs;  // channels of a group
    int64_t from[3], to[3], kernel[3], multiple[3], step[3], shift[3], divisor[3];
    int64_t w_group, w_output, w_input, threads;
    const float *x, *w, *bias;  // bias or null
    float* y;
    bool* finite;
};

// The gradients of w, (groups outputs, inputs, *kernel), and of bias, (groups outputs), or null, from that of y, of which
// `finite` of the image says that it was.
struct ImageWeightArgs {
    ImageArgs image;
    const float* grad;
    float *grad_w, *grad_bias;
};

// Means over windows of images (planes, *from) of up to three axes: output o of an axis has entries o stride - padding + i,
// i < size, of which those beyond the image are zeros, and count if `all_count`. Backward, x is the gradient of y, and y that
// of x.
struct MeansArgs {
    int64_t planes, from[3], to[3], size[3], stride[3], padding[3], all_count, threads;
    const float* x;
    float* y;
};

// y = x w + bias: x and y with contiguous rows `x_row` and `y_row` apart, w of any strides, bias or null.
struct ProjectArgs {
    const float *x, *w, *bias;
    float *y, *packed;  // packed: inputs times the columns filled up by kFill, scratch
    int64_t rows, inputs, columns, x_row, w_row, w_column, y_row, threads;
};

// y = x^T g over all rows, as the sum of so many `parts` of the rows; x (rows, inputs), g (rows, columns).
struct OuterArgs {
    const float *x, *g;
    float *y, *partial;  // y of any strides; partial: `parts` times inputs times the columns filled up, scratch
    int64_t rows, inputs, columns, x_row, g_row, y_row, y_column, parts, threads;
};

// A matrix of heads (heads depth, inputs), and the rows x (batch, inputs) of which it makes (batch, heads, depth); x is
// that already where there is no matrix. What it makes is turned by the cosines and sines of `turn`, (2, pairs), if there
// are any: channels j and j + pairs, or 2j and 2j + 1.
struct HeadsArgs {
    const void *x, *weight, *bias;
    const float* turn;
    int64_t heads, inputs, depth, pairs;
    bool halves;
};

// Entries of each head and element of the batch; the last one is written.
struct KeptArgs {
    void* entries;
    int64_t batch, head, row;
};

// One output that sees all entries kept, after one more was made: y = sum_k softmax(scale <q_k, key_k>) value_k O_k + b,
// O (outputs, heads channels); heads share keys and values where there are fewer. `added`, to the scores of each head and
// entry, may be null; its rows are so far apart. Without `half` all tensors are float32, else they are bfloat16 but for
// `turn`, `added` and scratch: (batch, heads, depth), (batch, heads, channels), and `room` numbers of a thread.
struct AttentionStepArgs {
    HeadsArgs query, key, value;
    KeptArgs keys, values;
    const void *output, *bias;
    const float* added;
    int64_t added_row;
    float *queries, *sums, *x;
    void* y;
    int64_t batch, entries, outputs, threads, half;
    double scale;
};

}  // namespace structconv
