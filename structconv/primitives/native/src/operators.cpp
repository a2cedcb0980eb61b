// The kernels as operators of torch, through its stable C++ ABI: one binary runs with every torch from
// TORCH_TARGET_VERSION on. An operator checks what could make a kernel read or write out of bounds, allocates its
// results, fills the struct of api.h and calls the kernel of the chosen instruction set. Compiled once.
//
// Layouts are sealed: one int32 tensor with a header, then indptr, index and, where the header says so, order and values.
// Only the operators here write the header, after they have proved the indices, so none is checked twice. Who changes a
// sealed tensor in place breaks the seal.
#include "api.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace structconv {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

#define SC_KERNELS(X, isa)                                                                                            \
    X(layouts, LayoutsArgs, isa) X(outside, OutsideArgs, isa) X(verify, VerifyArgs, isa) X(edges, EdgesArgs, isa)     \
    X(adjacency, AdjacencyArgs, isa) X(transpose, TransposeArgs, isa)                                                 \
    X(pool, PoolArgs, isa) X(pool_backward, PoolArgs, isa)                                                            \
    X(scatter, ScatterArgs, isa) X(scatter_backward, ScatterArgs, isa)                                                \
    X(norm, NormArgs, isa) X(norm_backward, NormArgs, isa)                                                            \
    X(spmm, SpmmArgs, isa) X(sddmm, SddmmArgs, isa) X(maxima, MaximaArgs, isa) X(maxima_backward, MaximaArgs, isa)    \
    X(messages, MessagesArgs, isa) X(messages_backward, MessagesArgs, isa)                                            \
    X(conditioned_sums, ConditionedArgs, isa) X(conditioned_adjoint, ConditionedArgs, isa)                            \
    X(affine_forward, AffineForwardArgs, isa) X(affine_backward, AffineBackwardArgs, isa)                             \
    X(edge_attention, EdgeAttentionArgs, isa) X(edge_attention_backward, EdgeAttentionArgs, isa)                      \
    X(additive_step, AdditiveStepArgs, isa) X(additive_step_backward, AdditiveStepBackwardArgs, isa)                  \
    X(edge_weights, EdgeAttentionArgs, isa) X(drop_block, DropBlockArgs, isa)                                         \
    X(window_forward, WindowForwardArgs, isa) X(window_backward, WindowBackwardArgs, isa)                             \
    X(attention_forward, AttentionForwardArgs, isa) X(attention_backward, AttentionBackwardArgs, isa)                 \
    X(images, ImageArgs, isa) X(images_backward, ImageWeightArgs, isa)                                                \
    X(window_means, MeansArgs, isa) X(window_means_backward, MeansArgs, isa)                                          \
    X(project, ProjectArgs, isa) X(outer, OuterArgs, isa) X(attention_step, AttentionStepArgs, isa)                   \
    X(sample_bounds, SampleBoundsArgs, isa) X(sample_draw, SampleDrawArgs, isa) X(number, NumberArgs, isa)
#define SC_MEMBER(name, Args, isa) void (*name)(const Args*);
#define SC_DECLARE(name, Args, isa) extern "C" void structconv_##name##_##isa(const structconv::Args*);
#define SC_ADDRESS(name, Args, isa) structconv_##name##_##isa,
#define SC_DECLARE_ALL(isa) SC_KERNELS(SC_DECLARE, isa)
#define SC_TABLE(isa) {#isa, {SC_KERNELS(SC_ADDRESS, isa)}},

}  // namespace
}  // namespace structconv
SC_EACH_LEVEL(SC_DECLARE_ALL)
namespace structconv {
namespace {

struct Kernels {
    SC_KERNELS(SC_MEMBER, )
};

struct Level {
    const char* name;
    Kernels kernels;
};

const Level kLevels[] = {SC_EACH_LEVEL(SC_TABLE)};
Kernels run;

// -- arguments ---------------------------------------------------------------------------------------------------------

constexpr double kFactorExponent = 80;
constexpr int64_t kFewNumbers = int64_t{1} << 24;  // of images that kernels read
constexpr int64_t kLimit = (int64_t{1} << 31) - 1, kLarge = int64_t{32} << 20, kScattered = int64_t{1} << 20;

struct Dtypes {
    int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(), i32 = aoti_torch_dtype_int32();
    int32_t i64 = aoti_torch_dtype_int64(), u8 = aoti_torch_dtype_uint8(), cpu = aoti_torch_device_type_cpu();
};

const Dtypes& types() {
    static const Dtypes found;
    return found;
}

// A tensor with its often used attributes; empty for none.
struct View {
    Maybe held;
    char* data = nullptr;
    const int64_t *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0;

    const Tensor& tensor() const { return *held; }
    int64_t size(int64_t dim) const { return sizes[dim]; }
    template <class T> T* as() const { return reinterpret_cast<T*>(data); }
    float* floats() const { return as<float>(); }
    int64_t half() const { return dtype == types().bf16; }
    Rows rows() const { return data || sizes ? Rows{data, strides[0], strides[1]} : Rows{nullptr, 0, 0}; }
};

constexpr int64_t kAny = -1;
using Shape = std::initializer_list<int64_t>;

struct __attribute__((packed, aligned(4))) Header {  // of an int32 tensor, which may be a part of another
    uint64_t seal;
    int32_t rows, slots, columns, ordered, valued, unused[9];
};
constexpr int64_t kHeader = sizeof(Header) / 4;

uint64_t seal() {
    static const uint64_t found = [] {
        std::random_device device;
        return (uint64_t{device()} << 32) ^ device();
    }();
    return found;
}

// A sealed layout.
struct Sealed {
    Maybe held;
    Header* header = nullptr;

    const Tensor& tensor() const { return *held; }
    int32_t* indptr() const { return reinterpret_cast<int32_t*>(header) + kHeader; }
    int32_t* index() const { return indptr() + header->rows + 1; }
    int32_t* order() const { return header->ordered ? index() + header->slots : nullptr; }
    float* values() const {
        return header->valued ? reinterpret_cast<float*>(index() + header->slots * int64_t{1 + header->ordered}) : nullptr;
    }
    Layout layout(bool with_order = true) const {
        return {indptr(), index(), with_order ? order() : nullptr, header->rows, header->slots};
    }
    int64_t rows() const { return header->rows; }
    int64_t slots() const { return header->slots; }
};

// Who checks: the name of the operator.
struct Op {
    const char* name;
    int64_t threads = torch::stable::get_num_threads();
    bool many = false;  // whether its products are those of `product`

    void check(bool holds, const char* argument, const char* expected) const {
        if (!holds)
            throw std::invalid_argument(std::string("structconv_native::") + name + ": " + argument + " must " + expected);
    }

    View view(const char* argument, const Tensor& t) const {
        View found;
        int32_t device, layout;
        int64_t *sizes, *strides, numbers;
        void* data = nullptr;
        const AtenTensorHandle handle = t.get();
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(handle, &layout));
        check(device == types().cpu && layout == 0, argument, "be a dense tensor on the CPU");
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &found.dtype));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &numbers));
        if (numbers) {
            TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
            check(data, argument, "have memory");
        }
        found.held = t, found.data = static_cast<char*>(data), found.sizes = sizes, found.strides = strides;
        return found;
    }

    void check_shape(const char* argument, const View& t, Shape shape) const {
        bool same = t.tensor().dim() == static_cast<int64_t>(shape.size());
        int64_t dim = 0;
        for (const int64_t size : shape) same = same && (size == kAny || t.sizes[dim] == size), ++dim;
        if (same) return;
        std::string expected = "have shape (", given;
        for (const int64_t size : shape) expected += (size == kAny ? "_" : std::to_string(size)) + ", ";
        for (dim = 0; dim < t.tensor().dim(); ++dim) given += std::to_string(t.sizes[dim]) + ", ";
        check(false, argument, (expected + "); got (" + given + ")").c_str());
    }

    // The tensor unchanged, after a check: one dtype, contiguous.
    View exact(const char* argument, const Tensor& t, Shape shape, int32_t dtype) const {
        View found = view(argument, t);
        check_shape(argument, found, shape);
        check(found.dtype == dtype && t.is_contiguous(), argument, "be contiguous, of the dtype that is read");
        return found;
    }

    // The tensor as contiguous float32.
    View floats(const char* argument, const Tensor& t, Shape shape) const {
        View found = view(argument, t);
        if (found.dtype != types().f32) found = view(argument, torch::stable::to(t, ScalarType::Float));
        if (!found.tensor().is_contiguous()) found = view(argument, torch::stable::contiguous(found.tensor()));
        check_shape(argument, found, shape);
        return found;
    }

    View floats(const char* argument, const Maybe& t, Shape shape) const {
        return t ? floats(argument, *t, shape) : View{};
    }

    // The tensor with contiguous channels, in float32 or bfloat16: (rows, heads, channels).
    View unit(const char* argument, const Tensor& t, Shape shape, int32_t dtype = 0) const {
        View found = view(argument, t);
        check_shape(argument, found, shape);
        check(dtype ? found.dtype == dtype : found.dtype == types().f32 || found.dtype == types().bf16, argument,
              "be float32 or bfloat16, as the other tensors are");
        const int64_t last = static_cast<int64_t>(shape.size()) - 1;
        check(found.sizes[last] <= kMaxChannels, argument, "have at most 7168 channels");
        if (found.strides[last] == 1 || found.sizes[last] <= 1) return found;
        return view(argument, torch::stable::contiguous(found.tensor()));
    }

    // The tensor, contiguous.
    View dense(const char* argument, const Tensor& t, Shape shape, int32_t dtype = 0) const {
        View found = unit(argument, t, shape, dtype);
        return found.tensor().is_contiguous() ? found : view(argument, torch::stable::contiguous(found.tensor()));
    }

    // The output of a kernel, (rows, heads, channels).
    View written(const char* argument, const Tensor& t, Shape shape, int32_t dtype) const {
        View found = view(argument, t);
        check_shape(argument, found, shape);
        const int64_t last = static_cast<int64_t>(shape.size()) - 1;
        check(found.dtype == dtype && (found.strides[last] == 1 || found.sizes[last] <= 1), argument,
              "have contiguous channels, and the dtype that is written");
        int64_t inner = 1;  // no two entries in one place: each stride reaches beyond what is within
        std::vector<std::pair<int64_t, int64_t>> axes;
        for (int64_t dim = 0; dim <= last; ++dim)
            if (found.sizes[dim] > 1) axes.emplace_back(found.strides[dim], found.sizes[dim]);
        std::sort(axes.begin(), axes.end());
        for (const auto& [stride, size] : axes) {
            check(stride >= inner, argument, "not overlap itself");
            inner += stride * (size - 1);
        }
        return found;
    }

    Sealed sealed(const char* argument, const Tensor& t) const {
        const View found = view(argument, t);
        const int64_t count = found.tensor().dim() == 1 ? found.size(0) : 0;
        check(found.dtype == types().i32 && count > kHeader && found.strides[0] == 1, argument, "be a sealed layout");
        Header* header = found.as<Header>();
        check(header->seal == seal(), argument, "be a layout that an operator of structconv_native has sealed");
        check(size(header->rows, header->slots, header->ordered, header->valued) <= count, argument, "be complete");
        return {found.tensor(), header};
    }

    // ... of at most so many columns.
    Sealed sealed(const char* argument, const Tensor& t, int64_t columns) const {
        const Sealed found = sealed(argument, t);
        check(found.header->columns <= columns, argument, "not have indices beyond the rows that it is applied to");
        return found;
    }

    static int64_t size(int64_t rows, int64_t slots, bool ordered, bool valued) {
        return kHeader + rows + 1 + slots * (1 + ordered + valued);
    }

    // Memory for a layout; `close` it when its indices are proved.
    Sealed open(int64_t rows, int64_t slots, int64_t columns, bool ordered, bool valued) const {
        for (const int64_t number : {rows, slots, columns})
            check(0 <= number && number < kLimit, "sizes", "not be negative, and below 2^31 - 1");
        Sealed made;
        made.held = empty({size(rows, slots, ordered, valued)}, types().i32);
        made.header = view("layout", made.tensor()).as<Header>();
        *made.header = {0, static_cast<int32_t>(rows), static_cast<int32_t>(slots), static_cast<int32_t>(columns), ordered,
                        valued, {}};
        return made;
    }

    // ... and what is returned: nothing if they are wrong.
    Tensor close(const Sealed& made, bool proved = true) const {
        if (!proved) return empty({0}, types().i32);
        made.header->seal = seal();
        return made.tensor();
    }

    // A result: huge pages, and what was kept of earlier results, for a large one.
    Tensor empty(Shape shape, int32_t dtype) const {
        int64_t strides[4], bytes = dtype == types().bf16 ? 2 : 4, dim = static_cast<int64_t>(shape.size());
        bool fits = true;
        for (int64_t i = dim - 1, step = 1; i >= 0; --i)
            strides[i] = step, fits = fits && !__builtin_mul_overflow(step, std::max<int64_t>(shape.begin()[i], 1), &step);
        for (const int64_t size : shape) fits = fits && !__builtin_mul_overflow(bytes, size, &bytes);
        check(fits, "result", "have fewer than 2^63 bytes");
        if (bytes >= kLarge && (dtype == types().f32 || dtype == types().bf16)) {
            const std::vector<int64_t> sizes(shape);
            StableIValue stack[2] = {torch::stable::detail::from(sizes), torch::stable::detail::from(dtype == types().bf16)};
            TORCH_ERROR_CODE_CHECK(
                torch_call_dispatcher("structconv_native::large", "", stack, TORCH_FEATURE_VERSION));
            return torch::stable::detail::to<Tensor>(stack[0]);
        }
        AtenTensorHandle made;
        TORCH_ERROR_CODE_CHECK(
            aoti_torch_empty_strided(dim, shape.begin(), strides, dtype, types().cpu, 0, &made));
        return Tensor(made);
    }

    View made(Shape shape, int32_t dtype) const { return view("result", empty(shape, dtype)); }
    View made(Shape shape) const { return made(shape, types().f32); }

    DropArgs drop(double p, int64_t seed, int64_t heads, int64_t outputs, int64_t source_major = 0) const {
        check(p >= 0 && p < 1, "p", "be in [0, 1)");
        check(heads >= 1, "batch_heads", "be at least 1");
        return {p, seed, heads, outputs, source_major};
    }

    // A list of edges (R, E), or more rows, of int32 or int64.
    View edge_index(const Tensor& t, int64_t rows) const {
        View found = view("index", t);
        check_shape("index", found, {rows, kAny});
        check(found.dtype == types().i32 || found.dtype == types().i64, "index", "be int32 or int64");
        return found;
    }

    int64_t wide(const View& t) const { return t.dtype == types().i64; }
};

Maybe maybe(const View& t) { return t.sizes ? Maybe(t.tensor()) : std::nullopt; }

// -- layouts -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, int64_t> layouts(const Tensor& index_, int64_t inputs, int64_t outputs) {
    const Op op{"layouts"};
    const View index = op.edge_index(index_, 2);
    const int64_t edges = index.size(1);
    const Sealed ahead = op.open(outputs, edges, inputs, true, false), back = op.open(inputs, edges, outputs, true, false);
    int64_t bad = -1;
    const LayoutsArgs args{index.data, index.strides[0], index.strides[1], op.wide(index), edges, inputs, outputs,
                           op.threads, ahead.indptr(), ahead.index(), ahead.order(), back.indptr(), back.index(),
                           back.order(), &bad};
    run.layouts(&args);
    return {op.close(ahead, bad < 0), op.close(back, bad < 0), bad};
}

// A copy of a layout, sealed if it is one; what is wrong with it, and how many columns it has at least.
std::tuple<Tensor, int64_t, int64_t> verify(const Tensor& indptr_, const Tensor& indices_, const Tensor& order_) {
    const Op op{"verify"};
    const View indptr = op.exact("indptr", indptr_, {kAny}, types().i32);
    const View indices = op.exact("indices", indices_, {kAny}, types().i32);
    const int64_t rows = indptr.size(0) - 1, slots = indices.size(0);
    const View order = op.exact("order", order_, {slots}, types().i32);
    const Sealed made = op.open(rows, slots, 0, true, false);
    std::memcpy(made.indptr(), indptr.data, 4 * (rows + 1));
    if (slots) std::memcpy(made.index(), indices.data, 4 * slots), std::memcpy(made.order(), order.data, 4 * slots);
    std::vector<uint8_t> met(slots);
    int64_t wrong = kNothing, columns = 0;
    const VerifyArgs args{made.layout(), met.data(), &wrong, &columns};
    run.verify(&args);
    made.header->columns = static_cast<int32_t>(std::min(columns, kLimit));
    return {op.close(made, wrong == kNothing), wrong, columns};
}

int64_t outside(const Tensor& index_, const std::vector<int64_t>& sizes) {
    const Op op{"outside"};
    const View index = op.edge_index(index_, static_cast<int64_t>(sizes.size()));
    int64_t bad = -1;
    const OutsideArgs args{index.data, index.strides[0], index.strides[1], op.wide(index), index.size(0), index.size(1),
                           sizes.data(), &bad};
    run.outside(&args);
    return bad;
}

int64_t edges(const Tensor& index_, int64_t inputs, int64_t outputs, const Maybe& input_starts, const Maybe& output_starts) {
    const Op op{"edges"};
    const View index = op.edge_index(index_, 2);
    View first, second;
    if (input_starts) {
        op.check(output_starts.has_value(), "output_starts", "be given with input_starts");
        first = op.exact("input_starts", *input_starts, {kAny}, types().i64);
        op.check(first.size(0) > 0, "input_starts", "not be empty");
        second = op.exact("output_starts", *output_starts, {first.size(0)}, types().i64);
    }
    int64_t bad = -1;
    const EdgesArgs args{index.data, index.strides[0], index.strides[1], op.wide(index), index.size(1), inputs, outputs,
                         first.sizes ? first.size(0) - 1 : 0, first.as<int64_t>(), second.as<int64_t>(), &bad};
    run.edges(&args);
    return bad;
}

// The edges (2, E) of a batch of graphs, of which each has the nodes from one of `starts` to the next: a copy of these, and
// the number of nodes; -1 where the starts do not rise from 0, an edge is not within a graph, or one of both is no such tensor.
std::tuple<Tensor, int64_t> batch(const Tensor& index_, const Tensor& starts_) {
    const Op op{"batch"};
    const View index = op.view("index", index_), starts = op.view("starts", starts_);
    const bool listed = index_.dim() == 2 && index.size(0) == 2 && (op.wide(index) || index.dtype == types().i32);
    if (!listed || starts_.dim() != 1 || starts.size(0) < 2 || !op.wide(starts)) return {op.empty({0}, types().i64), -1};
    const int64_t count = starts.size(0);
    const View own = op.made({count}, types().i64);
    int64_t* start = own.as<int64_t>();
    for (int64_t i = 0; i < count; ++i) start[i] = starts.as<int64_t>()[i * starts.strides[0]];
    const int64_t nodes = !start[0] && std::is_sorted(start, start + count) ? start[count - 1] : -1;
    return {own.tensor(), nodes >= 0 && edges(index_, nodes, nodes, own.tensor(), own.tensor()) < 0 ? nodes : -1};
}

// The first edge from an entry to itself, or -1.
int64_t first_loop(const Tensor& index_) {
    const Op op{"first_loop"};
    const View index = op.edge_index(index_, 2);
    const auto first = [&](const auto* source) {
        const auto* target = source + index.strides[0];
        for (int64_t e = 0; e < index.size(1); ++e)
            if (source[e * index.strides[1]] == target[e * index.strides[1]]) return e;
        return int64_t{-1};
    };
    return op.wide(index) ? first(index.as<int64_t>()) : first(index.as<int32_t>());
}

std::tuple<Tensor, int64_t> adjacency(const Tensor& index_, int64_t inputs, int64_t outputs, bool loops, bool square,
                                      int64_t normalize, const Maybe& weights_, bool numbered) {
    const Op op{"adjacency"};
    const View index = op.edge_index(index_, 2);
    op.check(outputs < kLimit, "outputs", "be below 2^31 - 1");
    const int64_t edges = index.size(1), slots = loops ? edges + outputs : edges;
    op.check(normalize >= kNone && normalize <= kSymmetric, "normalize", "be 0, 1 or 2");
    View weights;
    if (weights_) weights = op.exact("weights", *weights_, {slots}, types().f32);
    const bool ordered = weights_.has_value() || numbered, valued = normalize != kNone || weights_.has_value();
    op.check(!loops || outputs <= inputs, "loops", "begin at inputs");
    op.check(!(valued && square) || inputs == outputs, "inputs", "be the outputs of a square graph");
    const Sealed made = op.open(outputs, slots, inputs, ordered, valued);
    std::vector<float> scales(valued ? outputs + (square ? 0 : inputs) : 0);
    int64_t bad = -1;
    const AdjacencyArgs args{index.data, index.strides[0], index.strides[1], op.wide(index), edges, inputs, outputs, loops,
                             square, normalize, weights.floats(), made.indptr(), made.index(), made.order(), made.values(),
                             scales.data(), &bad};
    run.adjacency(&args);
    return {op.close(made, bad < 0), bad};
}

Tensor transpose(const Tensor& side) {
    const Op op{"transpose"};
    const Sealed from = op.sealed("side", side);
    const Header& h = *from.header;
    const Sealed made = op.open(h.columns, h.slots, h.rows, h.ordered, h.valued);
    const TransposeArgs args{from.layout(), from.values(), h.columns, made.indptr(), made.index(), made.order(),
                             made.values()};
    run.transpose(&args);
    return op.close(made);
}

// -- products along edges ----------------------------------------------------------------------------------------------

// y[v rows / count] += alpha A x[v batch / count] + beta z, A of values[v lead / count]; see SpmmArgs. 0: no result yet.
View multiply(const Op& op, const Tensor& layout_, const Maybe& values_, bool in_layout_order, const Tensor& x_, const Maybe& z_,
              int64_t rows, int64_t count, double alpha, double beta, View y) {
    const bool flat = x_.dim() == 2;
    const View x = flat ? op.dense("x", x_, {kAny, kAny}) : op.dense("x", x_, {kAny, kAny, kAny});
    const int64_t batch = flat ? 1 : x.size(0), inputs = x.size(flat ? 0 : 1), channels = x.size(flat ? 1 : 2);
    const Sealed layout = op.sealed("layout", layout_, inputs);
    const auto divides = [&](int64_t part) { return part > 0 && part <= count && count % part == 0; };
    op.check(count > 0 && divides(batch) && divides(rows) && (!flat || rows == 1), "rows", "divide the products, as x does");
    View values;
    int64_t stride = 0, repeats = count, lead = 1;
    if (values_) {
        Tensor given = *values_;
        if (op.view("values", given).dtype != x.dtype)
            given = torch::stable::to(given, x.half() ? ScalarType::BFloat16 : ScalarType::Float);
        values = op.view("values", torch::stable::contiguous(given));
        const int64_t numbers = values.tensor().numel();
        lead = layout.slots() ? numbers / layout.slots() : 1;
        op.check(lead * layout.slots() == numbers && divides(lead), "values", "be (E,) or (W, E) with W dividing the products");
        if (lead > 1) stride = layout.slots(), repeats = count / lead;
    }
    op.check(count / batch / rows <= lead, "count", "not exceed all combinations of x, values and results");
    const auto result = [&](const char* name, const Tensor& t) {
        return flat ? op.dense(name, t, {layout.rows(), channels}, x.dtype)
                    : op.dense(name, t, {rows, layout.rows(), channels}, x.dtype);
    };
    View z;
    if (z_) z = result("z", *z_);
    if (y.sizes) {
        op.check(y.tensor().is_contiguous(), "out", "be contiguous");
        y = result("out", y.tensor());
    } else {
        y = flat ? op.made({layout.rows(), channels}, x.dtype) : op.made({rows, layout.rows(), channels}, x.dtype);
    }
    const SpmmArgs args{layout.layout(!in_layout_order), values.data, x.data, z.data, y.data, inputs, channels, count, stride,
                        repeats, count / batch, count / rows, x.half(), op.threads, alpha, beta};
    run.spmm(&args);
    return y;
}

Tensor spmm(const Tensor& layout, const Maybe& values, bool in_layout_order, const Tensor& x, const Maybe& z, int64_t rows,
            int64_t count, double alpha, double beta) {
    return multiply({"spmm"}, layout, values, in_layout_order, x, z, rows, count, alpha, beta, {}).tensor();
}

void spmm_into(const Tensor& layout, const Maybe& values, bool in_layout_order, const Tensor& x, const Tensor& out, int64_t count,
               double alpha, double beta) {
    const Op op{"spmm_into"};
    multiply(op, layout, values, in_layout_order, x, beta ? Maybe(out) : std::nullopt, count, count, alpha, beta,
             op.view("out", out));
}

Tensor sddmm(const Tensor& layout_, const Tensor& q_, const Tensor& k_, int64_t rows) {
    const Op op{"sddmm"};
    const View q = op.dense("q", q_, {kAny, kAny, kAny}), k = op.dense("k", k_, {kAny, kAny, q.size(2)}, q.dtype);
    const Sealed layout = op.sealed("layout", layout_, k.size(1));
    op.check(q.size(1) == layout.rows() && layout.header->ordered, "q", "have the rows of the layout");
    for (const int64_t part : {q.size(0), k.size(0)})
        op.check(part > 0 && part <= rows && rows % part == 0, "rows", "be a multiple of the matrices of q and of k");
    const View s = op.made({rows, layout.slots()}, q.dtype);
    const SddmmArgs args{layout.layout(), q.data, k.data, s.data, k.size(1), q.size(2), rows, rows / q.size(0),
                         rows / k.size(0), q.half(), op.threads};
    run.sddmm(&args);
    return s.tensor();
}

// y = A x + more, A with its own values.
View along(const Op& op, const Sealed& side, const View& x, const View& more = {}) {
    op.check(x.size(0) >= side.header->columns, "x", "have a row for each column of the layout");
    const View y = op.made({side.rows(), x.size(1)});
    const SpmmArgs args{side.layout(false), side.values(), x.data, more.data, y.data, x.size(0), x.size(1), 1, 0, 1, 1, 1, 0,
                        op.threads, 1.0, 1.0};
    run.spmm(&args);
    return y;
}

Tensor sums(const Tensor& side, const Tensor& x) {
    const Op op{"sums"};
    return along(op, op.sealed("side", side), op.dense("x", x, {kAny, kAny}, types().f32)).tensor();
}

Tensor sums_backward(const Tensor&, const Tensor& by_source, const Tensor&, const Tensor& grad) { return sums(by_source, grad); }

Tensor maxima(const Tensor& side_, const Tensor& x_) {
    const Op op{"maxima"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    const Sealed side = op.sealed("side", side_, x.size(0));
    const View y = op.made({side.rows(), x.size(1)});
    const MaximaArgs args{side.layout(), {}, x.floats(), y.floats(), nullptr, nullptr, nullptr, x.size(1), op.threads};
    run.maxima(&args);
    return y.tensor();
}

Tensor maxima_backward(const Tensor& by_target, const Tensor& by_source, const Tensor& x_, const Tensor& y_,
                       const Tensor& grad_) {
    const Op op{"maxima_backward"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32), y = op.dense("y", y_, {kAny, x.size(1)}, types().f32);
    const View grad = op.dense("grad", grad_, {y.size(0), x.size(1)}, types().f32);
    const Sealed ahead = op.sealed("by_target", by_target, x.size(0)), back = op.sealed("by_source", by_source, y.size(0));
    op.check(ahead.rows() == y.size(0) && back.rows() == x.size(0), "by_source", "be the transpose of by_target");
    const View grad_x = op.made({x.size(0), x.size(1)}), shares = op.made({y.size(0), y.size(1)});
    const MaximaArgs args{ahead.layout(), back.layout(), x.floats(), y.floats(), grad.floats(), shares.floats(),
                          grad_x.floats(), x.size(1), op.threads};
    run.maxima_backward(&args);
    return grad_x.tensor();
}

// The attributes of edges that a layout numbers, a row for each.
View attributes_of(const Op& op, const Sealed& side, const Tensor& attributes, int64_t channels) {
    op.check(side.header->ordered, "by_target", "say which edge each slot belongs to");
    return op.dense("attributes", attributes, {side.slots(), channels}, types().f32);
}

Tensor messages(const Tensor& side_, const Tensor& x_, const Tensor& attributes_) {
    const Op op{"messages"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    const Sealed side = op.sealed("by_target", side_, x.size(0));
    const View attributes = attributes_of(op, side, attributes_, x.size(1)), y = op.made({side.rows(), x.size(1)});
    const MessagesArgs args{side.layout(), {}, x.floats(), attributes.floats(), y.floats(), nullptr, nullptr, nullptr, x.size(1),
                            op.threads};
    run.messages(&args);
    return y.tensor();
}

std::tuple<Maybe, Maybe> messages_backward(const Tensor& by_target, const Tensor& by_source, const Tensor& x_,
                                           const Tensor& attributes_, const Tensor& grad_, bool of_x, bool of_attributes) {
    const Op op{"messages_backward"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32), grad = op.dense("grad", grad_, {kAny, x.size(1)}, types().f32);
    const Sealed ahead = op.sealed("by_target", by_target, x.size(0)), back = op.sealed("by_source", by_source, grad.size(0));
    op.check(ahead.rows() == grad.size(0) && back.rows() == x.size(0) && ahead.slots() == back.slots() && back.header->ordered,
             "by_source", "be the transpose of by_target");
    const View attributes = attributes_of(op, ahead, attributes_, x.size(1));
    const View grad_x = of_x ? op.made({x.size(0), x.size(1)}) : View{};
    const View grad_attributes = of_attributes ? op.made({ahead.slots(), x.size(1)}) : View{};
    const MessagesArgs args{ahead.layout(), back.layout(), x.floats(), attributes.floats(), nullptr, grad.floats(),
                            grad_x.floats(), grad_attributes.floats(), x.size(1), op.threads};
    run.messages_backward(&args);
    return {maybe(grad_x), maybe(grad_attributes)};
}

// The first row of each group of sorted rows, and the number of all; nothing where a row is out of order or of no group.
// Without a count the last group is that of the last row.
Tensor starts(const Tensor& groups_, std::optional<int64_t> count_) {
    const Op op{"starts"};
    const View groups = op.exact("groups", groups_, {kAny}, types().i64);
    const int64_t rows = groups.size(0), *group = groups.as<int64_t>();
    if (!count_ && rows && (group[rows - 1] < 0 || group[rows - 1] >= kLimit - 1)) return op.made({0}, types().i64).tensor();
    const int64_t count = count_ ? *count_ : rows ? group[rows - 1] + 1 : 0;
    op.check(count >= 0 && count < kLimit && rows < kLimit, "count", "be in [0, 2^31 - 1)");
    const View found = op.made({count + 1}, types().i64);
    int64_t* first = found.as<int64_t>();
    int64_t next = 0;
    for (int64_t row = 0; row < rows; ++row) {
        if (group[row] < std::max<int64_t>(next - 1, 0) || group[row] >= count) return op.made({0}, types().i64).tensor();
        while (next <= group[row]) first[next++] = row;
    }
    while (next <= count) first[next++] = rows;
    return found.tensor();
}

// The first row of each of so many groups, and the number of all.
const int64_t* starts_of(const Op& op, const Tensor& starts_, const View& x, int64_t& groups) {
    const View starts = op.exact("starts", starts_, {kAny}, types().i64);
    const int64_t* start = starts.as<int64_t>();
    groups = starts.size(0) - 1;
    op.check(groups >= 0 && start[0] == 0 && start[groups] == x.size(0) && std::is_sorted(start, start + groups + 1), "starts",
             "rise from 0 to the number of rows");
    return start;
}

PoolArgs groups_of(const Op& op, const Tensor& starts_, const View& x, int64_t kind, double t) {
    op.check(kind >= kSumOf && kind <= kFixedSoftmaxOf, "kind", "be 0 to 6");
    int64_t groups = 0;
    const int64_t* start = starts_of(op, starts_, x, groups);
    return {start, groups, x.size(1), kind, op.threads, t, x.floats(), nullptr, nullptr, nullptr};
}

// The rows of each group into one.
Tensor pool(const Tensor& starts, const Tensor& x_, int64_t kind, double t) {
    const Op op{"pool"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    PoolArgs args = groups_of(op, starts, x, kind, t);
    const View y = op.made({args.groups, args.channels});
    args.out = y.floats();
    run.pool(&args);
    return y.tensor();
}

// The gradient of x.
Tensor pool_backward(const Tensor& starts, const Tensor& x_, const Tensor& y_, const Tensor& grad_, int64_t kind, double t) {
    const Op op{"pool_backward"};
    const bool even = kind == kSumOf || kind == kMeanOf;  // then x has a shape, of which no number is read, nor of y
    const View x = even ? op.view("x", x_) : op.dense("x", x_, {kAny, kAny}, types().f32);
    op.check_shape("x", x, {kAny, kAny});
    PoolArgs args = groups_of(op, starts, x, kind, t);
    const View y = op.dense("y", y_, {args.groups, args.channels}, types().f32);
    const View grad = op.dense("grad", grad_, {args.groups, args.channels}, types().f32);
    const View grad_x = op.made({x.size(0), args.channels});
    args.y = y.floats(), args.grad = grad.floats(), args.out = grad_x.floats();
    run.pool_backward(&args);
    return grad_x.tensor();
}

Tensor pool_evenly_backward(const Tensor& starts, const Tensor& x, const Tensor& grad, int64_t kind, double t) {
    Op{"pool_evenly_backward"}.check(kind == kSumOf || kind == kMeanOf, "kind", "be 0 or 1");
    return pool_backward(starts, x, grad, grad, kind, t);
}

ScatterArgs scattered(const Op& op, const View& x, const Tensor& index_, int64_t groups, int64_t kind) {
    op.check(kSumOf <= kind && kind <= kMinOf || kind == kSoftmaxOf, "kind", "be 0 to 3, or 5");
    op.check(0 <= groups && groups < kLimit, "groups", "be from 0 to 2^31");
    const View index = op.exact("index", index_, {x.size(0)}, types().i64);
    const int64_t* group = index.as<int64_t>();
    op.check(std::all_of(group, group + x.size(0), [&](int64_t g) { return 0 <= g && g < groups; }), "index",
             "be from 0 to the number of groups");
    return {group, x.size(0), groups, x.size(1), kind, op.threads, x.floats(), nullptr, nullptr, nullptr};
}

// The rows of each group, in any order, into one, or the softmax over them.
Tensor scatter(const Tensor& x_, const Tensor& index, int64_t groups, int64_t kind) {
    const Op op{"scatter"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    ScatterArgs args = scattered(op, x, index, groups, kind);
    const View y = op.made({kind == kSoftmaxOf ? args.rows : groups, args.channels});
    args.out = y.floats();
    run.scatter(&args);
    return y.tensor();
}

// The gradient of x.
Tensor scatter_backward(const Tensor& x_, const Tensor& index, const Tensor& y_, const Tensor& grad_, int64_t groups, int64_t kind) {
    const Op op{"scatter_backward"};
    const bool read = kind == kMaxOf || kind == kMinOf;  // else x has a shape, of which no number is read
    const View x = read ? op.dense("x", x_, {kAny, kAny}, types().f32) : op.view("x", x_);
    op.check_shape("x", x, {kAny, kAny});
    ScatterArgs args = scattered(op, x, index, groups, kind);
    const Shape shape{kind == kSoftmaxOf ? args.rows : groups, args.channels};
    const View y = op.dense("y", y_, shape, types().f32), grad = op.dense("grad", grad_, shape, types().f32);
    const View grad_x = op.made({args.rows, args.channels});
    args.y = y.floats(), args.grad = grad.floats(), args.out = grad_x.floats();
    run.scatter_backward(&args);
    return grad_x.tensor();
}

NormArgs norm_of(const Op& op, const Tensor& starts_, const View& x, const Maybe& shift, const Maybe& weight, const Maybe& bias,
                 int64_t center, int64_t scale, double eps, double gain) {
    op.check(center >= kChannelMean && center <= kWholeMean && scale >= kNoScale && scale <= kWholeScale, "center and scale",
             "be 0 to 1 and 0 to 2");
    int64_t groups = 0;
    const int64_t* start = starts_of(op, starts_, x, groups);
    const auto numbers = [&](const char* name, const Maybe& t) {
        return t ? op.exact(name, *t, {x.size(1)}, types().f32).floats() : nullptr;
    };
    return {start, groups, x.size(1), center, scale, op.threads, eps, gain, x.floats(), numbers("shift", shift),
            numbers("weight", weight), numbers("bias", bias), nullptr, nullptr, nullptr};
}

// The rows of each group, standardized.
Tensor norm(const Tensor& starts, const Tensor& x_, const Maybe& shift, const Maybe& weight, const Maybe& bias, int64_t center,
            int64_t scale, double eps, double gain) {
    const Op op{"norm"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    NormArgs args = norm_of(op, starts, x, shift, weight, bias, center, scale, eps, gain);
    const View y = op.made({x.size(0), x.size(1)});
    args.out = y.floats();
    run.norm(&args);
    return y.tensor();
}

// The gradients of x, and of shift, weight and bias where they are given.
std::tuple<Tensor, Maybe, Maybe, Maybe> norm_backward(const Tensor& starts, const Tensor& x_, const Maybe& shift,
                                                      const Maybe& weight, const Maybe& bias, const Tensor& grad_,
                                                      int64_t center, int64_t scale, double eps, double gain) {
    const Op op{"norm_backward"};
    const View x = op.dense("x", x_, {kAny, kAny}, types().f32);
    const int64_t channels = x.size(1);
    NormArgs args = norm_of(op, starts, x, shift, weight, bias, center, scale, eps, gain);
    const View grad = op.dense("grad", grad_, {x.size(0), channels}, types().f32), grad_x = op.made({x.size(0), channels});
    const int64_t parts = args.parts();
    std::vector<float> sums(3 * channels * parts);
    args.grad = grad.floats(), args.out = grad_x.floats(), args.sums = sums.data();
    run.norm_backward(&args);
    const auto total = [&](const Maybe& of, int64_t which) -> Maybe {
        if (!of) return std::nullopt;
        const View found = op.made({channels});
        std::fill_n(found.floats(), channels, 0.0f);
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t c = 0; c < channels; ++c) found.floats()[c] += sums[(part * 3 + which) * channels + c];
        return found.tensor();
    };
    return {grad_x.tensor(), total(shift, 0), total(weight, 1), total(bias, 2)};
}

// `norm` without shift, weight and bias, which is its own gradient where it has no scale.
Tensor center(const Tensor& starts, const Tensor& x, int64_t center, double gain) {
    return norm(starts, x, {}, {}, {}, center, kNoScale, 0, gain);
}

Tensor center_backward(const Tensor& starts, const Tensor&, const Tensor& grad, int64_t center_, double gain) {
    return center(starts, grad, center_, gain);
}

void conditioned(const Op& op, bool adjoint, const Tensor& layout_, const Tensor& values_, const Tensor& x_, int64_t first,
                 int64_t heads, const Tensor& sums_, const Maybe& grad_values_, const Maybe& grad_x_) {
    const View values = op.exact("values", values_, {kAny, kAny}, types().f32);
    op.check(first >= 0 && heads > 0 && first <= values.size(1) - heads, "heads", "be heads of the values");
    const View x = op.exact("x", x_, {kAny, kAny}, types().f32);
    const View sums = op.exact("sums", sums_, {kAny, heads * x.size(1)}, types().f32);
    const Sealed layout = op.sealed("layout", layout_, adjoint ? sums.size(0) : x.size(0));
    op.check(layout.rows() == (adjoint ? x : sums).size(0), "layout", "have a row for each row of the result");
    op.check(values.size(0) == layout.slots() && layout.header->ordered, "values", "have a row for each edge");
    View grad_values, grad_x;
    if (grad_values_) grad_values = op.exact("grad_values", *grad_values_, {values.size(0), values.size(1)}, types().f32);
    if (grad_x_) grad_x = op.exact("grad_x", *grad_x_, {x.size(0), x.size(1)}, types().f32);
    const ConditionedArgs args{layout.layout(), values.floats() + first, x.floats(), sums.floats(),
                               grad_values.sizes ? grad_values.floats() + first : nullptr, grad_x.floats(), values.size(1),
                               heads, x.size(1), op.threads};
    (adjoint ? run.conditioned_adjoint : run.conditioned_sums)(&args);
}

void conditioned_sums(const Tensor& layout, const Tensor& values, const Tensor& x, int64_t first, int64_t heads,
                      const Tensor& out) {
    conditioned({"conditioned_sums"}, false, layout, values, x, first, heads, out, {}, {});
}

void conditioned_adjoint(const Tensor& layout, const Tensor& values, const Tensor& x, int64_t first, int64_t heads,
                         const Tensor& grads, const Maybe& grad_values, const Maybe& grad_x) {
    conditioned({"conditioned_adjoint"}, true, layout, values, x, first, heads, grads, grad_values, grad_x);
}

// -- dense products, and layers of one graph ---------------------------------------------------------------------------

// Of x^T g: columns up to which vectors run over the wider operand, rows and numbers of a part, and how many there are.
constexpr int64_t kNarrowOuter = 16, kPartRows = 256, kPartNumbers = 1 << 23, kMostParts = 16;

int64_t filled(int64_t columns) { return (columns + kFill - 1) / kFill * kFill; }

Tensor project(const Tensor& x_, const Tensor& w_, const Maybe& bias_) {
    const Op op{"project"};
    View x = op.view("x", x_), w = op.view("w", w_);
    op.check_shape("x", x, {kAny, kAny});
    op.check_shape("w", w, {x.size(1), kAny});
    op.check(x.dtype == types().f32 && w.dtype == types().f32, "x", "be float32, as w is");
    if (x.strides[1] != 1 || x.strides[0] < x.size(1)) x = op.view("x", torch::stable::contiguous(x_));
    const int64_t rows = x.size(0), inputs = x.size(1), columns = w.size(1);
    op.check(rows && inputs && columns, "x", "not be empty");
    View bias;
    if (bias_) bias = op.dense("bias", torch::stable::reshape(*bias_, {1, bias_->numel()}), {1, columns}, types().f32);
    const View y = op.made({rows, columns}), packed = op.made({inputs * filled(columns)});
    const ProjectArgs args{x.floats(), w.floats(), bias.floats(), y.floats(), packed.floats(), rows, inputs, columns,
                           x.strides[0], w.strides[0], w.strides[1], columns, op.threads};
    run.project(&args);
    return y.tensor();
}

// x^T g; vectors run over the wider of both. As many parts of the rows whatever the threads, so that the sums are the same.
Tensor outer(const Tensor& x_, const Tensor& g_) {
    const Op op{"outer"};
    const auto by_rows = [&](const char* name, const Tensor& t, int64_t rows) {
        View found = op.view(name, t);
        op.check_shape(name, found, {rows, kAny});
        op.check(found.dtype == types().f32, name, "be float32");
        if (found.strides[1] == 1 && found.strides[0] >= found.size(1)) return found;
        return op.view(name, torch::stable::contiguous(t));
    };
    View x = by_rows("x", x_, kAny), g = by_rows("g", g_, x.size(0));
    const bool by_columns = g.size(1) <= kNarrowOuter && g.size(1) < x.size(1);
    if (by_columns) std::swap(x, g);
    const int64_t rows = x.size(0), inputs = x.size(1), columns = g.size(1);
    op.check(rows && inputs && columns, "x", "not be empty");
    int64_t parts = 1;
    while (2 * parts <= std::min({kMostParts, rows / kPartRows, kPartNumbers / (inputs * filled(columns))})) parts *= 2;
    const View y = by_columns ? op.made({columns, inputs}) : op.made({inputs, columns});
    const View partial = op.made({parts * inputs * filled(columns)});
    const OuterArgs args{x.floats(), g.floats(), y.floats(), partial.floats(), rows, inputs, columns, x.strides[0],
                         g.strides[0], by_columns ? 1 : columns, by_columns ? inputs : 1, parts, op.threads};
    run.outer(&args);
    return y.tensor();
}

// A matrix within a contiguous tensor.
struct Matrix {
    const Tensor* within;
    float* data;
    int64_t from, sizes[2], strides[2];  // from: numbers before it
    bool turned = false;

    Matrix transposed() const { return {within, data, from, {sizes[1], sizes[0]}, {strides[1], strides[0]}, !turned}; }

    Tensor tensor() const {
        AtenTensorHandle made;
        TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(within->get(), 2, sizes, strides, from, &made));
        return Tensor(made);
    }
};

// Number `at` of the matrices of a tensor, or its transpose.
Matrix matrix(const View& t, int64_t at, int64_t rows, int64_t columns, bool transposed = false) {
    const int64_t from = at * rows * columns;
    const Matrix found{&t.tensor(), t.floats() + from, from, {rows, columns}, {columns, 1}};
    return transposed ? found.transposed() : found;
}

Matrix matrix(const View& t) { return matrix(t, 0, t.size(0), t.size(1)); }
Matrix transposed(const View& t) { return matrix(t, 0, t.size(0), t.size(1), true); }

// A contiguous tensor in another shape.
Tensor shaped(const Tensor& t, Shape sizes) {
    int64_t strides[4], dim = static_cast<int64_t>(sizes.size());
    for (int64_t i = dim - 1, step = 1; i >= 0; --i) strides[i] = step, step *= sizes.begin()[i];
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), dim, sizes.begin(), strides, 0, &made));
    return Tensor(made);
}

// Products of numbers, and numbers of a matrix in an order of its own, up to which a call of torch's costs more than its
// faster kernel gains.
constexpr int64_t kFewProducts = 1 << 16, kFewInRows = 1 << 12, kFewTurned = 1 << 10;
// Numbers and products up to which torch's product is the fastest; see `products.product`.
constexpr int64_t kFullWidth = 16, kManyNumbers = 1 << 14, kManyProducts = 1 << 24, kAddedNumbers = 1 << 15;

// Whether the products of a layer of these edges and channels are many.
bool are_many(const Sealed& side, int64_t in, int64_t out) {
    const int64_t narrow = std::min(in, out), wide = std::max(in, out);
    const int64_t numbers = std::max(side.header->rows, side.header->columns) * wide;
    return numbers >= kManyNumbers && (narrow < kFullWidth || numbers * wide >= kManyProducts);
}

bool are_few_products(const Matrix& a, const Matrix& b) {
    const int64_t rows = a.sizes[0], inner = a.sizes[1], columns = b.sizes[1], products = rows * inner * columns;
    const int64_t turned = a.strides[1] == 1 ? inner * columns : rows * columns;
    return products > 0 && products <= kFewProducts && turned <= (a.strides[1] == 1 && b.strides[1] == 1 ? kFewInRows : kFewTurned);
}

// y = a b + bias, of a row-major y, by our kernels: few products.
void multiply_few(float* y, const Matrix& a, const Matrix& b, const View& bias) {
    const int64_t rows = a.sizes[0], inner = a.sizes[1], columns = b.sizes[1];
    const bool by_rows = a.strides[1] == 1;
    std::vector<float> scratch((by_rows ? inner : rows) * filled(columns));
    if (by_rows) {
        const ProjectArgs args{a.data, b.data, bias.floats(), y, scratch.data(), rows, inner, columns, a.strides[0],
                               b.strides[0], b.strides[1], columns, 1};
        run.project(&args);
    } else {
        const OuterArgs args{a.data, b.data, y, scratch.data(), inner, rows, columns, a.strides[1], b.strides[0], columns, 1, 1, 1};
        run.outer(&args);
    }
}

// y = a b, plus a bias (Q) or, `onto`, what y was; y is row-major, and so is b where a is not.
void multiply_into(const Matrix& y, const Matrix& a, const Matrix& b, const View& bias = {}, bool onto = false) {
    const int64_t numbers = y.sizes[0] * y.sizes[1];
    if (are_few_products(a, b)) {
        if (!onto) return multiply_few(y.data, a, b, bias);
        std::vector<float> more(numbers);
        multiply_few(more.data(), a, b, bias);
        for (int64_t i = 0; i < numbers; ++i) y.data[i] += more[i];
        return;
    }
    const Tensor to = y.tensor(), left = a.tensor(), right = b.tensor();
    const Tensor* plus = onto ? &to : bias.sizes ? &bias.tensor() : nullptr;
    TORCH_ERROR_CODE_CHECK(plus ? aoti_torch_cpu_addmm_out(to.get(), plus->get(), left.get(), right.get(), 1.0, 1.0)
                                : aoti_torch_cpu_mm_out(to.get(), left.get(), right.get()));
}

// a b + bias; of many numbers by the fastest library, which `products.product` and `products.outer` choose.
View times(const Op& op, const Matrix& a, const Matrix& b, const View& bias = {}) {
    const int64_t rows = a.sizes[0], columns = b.sizes[1];
    if (op.many) {
        StableIValue stack[4] = {torch::stable::detail::from((a.turned ? a.transposed() : a).tensor()),
                                 torch::stable::detail::from(b.tensor()), torch::stable::detail::from(maybe(bias)),
                                 torch::stable::detail::from(a.turned)};
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("structconv_native::product", "", stack, TORCH_FEATURE_VERSION));
        return op.dense("product", torch::stable::detail::to<Tensor>(stack[0]), {rows, columns}, types().f32);
    }
    const View y = op.made({rows, columns});
    multiply_into(matrix(y), a, b, bias);
    return y;
}

View times(const Op& op, const View& a, const Matrix& b, const View& bias = {}) { return times(op, matrix(a), b, bias); }

// y += more: a row for each of y, or one for all.
void add(const View& y, const View& more) {
    const int64_t columns = y.size(1), step = more.tensor().dim() > 1 ? columns : 0;
    torch::stable::parallel_for(0, y.size(0), kAddedNumbers / std::max<int64_t>(columns, 1) + 1, [&](int64_t n, int64_t end) {
        for (; n < end; ++n)
            for (int64_t c = 0; c < columns; ++c) y.floats()[n * columns + c] += more.floats()[n * step + c];
    });
}

// y += a b; in the place of y where torch's product does so, for fewer than `most` numbers.
void add_times(const Op& op, const View& y, const Matrix& a, const Matrix& b, int64_t most = kManyNumbers) {
    if (!op.many) return multiply_into(matrix(y), a, b, {}, true);
    const Tensor &to = y.tensor(), left = a.tensor(), right = b.tensor();
    if (to.numel() >= most) return add(y, times(op, a, b));
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(to.get(), to.get(), left.get(), right.get(), 1.0, 1.0));
}

View shaped(const Op& op, const View& t, Shape sizes) { return op.view("result", shaped(t.tensor(), sizes)); }

// The sum of so many rows of so many columns, each `stride` after the one before.
View row_sum(const Op& op, const float* from, int64_t rows, int64_t columns, int64_t stride) {
    std::vector<double> sums(columns);
    for (int64_t n = 0; n < rows; ++n, from += stride)
        for (int64_t c = 0; c < columns; ++c) sums[c] += from[c];
    const View found = op.made({columns});
    std::copy(sums.begin(), sums.end(), found.floats());
    return found;
}

// The sum of the rows of a gradient.
View row_sum(const Op& op, const View& grad) {
    if (!op.many) return row_sum(op, grad.floats(), grad.size(0), grad.size(1), grad.size(1));
    const int64_t axis = 0;
    return op.view("sum", torch::stable::sum(grad.tensor(), torch::headeronly::IntHeaderOnlyArrayRef(&axis, 1)));
}

// The arguments of the layers below: x (M, P), Theta (K, P, Q) and a bias (Q).
struct Dense {
    View x, theta, bias;
    int64_t in, out;

    Dense(const Op& op, const Tensor& x_, const Tensor& theta_, const Maybe& bias_, int64_t size)
        : x(op.dense("x", x_, {kAny, kAny}, types().f32)),
          theta(op.dense("theta", theta_, {size, x.size(1), kAny}, types().f32)),
          bias(op.floats("bias", bias_, {theta.size(2)})),
          in(x.size(1)), out(theta.size(2)) {}

    Matrix matrix(int64_t at, bool transposed = false) const { return structconv::matrix(theta, at, in, out, transposed); }
};

// y = sum_k A_k x Theta_k + b, and to train A x where that is computed first, as it is for several matrices. Row n K + k of
// A is row n of A_k, so that A x is (N, K P) too, and Theta (K P, Q).
std::tuple<Tensor, Maybe> convolve(const Tensor& side_, const Tensor& x_, const Tensor& theta_, const Maybe& bias_,
                                   bool structure_first, bool train) {
    Op op{"convolve"};
    const Dense d(op, x_, theta_, bias_, kAny);
    const Sealed side = op.sealed("side", side_, d.x.size(0));
    const int64_t size = d.theta.size(0), terms = size * d.in;
    op.many = are_many(side, d.in, d.out);
    op.check(size > 0 && side.rows() % size == 0 && (size == 1 || structure_first), "theta",
             "have a matrix for each row of an output");
    if (structure_first) {
        const View r = along(op, side, d.x);
        const View y = times(op, matrix(r, 0, side.rows() / size, terms), matrix(d.theta, 0, terms, d.out), d.bias);
        return {y.tensor(), train ? maybe(r) : std::nullopt};
    }
    const View y = along(op, side, times(op, d.x, d.matrix(0)));
    if (d.bias.sizes) add(y, d.bias);
    return {y.tensor(), std::nullopt};
}

// The gradients of x, Theta and the bias.
std::tuple<Maybe, Maybe, Maybe> convolve_backward(const Tensor&, const Tensor& side_T, const Tensor& x_, const Tensor& theta_,
                                                  const Maybe&, const Maybe& r_, const Tensor& grad_, bool of_x, bool of_theta,
                                                  bool of_bias, bool) {
    Op op{"convolve_backward"};
    const Dense d(op, x_, theta_, {}, kAny);
    const int64_t size = d.theta.size(0), terms = size * d.in;
    View grad = op.dense("grad", grad_, {kAny, d.out}, types().f32), grad_x, grad_theta, grad_bias;
    const Sealed side = op.sealed("side_T", side_T, grad.size(0) * size);
    op.many = are_many(side, d.in, d.out);
    op.check(side.rows() == d.x.size(0), "side_T", "have a row for each row of x");
    op.check(size == 1 || r_.has_value(), "r", "be given of several matrices");
    if (of_bias) grad_bias = row_sum(op, grad);
    View left = d.x;
    if (r_) left = op.dense("r", *r_, {grad.size(0) * size, d.in}, types().f32);
    if (!r_ && (of_x || of_theta)) grad = along(op, side, grad);
    if (of_theta)
        grad_theta = shaped(op, times(op, matrix(left, 0, grad.size(0), terms, true), matrix(grad)), {size, d.in, d.out});
    if (of_x) grad_x = times(op, grad, matrix(d.theta, 0, terms, d.out, true));
    if (of_x && r_) grad_x = along(op, side, shaped(op, grad_x, {grad.size(0) * size, d.in}));
    return {maybe(grad_x), maybe(grad_theta), maybe(grad_bias)};
}

// y = A x Theta_(1 - own) + x Theta_own + b, and to train A x.
std::tuple<Tensor, Maybe> convolve_with_self(const Tensor& side_, const Tensor& x_, const Tensor& theta_, const Maybe& bias_,
                                             int64_t own, bool train) {
    Op op{"convolve_with_self"};
    const Dense d(op, x_, theta_, bias_, 2);
    const Sealed side = op.sealed("side", side_, d.x.size(0));
    op.many = are_many(side, d.in, d.out);
    op.check(side.rows() == d.x.size(0) && (own == 0 || own == 1), "own", "be 0 or 1, of as many outputs as inputs");
    const View r = along(op, side, d.x), y = times(op, r, d.matrix(1 - own), d.bias);
    add_times(op, y, matrix(d.x), d.matrix(own), 0);
    return {y.tensor(), train ? maybe(r) : std::nullopt};
}

std::tuple<Maybe, Maybe, Maybe> convolve_with_self_backward(const Tensor&, const Tensor& side_T, const Tensor& x_,
                                                            const Tensor& theta_, const Maybe&, const Tensor& r_,
                                                            const Tensor& grad_, bool of_x, bool of_theta, bool of_bias,
                                                            int64_t own) {
    Op op{"convolve_with_self_backward"};
    const Dense d(op, x_, theta_, {}, 2);
    const View grad = op.dense("grad", grad_, {d.x.size(0), d.out}, types().f32);
    const View r = op.dense("r", r_, {d.x.size(0), d.in}, types().f32);
    const Sealed side = op.sealed("side_T", side_T, d.x.size(0));
    op.many = are_many(side, d.in, d.out);
    op.check(side.rows() == d.x.size(0) && (own == 0 || own == 1), "own", "be 0 or 1, of as many outputs as inputs");
    View grad_x, grad_theta, grad_bias;
    if (of_bias) grad_bias = row_sum(op, grad);
    if (of_x) grad_x = along(op, side, times(op, grad, d.matrix(1 - own, true)), times(op, grad, d.matrix(own, true)));
    if (of_theta) {
        grad_theta = op.made({2, d.in, d.out});
        for (const int64_t at : {int64_t{0}, int64_t{1}}) {
            const Matrix to = matrix(grad_theta, at, d.in, d.out), left = transposed(at == own ? d.x : r);
            if (op.many) std::copy_n(times(op, left, matrix(grad)).floats(), d.in * d.out, to.data);
            else multiply_into(to, left, matrix(grad));
        }
    }
    return {maybe(grad_x), maybe(grad_theta), maybe(grad_bias)};
}

// The arguments of the layer below: x (M, P), W (Q, P), R (Q, P') or none, the x_root (N, P') that it multiplies, or none
// for x, and a bias (Q).
struct Linear {
    View x, weight, root, own, bias;
    int64_t in, out;

    Linear(const Op& op, const Tensor& x_, const Tensor& weight_, const Maybe& root_, const Maybe& own_, const Maybe& bias_)
        : x(op.dense("x", x_, {kAny, kAny}, types().f32)),
          weight(op.dense("weight", weight_, {kAny, x.size(1)}, types().f32)), in(x.size(1)), out(weight.size(0)) {
        if (root_) root = op.dense("root", *root_, {out, own_ ? kAny : in}, types().f32);
        own = own_ ? op.dense("x_root", *own_, {kAny, root_ ? root.size(1) : kAny}, types().f32) : x;
        bias = op.floats("bias", bias_, {out});
    }

    void check(const Op& op, int64_t rows) const {
        op.check(!root.sizes || own.size(0) == rows, "x_root", "have a row for each output, as x where it is left out");
    }
};

// y = A x W^T + x_root R^T + b, and to train A x where that is computed first.
std::tuple<Tensor, Maybe> convolve_linear(const Tensor& side_, const Tensor& x, const Tensor& weight, const Maybe& root,
                                          const Maybe& x_root, const Maybe& bias, bool structure_first, bool train) {
    Op op{"convolve_linear"};
    const Linear d(op, x, weight, root, x_root, bias);
    const Sealed side = op.sealed("side", side_, d.x.size(0));
    op.many = are_many(side, d.in, d.out);
    d.check(op, side.rows());
    const Matrix w = transposed(d.weight);
    if (structure_first) {
        const View r = along(op, side, d.x), y = times(op, r, w, d.bias);
        if (root) add_times(op, y, matrix(d.own), transposed(d.root));
        return {y.tensor(), train ? maybe(r) : std::nullopt};
    }
    const View more = root ? times(op, d.own, transposed(d.root), d.bias) : View{};
    const View y = along(op, side, times(op, d.x, w), more);
    if (!root && bias) add(y, d.bias);
    return {y.tensor(), std::nullopt};
}

// The gradients of x, W, R, x_root and the bias.
std::tuple<Maybe, Maybe, Maybe, Maybe, Maybe> convolve_linear_backward(
    const Tensor&, const Tensor& side_T, const Tensor& x, const Tensor& weight, const Maybe& root, const Maybe& x_root,
    const Maybe&, const Maybe& r_, const Tensor& grad_, bool of_x, bool of_weight, bool of_root, bool of_own, bool of_bias,
    bool structure_first) {
    Op op{"convolve_linear_backward"};
    const Linear d(op, x, weight, root, x_root, {});
    const View grad = op.dense("grad", grad_, {kAny, d.out}, types().f32);
    const Sealed side = op.sealed("side_T", side_T, grad.size(0));
    op.many = are_many(side, d.in, d.out);
    d.check(op, grad.size(0));
    op.check(side.rows() == d.x.size(0), "side_T", "have a row for each row of x");
    op.check(r_.has_value() || !structure_first || !of_weight, "r", "be given where it was computed first");
    op.check(root || !(of_root || of_own), "root", "be given for its gradients");
    const View left = structure_first && r_ ? op.dense("r", *r_, {grad.size(0), d.in}, types().f32) : d.x;
    const View to_x = structure_first || !(of_x || of_weight) ? grad : along(op, side, grad);
    const bool shared = root && !x_root;
    View grad_x, grad_weight, grad_root, grad_own, grad_bias;
    if (of_x) {
        grad_x = times(op, to_x, matrix(d.weight));
        if (structure_first) grad_x = along(op, side, grad_x, shared ? times(op, grad, matrix(d.root)) : View{});
        else if (shared) add_times(op, grad_x, matrix(grad), matrix(d.root));
    }
    if (of_weight) grad_weight = times(op, transposed(to_x), matrix(left));
    if (of_root) grad_root = times(op, transposed(grad), matrix(d.own));
    if (of_own) grad_own = times(op, grad, matrix(d.root));
    if (of_bias) grad_bias = row_sum(op, grad);
    return {maybe(grad_x), maybe(grad_weight), maybe(grad_root), maybe(grad_own), maybe(grad_bias)};
}

// -- attention along edges ---------------------------------------------------------------------------------------------

// Numbers of sums over pieces of the rows; see VectorArgs.
int64_t piece_numbers(const View& x, const Sealed& by_target) {
    const int64_t work = (by_target.slots() + std::max(by_target.rows(), x.size(0))) * x.size(1) * (x.size(2) + 8) *
                         (x.half() ? 2 : 4) >> 17;
    return std::clamp<int64_t>(work, 1, kSummedPieces) * 3 * std::max(kBlock, (x.size(2) + 7) / 8 * 8);
}

struct Affine {
    Op op;
    View x, source, target, z, bias;  // source and target: terms (rows, heads), or vectors (heads, channels)
    double slope;
    int64_t terms;

    Affine(Op op_, const Tensor& x_, const Tensor& source_, const Tensor& target_, const Maybe& z_, const Maybe& bias_,
           double slope_, bool projected)
        : op(op_), x(op.unit("x", x_, {kAny, kAny, kAny})), slope(slope_), terms(kGiven) {
        op.check(slope >= 0, "slope", "be at least 0");
        const int64_t heads = x.size(1), channels = x.size(2);
        source = op.floats("source", source_, {projected ? heads : x.size(0), projected ? channels : heads});
        target = op.floats("target", target_, {projected ? heads : kAny, projected ? channels : heads});
        bias = op.floats("bias", bias_, {heads, channels});
        if (z_) z = op.unit("z", *z_, {kAny, heads, channels}, x.dtype);
        if (projected) terms = z_ ? kOfXAndZ : kOfX;
    }

    void check_rows(int64_t rows) const {
        const int64_t given = terms == kGiven ? target.size(0) : terms == kOfX ? x.size(0) : z.size(0);
        op.check(given == rows, "by_target", "have a row for each output");
    }

    void forward(const Sealed& layout, float* of_source, float* of_target, const View& y, const View& y2, float* peaks,
                 float* mass, double p, int64_t seed, int64_t heads) const {
        check_rows(layout.rows());
        VectorArgs vectors{};
        if (terms != kGiven) vectors.terms = terms, vectors.of_source = source.floats(), vectors.of_target = target.floats();
        vectors.bias = bias.floats(), vectors.z = z.rows();
        const AffineForwardArgs args{layout.layout(), of_source, of_target, x.rows(), y.rows(), y2.rows(), peaks, mass,
                                     x.size(0), x.size(1), x.size(2), x.half(), op.threads, slope,
                                     op.drop(p, seed, heads, layout.rows()), vectors};
        run.affine_forward(&args);
    }

    // Gradients of the terms (source, target), x, z, and in float32 of vectors and bias, where they are given.
    void backward(const Sealed& ahead, const Sealed& back, const float* of_source, const float* of_target, const float* peaks,
                  const float* mass, const View& y, const View& y2, const View& grad, const View& grad_x, const View& grad_z,
                  float* grad_source, float* grad_target, float* scratch, float* const vectors_grads[3], double p,
                  int64_t seed, int64_t heads) const {
        check_rows(ahead.rows());
        op.check(back.rows() == x.size(0), "by_source", "have a row for each input");
        VectorArgs vectors{};
        if (terms != kGiven) {
            vectors.terms = terms, vectors.of_source = source.floats(), vectors.of_target = target.floats();
            vectors.grad_source = vectors_grads[0], vectors.grad_target = vectors_grads[1];
            vectors.grad_bias = vectors_grads[2];
        }
        vectors.bias = bias.floats(), vectors.z = z.rows(), vectors.grad_z = grad_z.rows();
        vectors.partial = scratch + 4 * ahead.rows() * x.size(1);
        const AffineBackwardArgs args{ahead.layout(), back.layout(), of_source, of_target, peaks, mass, x.rows(), y.rows(),
                                      y2.rows(), grad.rows(), grad_x.rows(), grad_source, grad_target, scratch, x.size(1),
                                      x.size(2), x.half(), op.threads, slope, op.drop(p, seed, heads, ahead.rows(), 1),
                                      vectors};
        run.affine_backward(&args);
    }

    View scratch(const Sealed& ahead) const { return op.made({4 * ahead.rows() * x.size(1) + piece_numbers(x, ahead)}); }
};

// (y, y2, peaks, mass), and source and target where they are computed from vectors.
std::tuple<View, View, View, View, View, View> affine(const Affine& a, const Tensor& by_target, double p, int64_t seed,
                                                      int64_t batch_heads, bool train) {
    const Sealed layout = a.op.sealed("by_target", by_target, a.x.size(0));
    const int64_t rows = layout.rows(), heads = a.x.size(1), channels = a.x.size(2);
    const View y = a.op.made({rows, heads, channels}, a.x.dtype);
    const View y2 = a.op.made({train ? rows : 0, heads, channels}, a.x.dtype);
    const View peaks = a.op.made({rows, 2, heads}), mass = a.op.made({rows, heads});
    const View source = a.terms == kGiven ? a.source : a.op.made({a.x.size(0), heads});
    const View target = a.terms == kGiven ? a.target : a.op.made({rows, heads});
    a.forward(layout, source.floats(), target.floats(), y, train ? y2 : View{}, peaks.floats(), mass.floats(), p, seed,
              batch_heads);
    return {y, y2, peaks, mass, source, target};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> affine_forward(const Tensor& by_target, const Tensor& source,
                                                          const Tensor& target, const Tensor& x, double slope, double p,
                                                          int64_t seed, int64_t batch_heads, bool train) {
    const auto [y, y2, peaks, mass, s, t] = affine({{"affine_forward"}, x, source, target, {}, {}, slope, false}, by_target, p,
                                                 seed, batch_heads, train);
    return {y.tensor(), y2.tensor(), peaks.tensor(), mass.tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> projected_forward(
    const Tensor& by_target, const Tensor& x, const Maybe& z, const Tensor& of_source, const Tensor& of_target,
    const Maybe& bias, double slope, double p, int64_t seed, int64_t batch_heads, bool train) {
    const auto [y, y2, peaks, mass, s, t] = affine({{"projected_forward"}, x, of_source, of_target, z, bias, slope, true},
                                                 by_target, p, seed, batch_heads, train);
    return {y.tensor(), y2.tensor(), peaks.tensor(), mass.tensor(), s.tensor(), t.tensor()};
}

std::tuple<Tensor, Maybe, Tensor, Tensor, Maybe, View, View> affine_gradients(
    const Affine& a, const Tensor& by_target, const Tensor& by_source, const View& source, const View& target,
    const Tensor& y_, const Tensor& y2_, const Tensor& peaks_, const Tensor& mass_, const Tensor& grad_, double p, int64_t seed,
    int64_t batch_heads) {
    const Op& op = a.op;
    const Sealed ahead = op.sealed("by_target", by_target, a.x.size(0));
    const int64_t rows = ahead.rows(), inputs = a.x.size(0), heads = a.x.size(1), channels = a.x.size(2);
    const Sealed back = op.sealed("by_source", by_source, rows);
    const View y = op.dense("y", y_, {rows, heads, channels}, a.x.dtype);
    const View y2 = op.dense("y2", y2_, {rows, heads, channels}, a.x.dtype);
    const View grad = op.unit("grad", grad_, {rows, heads, channels}, a.x.dtype);
    const View peaks = op.floats("peaks", peaks_, {rows, 2, heads}), mass = op.floats("mass", mass_, {rows, heads});
    op.check_shape("source", source, {inputs, heads});
    op.check_shape("target", target, {rows, heads});
    const View grad_x = op.made({inputs, heads, channels}, a.x.dtype), scratch = a.scratch(ahead);
    const View grad_source = op.made({inputs, heads}), grad_target = op.made({rows, heads});
    View grad_z, vectors[3];
    if (a.z.sizes) grad_z = op.made({rows, heads, channels}, a.x.dtype);
    for (int64_t i = 0; a.terms != kGiven && i < (a.bias.sizes ? 3 : 2); ++i) vectors[i] = op.made({heads, channels});
    float* const of_vectors[3] = {vectors[0].floats(), vectors[1].floats(), vectors[2].floats()};
    a.backward(ahead, back, source.floats(), target.floats(), peaks.floats(), mass.floats(), y, y2, grad, grad_x, grad_z,
               grad_source.floats(), grad_target.floats(), scratch.floats(), of_vectors, p, seed, batch_heads);
    if (a.terms == kGiven) return {grad_x.tensor(), {}, grad_source.tensor(), grad_target.tensor(), {}, {}, {}};
    return {grad_x.tensor(), maybe(grad_z), vectors[0].tensor(), vectors[1].tensor(), maybe(vectors[2]), {}, {}};
}

std::tuple<Tensor, Tensor, Tensor> affine_backward(const Tensor& by_target, const Tensor& by_source, const Tensor& source,
                                                   const Tensor& target, const Tensor& x, const Tensor& y, const Tensor& y2,
                                                   const Tensor& peaks, const Tensor& mass, const Tensor& grad, double slope,
                                                   double p, int64_t seed, int64_t batch_heads) {
    const Affine a({"affine_backward"}, x, source, target, {}, {}, slope, false);
    const auto found = affine_gradients(a, by_target, by_source, a.source, a.target, y, y2, peaks, mass, grad, p, seed,
                                        batch_heads);
    return {std::get<2>(found), std::get<3>(found), std::get<0>(found)};
}

std::tuple<Tensor, Maybe, Tensor, Tensor, Maybe> projected_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& x, const Maybe& z, const Tensor& of_source,
    const Tensor& of_target, const Maybe& bias, const Tensor& y, const Tensor& y2, const Tensor& peaks, const Tensor& mass,
    const Tensor& source, const Tensor& target, const Tensor& grad, double slope, double p, int64_t seed,
    int64_t batch_heads) {
    const Affine a({"projected_backward"}, x, of_source, of_target, z, bias, slope, true);
    const View s = a.op.floats("source", source, {kAny, kAny}), t = a.op.floats("target", target, {kAny, kAny});
    const auto found = affine_gradients(a, by_target, by_source, s, t, y, y2, peaks, mass, grad, p, seed, batch_heads);
    return {std::get<0>(found), std::get<1>(found), std::get<2>(found), std::get<3>(found), std::get<4>(found)};
}

// Among the inputs, in few results: y, y2, and peaks, mass and both terms in one.
std::tuple<Tensor, Maybe, Tensor> attend_forward(const Tensor& side_, const Tensor& x, const Tensor& of_source,
                                                 const Tensor& of_target, const Maybe& bias, double slope, double p,
                                                 int64_t seed, int64_t batch_heads, bool train) {
    const Affine a({"attend_forward"}, x, of_source, of_target, {}, bias, slope, true);
    const Sealed side = a.op.sealed("side", side_, a.x.size(0));
    const int64_t nodes = a.x.size(0), heads = a.x.size(1), channels = a.x.size(2), size = nodes * heads;
    const View y = a.op.made({nodes, heads, channels}, a.x.dtype), numbers = a.op.made({5, nodes, heads});
    View y2;
    if (train) y2 = a.op.made({nodes, heads, channels}, a.x.dtype);
    float* peaks = numbers.floats();
    a.forward(side, peaks + 3 * size, peaks + 4 * size, y, y2, peaks, peaks + 2 * size, p, seed, batch_heads);
    return {y.tensor(), maybe(y2), numbers.tensor()};
}

// The gradients of x, of_source, of_target and the bias.
std::tuple<Tensor, Tensor, Tensor, Maybe> attend_backward(const Tensor& by_target, const Tensor& by_source, const Tensor& x,
                                           const Tensor& of_source, const Tensor& of_target, const Maybe& bias,
                                           const Tensor& y_, const Tensor& y2_, const Tensor& numbers_, const Tensor& grad_,
                                           double slope, double p, int64_t seed, int64_t batch_heads) {
    const Affine a({"attend_backward"}, x, of_source, of_target, {}, bias, slope, true);
    const Op& op = a.op;
    const int64_t nodes = a.x.size(0), heads = a.x.size(1), channels = a.x.size(2), size = nodes * heads;
    const Sealed ahead = op.sealed("by_target", by_target, nodes), back = op.sealed("by_source", by_source, nodes);
    const View y = op.dense("y", y_, {nodes, heads, channels}, a.x.dtype);
    const View y2 = op.dense("y2", y2_, {nodes, heads, channels}, a.x.dtype);
    const View grad = op.unit("grad", grad_, {nodes, heads, channels}, a.x.dtype);
    const View numbers = op.exact("numbers", numbers_, {5, nodes, heads}, types().f32);
    const View grad_x = op.made({nodes, heads, channels}, a.x.dtype), grads = op.made({a.bias.sizes ? 3 : 2, heads, channels});
    const View scratch = op.made({6 * size + piece_numbers(a.x, ahead)});
    const float* peaks = numbers.floats();
    float *first = scratch.floats(), *own = grads.floats();
    float* const vectors[3] = {own, own + heads * channels, a.bias.sizes ? own + 2 * heads * channels : nullptr};
    a.backward(ahead, back, peaks + 3 * size, peaks + 4 * size, peaks, peaks + 2 * size, y, y2, grad, grad_x, {}, first, first + size,
               first + 2 * size, vectors, p, seed, batch_heads);
    const auto part = [&](int64_t at) { return matrix(grads, at, heads, channels).tensor(); };
    return {grad_x.tensor(), part(0), part(1), a.bias.sizes ? Maybe(part(2)) : std::nullopt};
}

// x (M, P) and Theta (K, P, C), whose products are the heads of the operator above.
struct Projected {
    View x, theta, packed;  // packed: Theta as (P, K C)
    int64_t nodes, in, heads, channels, width;

    Projected(const Op& op, const Tensor& x_, const Tensor& theta_)
        : x(op.dense("x", x_, {kAny, kAny}, types().f32)), theta(op.dense("theta", theta_, {kAny, x.size(1), kAny}, types().f32)),
          nodes(x.size(0)), in(x.size(1)), heads(theta.size(0)), channels(theta.size(2)), width(heads * channels) {
        packed = op.made({in, width});
        for (int64_t k = 0; k < heads; ++k)
            for (int64_t i = 0; i < in; ++i)
                std::copy_n(theta.floats() + (k * in + i) * channels, channels, packed.floats() + i * width + k * channels);
    }
};

// y (M, K C), y2, the numbers and x Theta_k.
std::tuple<Tensor, Maybe, Tensor, Tensor> attend_layer_forward(const Tensor& side, const Tensor& x, const Tensor& theta,
                                                               const Tensor& of_source, const Tensor& of_target,
                                                               const Maybe& bias, double slope, double p, int64_t seed,
                                                               int64_t batch_heads, bool train) {
    const Op op{"attend_layer_forward"};
    const Projected a(op, x, theta);
    const Tensor h = shaped(times(op, a.x, matrix(a.packed)).tensor(), {a.nodes, a.heads, a.channels});
    Maybe by_head;
    if (bias) by_head = shaped(op.floats("bias", bias, {a.width}).tensor(), {a.heads, a.channels});
    auto [y, y2, numbers] = attend_forward(side, h, of_source, of_target, by_head, slope, p, seed, batch_heads, train);
    return {shaped(y, {a.nodes, a.width}), y2, numbers, h};
}

// The gradients of x, Theta, of_source, of_target and the bias.
std::tuple<Maybe, Tensor, Tensor, Tensor, Maybe> attend_layer_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& x, const Tensor& theta, const Tensor& of_source,
    const Tensor& of_target, const Maybe& bias, const Tensor& y_, const Tensor& y2, const Tensor& numbers, const Tensor& h,
    const Tensor& grad_, bool of_x, double slope, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"attend_layer_backward"};
    const Projected a(op, x, theta);
    const auto heads = [&](const char* name, const Tensor& t) {
        return shaped(op.dense(name, t, {a.nodes, a.width}, types().f32).tensor(), {a.nodes, a.heads, a.channels});
    };
    Maybe by_head, grad_bias;
    if (bias) by_head = shaped(op.floats("bias", bias, {a.width}).tensor(), {a.heads, a.channels});
    op.dense("h", h, {a.nodes, a.heads, a.channels}, types().f32);
    const auto [grad_h, of_sources, of_targets, of_bias] = attend_backward(
        by_target, by_source, h, of_source, of_target, by_head, heads("y", y_), y2, numbers, heads("grad", grad_), slope, p,
        seed, batch_heads);
    const View of_h = op.view("h", grad_h);
    const Matrix flat = matrix(of_h, 0, a.nodes, a.width);
    const View grad_packed = op.made({a.in, a.width}), grad_theta = op.made({a.heads, a.in, a.channels});
    View grad_x;
    if (of_x) grad_x = times(op, flat, transposed(a.packed));
    multiply_into(matrix(grad_packed), transposed(a.x), flat);
    for (int64_t k = 0; k < a.heads; ++k)
        for (int64_t i = 0; i < a.in; ++i)
            std::copy_n(grad_packed.floats() + i * a.width + k * a.channels, a.channels,
                        grad_theta.floats() + (k * a.in + i) * a.channels);
    if (of_bias) grad_bias = shaped(*of_bias, {a.width});
    return {maybe(grad_x), grad_theta.tensor(), of_sources, of_targets, grad_bias};
}

// q (N, K, D), k (M, K, D) and v or x (M, K, C), each a tensor of its own, or columns of one table: [q | k | v] or [k | v].
struct Queries {
    View q, k, v, table;
    Rows q_rows, k_rows, v_rows;
    int64_t rows, inputs, heads, depth, channels;

    Queries(const Op& op, const Tensor& q_, const Tensor& k_, const Tensor& v_, const char* name = "v")
        : q(op.unit("q", q_, {kAny, kAny, kAny})), k(op.unit("k", k_, {kAny, q.size(1), q.size(2)}, q.dtype)),
          v(op.unit(name, v_, {k.size(0), q.size(1), kAny}, q.dtype)), q_rows(q.rows()), k_rows(k.rows()), v_rows(v.rows()),
          rows(q.size(0)), inputs(k.size(0)), heads(q.size(1)), depth(q.size(2)), channels(v.size(2)) {}

    Queries(const Op& op, const Tensor& table_, const Maybe& q_, int64_t heads, int64_t depth)
        : table(op.dense("table", table_, {kAny, kAny})), rows(table.size(0)), inputs(rows), heads(heads), depth(depth) {
        op.check(heads > 0 && depth >= 0 && heads < kLimit && depth <= kMaxChannels, "heads", "be at least one, of channels");
        const int64_t own = heads * depth, rest = table.size(1) - (q_ ? own : 2 * own);
        op.check(rest >= 0 && rest % heads == 0, "table", "have columns for queries, keys and values of all heads");
        channels = rest / heads;
        if (q_) q = op.unit("q", *q_, {kAny, heads, depth}, table.dtype), rows = q.size(0);
        into(table, q, q_rows, k_rows, v_rows);
    }

    // The parts of a table, the first of which may be a tensor of its own.
    void into(const View& whole, const View& query, Rows& first, Rows& second, Rows& third) const {
        const int64_t own = heads * depth, bytes = table.half() ? 2 : 4, skipped = query.sizes ? 0 : own;
        const auto part = [&](int64_t at, int64_t each) {
            return Rows{whole.data ? whole.data + at * bytes : nullptr, table.size(1), each};
        };
        first = query.sizes ? query.rows() : part(0, depth), second = part(skipped, depth);
        third = part(skipped + own, channels);
    }

    int32_t dtype() const { return table.sizes ? table.dtype : q.dtype; }
    int64_t half() const { return dtype() == types().bf16; }

    EdgeAttentionArgs args(const Op& op, Scores scores, int64_t activation, bool causal, double parameter, double p,
                           int64_t seed, int64_t batch_heads) const {
        return {scores, heads, depth, channels, activation, causal, half(), op.threads, parameter,
                op.drop(p, seed, batch_heads, rows), {}, {}, q_rows, k_rows, v_rows};
    }

    // y and peaks.
    std::tuple<Tensor, Tensor> attend(const Op& op, EdgeAttentionArgs args) const {
        const View y = op.made({rows, heads, channels}, dtype()), peaks = op.made({rows, 2, heads});
        args.y = y.rows(), args.peaks = peaks.floats();
        run.edge_attention(&args);
        return {y.tensor(), peaks.tensor()};
    }

    void attend_backward(const Op& op, EdgeAttentionArgs args, const Tensor& y_, const Tensor& peaks_, const Tensor& grad_) const {
        const View y = op.dense("y", y_, {rows, heads, channels}, dtype()), peaks = op.floats("peaks", peaks_, {rows, 2, heads});
        const View grad = op.unit("grad", grad_, {rows, heads, channels}, dtype()), packed = op.made({rows, 3, heads});
        args.y = y.rows(), args.grad = grad.rows(), args.peaks = peaks.floats(), args.packed = packed.floats();
        run.edge_attention_backward(&args);
    }
};

std::tuple<Tensor, Tensor> weigh_products(const Op& op, const Queries& s, const Tensor& by_target, const Maybe& bias_,
                                          double scale, double p, int64_t seed, int64_t batch_heads) {
    const Sealed layout = op.sealed("by_target", by_target, s.inputs);
    op.check(layout.rows() == s.rows && (!bias_ || layout.header->ordered), "q", "have a row for each output");
    const View bias = op.floats("bias", bias_, {s.heads, layout.slots()});
    EdgeAttentionArgs args = s.args(op, kProducts, 0, false, scale, p, seed, batch_heads);
    args.by_target = layout.layout(), args.bias = bias.floats();
    return s.attend(op, args);
}

// The gradients of q, k and v are written; that of the bias is returned.
Maybe weigh_products_backward(const Op& op, const Queries& s, const Tensor& by_target, const Tensor& by_source,
                              const Maybe& bias_, const Tensor& y_, const Tensor& peaks_, const Tensor& grad_, double scale,
                              double p, int64_t seed, int64_t batch_heads, Rows grad_q, Rows grad_k, Rows grad_v) {
    const Sealed ahead = op.sealed("by_target", by_target, s.inputs), back = op.sealed("by_source", by_source, s.rows);
    op.check(ahead.rows() == s.rows && back.rows() == s.inputs && ahead.slots() == back.slots() &&
             (!bias_ || (ahead.header->ordered && back.header->ordered)), "by_source",
             "be the transpose of by_target, with a row for each input");
    const View bias = op.floats("bias", bias_, {s.heads, ahead.slots()});
    View grad_bias;
    if (bias_) grad_bias = op.made({s.heads, ahead.slots()});
    EdgeAttentionArgs args = s.args(op, kProducts, 0, false, scale, p, seed, batch_heads);
    args.by_target = ahead.layout(), args.by_source = back.layout(), args.bias = bias.floats();
    args.grad_q = grad_q, args.grad_k = grad_k, args.grad_x = grad_v, args.grad_bias = grad_bias.floats();
    s.attend_backward(op, args, y_, peaks_, grad_);
    return maybe(grad_bias);
}

std::tuple<Tensor, Tensor> bilinear_forward(const Tensor& by_target, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Maybe& bias, double scale, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"bilinear_forward"};
    return weigh_products(op, {op, q, k, v}, by_target, bias, scale, p, seed, batch_heads);
}

std::tuple<Tensor, Tensor, Tensor, Maybe> bilinear_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& bias,
    const Tensor& y, const Tensor& peaks, const Tensor& grad, double scale, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"bilinear_backward"};
    const Queries s(op, q, k, v);
    const View grad_q = op.made({s.rows, s.heads, s.depth}, s.dtype()), grad_k = op.made({s.inputs, s.heads, s.depth}, s.dtype());
    const View grad_v = op.made({s.inputs, s.heads, s.channels}, s.dtype());
    const Maybe of_bias = weigh_products_backward(op, s, by_target, by_source, bias, y, peaks, grad, scale, p, seed, batch_heads,
                                                  grad_q.rows(), grad_k.rows(), grad_v.rows());
    return {grad_q.tensor(), grad_k.tensor(), grad_v.tensor(), of_bias};
}

std::tuple<Tensor, Tensor> packed_forward(const Tensor& by_target, const Tensor& table, const Maybe& q, const Maybe& bias,
                                          int64_t heads, int64_t depth, double scale, double p, int64_t seed,
                                          int64_t batch_heads) {
    const Op op{"packed_forward"};
    return weigh_products(op, {op, table, q, heads, depth}, by_target, bias, scale, p, seed, batch_heads);
}

std::tuple<Tensor, Maybe, Maybe> packed_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& table, const Maybe& q, const Maybe& bias, const Tensor& y,
    const Tensor& peaks, const Tensor& grad, int64_t heads, int64_t depth, double scale, double p, int64_t seed,
    int64_t batch_heads) {
    const Op op{"packed_backward"};
    const Queries s(op, table, q, heads, depth);
    const View grad_table = op.made({s.inputs, s.table.size(1)}, s.dtype());
    View grad_q;
    if (q) grad_q = op.made({s.rows, heads, depth}, s.dtype());
    Rows of_q, of_k, of_v;
    s.into(grad_table, grad_q, of_q, of_k, of_v);
    const Maybe of_bias = weigh_products_backward(op, s, by_target, by_source, bias, y, peaks, grad, scale, p, seed, batch_heads,
                                                  of_q, of_k, of_v);
    return {grad_table.tensor(), maybe(grad_q), of_bias};
}

// Scaled dot products of queries, keys and values that are projections of one x (M, P): by weights (K D, P) of queries and
// keys, with biases or none, and Theta (K, P, C), or with `heads` a weight (K C, P). One product makes all of them, a table
// (M, 2 K D + K C).
struct Dots {
    View x, query, key, value, biases[3];
    int64_t nodes, in, heads, channels, own, depth, width;  // own: K D
    bool turned, by_head = false;  // values by Theta; their bias by head

    Dots(const Op& op, const View& x_, const Tensor& query_, const Maybe& query_bias, const Tensor& key_, const Maybe& key_bias,
         const Tensor& value_, const Maybe& value_bias = {}, int64_t heads_ = 0)
        : x(x_), nodes(x.tensor().dim() == 3 ? x.size(0) * x.size(1) : x.size(0)),
          in(x.size(x.tensor().dim() - 1)), turned(!heads_) {
        query = op.dense("query", query_, {kAny, in}, types().f32);
        own = query.size(0), key = op.dense("key", key_, {own, in}, types().f32);
        value = turned ? op.dense("value", value_, {kAny, in, kAny}, types().f32) : op.dense("value", value_, {kAny, in}, types().f32);
        heads = turned ? value.size(0) : heads_;
        op.check(heads > 0 && own % heads == 0 && (turned || value.size(0) % heads == 0), "query", "have as many rows for each head");
        depth = own / heads, channels = turned ? value.size(2) : value.size(0) / heads, width = 2 * own + heads * channels;
        biases[0] = op.floats("query_bias", query_bias, {own}), biases[1] = op.floats("key_bias", key_bias, {own});
        if (value_bias) {  // (K C) or (K, C)
            const View given = value_bias->dim() == 2 ? op.floats("value_bias", value_bias, {heads, channels})
                                                      : op.floats("value_bias", value_bias, {heads * channels});
            biases[2] = op.view("value_bias", shaped(given.tensor(), {heads * channels})), by_head = value_bias->dim() == 2;
        }
    }

    int64_t rows(int64_t part) const { return part < 2 ? own : heads * channels; }

    // All weights, as rows (width, P): where they lie one after the other, as in one parameter, they are not copied.
    View packed(const Op& op) const {
        if (!turned && own * in && key.data == query.data + 4 * own * in && value.data == key.data + 4 * own * in) {
            const int64_t sizes[2] = {width, in}, strides[2] = {in, 1};
            AtenTensorHandle made;
            TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(query.data, 2, sizes, strides, 0, types().f32,
                                                                      types().cpu, 0, &made));
            return op.view("weights", Tensor(made));
        }
        const View found = op.made({width, in});
        float* to = found.floats();
        if (own * in) std::memcpy(to, query.data, 4 * own * in), std::memcpy(to + own * in, key.data, 4 * own * in);
        if (turned) turn(value.floats(), in, channels, to + 2 * own * in);
        else if (in) std::memcpy(to + 2 * own * in, value.data, 4 * rows(2) * in);
        return found;
    }

    // All projections, with the biases.
    View table(const Op& op) const {
        View added;
        if (biases[0].sizes || biases[1].sizes || biases[2].sizes) {
            added = op.made({width});
            float* to = added.floats();
            for (int64_t part = 0; part < 3; to += rows(part++))
                biases[part].sizes ? std::copy_n(biases[part].floats(), rows(part), to) : std::fill_n(to, rows(part), 0.0f);
        }
        const View found = op.made({nodes, width});
        multiply_into(matrix(found), matrix(x, 0, nodes, in), transposed(packed(op)), added);
        return found;
    }

    // (heads, rows, columns) -> (heads, columns, rows)
    void turn(const float* from, int64_t rows, int64_t columns, float* to) const {
        for (int64_t k = 0; k < heads; ++k, from += rows * columns, to += rows * columns)
            for (int64_t c = 0; c < columns; ++c)
                for (int64_t r = 0; r < rows; ++r) to[c * rows + r] = from[r * columns + c];
    }

    Rows part(const View& table, int64_t number) const {
        return {table.floats() + number * own, width, number < 2 ? depth : channels};
    }

    EdgeAttentionArgs args(const Op& op, const View& table, const View& y, const View& peaks, const Layout& by_target,
                           const Layout& by_source, double scale, const DropArgs& drop) const {
        return {kProducts, heads, depth, channels, 0, false, 0, op.threads, scale, drop, by_target, by_source, part(table, 0),
                part(table, 1), part(table, 2), {y.data, heads * channels, channels}, nullptr, nullptr, peaks.floats()};
    }

    // The gradients of x, if needed, and of weights and biases: query, its bias, key, its bias, value, its bias.
    std::tuple<Maybe, Tensor, Maybe, Tensor, Maybe, Tensor, Maybe> gradients(const Op& op, const View& grad_table, bool of_x) const {
        View grad_x;
        if (of_x) {
            grad_x = x.tensor().dim() == 3 ? op.made({x.size(0), x.size(1), in}) : op.made({nodes, in});
            multiply_into(matrix(grad_x, 0, nodes, in), matrix(grad_table), matrix(packed(op)));
        }
        const View grad_rows = op.made({width, in});
        multiply_into(matrix(grad_rows), transposed(grad_table), matrix(x, 0, nodes, in));
        View of_biases[3], grad_value;
        for (int64_t part = 0; part < 3; ++part)
            if (biases[part].sizes) of_biases[part] = row_sum(op, grad_table.floats() + part * own, nodes, rows(part), width);
        Maybe of_values = maybe(of_biases[2]);
        if (of_values && by_head) of_values = shaped(*of_values, {heads, channels});
        if (turned) grad_value = op.made({heads, in, channels});
        if (turned) turn(grad_rows.floats() + 2 * own * in, channels, in, grad_value.floats());
        return {maybe(grad_x), matrix(grad_rows, 0, own, in).tensor(), maybe(of_biases[0]), piece(grad_rows, own, own),
                maybe(of_biases[1]), turned ? grad_value.tensor() : piece(grad_rows, 2 * own, rows(2)), of_values};
    }

    // So many rows of weights, from row `first` on.
    Tensor piece(const View& rows, int64_t first, int64_t count) const {
        const int64_t sizes[2] = {count, in}, strides[2] = {in, 1};
        AtenTensorHandle made;
        TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(rows.tensor().get(), 2, sizes, strides, first * in, &made));
        return Tensor(made);
    }
};

// y (M, K C), with b added, and for the backward the table and peaks.
std::tuple<Tensor, Maybe, Maybe> attend_dots_forward(const Tensor& side_, const Tensor& x, const Tensor& query,
                                                     const Maybe& query_bias, const Tensor& key, const Maybe& key_bias,
                                                     const Tensor& value, const Maybe& value_bias, const Maybe& bias_,
                                                     int64_t heads, double scale, double p, int64_t seed,
                                                     int64_t batch_heads, bool train) {
    const Op op{"attend_dots_forward"};
    const Dots d(op, op.dense("x", x, {kAny, kAny}, types().f32), query, query_bias, key, key_bias, value, value_bias, heads);
    const Sealed side = op.sealed("side", side_, d.nodes);
    op.check(side.rows() == d.nodes, "side", "have a row for each row of x");
    const View bias = op.floats("bias", bias_, {d.heads * d.channels});
    const View table = d.table(op), y = op.made({d.nodes, d.heads * d.channels}), peaks = op.made({d.nodes, 2, d.heads});
    const EdgeAttentionArgs args = d.args(op, table, y, peaks, side.layout(false), {}, scale, op.drop(p, seed, batch_heads, d.nodes));
    run.edge_attention(&args);
    if (bias.sizes) add(y, bias);
    if (!train) return {y.tensor(), std::nullopt, std::nullopt};
    return {y.tensor(), table.tensor(), peaks.tensor()};
}

// The gradients of x, of the weights and the biases of queries, keys and values, and of the bias.
std::tuple<Maybe, Tensor, Maybe, Tensor, Maybe, Tensor, Maybe, Maybe> attend_dots_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& x, const Tensor& query, const Maybe& query_bias,
    const Tensor& key, const Maybe& key_bias, const Tensor& value, const Maybe& value_bias, const Maybe& bias_,
    const Tensor& y_, const Tensor& table_, const Tensor& peaks_, const Tensor& grad_, bool of_x, int64_t heads, double scale,
    double p, int64_t seed, int64_t batch_heads) {
    const Op op{"attend_dots_backward"};
    const Dots d(op, op.dense("x", x, {kAny, kAny}, types().f32), query, query_bias, key, key_bias, value, value_bias, heads);
    const Sealed ahead = op.sealed("by_target", by_target, d.nodes), back = op.sealed("by_source", by_source, d.nodes);
    op.check(ahead.rows() == d.nodes && back.rows() == d.nodes && ahead.slots() == back.slots(), "by_source",
             "be the transpose of by_target, with a row for each row of x");
    const int64_t out = d.heads * d.channels;
    View y = op.dense("y", y_, {d.nodes, out}, types().f32);
    const View table = op.dense("table", table_, {d.nodes, d.width}, types().f32), peaks = op.floats("peaks", peaks_, {d.nodes, 2, d.heads});
    const View grad = op.dense("grad", grad_, {d.nodes, out}, types().f32), bias = op.floats("bias", bias_, {out});
    if (bias.sizes) {  // the kernel reads y without it
        const View without = op.made({d.nodes, out});
        for (int64_t n = 0; n < d.nodes; ++n)
            for (int64_t c = 0; c < out; ++c) without.floats()[n * out + c] = y.floats()[n * out + c] - bias.floats()[c];
        y = without;
    }
    const View grad_table = op.made({d.nodes, d.width}), packs = op.made({d.nodes, 3, d.heads});
    EdgeAttentionArgs args = d.args(op, table, y, peaks, ahead.layout(false), back.layout(false), scale,
                                    op.drop(p, seed, batch_heads, d.nodes));
    args.grad = {grad.data, out, d.channels}, args.packed = packs.floats();
    args.grad_q = d.part(grad_table, 0), args.grad_k = d.part(grad_table, 1), args.grad_x = d.part(grad_table, 2);
    run.edge_attention_backward(&args);
    Maybe grad_bias;
    if (bias.sizes) grad_bias = row_sum(op, grad.floats(), d.nodes, out, out).tensor();
    return std::tuple_cat(d.gradients(op, grad_table, of_x), std::make_tuple(grad_bias));
}

// The mask of attention, with its strides for the sizes that are known.
View mask_of(const Op& op, const Maybe& given, AttentionArgs& args) {
    if (!given) return {};
    const View mask = op.view("mask", *given);
    const int64_t dims = given->dim(), sizes[4] = {args.batch, args.heads, args.outputs, args.inputs};
    int64_t* strides[4] = {&args.mask_batch, &args.mask_head, &args.mask_row, &args.mask_column};
    bool fits = dims <= 4 && (mask.dtype == types().f32 || mask.dtype == aoti_torch_dtype_bool());
    for (int64_t dim = 0; fits && dim < dims; ++dim) {
        const int64_t size = mask.size(dims - 1 - dim);
        fits = size == 1 || size == sizes[3 - dim];
        *strides[3 - dim] = size == 1 ? 0 : mask.strides[dims - 1 - dim];
    }
    op.check(fits && (mask.data || !args.batch || !args.heads || !args.outputs || !args.inputs), "mask",
             "be boolean or float32, and broadcast to (batch, heads, outputs, inputs)");
    args.mask = mask.data, args.mask_is_bool = mask.dtype != types().f32;
    return mask;
}

// Multi-head attention of x (B, M, P) or (M, P) to itself, with an output projection (Q, K C); without one, the heads side by
// side (Q = K C) or added up (Q = C); and a bias (Q). The mask is as of `attention_forward`, or with `index` (M M) a table
// (K or 1, 1, L), of which pair (m, n) has number index[n M + m].
struct Entries {
    Dots d;
    View output, bias, mask, index;
    Maybe added;  // the mask that the kernel reads
    int64_t samples, entries, inner, out;

    Entries(const Op& op, const Tensor& x, const Tensor& query, const Maybe& query_bias, const Tensor& key, const Maybe& key_bias,
            const Tensor& value, const Maybe& value_bias, const Maybe& output_, const Maybe& bias_, const Maybe& mask_,
            const Maybe& index_, int64_t heads, bool summed)
        : d(op, x.dim() == 3 ? op.dense("x", x, {kAny, kAny, kAny}, types().f32) : op.dense("x", x, {kAny, kAny}, types().f32),
            query, query_bias, key, key_bias, value, value_bias, value.dim() == 3 ? 0 : std::max<int64_t>(heads, 1)), added(mask_) {
        op.check(d.heads == std::max<int64_t>(heads, 1), "value", "have a matrix for each head");
        samples = d.x.tensor().dim() == 3 ? d.x.size(0) : 1, entries = d.x.size(d.x.tensor().dim() - 2);
        inner = d.heads * d.channels, out = summed ? d.channels : inner;
        if (output_) output = op.dense("output", *output_, {kAny, inner}, types().f32), out = output.size(0);
        bias = op.floats("bias", bias_, {out});
        if (index_) gather(op, *index_);
        op.check(d.depth <= kAttentionChannels && d.channels <= kAttentionChannels, "query", "have at most 256 channels, as value");
    }

    // Queries, keys or values of a table.
    Planes part(const View& table, int64_t number) const {
        return {table.floats() + number * d.own, entries * d.width, number < 2 ? d.depth : d.channels, d.width};
    }

    Planes rows(const View& r) const { return {r.floats(), entries * inner, d.channels, inner}; }

    AttentionArgs attention(const Op& op, const View& table, bool causal, double scale) const {
        AttentionArgs args{part(table, 0), part(table, 1), part(table, 2), nullptr, 0, 0, 0, 0, 0, samples, d.heads, 1, entries, entries,
                           d.depth, d.channels, causal, op.threads, scale, op.drop(0, 0, 1, entries)};
        mask_of(op, added, args);
        return args;
    }

    // The mask (K or 1, M, M) of a table.
    void gather(const Op& op, const Tensor& index_) {
        const int64_t pairs = entries * entries;
        op.check(added.has_value(), "mask", "be a table if index is given");
        mask = op.dense("mask", *added, {kAny, 1, kAny}, types().f32), index = op.exact("index", index_, {pairs}, types().i64);
        const int64_t* of_pair = index.as<int64_t>();
        for (int64_t i = 0; i < pairs; ++i) op.check(of_pair[i] >= 0 && of_pair[i] < mask.size(2), "index", "hold numbers of the table");
        const View found = op.made({mask.size(0), entries, entries});
        for (int64_t k = 0; k < mask.size(0); ++k)
            for (int64_t i = 0; i < pairs; ++i) found.floats()[k * pairs + i] = mask.floats()[k * mask.size(2) + of_pair[i]];
        added = found.tensor();
    }

    // ... and the gradient of the table, of that of the mask.
    View gradient(const Op& op, const View& grad) const {
        const int64_t pairs = entries * entries, count = mask.size(2);
        const int64_t* of_pair = index.as<int64_t>();
        const View found = op.made({mask.size(0), 1, count});
        std::vector<double> sums(count);
        for (int64_t k = 0; k < mask.size(0); ++k) {
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int64_t i = 0; i < pairs; ++i) sums[of_pair[i]] += grad.floats()[k * pairs + i];
            std::copy(sums.begin(), sums.end(), found.floats() + k * count);
        }
        return found;
    }

    // y of what the heads give, r (nodes, K C).
    void finish(const View& y, const View& r) const {
        if (output.sizes) return multiply_into(matrix(y, 0, d.nodes, out), matrix(r), transposed(output), bias);
        const float* from = r.floats();
        float* to = y.floats();
        for (int64_t n = 0; n < d.nodes; ++n, to += out)
            for (int64_t head = 0; head < inner; head += out, from += out)
                for (int64_t c = 0; c < out; ++c) to[c] = from[c] + (head ? to[c] : bias.sizes ? bias.floats()[c] : 0.0f);
    }
};

// y like x, the table, peaks and what the output projection multiplies; into `each` the weights (B, K, N, M), if it has memory.
std::tuple<View, View, View, View> attend_entries(const Op& op, const Entries& e, double scale, bool causal, const View& each) {
    const Dots& d = e.d;
    const View table = d.table(op), r = op.made({d.nodes, e.inner}), peaks = op.made({2, e.samples, d.heads, e.entries});
    const AttentionForwardArgs args{e.attention(op, table, causal, scale), e.rows(r), peaks.floats(), each.floats()};
    run.attention_forward(&args);
    const View y = d.x.tensor().dim() == 3 ? op.made({e.samples, e.entries, e.out}) : op.made({e.entries, e.out});
    e.finish(y, r);
    return {y, table, peaks, r};
}

std::tuple<Tensor, Maybe, Maybe, Maybe> attend_entries_forward(
    const Tensor& x, const Tensor& query, const Maybe& query_bias, const Tensor& key, const Maybe& key_bias, const Tensor& value,
    const Maybe& value_bias, const Maybe& output, const Maybe& bias, const Maybe& mask, const Maybe& index, int64_t heads, double scale,
    bool causal, bool summed, bool train) {
    const Op op{"attend_entries_forward"};
    const Entries e(op, x, query, query_bias, key, key_bias, value, value_bias, output, bias, mask, index, heads, summed);
    const auto [y, table, peaks, r] = attend_entries(op, e, scale, causal, {});
    if (!train) return {y.tensor(), {}, {}, {}};
    return {y.tensor(), maybe(table), maybe(peaks), maybe(r)};
}

// y, and the weights (B, K, N, M) or their means over the heads (B, N, M).
std::tuple<Tensor, Tensor> attend_entries_weighted(
    const Tensor& x, const Tensor& query, const Maybe& query_bias, const Tensor& key, const Maybe& key_bias, const Tensor& value,
    const Maybe& value_bias, const Maybe& output, const Maybe& bias, const Maybe& mask, int64_t heads_, double scale, bool causal,
    bool of_mean) {
    const Op op{"attend_entries_weighted"};
    const Entries e(op, x, query, query_bias, key, key_bias, value, value_bias, output, bias, mask, {}, heads_, false);
    const int64_t heads = e.d.heads, pairs = e.entries * e.entries;
    const View each = op.made({e.samples, heads, e.entries, e.entries});
    const Tensor y = std::get<0>(attend_entries(op, e, scale, causal, each)).tensor();
    if (!of_mean) return {y, each.tensor()};
    const View mean = op.made({e.samples, e.entries, e.entries});
    for (int64_t b = 0; b < e.samples; ++b) {
        float* to = mean.floats() + b * pairs;
        std::fill_n(to, pairs, 0.0f);
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t at = 0; at < pairs; ++at) to[at] += each.floats()[(b * heads + head) * pairs + at];
        for (int64_t at = 0; at < pairs; ++at) to[at] /= static_cast<float>(heads);
    }
    return {y, mean.tensor()};
}

// The gradients of x, of weights and biases of queries, keys, values and outputs, and of a table with an index.
std::tuple<Maybe, Tensor, Maybe, Tensor, Maybe, Tensor, Maybe, Maybe, Maybe, Maybe> attend_entries_backward(
    const Tensor& x, const Tensor& query, const Maybe& query_bias, const Tensor& key, const Maybe& key_bias, const Tensor& value,
    const Maybe& value_bias, const Maybe& output, const Maybe& bias, const Maybe& mask, const Tensor& table_, const Tensor& peaks_,
    const Tensor& r_, const Tensor& grad_, bool of_x, const Maybe& index, int64_t heads, double scale, bool causal, bool summed) {
    const Op op{"attend_entries_backward"};
    const Entries e(op, x, query, query_bias, key, key_bias, value, value_bias, output, bias, mask, index, heads, summed);
    const Dots& d = e.d;
    const View table = op.dense("table", table_, {d.nodes, d.width}, types().f32);
    const View peaks = op.floats("peaks", peaks_, {2, e.samples, d.heads, e.entries}), r = op.dense("r", r_, {d.nodes, e.inner}, types().f32);
    const View given = d.x.tensor().dim() == 3 ? op.dense("grad", grad_, {e.samples, e.entries, e.out}, types().f32)
                                               : op.dense("grad", grad_, {e.entries, e.out}, types().f32);
    Planes of_r{given.floats(), e.entries * e.out, e.out == e.inner ? d.channels : 0, e.out};  // of heads that are added up the same
    View grad_r, grad_output, grad_bias, grad_mask;
    if (output) {
        grad_r = op.made({d.nodes, e.inner}), grad_output = op.made({e.out, e.inner}), of_r = e.rows(grad_r);
        multiply_into(matrix(grad_r), matrix(given, 0, d.nodes, e.out), matrix(e.output));
        multiply_into(matrix(grad_output), matrix(given, 0, d.nodes, e.out, true), matrix(r));
    }
    if (e.bias.sizes) grad_bias = row_sum(op, given.floats(), d.nodes, e.out, e.out);
    const View grad_table = op.made({d.nodes, d.width});
    AttentionBackwardArgs args{e.attention(op, table, causal, scale), e.rows(r), of_r, e.part(grad_table, 0),
                               e.part(grad_table, 1), e.part(grad_table, 2), peaks.floats(), nullptr, 0, 0, 0, 0};
    if (index) {
        const int64_t pairs = e.entries * e.entries;
        grad_mask = op.made({e.mask.size(0), pairs});
        std::fill_n(grad_mask.floats(), e.mask.size(0) * pairs, 0.0f);
        args.grad_mask = grad_mask.floats(), args.of_head = e.mask.size(0) > 1 ? pairs : 0, args.of_row = e.entries, args.of_column = 1;
    }
    run.attention_backward(&args);
    return std::tuple_cat(d.gradients(op, grad_table, of_x), std::make_tuple(maybe(grad_output), maybe(grad_bias),
                                                                       index ? maybe(e.gradient(op, grad_mask)) : Maybe{}));
}

// Edges, or all pairs; then `every` holds the numbers 0, 1, ...
struct Pairs {
    Sealed sealed;
    std::vector<int32_t> every;
    Layout layout{};

    Pairs(const Op& op, const char* argument, const Maybe& given, int64_t rows, int64_t columns) {
        if (given) {
            sealed = op.sealed(argument, *given, columns);
            layout = sealed.layout();
            op.check(layout.rows == rows, argument, "have a row for each output, or each input");
            return;
        }
        every.resize(columns);
        for (int64_t i = 0; i < columns; ++i) every[i] = static_cast<int32_t>(i);
        layout = {nullptr, every.data(), nullptr, rows, columns};
    }
};

void check_activation(const Op& op, int64_t activation) {
    op.check(activation >= kPiecewise && activation <= kProduct, "activation", "be 0, 1 or 2");
}

// Along edges, or without any of all pairs.
std::tuple<Tensor, Tensor> additive(const Op& op, const Maybe& by_target, const Tensor& q_, const Tensor& k_, const Tensor& x_,
                                    const Tensor& vector_, int64_t activation, double parameter, bool causal, double p,
                                    int64_t seed, int64_t batch_heads) {
    const Queries s(op, q_, k_, x_, "x");
    const View vector = op.floats("vector", vector_, {s.heads, s.depth});
    check_activation(op, activation);
    const Pairs pairs(op, "by_target", by_target, s.rows, s.inputs);
    EdgeAttentionArgs args = s.args(op, kActivations, activation, causal && !by_target, parameter, p, seed, batch_heads);
    args.by_target = pairs.layout, args.vector = vector.floats();
    return s.attend(op, args);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> additive_gradients(
    const Op& op, const Maybe& by_target, const Maybe& by_source, const Tensor& q_, const Tensor& k_, const Tensor& x_,
    const Tensor& vector_, const Tensor& y, const Tensor& peaks, const Tensor& grad, int64_t activation, double parameter,
    bool causal, double p, int64_t seed, int64_t batch_heads) {
    const Queries s(op, q_, k_, x_, "x");
    const View vector = op.floats("vector", vector_, {s.heads, s.depth});
    check_activation(op, activation);
    const Pairs ahead(op, "by_target", by_target, s.rows, s.inputs), back(op, "by_source", by_source, s.inputs, s.rows);
    const View grad_q = op.made({s.rows, s.heads, s.depth}, s.dtype()), grad_k = op.made({s.inputs, s.heads, s.depth}, s.dtype());
    const View grad_x = op.made({s.inputs, s.heads, s.channels}, s.dtype()), grad_vector = op.made({s.heads, s.depth});
    const View partial = op.made({kRanges, s.heads, s.depth});
    EdgeAttentionArgs args = s.args(op, kActivations, activation, causal && !by_target, parameter, p, seed, batch_heads);
    args.by_target = ahead.layout, args.by_source = back.layout, args.vector = vector.floats();
    args.grad_q = grad_q.rows(), args.grad_k = grad_k.rows(), args.grad_x = grad_x.rows();
    args.grad_vector = grad_vector.floats(), args.partial = partial.floats();
    s.attend_backward(op, args, y, peaks, grad);
    return {grad_q.tensor(), grad_k.tensor(), grad_x.tensor(), grad_vector.tensor()};
}

std::tuple<Tensor, Tensor> additive_forward(const Tensor& by_target, const Tensor& q, const Tensor& k, const Tensor& x,
                                            const Tensor& vector, int64_t activation, double parameter, double p,
                                            int64_t seed, int64_t batch_heads) {
    return additive({"additive_forward"}, by_target, q, k, x, vector, activation, parameter, false, p, seed, batch_heads);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> additive_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& q, const Tensor& k, const Tensor& x, const Tensor& vector,
    const Tensor& y, const Tensor& peaks, const Tensor& grad, int64_t activation, double parameter, double p, int64_t seed,
    int64_t batch_heads) {
    return additive_gradients({"additive_backward"}, by_target, by_source, q, k, x, vector, y, peaks, grad, activation, parameter,
                              false, p, seed, batch_heads);
}

// exp(-rate t), of which an activation is made; nothing where one would be no normal number, so that products of two are
// not right, or do not saturate.
Maybe factor(const Tensor& t_, double rate) {
    const Op op{"factor"};
    const View t = op.view("t", t_);
    op.check(t.dtype == types().f32 || t.dtype == types().bf16, "t", "be float32 or bfloat16");
    const Tensor numbers = t.dtype == types().f32 ? t_ : torch::stable::to(t_, ScalarType::Float);
    if (t_.numel()) {
        StableIValue stack[3] = {torch::stable::detail::from(numbers), torch::stable::detail::from(std::optional<int64_t>{}),
                                 torch::stable::detail::from(false)};
        TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::aminmax", "", stack, TORCH_FEATURE_VERSION));
        const Tensor least = torch::stable::detail::to<Tensor>(stack[0]), most = torch::stable::detail::to<Tensor>(stack[1]);
        const double low = rate * *op.view("least", least).floats(), high = rate * *op.view("most", most).floats();
        if (!(low >= -kFactorExponent && high <= kFactorExponent)) return std::nullopt;
    }
    AtenTensorHandle scaled;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mul_Scalar(numbers.get(), -rate, &scaled));
    StableIValue stack[1] = {torch::stable::detail::from(Tensor(scaled))};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::exp", "", stack, TORCH_FEATURE_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// q, k and x as kernels read them over all pairs: where factors exist, these instead of q and k, in float32.
struct Factored {
    Tensor q, k, x;
    int64_t activation;

    Factored(const Op& op, const Tensor& q_, const Tensor& k_, const Tensor& x_, int64_t activation_, double rate,
             const Maybe& factor_) : q(q_), k(k_), x(x_), activation(activation_) {
        op.check(activation == kPiecewise || activation == kLogistic, "activation", "be 0 or 1");
        if (activation != kLogistic) return;
        const Maybe of_q = factor(q_, rate), of_k = !of_q ? Maybe{} : factor_ ? factor_ : factor(k_, rate);
        if (!of_q || !of_k) return;
        q = *of_q, k = *of_k, x = torch::stable::to(x_, ScalarType::Float), activation = kProduct;
    }
};

std::tuple<Tensor, Tensor> dense_additive_forward(const Tensor& q, const Tensor& k, const Tensor& x, const Tensor& vector,
                                                  int64_t activation, double parameter, bool causal, const Maybe& factor_,
                                                  double p, int64_t seed, int64_t batch_heads) {
    const Op op{"dense_additive_forward"};
    const Factored f(op, q, k, x, activation, parameter, factor_);
    const auto [y, peaks] = additive(op, {}, f.q, f.k, f.x, vector, f.activation, parameter, causal, p, seed, batch_heads);
    return {torch::stable::to(y, x.scalar_type()), peaks};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dense_additive_backward(
    const Tensor& q, const Tensor& k, const Tensor& x, const Tensor& vector, const Tensor& y, const Tensor& peaks,
    const Tensor& grad, int64_t activation, double parameter, bool causal, const Maybe& factor_, double p, int64_t seed,
    int64_t batch_heads) {
    const Op op{"dense_additive_backward"};
    const Factored f(op, q, k, x, activation, parameter, factor_);
    const ScalarType dtype = f.x.scalar_type();
    return additive_gradients(op, {}, {}, f.q, f.k, f.x, vector, torch::stable::to(y, dtype), peaks,
                              torch::stable::to(grad, dtype), f.activation, parameter, causal, p, seed, batch_heads);
}

// Values and keys x Theta_k, queries x W^T + c: x (M, P), Theta (K, P, C), W (K C, P) and c (K C), in one table
// (M, 2 K C). The score of an edge is <vector_k, leaky_relu(query + key)>.
struct Pairwise {
    Projected a;
    View weight, offset, vector, packed;  // packed: both weights as (P, 2 K C)
    int64_t width;                        // K C

    Pairwise(const Op& op, const Tensor& x, const Tensor& theta, const Tensor& weight_, const Tensor& offset_,
             const Tensor& vector_)
        : a(op, x, theta), weight(op.dense("weight", weight_, {a.width, a.in}, types().f32)),
          offset(op.floats("offset", offset_, {a.width})), vector(op.floats("vector", vector_, {a.heads, a.channels})),
          packed(op.made({a.in, 2 * a.width})), width(a.width) {
        for (int64_t i = 0; i < a.in; ++i) {
            float* row = packed.floats() + 2 * i * width;
            std::copy_n(a.packed.floats() + i * width, width, row);
            for (int64_t c = 0; c < width; ++c) row[width + c] = weight.floats()[c * a.in + i];
        }
    }

    Rows part(const View& table, int64_t number) const { return {table.floats() + number * width, 2 * width, a.channels}; }
    Rows rows(const View& t) const { return {t.data, width, a.channels}; }

    EdgeAttentionArgs args(const Op& op, const View& table, const View& y, const View& peaks, const Layout& by_target,
                           const Layout& by_source, double slope, const DropArgs& drop) const {
        return {kActivations, a.heads, a.channels, a.channels, kPiecewise, false, 0, op.threads, slope, drop, by_target,
                by_source, part(table, 1), part(table, 0), part(table, 0), rows(y), nullptr, vector.floats(), peaks.floats()};
    }
};

// y (M, K C), with b added, the table and peaks.
std::tuple<Tensor, Tensor, Tensor> attend_pairs_forward(const Tensor& side_, const Tensor& x, const Tensor& theta,
                                                        const Tensor& weight, const Tensor& offset, const Tensor& vector,
                                                        const Maybe& bias_, double slope, double p, int64_t seed,
                                                        int64_t batch_heads) {
    const Op op{"attend_pairs_forward"};
    const Pairwise w(op, x, theta, weight, offset, vector);
    const int64_t nodes = w.a.nodes, heads = w.a.heads, channels = w.a.channels;
    const Sealed side = op.sealed("side", side_, nodes);
    op.check(side.rows() == nodes, "side", "have a row for each row of x");
    const View bias = op.floats("bias", bias_, {w.width}), added = op.made({2 * w.width});
    std::fill_n(added.floats(), w.width, 0.0f), std::copy_n(w.offset.floats(), w.width, added.floats() + w.width);
    const View table = times(op, w.a.x, matrix(w.packed), added);
    const View y = op.made({nodes, w.width}), peaks = op.made({nodes, 2, heads});
    const EdgeAttentionArgs args = w.args(op, table, y, peaks, side.layout(false), {}, slope, op.drop(p, seed, batch_heads, nodes));
    run.edge_attention(&args);
    if (bias.sizes) add(y, bias);
    return {y.tensor(), table.tensor(), peaks.tensor()};
}

// The gradients of x, Theta, the weight, the offset, the vector and the bias.
std::tuple<Maybe, Tensor, Tensor, Tensor, Tensor, Maybe> attend_pairs_backward(
    const Tensor& by_target, const Tensor& by_source, const Tensor& x, const Tensor& theta, const Tensor& weight,
    const Tensor& offset, const Tensor& vector, const Maybe& bias_, const Tensor& y_, const Tensor& table_, const Tensor& peaks_,
    const Tensor& grad_, bool of_x, double slope, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"attend_pairs_backward"};
    const Pairwise w(op, x, theta, weight, offset, vector);
    const int64_t nodes = w.a.nodes, heads = w.a.heads, channels = w.a.channels, in = w.a.in, width = w.width;
    const Sealed ahead = op.sealed("by_target", by_target, nodes), back = op.sealed("by_source", by_source, nodes);
    op.check(ahead.rows() == nodes && back.rows() == nodes && ahead.slots() == back.slots(), "by_source",
             "be the transpose of by_target, with a row for each row of x");
    const View given = op.dense("y", y_, {nodes, width}, types().f32), y = op.made({nodes, width});
    const View bias = op.floats("bias", bias_, {width}), grad = op.dense("grad", grad_, {nodes, width}, types().f32);
    const View table = op.dense("table", table_, {nodes, 2 * width}, types().f32), peaks = op.floats("peaks", peaks_, {nodes, 2, heads});
    for (int64_t n = 0; n < nodes; ++n)  // the kernel reads y without the bias
        for (int64_t c = 0; c < width; ++c)
            y.floats()[n * width + c] = given.floats()[n * width + c] - (bias.sizes ? bias.floats()[c] : 0.0f);
    const View grad_table = op.made({nodes, 2 * width}), grad_values = op.made({nodes, width}), grad_vector = op.made({heads, channels});
    const View packs = op.made({nodes, 3, heads}), partial = op.made({kRanges, heads, channels});
    EdgeAttentionArgs args = w.args(op, table, y, peaks, ahead.layout(false), back.layout(false), slope,
                                    op.drop(p, seed, batch_heads, nodes));
    args.grad = w.rows(grad), args.grad_q = w.part(grad_table, 1), args.grad_k = w.part(grad_table, 0);
    args.grad_x = w.rows(grad_values), args.grad_vector = grad_vector.floats();
    args.packed = packs.floats(), args.partial = partial.floats();
    run.edge_attention_backward(&args);
    for (int64_t n = 0; n < nodes; ++n)
        for (int64_t c = 0; c < width; ++c) grad_table.floats()[2 * n * width + c] += grad_values.floats()[n * width + c];
    View grad_x;
    if (of_x) grad_x = times(op, grad_table, transposed(w.packed));
    const View grad_packed = op.made({in, 2 * width});
    multiply_into(matrix(grad_packed), transposed(w.a.x), matrix(grad_table));
    const View grad_theta = op.made({heads, in, channels}), grad_weight = op.made({width, in});
    for (int64_t i = 0; i < in; ++i) {
        const float* row = grad_packed.floats() + 2 * i * width;
        for (int64_t k = 0; k < heads; ++k)
            std::copy_n(row + k * channels, channels, grad_theta.floats() + (k * in + i) * channels);
        for (int64_t c = 0; c < width; ++c) grad_weight.floats()[c * in + i] = row[width + c];
    }
    View grad_bias;
    if (bias.sizes) grad_bias = row_sum(op, grad.floats(), nodes, width, width);
    return {maybe(grad_x), grad_theta.tensor(), grad_weight.tensor(),
            row_sum(op, grad_table.floats() + width, nodes, width, 2 * width).tensor(), grad_vector.tensor(), maybe(grad_bias)};
}

// A step of additive attention: q (N, B, D) over k, factor (M, B, D) and x (M, B, C).
struct Step {
    View q, k, factor, x, vector;
    int64_t outputs, inputs, heads, depth, channels;

    Step(const Op& op, const Tensor& q_, const Tensor& k_, const Tensor& factor_, const Tensor& x_, const Tensor& vector_)
        : q(op.unit("q", q_, {kAny, kAny, kAny}, types().f32)),
          k(op.unit("k", k_, {kAny, q.size(1), q.size(2)}, types().f32)),
          factor(op.unit("factor", factor_, {k.size(0), q.size(1), q.size(2)}, types().f32)),
          x(op.unit("x", x_, {k.size(0), q.size(1), kAny}, types().f32)),
          vector(op.floats("vector", vector_, {q.size(1), q.size(2)})),
          outputs(q.size(0)), inputs(k.size(0)), heads(q.size(1)), depth(q.size(2)), channels(x.size(2)) {
        op.check(outputs > 0 && outputs <= kDecodeOutputs, "q", "have 1 to 8 rows");
        op.check(inputs > 0 && inputs <= kDecodeInputs, "k", "have 1 to 4096 rows");
    }
};

std::tuple<Tensor, Tensor> additive_step(const Tensor& q, const Tensor& k, const Tensor& factor, const Tensor& x,
                                         const Tensor& vector, const Maybe& keep_, double rate) {
    const Op op{"additive_step"};
    const Step s(op, q, k, factor, x, vector);
    View keep;
    if (keep_) keep = op.exact("keep", *keep_, {s.heads, s.inputs}, types().u8);
    const View y = op.made({s.outputs, s.heads, s.channels}), weights = op.made({s.heads, s.outputs, s.inputs});
    const AdditiveStepArgs args{s.q.rows(), s.k.rows(), s.factor.rows(), s.x.rows(), y.rows(), s.vector.floats(),
                                weights.floats(), keep.as<uint8_t>(), s.outputs, s.inputs, s.heads, s.depth, s.channels,
                                op.threads, rate};
    run.additive_step(&args);
    return {y.tensor(), weights.tensor()};
}

Tensor additive_step_backward(const Tensor& q, const Tensor& k, const Tensor& factor, const Tensor& x, const Tensor& vector,
                              const Tensor& weights_, const Tensor& grad_, const Maybe& grad_k_, const Maybe& grad_vector_,
                              bool first, double rate) {
    const Op op{"additive_step_backward"};
    const Step s(op, q, k, factor, x, vector);
    const View weights = op.floats("weights", weights_, {s.heads, s.outputs, s.inputs});
    const View grad = op.unit("grad", grad_, {s.outputs, s.heads, s.channels}, types().f32);
    const View grad_q = op.made({s.outputs, s.heads, s.depth});
    View grad_k, grad_vector;
    if (grad_k_) grad_k = op.written("grad_k", *grad_k_, {s.inputs, s.heads, s.depth}, types().f32);
    if (grad_vector_) grad_vector = op.exact("grad_vector", *grad_vector_, {s.heads, s.depth}, types().f32);
    const AdditiveStepBackwardArgs args{s.q.rows(), s.k.rows(), s.factor.rows(), s.x.rows(), grad.rows(), grad_q.rows(),
                                        grad_k.rows(), s.vector.floats(), weights.floats(), grad_vector.floats(), s.outputs,
                                        s.inputs, s.heads, s.depth, s.channels, first, op.threads, rate};
    run.additive_step_backward(&args);
    return grad_q.tensor();
}

// The weights of the edges, (E, heads), of q (N, heads, depth) and k (M, heads, depth); terms have a depth of one.
Tensor edge_weights(const Op& op, Scores scores, const Tensor& by_target, const View& q, const View& k, const View& vector,
                    const Maybe& bias_, double parameter, int64_t activation, double p, int64_t seed, int64_t batch_heads) {
    const Sealed layout = op.sealed("by_target", by_target, k.size(0));
    op.check(layout.rows() == q.size(0) && layout.header->ordered, "by_target", "have a row for each output");
    const int64_t heads = q.size(1);
    const View bias = op.floats("bias", bias_, {heads, layout.slots()}), weights = op.made({layout.slots(), heads});
    EdgeAttentionArgs args{scores, heads, scores == kTerms ? 1 : q.size(2), 0, activation, false, scores != kTerms && q.half(),
                           op.threads, parameter, op.drop(p, seed, batch_heads, q.size(0)), layout.layout()};
    args.q = scores == kTerms ? Rows{q.data, heads, 1} : q.rows(), args.k = scores == kTerms ? Rows{k.data, heads, 1} : k.rows();
    args.bias = bias.floats(), args.vector = vector.floats(), args.weights = weights.floats();
    run.edge_weights(&args);
    return weights.tensor();
}

Tensor affine_weights_forward(const Tensor& by_target, const Tensor& source_, const Tensor& target_, double slope, double p,
                              int64_t seed, int64_t batch_heads) {
    const Op op{"affine_weights_forward"};
    const View target = op.floats("target", target_, {kAny, kAny}), source = op.floats("source", source_, {kAny, target.size(1)});
    return edge_weights(op, kTerms, by_target, target, source, {}, {}, slope, 0, p, seed, batch_heads);
}

Tensor bilinear_weights_forward(const Tensor& by_target, const Tensor& q_, const Tensor& k_, const Maybe& bias, double scale,
                                double p, int64_t seed, int64_t batch_heads) {
    const Op op{"bilinear_weights_forward"};
    const View q = op.unit("q", q_, {kAny, kAny, kAny}), k = op.unit("k", k_, {kAny, q.size(1), q.size(2)}, q.dtype);
    return edge_weights(op, kProducts, by_target, q, k, {}, bias, scale, 0, p, seed, batch_heads);
}

Tensor additive_weights_forward(const Tensor& by_target, const Tensor& q_, const Tensor& k_, const Tensor& vector,
                                int64_t activation, double parameter, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"additive_weights_forward"};
    const View q = op.unit("q", q_, {kAny, kAny, kAny}), k = op.unit("k", k_, {kAny, q.size(1), q.size(2)}, q.dtype);
    check_activation(op, activation);
    return edge_weights(op, kActivations, by_target, q, k, op.floats("vector", vector, {q.size(1), q.size(2)}), {}, parameter,
                        activation, p, seed, batch_heads);
}

void drop_block(const Tensor& weights_, const Tensor& dropped_, const Maybe& gradient_, int64_t first_head, int64_t last_row,
                int64_t outputs, double p, int64_t seed, int64_t batch_heads) {
    const Op op{"drop_block"};
    const View weights = op.exact("weights", weights_, {kAny, kAny, kAny}, types().f32);
    const int64_t heads = weights.size(0), rows = weights.size(1), columns = weights.size(2);
    const View dropped = op.exact("dropped", dropped_, {heads, rows, columns}, types().f32);
    View gradient;
    if (gradient_) gradient = op.exact("gradient", *gradient_, {heads, rows, columns}, types().f32);
    op.check(first_head >= 0 && first_head <= INT64_MAX - heads && last_row >= -1, "first_head", "be a number, as last_row");
    const DropBlockArgs args{weights.floats(), dropped.floats(), gradient.floats(), heads, rows, columns, first_head,
                             last_row, op.threads, op.drop(p, seed, batch_heads, outputs)};
    run.drop_block(&args);
}

// -- windows -----------------------------------------------------------------------------------------------------------

using Numbers = std::vector<int64_t>;

struct Window {
    Op op;
    View q, k, v, outputs, inputs, falling, rising;
    std::vector<int32_t> lines[6];  // indptr, line, combination by target, then by source
    WindowArgs args{};
    int64_t combinations = 1, offsets, width;  // the last: offsets on the last axis, and with borders

    Window(Op op_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Maybe& table, const Numbers& shape,
           const Numbers& below, const Numbers& above, const Numbers& dilation, const Maybe& outputs_, const Maybe& inputs_,
           double scale, double p, int64_t seed, int64_t batch_heads)
        : op(op_) {
        q = op.unit("q", q_, {kAny, kAny, kAny});
        const int64_t heads = q.size(1), depth = q.size(2);
        k = op.unit("k", k_, {kAny, heads, depth}, q.dtype), v = op.unit("v", v_, {k.size(0), heads, kAny}, q.dtype);
        op.check(q.size(0) > 0 && depth > 0 && depth <= kWindowChannels && v.size(2) > 0 && v.size(2) <= kWindowChannels, "q",
                 "not be empty, with 1 to 256 channels, as v");
        const size_t axes = shape.size(), last = axes - 1;
        op.check(axes && below.size() == axes && above.size() == axes && dilation.size() == axes, "shape",
                 "have a number for each axis, as below, above and dilation");
        const bool apart = outputs_ || inputs_;
        const int64_t longest = *std::max_element(shape.begin(), shape.end()), size = shape[last];
        Numbers steps, widths{table && table->dim() ? table->size(0) : 1};
        int64_t count = 1;
        for (size_t axis = 0; axis < axes; ++axis) {
            op.check(shape[axis] > 0 && shape[axis] < kLimit && below[axis] >= 0 && below[axis] < kLimit && above[axis] >= 0 &&
                         above[axis] < kLimit && dilation[axis] > 0, "shape", "be positive, below 2^31 - 1, as the offsets");
            steps.push_back(std::min(dilation[axis], longest));  // a step beyond every axis leaves the grid as that one does
            widths.push_back(below[axis] + above[axis] + 1);
            if (axis < last)
                op.check(!__builtin_mul_overflow(count, shape[axis], &count) && count < kLimit &&
                             !__builtin_mul_overflow(combinations, widths.back(), &combinations), "shape", "be of fewer lines");
        }
        offsets = widths.back(), width = offsets + 2 * kWindowBorder;
        if (apart) {
            op.check(outputs_ && inputs_ && axes == 1 && steps[0] == 1, "outputs", "be given with inputs, without dilation");
            count = std::max<int64_t>(outputs_->numel() - 1, 0);
        }
        int64_t rows = 0, columns = 0;
        if (apart) {
            rows = starts("outputs", *outputs_, count, size, outputs, args.outputs);
            columns = starts("inputs", *inputs_, count, size, inputs, args.inputs);
        } else {
            op.check(!__builtin_mul_overflow(count, size, &rows), "shape", "be of fewer entries"), columns = rows;
        }
        op.check(q.size(0) == rows && k.size(0) == columns, "q", "have the entries of the grid, as k and v");
        int64_t pairs = 0;
        op.check(!__builtin_mul_overflow(count, combinations, &pairs) && pairs < kLimit, "shape", "be of fewer pairs of lines");
        for (const int64_t sign : {1, -1}) {
            std::vector<int32_t>* const into = lines + (sign > 0 ? 0 : 3);
            for (int64_t line = 0; line < count; ++line) {
                into[0].push_back(static_cast<int32_t>(into[1].size()));
                apart ? push(line, 0, into) : near(line, count, 0, 0, 0, sign, shape, below, widths, steps, into);
            }
            into[0].push_back(static_cast<int32_t>(into[1].size()));
            (sign > 0 ? args.by_target : args.by_source) = {into[0].data(), into[1].data(), into[2].data()};
        }
        fill(table, widths, heads);
        args.q = q.rows(), args.k = k.rows(), args.v = v.rows();
        args.falling = falling.floats(), args.rising = rising.floats();
        args.table_size = combinations * width, args.table_head = falling.size(0) == 1 ? 0 : args.table_size;
        args.lines = count, args.size = size, args.step = steps[last], args.below = below[last], args.above = above[last];
        args.heads = heads, args.depth = depth, args.channels = v.size(2), args.half = q.half(), args.threads = op.threads;
        args.scale = scale, args.drop = op.drop(p, seed, batch_heads, rows);
    }

    static void push(int64_t line, int64_t combination, std::vector<int32_t>* into) {
        into[1].push_back(static_cast<int32_t>(line)), into[2].push_back(static_cast<int32_t>(combination));
    }

    // The lines near one of `count` that differ by the offsets on the leading axes from this one on, or by their opposites.
    static void near(int64_t line, int64_t count, size_t axis, int64_t found, int64_t combination, int64_t sign, const Numbers& shape,
                     const Numbers& below, const Numbers& widths, const Numbers& steps, std::vector<int32_t>* into) {
        if (axis == shape.size() - 1) return push(found, combination, into);
        const int64_t stride = count / shape[axis], place = line / stride, width = widths[axis + 1];
        for (int64_t i = 0; i < width; ++i) {
            const int64_t other = place + sign * (i - below[axis]) * steps[axis];
            if (other >= 0 && other < shape[axis])
                near(line % stride, stride, axis + 1, found * shape[axis] + other, combination * width + i, sign, shape, below, widths,
                     steps, into);
        }
    }

    // The table by falling and by rising offset on the last axis, with borders; zeros for none.
    void fill(const Maybe& table, const Numbers& widths, int64_t heads) {
        const int64_t tables = widths[0];
        View given;
        if (table) {
            bool fits = table->dim() == static_cast<int64_t>(widths.size()) && (tables == 1 || tables == heads);
            for (int64_t dim = 1; fits && dim < table->dim(); ++dim) fits = table->size(dim) == widths[dim];
            op.check(fits, "table", "have a number for each offset");
            given = op.floats("table", torch::stable::reshape(*table, {tables, combinations, offsets}), {tables, combinations, offsets});
        }
        falling = op.made({tables, combinations, width}), rising = op.made({tables, combinations, width});
        for (int64_t row = 0; row < tables * combinations; ++row)
            for (int64_t i = 0; i < width; ++i) {
                const int64_t at = i - kWindowBorder;
                const bool there = at >= 0 && at < offsets;
                const float* from = given.floats() + row * offsets;
                rising.floats()[row * width + i] = !there ? -INFINITY : table ? from[at] : 0;
                falling.floats()[row * width + i] = !there ? -INFINITY : table ? from[offsets - 1 - at] : 0;
            }
    }

    int64_t starts(const char* name, const Tensor& t, int64_t count, int64_t size, View& held, const int64_t*& into) {
        held = op.exact(name, t, {count + 1}, types().i64);
        into = held.as<int64_t>();
        bool sound = into[0] == 0;
        for (int64_t r = 0; r < count; ++r) sound &= into[r + 1] >= into[r] && into[r + 1] - into[r] <= size;
        op.check(sound, name, "rise from 0 by at most the size of a line");
        return into[count];
    }

    // Parts of the rows of a head, with a table of gradients each.
    int64_t tasks() const {
        const int64_t span = kWindowSpan * args.step;
        return args.lines * args.step * ((args.size + span - 1) / span);
    }

    // The gradient of the table, of sums by falling offset for each task: (heads, tasks, combinations, width).
    Tensor gradient(const View& sums, const Tensor& table) const {
        const auto sum = [](const Tensor& t, int64_t axis) {
            return torch::stable::sum(t, torch::headeronly::IntHeaderOnlyArrayRef(&axis, 1));
        };
        const View whole = op.view("sums", sum(sums.tensor(), 1)), rising = op.made({args.heads, combinations, offsets});
        for (int64_t row = 0; row < args.heads * combinations; ++row)
            for (int64_t i = 0; i < offsets; ++i)
                rising.floats()[row * offsets + i] = whole.floats()[row * width + kWindowBorder + offsets - 1 - i];
        const Numbers sizes(op.view("table", table).sizes, op.view("table", table).sizes + table.dim());
        return torch::stable::reshape(sizes[0] == 1 ? sum(rising.tensor(), 0) : rising.tensor(), sizes);
    }
};

std::tuple<Tensor, Tensor> window_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& table,
                                          const Numbers& shape, const Numbers& below, const Numbers& above,
                                          const Numbers& dilation, const Maybe& outputs, const Maybe& inputs, double scale,
                                          double p, int64_t seed, int64_t batch_heads) {
    const Op op{"window_forward"};
    const Window w(op, q, k, v, table, shape, below, above, dilation, outputs, inputs, scale, p, seed, batch_heads);
    const int64_t rows = w.q.size(0), heads = w.args.heads;
    const View y = op.made({rows, heads, w.args.channels}, w.q.dtype), peaks = op.made({rows, 2, heads});
    const WindowForwardArgs args{w.args, y.rows(), peaks.floats()};
    run.window_forward(&args);
    return {y.tensor(), peaks.tensor()};
}

// Gradients of q, k, v, and of the table where it is asked for.
std::tuple<Tensor, Tensor, Tensor, Maybe> window_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& table, const Tensor& y_, const Tensor& peaks_,
    const Tensor& grad_, const Numbers& shape, const Numbers& below, const Numbers& above, const Numbers& dilation,
    const Maybe& outputs, const Maybe& inputs, double scale, double p, int64_t seed, int64_t batch_heads, bool of_table) {
    const Op op{"window_backward"};
    const Window w(op, q, k, v, table, shape, below, above, dilation, outputs, inputs, scale, p, seed, batch_heads);
    const int64_t rows = w.q.size(0), columns = w.k.size(0), heads = w.args.heads, depth = w.args.depth;
    const int32_t dtype = w.q.dtype;
    const View y = op.unit("y", y_, {rows, heads, w.args.channels}, dtype);
    const View grad = op.unit("grad", grad_, {rows, heads, w.args.channels}, dtype);
    const View peaks = op.floats("peaks", peaks_, {rows, 2, heads});
    const View grad_q = op.made({rows, heads, depth}, dtype), grad_k = op.made({columns, heads, depth}, dtype);
    const View grad_v = op.made({columns, heads, w.args.channels}, dtype), delta = op.made({rows, heads});
    View sums;
    if (of_table && table) {
        sums = op.made({heads, w.tasks(), w.combinations, w.width});
        std::fill_n(sums.floats(), sums.tensor().numel(), 0.0f);
    }
    const WindowBackwardArgs args{w.args, y.rows(), grad.rows(), grad_q.rows(), grad_k.rows(), grad_v.rows(), peaks.floats(),
                                  delta.floats(), sums.floats()};
    run.window_backward(&args);
    return {grad_q.tensor(), grad_k.tensor(), grad_v.tensor(),
            sums.sizes ? Maybe(w.gradient(sums, *table)) : std::nullopt};
}

// -- attention of all pairs --------------------------------------------------------------------------------------------

// q (B, K, N, D), k (B, K', M, D), v (B, K', M, C), and a mask that broadcasts to (B, K, N, M).
struct Attention {
    View q, k, v, mask;
    AttentionArgs args{};

    Attention(const Op& op, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Maybe& mask_, bool causal, double scale,
              double p, int64_t seed) {
        q = op.unit("q", q_, {kAny, kAny, kAny, kAny}, types().f32), k = op.unit("k", k_, {q.size(0), kAny, kAny, q.size(3)}, q.dtype);
        v = op.unit("v", v_, {q.size(0), k.size(1), k.size(2), kAny}, q.dtype);
        const int64_t heads = q.size(1), shared = std::max<int64_t>(k.size(1) ? heads / k.size(1) : 1, 1);
        op.check(shared * k.size(1) == heads, "k", "have a divisor of the heads");
        op.check(q.size(3) > 0 && q.size(3) <= kAttentionChannels && v.size(3) > 0 && v.size(3) <= kAttentionChannels, "q",
                 "have 1 to 256 channels, as v");
        k = gathered(op, k), v = gathered(op, v);
        args.q = planes(q), args.k = planes(k), args.v = planes(v);
        args.batch = q.size(0), args.heads = heads, args.shared = shared, args.outputs = q.size(2), args.inputs = k.size(2);
        args.depth = q.size(3), args.channels = v.size(3), args.causal = causal, args.threads = op.threads, args.scale = scale;
        args.drop = op.drop(p, seed, std::max<int64_t>(heads, 1), args.outputs);
        mask = mask_of(op, mask_, args);
    }

    // Whether the tensors have four axes that fit each other, and no more channels than the kernel holds.
    static bool takes(const Op& op, const Tensor& q_, const Tensor& k_, const Tensor& v_) {
        if (q_.dim() != 4 || k_.dim() != 4 || v_.dim() != 4) return false;
        const View q = op.view("q", q_), k = op.view("k", k_), v = op.view("v", v_);
        const auto few = [](int64_t channels) { return channels > 0 && channels <= kAttentionChannels; };
        return q.dtype == types().f32 && k.dtype == q.dtype && v.dtype == q.dtype && k.size(0) == q.size(0) && v.size(0) == q.size(0) &&
               k.size(1) > 0 && k.size(1) == v.size(1) && q.size(1) % k.size(1) == 0 && k.size(2) == v.size(2) &&
               k.size(3) == q.size(3) && few(q.size(3)) && few(v.size(3));
    }

    // Many rows that lie far apart, as a head's are among those of others, share few places of the caches.
    static bool is_scattered(const View& t) {
        const int64_t row = t.strides[2];
        return row > t.size(3) && t.size(2) * row * int64_t{sizeof(float)} >= kScattered;
    }

    static View gathered(const Op& op, const View& t) {
        return is_scattered(t) ? op.view("rows", torch::stable::contiguous(t.tensor())) : t;
    }

    static Planes planes(const View& t) { return {t.floats(), t.strides[0], t.strides[1], t.strides[2]}; }

    // (B, K, N, C) that lies as (B, N, K, C)
    static View by_rows(const Op& op, int64_t batch, int64_t heads, int64_t rows, int64_t channels) {
        const int64_t sizes[4] = {batch, heads, rows, channels}, row = std::max<int64_t>(heads, 1) * std::max<int64_t>(channels, 1);
        const int64_t strides[4] = {std::max<int64_t>(rows, 1) * row, std::max<int64_t>(channels, 1), row, 1};
        AtenTensorHandle made;
        TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, sizes, strides, types().f32, types().cpu, 0, &made));
        return op.view("result", Tensor(made));
    }
};

// An image (batch, channels, *sizes), of as many axes.
View image_made(const Op& op, int64_t rows, int64_t channels, const int64_t (&all)[3], int64_t axes) {
    int64_t sizes[5] = {rows, channels}, strides[5], step = 1;
    for (int64_t axis = 0; axis < axes; ++axis) sizes[2 + axis] = all[3 - axes + axis];
    for (int64_t dim = axes + 1; dim >= 0; --dim) strides[dim] = step, step *= sizes[dim];
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(axes + 2, sizes, strides, types().f32, types().cpu, 0, &handle));
    return op.view("result", Tensor(handle));
}

View image_of(const Op& op, const char* name, const Tensor& t) {
    View found = op.view(name, t);
    op.check(t.dim() >= 3 && t.dim() <= 5 && found.data && found.dtype == types().f32 && t.numel() < kFewNumbers, name,
             "be float32 with 3 to 5 axes, and neither empty nor of 2^24 numbers or more");
    return t.is_contiguous() ? found : op.view(name, torch::stable::contiguous(t));
}

// Whether an image of these sizes has few numbers.
bool are_few(const int64_t (&sizes)[3], int64_t numbers) {
    for (const int64_t size : sizes) {
        if (numbers >= kFewNumbers || size >= kFewNumbers) return false;
        numbers *= size;
    }
    return numbers < kFewNumbers;
}

// A number for each axis of an image, of kAxisBits each in one, the first in the lowest: a list takes longer to pass.
constexpr int kAxisBits = 20;

struct Axes {
    int64_t numbers;

    int64_t operator[](int64_t axis) const { return numbers >> (kAxisBits * axis) & ((int64_t{1} << kAxisBits) - 1); }
};

// Images (batch, channels, *sizes) of one to three axes, and the kernel (outputs, inputs of a group, *sizes).
struct Images {
    const Op& op;
    View x, w;
    int64_t axes = 0;
    bool finite = true;
    ImageArgs args{};

    Images(const Op& op, const Tensor& x_, const Tensor& w_, Axes stride, Axes padding, Axes dilation, int64_t groups)
        : op(op), x(image_of(op, "x", x_)), w(image_of(op, "w", w_)), axes(x_.dim() - 2) {
        op.check(axes >= 1 && axes <= 3 && w_.dim() == axes + 2, "x", "have one to three axes of an image, as w has of a kernel");
        op.check(groups >= 1 && w.size(0) % groups == 0 && x.size(1) == groups * w.size(1), "groups", "divide the channels");
        args.batch = x.size(0), args.groups = groups, args.inputs = w.size(1), args.outputs = w.size(0) / groups;
        args.w_group = args.outputs, args.w_input = 1, args.threads = op.threads;
        for (int64_t axis = 0; axis < 3; ++axis) {
            const int64_t own = axis - (3 - axes);
            args.from[axis] = own < 0 ? 1 : x.size(2 + own), args.kernel[axis] = own < 0 ? 1 : w.size(2 + own);
            const int64_t step = own < 0 ? 1 : stride[own], pad = own < 0 ? 0 : padding[own], apart = own < 0 ? 1 : dilation[own];
            op.check(step >= 1 && apart >= 1, "stride", "be at least 1, as dilation");
            const int64_t rest = args.from[axis] + 2 * pad - apart * (args.kernel[axis] - 1) - 1;
            op.check(rest >= 0, "x", "be as large as the kernel");
            args.to[axis] = rest / step + 1, args.multiple[axis] = step, args.step[axis] = apart, args.shift[axis] = -pad;
            args.divisor[axis] = 1, args.w_input *= args.kernel[axis];
        }
        args.w_output = args.inputs * args.w_input, args.w_group *= args.w_output;
        op.check(are_few(args.to, args.batch * args.groups * args.outputs), "x", "be below 2^24 numbers, as the result");
        args.x = x.floats(), args.w = w.floats(), args.finite = &finite;
    }

    // The same from y to x: the reversed steps, and w of its other side.
    ImageArgs reversed() const {
        ImageArgs back = args;
        std::swap(back.inputs, back.outputs), std::swap(back.w_input, back.w_output), std::swap(back.from, back.to);
        for (int64_t axis = 0; axis < 3; ++axis) {
            back.multiple[axis] = 1, back.divisor[axis] = args.multiple[axis];
            back.step[axis] = -args.step[axis], back.shift[axis] = -args.shift[axis];
        }
        return back;
    }
};

// Nothing where w is not finite.
Tensor images(const Tensor& x, const Tensor& w, const Maybe& bias_, int64_t stride, int64_t padding, int64_t dilation, int64_t groups) {
    const Op op{"images"};
    Images s(op, x, w, {stride}, {padding}, {dilation}, groups);
    const View bias = op.floats("bias", bias_, {s.w.size(0)}), y = image_made(op, s.x.size(0), s.w.size(0), s.args.to, s.axes);
    s.args.bias = bias.floats(), s.args.y = y.floats();
    run.images(&s.args);
    return s.finite ? y.tensor() : op.made({0}).tensor();
}

// The gradients of x, w and bias, those that are asked for; none of them where w or the gradient of y is not finite.
std::tuple<Maybe, Maybe, Maybe> images_backward(const Tensor& x, const Tensor& w, const Tensor& grad_, int64_t stride, int64_t padding,
                                                int64_t dilation, int64_t groups, bool of_x, bool of_w, bool of_bias) {
    const Op op{"images_backward"};
    Images s(op, x, w, {stride}, {padding}, {dilation}, groups);
    const View grad = image_of(op, "grad", grad_);
    bool fits = grad_.dim() == s.axes + 2 && grad.size(0) == s.x.size(0) && grad.size(1) == s.w.size(0);
    for (int64_t axis = 0; fits && axis < s.axes; ++axis) fits = grad.size(2 + axis) == s.args.to[3 - s.axes + axis];
    op.check(fits, "grad", "have the shape of the result");
    View grad_x, grad_w, grad_bias;
    if (of_x) {
        grad_x = image_made(op, s.x.size(0), s.x.size(1), s.args.from, s.axes);
        ImageArgs back = s.reversed();
        back.x = grad.floats(), back.y = grad_x.floats();
        run.images(&back);
    }
    if (s.finite && (of_w || of_bias)) {
        grad_w = image_made(op, s.w.size(0), s.w.size(1), s.args.kernel, s.axes), grad_bias = op.made({s.w.size(0)});
        std::fill_n(grad_w.floats(), grad_w.tensor().numel(), 0.0f), std::fill_n(grad_bias.floats(), s.w.size(0), 0.0f);
        const ImageWeightArgs args{s.args, grad.floats(), grad_w.floats(), of_bias ? grad_bias.floats() : nullptr};
        run.images_backward(&args);
    }
    if (!s.finite) return {};
    return {maybe(grad_x), of_w ? maybe(grad_w) : std::nullopt, of_bias ? maybe(grad_bias) : std::nullopt};
}

// Windows over an image of these sizes.
MeansArgs windows(const Op& op, int64_t planes, const int64_t* from, Axes size, Axes stride, Axes padding, int64_t axes, bool all_count) {
    MeansArgs args{};
    args.planes = planes, args.all_count = all_count, args.threads = op.threads;
    for (int64_t axis = 0; axis < 3; ++axis) {
        const int64_t own = axis - (3 - axes);
        args.from[axis] = own < 0 ? 1 : from[own], args.size[axis] = own < 0 ? 1 : size[own];
        args.stride[axis] = own < 0 ? 1 : stride[own], args.padding[axis] = own < 0 ? 0 : padding[own];
        op.check(args.size[axis] >= 1 && args.stride[axis] >= 1 && args.padding[axis] <= args.size[axis] / 2, "size",
                 "be at least 1, as stride, and padding at most half of it");
        op.check(args.from[axis] >= 1 && args.from[axis] < kFewNumbers, "x", "have sizes from 1 to 2^24");
        const int64_t rest = args.from[axis] + 2 * args.padding[axis] - args.size[axis];
        op.check(rest >= 0, "x", "be as large as the window");
        args.to[axis] = rest / args.stride[axis] + 1;
    }
    op.check(are_few(args.from, planes) && are_few(args.to, planes), "x", "be below 2^24 numbers, as the result");
    return args;
}

Tensor window_means(const Tensor& x_, int64_t size, int64_t stride, int64_t padding, bool all_count) {
    const Op op{"window_means"};
    const View x = image_of(op, "x", x_);
    MeansArgs args = windows(op, x.size(0) * x.size(1), x.sizes + 2, {size}, {stride}, {padding}, x_.dim() - 2, all_count);
    const View y = image_made(op, x.size(0), x.size(1), args.to, x_.dim() - 2);
    args.x = x.floats(), args.y = y.floats();
    run.window_means(&args);
    return y.tensor();
}

// ... of an image of the sizes `from`.
Tensor window_means_backward(const Tensor& grad_, const std::vector<int64_t>& from, int64_t size, int64_t stride, int64_t padding,
                             bool all_count) {
    const Op op{"window_means_backward"};
    const View grad = image_of(op, "grad", grad_);
    const int64_t axes = grad_.dim() - 2;
    op.check(from.size() == static_cast<size_t>(axes), "from", "have a size for each axis");
    MeansArgs args = windows(op, grad.size(0) * grad.size(1), from.data(), {size}, {stride}, {padding}, axes, all_count);
    bool fits = true;
    for (int64_t axis = 0; axis < axes; ++axis) fits = fits && grad.size(2 + axis) == args.to[3 - axes + axis];
    op.check(fits, "grad", "have the shape of the result");
    const View made = image_made(op, grad.size(0), grad.size(1), args.from, axes);
    std::fill_n(made.floats(), made.tensor().numel(), 0.0f);
    args.x = grad.floats(), args.y = made.floats();
    run.window_means_backward(&args);
    return made.tensor();
}

// y and, to train, what says their softmax (2, B, K, N); the weights (B, K, N, M) where asked for. Nothing for tensors that do
// not fit: others compute these, or say what is wrong.
std::tuple<Maybe, Maybe, Maybe> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, bool causal,
                                                  double scale, double p, int64_t seed, bool train, bool weights) {
    const Op op{"attention_forward"};
    if (!Attention::takes(op, q, k, v)) return {};
    const Attention s(op, q, k, v, mask, causal, scale, p, seed);
    const AttentionArgs& a = s.args;
    const View y = Attention::by_rows(op, a.batch, a.heads, a.outputs, a.channels);
    const View peaks = train ? op.made({2, a.batch, a.heads, a.outputs}) : View{};
    const View table = weights ? op.made({a.batch, a.heads, a.outputs, a.inputs}) : View{};
    const AttentionForwardArgs args{a, Attention::planes(y), peaks.floats(), table.floats()};
    run.attention_forward(&args);
    return {y.tensor(), maybe(peaks), maybe(table)};
}

// The gradients of q, k, v and, where asked for, of the mask.
std::tuple<Tensor, Tensor, Tensor, Maybe> attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask,
                                                             const Tensor& y_, const Tensor& peaks_, const Tensor& grad_, bool causal,
                                                             double scale, double p, int64_t seed, bool of_mask) {
    const Op op{"attention_backward"};
    const Attention s(op, q, k, v, mask, causal, scale, p, seed);
    const AttentionArgs& a = s.args;
    const Shape shape{a.batch, a.heads, a.outputs, a.channels};
    const View y = op.unit("y", y_, shape, types().f32), grad = op.unit("grad", grad_, shape, types().f32);
    const View peaks = op.exact("peaks", peaks_, {2, a.batch, a.heads, a.outputs}, types().f32);
    const View grad_q = Attention::by_rows(op, a.batch, a.heads, a.outputs, a.depth);
    View grad_k = Attention::by_rows(op, a.batch, a.heads / a.shared, a.inputs, a.depth);
    View grad_v = Attention::by_rows(op, a.batch, a.heads / a.shared, a.inputs, a.channels);
    if (Attention::is_scattered(grad_k)) grad_k = op.made({a.batch, a.heads / a.shared, a.inputs, a.depth});
    if (Attention::is_scattered(grad_v)) grad_v = op.made({a.batch, a.heads / a.shared, a.inputs, a.channels});
    AttentionBackwardArgs args{a, Attention::planes(y), Attention::planes(grad), Attention::planes(grad_q),
                               Attention::planes(grad_k), Attention::planes(grad_v), peaks.floats(), nullptr, 0, 0, 0, 0};
    Maybe of;
    if (of_mask) {
        op.check(mask && !a.mask_is_bool, "mask", "be of numbers to have a gradient");
        int64_t* strides[4] = {&args.of_column, &args.of_row, &args.of_head, &args.of_batch};
        std::vector<int64_t> sizes(s.mask.sizes, s.mask.sizes + mask->dim());
        of = torch::stable::new_zeros(*mask, sizes);
        int64_t step = 1;
        for (int64_t dim = 0; dim < mask->dim(); ++dim) {
            const int64_t size = sizes[sizes.size() - 1 - dim];
            *strides[dim] = size == 1 ? 0 : step, step *= size;
        }
        args.grad_mask = op.view("grad_mask", *of).floats();
    }
    run.attention_backward(&args);
    return {grad_q.tensor(), grad_k.tensor(), grad_v.tensor(), of};
}

// -- a step of decoding ------------------------------------------------------------------------------------------------

struct Heads {
    View x, weight, bias;
    HeadsArgs args{};

    // Turned by `turn`, the cosines and sines of so many pairs of channels, where a matrix makes it.
    Heads(const Op& op, const Tensor& x_, const Maybe& weight_, const Maybe& bias_, int32_t dtype, int64_t batch,
          int64_t heads, int64_t depth, const float* turn = nullptr, int64_t pairs = 0, bool halves = false) {
        x = op.view("query, key or value", x_);
        const int64_t inputs = x.tensor().dim() ? x.size(x.tensor().dim() - 1) : 0;
        op.check(x.dtype == dtype && x.tensor().is_contiguous() && x.tensor().dim() > 1 &&
                 x.tensor().numel() == (weight_ ? batch * inputs : batch * heads * depth),
                 "query, key or value", "be contiguous, an entry for each of the batch, of the dtype of the keys");
        if (weight_) {
            weight = op.view("weight", *weight_);
            op.check(weight.dtype == dtype && weight_->is_contiguous() && weight_->numel() == heads * depth * inputs,
                     "weight", "be contiguous, of heads depth times inputs numbers, of the dtype of the keys");
        }
        if (bias_) {
            bias = op.view("bias", *bias_);
            op.check(bias.dtype == dtype && bias_->is_contiguous() && bias_->numel() == heads * depth, "bias",
                     "be contiguous, of heads times depth numbers, of the dtype of the keys");
        }
        args = {x.data, weight.data, bias.data, weight_ ? turn : nullptr, heads, inputs, depth, pairs, halves};
    }
};

// The cosines and sines, (2, pairs), by which the channels of an entry at a position are turned.
void turn_of(const View& rates, double gain, int64_t position, float* turn) {
    const double* rate = rates.as<double>();
    for (int64_t j = 0, pairs = rates.size(0); j < pairs; ++j) {
        turn[j] = static_cast<float>(gain * std::cos(position * rate[j]));
        turn[pairs + j] = static_cast<float>(gain * std::sin(position * rate[j]));
    }
}

Tensor attention_step(const Tensor& query, const Maybe& query_weight, const Maybe& query_bias, const Tensor& key,
                      const Maybe& key_weight, const Maybe& key_bias, const Tensor& value, const Maybe& value_weight,
                      const Maybe& value_bias, const Tensor& keys_, const Tensor& values_, const Tensor& output_,
                      const Maybe& bias_, double scale, const Maybe& added_, const Maybe& rates_, double gain,
                      bool halves, int64_t position) {
    const Op op{"attention_step"};
    const int32_t dtype = op.view("keys", keys_).dtype;
    op.check(dtype == types().f32 || dtype == types().bf16, "keys", "be float32 or bfloat16");
    const View keys = op.written("keys", keys_, {kAny, kAny, kAny, kAny}, dtype);
    const int64_t batch = keys.size(0), entries = keys.size(2), depth = keys.size(3);
    const View values = op.written("values", values_, {batch, kAny, entries, kAny}, dtype);
    const int64_t channels = values.size(3);
    op.check(entries > 0, "keys", "have an entry, which is written");
    const View output = op.exact("output", output_, {kAny, kAny}, dtype);
    const int64_t columns = output.size(0), heads = channels ? output.size(1) / channels : 0;
    op.check(heads > 0 && heads * channels == output.size(1), "output", "have a column for each head and channel of values");
    for (const View* shared : {&keys, &values})
        op.check(shared->size(1) > 0 && heads % shared->size(1) == 0, "keys and values", "have a divisor of the heads");
    View bias, added, rates;
    if (added_) {
        added = op.view("added", *added_);
        op.check(added.dtype == types().f32 && added_->dim() == 2 && added.size(0) == heads && added.size(1) == entries &&
                 added.strides[1] == 1, "added", "be float32, a row of numbers for each head");
    }
    if (bias_) {
        bias = op.view("bias", *bias_);
        op.check(bias.dtype == dtype && bias_->is_contiguous() && bias_->numel() == columns, "bias",
                 "be contiguous, a number for each output channel, of the dtype of the keys");
    }
    if (rates_) {
        rates = op.exact("rates", *rates_, {kAny}, aoti_torch_dtype_float64());
        op.check(2 * rates.size(0) <= depth, "rates", "be of at most half of the channels");
    }
    const int64_t pairs = rates_ ? rates.size(0) : 0;
    std::vector<float> turn(2 * pairs);
    if (pairs) turn_of(rates, gain, position, turn.data());
    const float* turned = pairs ? turn.data() : nullptr;
    const Heads q(op, query, query_weight, query_bias, dtype, batch, heads, depth, turned, pairs, halves);
    const Heads k(op, key, key_weight, key_bias, dtype, batch, keys.size(1), depth, turned, pairs, halves);
    const Heads v(op, value, value_weight, value_bias, dtype, batch, values.size(1), channels);
    const int64_t inputs = dtype == types().f32 ? 0 : q.args.inputs + k.args.inputs + v.args.inputs;
    const View y = op.made({batch, columns}, dtype), scratch = op.made({batch * (heads * (depth + channels) + inputs)});
    float *queries = scratch.floats(), *sums = queries + batch * heads * depth;
    const AttentionStepArgs args{q.args, k.args, v.args, {keys.data, keys.strides[0], keys.strides[1], keys.strides[2]},
                                 {values.data, values.strides[0], values.strides[1], values.strides[2]}, output.data,
                                 bias.data, added.floats(), added_ ? added.strides[0] : 0, queries, sums,
                                 sums + batch * heads * channels, y.data, batch, entries, columns, op.threads,
                                 dtype == types().bf16, scale};
    run.attention_step(&args);
    return y.tensor();
}

// -- sampling ----------------------------------------------------------------------------------------------------------

// Source, number and target of the edges drawn into nodes, and -1 or the first wrong node; see SampleDrawArgs. The order of
// edges, their times, those of the nodes where they begin, and weights may be missing.
std::tuple<Tensor, Tensor, Tensor, int64_t> sample(const Tensor& indptr_, const Tensor& index_, const Maybe& order_,
                                                   const Maybe& edge_times_, const Maybe& node_times_,
                                                   const Maybe& weights_, const Tensor& nodes_, const Maybe& groups_,
                                                   const Maybe& limits_, int64_t fanout, bool replace, bool last,
                                                   int64_t seed, int64_t relation, int64_t base) {
    const Op op{"sample"};
    const View indptr = op.view("indptr", indptr_);
    op.check(indptr.dtype == types().i64 || indptr.dtype == types().i32, "indptr", "be int32 or int64");
    const int32_t own = indptr.dtype, i64 = types().i64;
    op.exact("indptr", indptr_, {kAny}, own);
    op.check(indptr.size(0) > 0, "indptr", "not be empty");
    const View index = op.exact("index", index_, {kAny}, own), nodes = op.exact("nodes", nodes_, {kAny}, i64);
    const int64_t slots = index.size(0), count = nodes.size(0);
    const auto given = [&](const char* name, const Maybe& t, int64_t size, int32_t dtype) {
        return t ? op.exact(name, *t, {size}, dtype) : View{};
    };
    const View order = given("order", order_, slots, own), edge_times = given("edge_times", edge_times_, slots, i64);
    const View node_times = given("node_times", node_times_, kAny, i64);
    const View weights = given("weights", weights_, slots, aoti_torch_dtype_float64());
    const View groups = given("groups", groups_, count, i64), limits = given("limits", limits_, count, i64);
    op.check(!limits.sizes || edge_times.sizes || node_times.sizes, "limits", "be of edges with times");
    op.check(fanout < kLimit, "fanout", "be below 2^31 - 1");
    op.check(base >= 0 && base <= INT64_MAX - count, "base", "leave a number to each node");
    const InEdges edges{indptr.data, index.data, order.data, edge_times.as<int64_t>(), node_times.as<int64_t>(),
                        weights.as<double>(), own == i64, indptr.size(0) - 1, slots,
                        node_times.sizes ? node_times.size(0) : 0};
    std::vector<int64_t> rows(2 * count), offsets(count + 1);
    int64_t bad = -1;
    const SampleBoundsArgs found{edges, nodes.as<int64_t>(), limits.as<int64_t>(), count, fanout, replace, last,
                                 rows.data(), rows.data() + count, offsets.data(), &bad};
    run.sample_bounds(&found);
    const int64_t drawn = bad < 0 ? offsets[count] : 0;
    const View sources = op.made({drawn}, i64), numbers = op.made({drawn}, i64), targets = op.made({drawn}, i64);
    if (drawn) {
        const SampleDrawArgs args{edges, nodes.as<int64_t>(), groups.as<int64_t>(), rows.data(), rows.data() + count,
                                  offsets.data(), count, fanout, replace, seed, relation, base, op.threads,
                                  sources.as<int64_t>(), numbers.as<int64_t>(), targets.as<int64_t>()};
        run.sample_draw(&args);
    }
    return {sources.tensor(), numbers.tensor(), targets.tensor(), bad};
}

// Numbers of keys, and the keys that had none; see Numbering.
std::tuple<Tensor, Tensor, int64_t> number(const Tensor& table_, const Tensor& keys_, int64_t next, int64_t numbering) {
    const Op op{"number"};
    const View keys = op.exact("keys", keys_, {kAny}, types().i64);
    const bool direct = op.view("table", table_).dtype == types().i32;
    const View table = op.exact("table", table_, {kAny, kAny}, direct ? types().i32 : types().i64);
    const int64_t capacity = table.size(0), words = table.size(1), count = keys.size(0);
    op.check(direct ? words == 1 : capacity > 0 && !(capacity & (capacity - 1)) && (words == 1 || words == 2), "table",
             "have an int32 for each key, or a power of two entries of one or two words");
    op.check(kEnter <= numbering && numbering <= kFind, "numbering", "be one of Numbering");
    op.check(next >= 0 && next <= INT64_MAX - count, "next", "leave a number to each key");
    const View numbers = op.made({numbering == kEnter ? 0 : count}, types().i64);
    const View fresh = op.made({numbering == kAdd ? count : 0}, types().i64);
    int64_t added = 0;
    op.check(!direct || next + count < kLimit, "next", "leave a number of 32 bits to each key");
    const NumberArgs args{table.data, keys.as<int64_t>(), direct ? kDirect : words > 1 ? kWide : kNarrow, capacity, count,
                          next, numbering, numbers.as<int64_t>(), fresh.as<int64_t>(), &added};
    run.number(&args);
    op.check(added >= 0, "keys", "be in the table");
    return {numbers.tensor(), fresh.tensor(), added};
}

// -- registration ------------------------------------------------------------------------------------------------------

#define SC_DROP "float p, int seed, int batch_heads"
#define SC_CONVOLVE "Tensor x, Tensor theta, Tensor? bias"
#define SC_LINEAR "Tensor x, Tensor weight, Tensor? root, Tensor? x_root, Tensor? bias"
#define SC_FACTORED "int activation, float parameter, bool causal, Tensor? factor, " SC_DROP
#define SC_ENTRIES                                                                                                    \
    "Tensor x, Tensor query, Tensor? query_bias, Tensor key, Tensor? key_bias, Tensor value, Tensor? value_bias, "    \
    "Tensor? output, Tensor? bias, Tensor? mask"
#define SC_WINDOW                                                                                                     \
    "int[] shape, int[] below, int[] above, int[] dilation, Tensor? outputs, Tensor? inputs, float scale, " SC_DROP
#define SC_HEADS(name) "Tensor " name ", Tensor? " name "_weight, Tensor? " name "_bias, "

struct Operator {
    const char *name, *schema;
    void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

#define SC_STEPS "int stride, int padding, int dilation, int groups"
#define SC_NORM "Tensor? shift, Tensor? weight, Tensor? bias"
#define SC_WINDOWS "int size, int stride, int padding, bool all_count"

const Operator kOperators[] = {
    {"layouts", "(Tensor index, int inputs, int outputs) -> (Tensor, Tensor, int)", TORCH_BOX(&layouts)},
    {"verify", "(Tensor indptr, Tensor indices, Tensor order) -> (Tensor, int, int)", TORCH_BOX(&verify)},
    {"outside", "(Tensor index, int[] sizes) -> int", TORCH_BOX(&outside)},
    {"edges", "(Tensor index, int inputs, int outputs, Tensor? input_starts, Tensor? output_starts) -> int", TORCH_BOX(&edges)},
    {"batch", "(Tensor index, Tensor starts) -> (Tensor, int)", TORCH_BOX(&batch)},
    {"first_loop", "(Tensor index) -> int", TORCH_BOX(&first_loop)},
    {"adjacency", "(Tensor index, int inputs, int outputs, bool loops, bool square, int normalize, Tensor? weights, "
     "bool numbered) -> (Tensor, int)", TORCH_BOX(&adjacency)},
    {"transpose", "(Tensor side) -> Tensor", TORCH_BOX(&transpose)},
    {"spmm", "(Tensor layout, Tensor? values, bool in_layout_order, Tensor x, Tensor? z, int rows, int count, float alpha, "
     "float beta) -> Tensor", TORCH_BOX(&spmm)},
    {"spmm_into", "(Tensor layout, Tensor? values, bool in_layout_order, Tensor x, Tensor(a!) out, int count, float alpha, "
     "float beta) -> ()", TORCH_BOX(&spmm_into)},
    {"sddmm", "(Tensor layout, Tensor q, Tensor k, int rows) -> Tensor", TORCH_BOX(&sddmm)},
    {"sums", "(Tensor by_target, Tensor x) -> Tensor", TORCH_BOX(&sums)},
    {"sums_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor grad) -> Tensor", TORCH_BOX(&sums_backward)},
    {"maxima", "(Tensor side, Tensor x) -> Tensor", TORCH_BOX(&maxima)},
    {"maxima_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor y, Tensor grad) -> Tensor",
     TORCH_BOX(&maxima_backward)},
    {"messages", "(Tensor by_target, Tensor x, Tensor attributes) -> Tensor", TORCH_BOX(&messages)},
    {"messages_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor attributes, Tensor grad, bool of_x, "
     "bool of_attributes) -> (Tensor?, Tensor?)", TORCH_BOX(&messages_backward)},
    {"starts", "(Tensor groups, int? count) -> Tensor", TORCH_BOX(&starts)},
    {"pool", "(Tensor starts, Tensor x, int kind, float t) -> Tensor", TORCH_BOX(&pool)},
    {"pool_backward", "(Tensor starts, Tensor x, Tensor y, Tensor grad, int kind, float t) -> Tensor", TORCH_BOX(&pool_backward)},
    {"pool_evenly_backward", "(Tensor starts, Tensor x, Tensor grad, int kind, float t) -> Tensor",
     TORCH_BOX(&pool_evenly_backward)},
    {"scatter", "(Tensor x, Tensor index, int groups, int kind) -> Tensor", TORCH_BOX(&scatter)},
    {"scatter_backward", "(Tensor x, Tensor index, Tensor y, Tensor grad, int groups, int kind) -> Tensor",
     TORCH_BOX(&scatter_backward)},
    {"center", "(Tensor starts, Tensor x, int center, float gain) -> Tensor", TORCH_BOX(&center)},
    {"center_backward", "(Tensor starts, Tensor x, Tensor grad, int center, float gain) -> Tensor", TORCH_BOX(&center_backward)},
    {"norm", "(Tensor starts, Tensor x, " SC_NORM ", int center, int scale, float eps, float gain) -> Tensor", TORCH_BOX(&norm)},
    {"norm_backward", "(Tensor starts, Tensor x, " SC_NORM ", Tensor grad, int center, int scale, float eps, float gain) -> "
     "(Tensor, Tensor?, Tensor?, Tensor?)", TORCH_BOX(&norm_backward)},
    {"conditioned_sums", "(Tensor layout, Tensor values, Tensor x, int first, int heads, Tensor(a!) out) -> ()",
     TORCH_BOX(&conditioned_sums)},
    {"conditioned_adjoint", "(Tensor layout, Tensor values, Tensor x, int first, int heads, Tensor grads, "
     "Tensor(a!)? grad_values, Tensor(b!)? grad_x) -> ()", TORCH_BOX(&conditioned_adjoint)},
    {"images", "(Tensor x, Tensor w, Tensor? bias, " SC_STEPS ") -> Tensor", TORCH_BOX(&images)},
    {"images_backward", "(Tensor x, Tensor w, Tensor grad, " SC_STEPS ", bool of_x, bool of_w, bool of_bias) -> "
     "(Tensor?, Tensor?, Tensor?)", TORCH_BOX(&images_backward)},
    {"window_means", "(Tensor x, " SC_WINDOWS ") -> Tensor", TORCH_BOX(&window_means)},
    {"window_means_backward", "(Tensor grad, int[] sizes, " SC_WINDOWS ") -> Tensor", TORCH_BOX(&window_means_backward)},
    {"project", "(Tensor x, Tensor w, Tensor? bias) -> Tensor", TORCH_BOX(&project)},
    {"outer", "(Tensor x, Tensor g) -> Tensor", TORCH_BOX(&outer)},
    {"convolve", "(Tensor side, " SC_CONVOLVE ", bool structure_first, bool train) -> (Tensor, Tensor?)", TORCH_BOX(&convolve)},
    {"convolve_backward", "(Tensor side, Tensor side_T, " SC_CONVOLVE ", Tensor? r, Tensor grad, bool of_x, bool of_theta, "
     "bool of_bias, bool structure_first) -> (Tensor?, Tensor?, Tensor?)", TORCH_BOX(&convolve_backward)},
    {"convolve_with_self", "(Tensor side, " SC_CONVOLVE ", int own, bool train) -> (Tensor, Tensor?)",
     TORCH_BOX(&convolve_with_self)},
    {"convolve_with_self_backward", "(Tensor side, Tensor side_T, " SC_CONVOLVE ", Tensor r, Tensor grad, bool of_x, "
     "bool of_theta, bool of_bias, int own) -> (Tensor?, Tensor?, Tensor?)", TORCH_BOX(&convolve_with_self_backward)},
    {"convolve_linear", "(Tensor side, " SC_LINEAR ", bool structure_first, bool train) -> (Tensor, Tensor?)",
     TORCH_BOX(&convolve_linear)},
    {"convolve_linear_backward", "(Tensor side, Tensor side_T, " SC_LINEAR ", Tensor? r, Tensor grad, bool of_x, "
     "bool of_weight, bool of_root, bool of_own, bool of_bias, bool structure_first) -> "
     "(Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)", TORCH_BOX(&convolve_linear_backward)},
    {"affine_forward", "(Tensor by_target, Tensor source, Tensor target, Tensor x, float slope, " SC_DROP ", bool train) -> "
     "(Tensor, Tensor, Tensor, Tensor)", TORCH_BOX(&affine_forward)},
    {"affine_backward", "(Tensor by_target, Tensor by_source, Tensor source, Tensor target, Tensor x, Tensor y, Tensor y2, "
     "Tensor peaks, Tensor mass, Tensor grad, float slope, " SC_DROP ") -> (Tensor, Tensor, Tensor)",
     TORCH_BOX(&affine_backward)},
    {"projected_forward", "(Tensor by_target, Tensor x, Tensor? z, Tensor of_source, Tensor of_target, Tensor? bias, "
     "float slope, " SC_DROP ", bool train) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
     TORCH_BOX(&projected_forward)},
    {"projected_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor? z, Tensor of_source, Tensor of_target, "
     "Tensor? bias, Tensor y, Tensor y2, Tensor peaks, Tensor mass, Tensor source, Tensor target, Tensor grad, float slope, "
     SC_DROP ") -> (Tensor, Tensor?, Tensor, Tensor, Tensor?)", TORCH_BOX(&projected_backward)},
    {"attend_forward", "(Tensor side, Tensor x, Tensor of_source, Tensor of_target, Tensor? bias, float slope, " SC_DROP
     ", bool train) -> (Tensor, Tensor?, Tensor)", TORCH_BOX(&attend_forward)},
    {"attend_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor of_source, Tensor of_target, Tensor? bias, "
     "Tensor y, Tensor y2, Tensor numbers, Tensor grad, float slope, " SC_DROP ") -> (Tensor, Tensor, Tensor, Tensor?)",
     TORCH_BOX(&attend_backward)},
    {"attend_layer_forward", "(Tensor side, Tensor x, Tensor theta, Tensor of_source, Tensor of_target, Tensor? bias, "
     "float slope, " SC_DROP ", bool train) -> (Tensor, Tensor?, Tensor, Tensor)", TORCH_BOX(&attend_layer_forward)},
    {"attend_layer_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor theta, Tensor of_source, "
     "Tensor of_target, Tensor? bias, Tensor y, Tensor y2, Tensor numbers, Tensor h, Tensor grad, bool of_x, float slope, "
     SC_DROP ") -> (Tensor?, Tensor, Tensor, Tensor, Tensor?)", TORCH_BOX(&attend_layer_backward)},
    {"bilinear_forward", "(Tensor by_target, Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, " SC_DROP ") -> "
     "(Tensor, Tensor)", TORCH_BOX(&bilinear_forward)},
    {"bilinear_backward", "(Tensor by_target, Tensor by_source, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor y, "
     "Tensor peaks, Tensor grad, float scale, " SC_DROP ") -> (Tensor, Tensor, Tensor, Tensor?)", TORCH_BOX(&bilinear_backward)},
    {"packed_forward", "(Tensor by_target, Tensor table, Tensor? q, Tensor? bias, int heads, int depth, float scale, " SC_DROP
     ") -> (Tensor, Tensor)", TORCH_BOX(&packed_forward)},
    {"packed_backward", "(Tensor by_target, Tensor by_source, Tensor table, Tensor? q, Tensor? bias, Tensor y, Tensor peaks, "
     "Tensor grad, int heads, int depth, float scale, " SC_DROP ") -> (Tensor, Tensor?, Tensor?)", TORCH_BOX(&packed_backward)},
    {"attend_dots_forward", "(Tensor side, Tensor x, Tensor query, Tensor? query_bias, Tensor key, Tensor? key_bias, "
     "Tensor value, Tensor? value_bias, Tensor? bias, int heads, float scale, " SC_DROP ", bool train) -> "
     "(Tensor, Tensor?, Tensor?)", TORCH_BOX(&attend_dots_forward)},
    {"attend_dots_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor query, Tensor? query_bias, Tensor key, "
     "Tensor? key_bias, Tensor value, Tensor? value_bias, Tensor? bias, Tensor y, Tensor table, Tensor peaks, Tensor grad, "
     "bool of_x, int heads, float scale, " SC_DROP ") -> (Tensor?, Tensor, Tensor?, Tensor, Tensor?, Tensor, Tensor?, Tensor?)",
     TORCH_BOX(&attend_dots_backward)},
    {"attend_entries_forward", "(" SC_ENTRIES ", Tensor? index, int heads, float scale, bool causal, bool summed, bool train) -> "
     "(Tensor, Tensor?, Tensor?, Tensor?)", TORCH_BOX(&attend_entries_forward)},
    {"attend_entries_weighted", "(" SC_ENTRIES ", int heads, float scale, bool causal, bool of_mean) -> (Tensor, Tensor)",
     TORCH_BOX(&attend_entries_weighted)},
    {"attend_entries_backward", "(" SC_ENTRIES ", Tensor table, Tensor peaks, Tensor r, Tensor grad, bool of_x, Tensor? index, int heads, "
     "float scale, bool causal, bool summed) -> (Tensor?, Tensor, Tensor?, Tensor, Tensor?, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
     TORCH_BOX(&attend_entries_backward)},
    {"additive_forward", "(Tensor by_target, Tensor q, Tensor k, Tensor x, Tensor vector, int activation, "
     "float parameter, " SC_DROP ") -> (Tensor, Tensor)", TORCH_BOX(&additive_forward)},
    {"additive_backward", "(Tensor by_target, Tensor by_source, Tensor q, Tensor k, Tensor x, Tensor vector, Tensor y, "
     "Tensor peaks, Tensor grad, int activation, float parameter, " SC_DROP ") -> "
     "(Tensor, Tensor, Tensor, Tensor)", TORCH_BOX(&additive_backward)},
    {"factor", "(Tensor t, float rate) -> Tensor?", TORCH_BOX(&factor)},
    {"dense_additive_forward", "(Tensor q, Tensor k, Tensor x, Tensor vector, " SC_FACTORED ") -> (Tensor, Tensor)",
     TORCH_BOX(&dense_additive_forward)},
    {"dense_additive_backward", "(Tensor q, Tensor k, Tensor x, Tensor vector, Tensor y, Tensor peaks, Tensor grad, " SC_FACTORED
     ") -> (Tensor, Tensor, Tensor, Tensor)", TORCH_BOX(&dense_additive_backward)},
    {"attend_pairs_forward", "(Tensor side, Tensor x, Tensor theta, Tensor weight, Tensor offset, Tensor vector, "
     "Tensor? bias, float slope, " SC_DROP ") -> (Tensor, Tensor, Tensor)", TORCH_BOX(&attend_pairs_forward)},
    {"attend_pairs_backward", "(Tensor by_target, Tensor by_source, Tensor x, Tensor theta, Tensor weight, Tensor offset, "
     "Tensor vector, Tensor? bias, Tensor y, Tensor table, Tensor peaks, Tensor grad, bool of_x, float slope, " SC_DROP ") -> "
     "(Tensor?, Tensor, Tensor, Tensor, Tensor, Tensor?)", TORCH_BOX(&attend_pairs_backward)},
    {"additive_step", "(Tensor q, Tensor k, Tensor factor, Tensor x, Tensor vector, Tensor? keep, float rate) -> "
     "(Tensor, Tensor)", TORCH_BOX(&additive_step)},
    {"additive_step_backward", "(Tensor q, Tensor k, Tensor factor, Tensor x, Tensor vector, Tensor weights, Tensor grad, "
     "Tensor(a!)? grad_k, Tensor(b!)? grad_vector, bool first, float rate) -> Tensor", TORCH_BOX(&additive_step_backward)},
    {"affine_weights_forward", "(Tensor by_target, Tensor source, Tensor target, float slope, " SC_DROP ") -> Tensor",
     TORCH_BOX(&affine_weights_forward)},
    {"bilinear_weights_forward", "(Tensor by_target, Tensor q, Tensor k, Tensor? bias, float scale, " SC_DROP ") -> Tensor",
     TORCH_BOX(&bilinear_weights_forward)},
    {"additive_weights_forward", "(Tensor by_target, Tensor q, Tensor k, Tensor vector, int activation, float parameter, "
     SC_DROP ") -> Tensor", TORCH_BOX(&additive_weights_forward)},
    {"drop_block", "(Tensor weights, Tensor(a!) dropped, Tensor(b!)? gradient, int first_head, int last_row, int outputs, "
     SC_DROP ") -> ()", TORCH_BOX(&drop_block)},
    {"window_forward", "(Tensor q, Tensor k, Tensor v, Tensor? table, " SC_WINDOW ") -> (Tensor, Tensor)",
     TORCH_BOX(&window_forward)},
    {"window_backward", "(Tensor q, Tensor k, Tensor v, Tensor? table, Tensor y, Tensor peaks, Tensor grad, " SC_WINDOW
     ", bool of_table) -> (Tensor, Tensor, Tensor, Tensor?)", TORCH_BOX(&window_backward)},
    {"attention_forward", "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, float p, int seed, "
     "bool train, bool weights) -> (Tensor?, Tensor?, Tensor?)", TORCH_BOX(&attention_forward)},
    {"attention_backward", "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor y, Tensor peaks, Tensor grad, bool causal, "
     "float scale, float p, int seed, bool of_mask) -> (Tensor, Tensor, Tensor, Tensor?)", TORCH_BOX(&attention_backward)},
    {"attention_step", "(" SC_HEADS("query") SC_HEADS("key") SC_HEADS("value") "Tensor(a!) keys, Tensor(b!) values, "
     "Tensor output, Tensor? bias, float scale, Tensor? added, Tensor? rates, float gain, bool halves, int position) -> Tensor",
     TORCH_BOX(&attention_step)},
    {"sample", "(Tensor indptr, Tensor index, Tensor? order, Tensor? edge_times, Tensor? node_times, Tensor? weights, "
     "Tensor nodes, Tensor? groups, Tensor? limits, int fanout, bool replace, bool last, int seed, int relation, int base) -> "
     "(Tensor, Tensor, Tensor, int)", TORCH_BOX(&sample)},
    {"number", "(Tensor(a!) table, Tensor keys, int next, int numbering) -> (Tensor, Tensor, int)", TORCH_BOX(&number)},
};

}  // namespace
}  // namespace structconv

// The name of an operator; null beyond the last one.
extern "C" __attribute__((visibility("default"))) const char* structconv_operator(int64_t number) {
    return number < static_cast<int64_t>(std::size(structconv::kOperators)) ? structconv::kOperators[number].name : nullptr;
}

// Registers the operators in a namespace, for a compiled instruction set; null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* structconv_register(const char* space, const char* level) {
    using namespace structconv;
    static std::string wrong;
    try {
        const Level* found = nullptr;
        for (const Level& compiled : kLevels)
            if (!std::strcmp(compiled.name, level)) found = &compiled;
        STD_TORCH_CHECK(found, "not compiled for ", level);
        run = found->kernels;
        using torch::stable::detail::StableLibrary;
        // never deleted: torch keeps the operators for as long as the process lives
        auto* library = new StableLibrary(StableLibrary::Kind::FRAGMENT, space, nullptr, __FILE__, __LINE__);
        auto* kernels = new StableLibrary(StableLibrary::Kind::IMPL, space, "CPU", __FILE__, __LINE__);
        for (const Operator& op : kOperators) {
            library->def((std::string(op.name) + op.schema).c_str());
            kernels->impl(op.name, op.boxed);
        }
        return nullptr;
    } catch (const std::exception& error) {
        wrong = error.what();
        return wrong.c_str();
    }
}
