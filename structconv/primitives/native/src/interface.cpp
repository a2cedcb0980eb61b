// What api.h declares, for the caller to compare with its own declarations: every struct's size, every field's place and
// kind, every constant. build.py writes interface.inc, a line for each, from the text of api.h.
#include "api.h"

#include <cstddef>
#include <type_traits>

namespace structconv {
namespace {

template <class T> constexpr int64_t kind() {
    return std::is_pointer_v<T> ? 'P' : std::is_floating_point_v<T> ? 'd' : std::is_integral_v<T> ? 'q' : 's';
}

}  // namespace

struct Entry {
    const char *owner, *name;  // no name: the struct itself; no owner: a constant
    int64_t value, kind;       // a size, a place or a number; of a field
};

#define STRUCT(S) {#S, nullptr, sizeof(S), 0},
#define FIELD(S, f) {#S, #f, offsetof(S, f), kind<decltype(S::f)>()},
#define CONSTANT(k) {nullptr, #k, k, 0},

extern "C" __attribute__((visibility("default"))) const Entry structconv_interface[] = {
#include "interface.inc"
    {nullptr, nullptr, 0, 0},
};

}  // namespace structconv
