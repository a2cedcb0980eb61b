// Neighbors of nodes, drawn with or without replacement, and the numbers of those that were drawn. Each draw is a function of
// its seed, node and number, so that threads change nothing. All costs grow with the draws, none with the graph.
#include <vector>

#include "api.h"
#include "dropout.h"
#include "parallel.h"

namespace structconv::SC_ISA {
namespace {

constexpr int64_t kAhead = 12;  // elements that are prefetched
constexpr int64_t kScanned = 32;  // draws of a node that are compared one by one

template <class I> const I* as(const void* t) { return static_cast<const I*>(t); }

// The first slot of [low, high) that is later than the limit.
template <class I> int64_t later(const InEdges& edges, int64_t low, int64_t high, int64_t limit) {
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const int64_t source = as<I>(edges.index)[middle];
        const bool known = edges.edge_times || static_cast<uint64_t>(source) < static_cast<uint64_t>(edges.sources);
        if (known && (edges.edge_times ? edges.edge_times[middle] : edges.node_times[source]) <= limit) low = middle + 1;
        else high = middle;
    }
    return low;
}

template <class I> int64_t bounds(const SampleBoundsArgs& a) {
    const I* indptr = as<I>(a.edges.indptr);
    a.offsets[0] = 0;
    for (int64_t i = 0; i < a.count; ++i) {
        const int64_t node = a.nodes[i];
        if (i + kAhead < a.count && static_cast<uint64_t>(a.nodes[i + kAhead]) < static_cast<uint64_t>(a.edges.nodes))
            __builtin_prefetch(indptr + a.nodes[i + kAhead]);
        if (static_cast<uint64_t>(node) >= static_cast<uint64_t>(a.edges.nodes)) return i;
        int64_t first = indptr[node], end = indptr[node + 1];
        if (first < 0 || end < first || end > a.edges.slots || end - first >= int64_t{1} << 31) return i;
        if (a.limits) end = later<I>(a.edges, first, end, a.limits[i]);
        if (a.last && a.fanout >= 0 && a.edges.weights) {
            int64_t slot = end;
            for (int64_t kept = 0; slot > first && kept < a.fanout;) kept += a.edges.weights[--slot] > 0;
            first = slot;
        } else if (a.last && a.fanout >= 0 && end - first > a.fanout) {
            first = end - a.fanout;
        }
        const int64_t population = end - first;
        int64_t drawn = population;
        if (a.fanout >= 0) {
            if (a.edges.weights) {
                drawn = 0;
                for (int64_t slot = first; slot < end; ++slot) drawn += a.edges.weights[slot] > 0;
            }
            drawn = a.replace ? (drawn ? a.fanout : 0) : drawn < a.fanout ? drawn : a.fanout;
        }
        a.first[i] = first;
        a.population[i] = population;
        a.offsets[i + 1] = a.offsets[i] + drawn;
    }
    return -1;
}

// The random bits of the draws of one node.
struct Bits {
    uint32_t state, key;
    uint64_t below(int64_t draw, int64_t size) const {
        return mix(state ^ static_cast<uint32_t>(draw), key) * static_cast<uint64_t>(size) >> 32;
    }
    double uniform(int64_t draw) const { return mix(state ^ static_cast<uint32_t>(draw), key) * 0x1p-32; }
};

// A set of offsets for one node at a time.
class Drawn {
public:
    void clear(int64_t draws) {
        size_ = 64;
        while (size_ < 4 * draws) size_ *= 2;
        table_.assign(static_cast<size_t>(size_), -1);
    }
    // Returns true if the offset is new.
    bool insert(int64_t offset) {
        int64_t at = static_cast<uint32_t>(offset) * kFirst & (size_ - 1);
        while (table_[at] >= 0 && table_[at] != offset) at = (at + 1) & (size_ - 1);
        const bool fresh = table_[at] < 0;
        table_[at] = offset;
        return fresh;
    }

private:
    int64_t size_ = 0;
    std::vector<int64_t> table_;
};

struct Scratch {
    Drawn drawn;
    std::vector<double> weights;
};

// R. Floyd's algorithm: any `draws` of `population` offsets are equally likely. (Bentley and Floyd 1987)
void distinct(const Bits& bits, int64_t draws, int64_t population, Drawn* drawn, int64_t* offsets) {
    const int64_t first = population - draws;
    if (draws > kScanned) {
        drawn->clear(draws);
        for (int64_t d = 0; d < draws; ++d) {
            const int64_t offset = static_cast<int64_t>(bits.below(d, first + d + 1));
            const bool fresh = drawn->insert(offset);
            if (!fresh) drawn->insert(first + d);
            offsets[d] = fresh ? offset : first + d;
        }
        return;
    }
    uint32_t chosen[kScanned];
    for (int64_t d = 0; d < draws; ++d) chosen[d] = static_cast<uint32_t>(bits.below(d, first + d + 1));
    for (int64_t d = 1; d < draws; ++d) {
        bool met = false;
        for (int64_t before = 0; before < d; ++before) met |= chosen[before] == chosen[d];
        chosen[d] = met ? static_cast<uint32_t>(first + d) : chosen[d];
    }
    for (int64_t d = 0; d < draws; ++d) offsets[d] = chosen[d];
}

// Offsets with probabilities as their weights, of those that are left.
void weighted(const Bits& bits, int64_t draws, int64_t population, const double* of_slots, bool replace,
              std::vector<double>* scratch, int64_t* offsets) {
    scratch->assign(of_slots, of_slots + population);
    double* weights = scratch->data();
    for (int64_t d = 0; d < draws; ++d) {
        double total = 0, sum = 0;
        for (int64_t s = 0; s < population; ++s) total += weights[s];
        const double target = bits.uniform(d) * total;
        int64_t s = 0;
        for (; s < population - 1; ++s) {
            sum += weights[s];
            if (sum > target) break;
        }
        offsets[d] = s;
        if (!replace) weights[s] = 0;
    }
}

template <class I> void draw(const SampleDrawArgs& a) {
    const I *index = as<I>(a.edges.index), *order = as<I>(a.edges.order);
    const auto low = static_cast<uint32_t>(a.seed), high = static_cast<uint32_t>(static_cast<uint64_t>(a.seed) >> 32);
    Bits root{mix(low, high), mix(high ^ kGolden, low)};
    enter(fold(static_cast<uint64_t>(a.relation)), &root.state, &root.key);
    const int64_t total = a.offsets[a.count];
    const int64_t team = a.threads > 1 && total >= 1 << 14 ? a.threads : 1, pieces = team > 1 ? team * 8 : 1;
    for_each(pieces, team, [&](int64_t piece) {
        Scratch scratch;
        for (int64_t i = a.count * piece / pieces; i < a.count * (piece + 1) / pieces; ++i) {
            if (i + kAhead < a.count) {
                __builtin_prefetch(index + a.first[i + kAhead]);
                if (order) __builtin_prefetch(order + a.first[i + kAhead]);
            }
            const int64_t first = a.first[i], population = a.population[i], at = a.offsets[i];
            const int64_t draws = a.offsets[i + 1] - at;
            if (!draws) continue;
            int64_t* numbers = a.numbers + at;
            Bits bits = root;
            enter(a.groups ? fold(static_cast<uint64_t>(a.groups[i])) : 0, &bits.state, &bits.key);
            enter(fold(static_cast<uint64_t>(a.nodes[i])), &bits.state, &bits.key);
            if (a.fanout < 0 || (draws == population && !a.replace && !a.edges.weights))
                for (int64_t d = 0; d < draws; ++d) numbers[d] = d;
            else if (a.edges.weights)
                weighted(bits, draws, population, a.edges.weights + first, a.replace, &scratch.weights, numbers);
            else if (a.replace)
                for (int64_t d = 0; d < draws; ++d) numbers[d] = static_cast<int64_t>(bits.below(d, population));
            else
                distinct(bits, draws, population, &scratch.drawn, numbers);
            for (int64_t d = 0; d < draws; ++d) {
                const int64_t slot = first + numbers[d];
                a.sources[at + d] = index[slot];
                numbers[d] = order ? order[slot] : slot;
                a.targets[at + d] = a.base + i;
            }
        }
    });
}

int64_t place(int64_t key, int64_t capacity) {
    const uint64_t mixed = static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((mixed >> 32) & static_cast<uint64_t>(capacity - 1));
}

// An entry of the table: a key and its number in one word, or in two.
struct Narrow {
    int64_t word;
    int64_t key() const { return word < 0 ? -1 : word >> 32; }
    int64_t number() const { return word & 0xFFFFFFFF; }
    void set(int64_t key, int64_t number) { word = static_cast<int64_t>(static_cast<uint64_t>(key) << 32) | number; }
};

struct Wide {
    int64_t held, numbered;
    int64_t key() const { return held; }
    int64_t number() const { return numbered; }
    void set(int64_t key, int64_t number) { held = key, numbered = number; }
};

template <class Entry> int64_t number(const NumberArgs& a) {
    Entry* table = static_cast<Entry*>(a.table);
    int64_t added = 0;
    for (int64_t i = 0; i < a.count; ++i) {
        if (i + kAhead < a.count) __builtin_prefetch(table + place(a.keys[i + kAhead], a.capacity));
        const int64_t key = a.keys[i];
        int64_t at = place(key, a.capacity);
        int64_t held = table[at].key();
        for (int64_t met = 1; held != key && held != -1 && met < a.capacity; ++met)
            held = table[at = (at + 1) & (a.capacity - 1)].key();
        if (held == -1 && a.numbering != kFind) {
            table[at].set(key, a.next + (a.numbering == kEnter ? i : added));
            if (a.numbering == kAdd) a.fresh[added] = key;
            held = key;
            ++added;
        }
        if (a.numbering != kEnter) a.numbers[i] = held == key ? table[at].number() : -1;
    }
    return added;
}

// A table with a number for each key: one access a key and no branch. Returns -1 if a key is not in the table.
int64_t number_directly(const NumberArgs& a) {
    int32_t* table = static_cast<int32_t*>(a.table);
    int64_t added = 0;
    const auto inside = [&](int64_t key) { return static_cast<uint64_t>(key) < static_cast<uint64_t>(a.capacity); };
    for (int64_t i = 0; i < a.count; ++i) {
        if (i + kAhead < a.count && inside(a.keys[i + kAhead])) __builtin_prefetch(table + a.keys[i + kAhead]);
        const int64_t key = a.keys[i];
        if (!inside(key)) return -1;
        const int64_t held = table[key], is_new = held < 0;
        if (a.numbering == kFind) {
            a.numbers[i] = held;
            continue;
        }
        const int64_t given = a.next + (a.numbering == kEnter ? i : added), own = is_new ? given : held;
        table[key] = static_cast<int32_t>(own);
        if (a.numbering == kAdd) a.fresh[added] = key, a.numbers[i] = own;
        added += is_new;
    }
    return added;
}

}  // namespace
}  // namespace structconv::SC_ISA

SC_EXPORT(sample_bounds)(const structconv::SampleBoundsArgs* args) {
    using namespace structconv::SC_ISA;
    *args->bad = args->edges.wide ? bounds<int64_t>(*args) : bounds<int32_t>(*args);
}

SC_EXPORT(sample_draw)(const structconv::SampleDrawArgs* args) {
    using namespace structconv::SC_ISA;
    args->edges.wide ? draw<int64_t>(*args) : draw<int32_t>(*args);
}

SC_EXPORT(number)(const structconv::NumberArgs* args) {
    using namespace structconv::SC_ISA;
    using structconv::kDirect, structconv::kWide;
    *args->added = args->kind == kDirect ? number_directly(*args)
                   : args->kind == kWide ? number<Wide>(*args) : number<Narrow>(*args);
}
