// The inner loops of additive scores <v, act(q_n + k_m)>: the scores of one row with gathered rows, and the sums that
// their gradients need, a range of channels at a time.
#pragma once

#include "api.h"
#include "gather.h"

namespace structconv::SC_ISA {

// products[e][h] += <vector[h], act(own[h], x[index_e][h])>
using Score = void (*)(const Edges&, const Table&, int part, int heads, float parameter, const float* own,
                       const float* vector, float* products);
// slopes[h][c] += sum_e ds[e][h] act'(own[h][c], x[index_e][h][c]), without the rate, and the same of act - constant
// where `values` is given.
using Slopes = void (*)(const Edges&, const Table&, int part, int heads, float parameter, const float* own,
                        const float* ds, float* slopes, float* values);

struct Activated {
    Score score;
    Slopes slopes;
};

// The loops for a piece of storage T.
template <class T> Activated activated(const Piece& piece, int64_t activation);

}  // namespace structconv::SC_ISA
