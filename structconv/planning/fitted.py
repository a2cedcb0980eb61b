"""The fitted constants of the cost model: ratios that `python -m benchmarks.fit` measures again on another machine.

Rates belong to the machine (`planning.machine`). Not here: counted bytes and flops, block sizes, memory limits, and the
thresholds by which `primitives.products` chooses among libraries. Calls are counted in operators with almost no work:
`Machine.call_us` is the time of one.
"""

from __future__ import annotations

__all__ = ["CAUSAL_CALLS", "CHANNEL_CALLS", "DENSE_CALLS", "DIVIDED_CALLS", "FACTOR_CALLS", "FEW_COLUMNS", "FEW_TAKEN",
           "FULL_COLUMNS", "FUSED_SHARE", "IN_FAVOR", "NARROW", "NARROW_TAKEN", "NODE_CALLS", "OPERATOR_CALLS",
           "PADDED", "REPEAT_CALLS", "SAMPLE_CALLS", "SPARSE_CALLS", "WINDOW_ENTRY"]

# -- calls --------------------------------------------------------------------------------------------------------

#: Calls that applying a stored matrix takes.
DENSE_CALLS = 3
#: Calls that applying a matrix along edges takes.
SPARSE_CALLS = 8
#: Calls that repeating x for every head takes, or summing the results of the heads.
REPEAT_CALLS = 2
#: Calls that a node of an expression takes, if it is rebuilt from the basis of a call and evaluated by itself.
NODE_CALLS = 15
#: Calls that a product with Theta takes.
CHANNEL_CALLS = 4
#: Calls that a product with one more factor of Theta takes.
FACTOR_CALLS = 3
#: Calls that building the dense operator of a basis and Theta takes.
OPERATOR_CALLS = 10
#: Calls that padding queries, keys and values to one length takes, for torch's attention.
PADDED = 4
#: Calls that dividing rows or columns by their sums takes, where products of queries and keys are reassociated.
DIVIDED_CALLS = 4
#: Calls that causal reassociated products take beside the others.
CAUSAL_CALLS = 8

#: Calls that a sample of a batch with its own plan takes beside those of its kernel.
SAMPLE_CALLS = 50

# -- products of few columns --------------------------------------------------------------------------------------

#: A product runs at its full rate if the number of columns is a multiple of this.
FULL_COLUMNS = 16
#: Columns up to which a product is among the skinniest, from 2 on.
FEW_COLUMNS = 8
#: Columns, at the full rate, whose time 2 to `FEW_COLUMNS` take.
FEW_TAKEN = 40
#: Columns, at the full rate, whose time more than `FEW_COLUMNS` take, and fewer than `FULL_COLUMNS`.
NARROW_TAKEN = 25

# -- attention ----------------------------------------------------------------------------------------------------

#: Share of the time of separate operators, which pass over the scores several times, that a fused kernel takes.
FUSED_SHARE = 0.3
#: Pairs in the window kernel whose time an output takes there beside its own: its row becomes a lane, and is put back.
WINDOW_ENTRY = 110.0

# -- relations ----------------------------------------------------------------------------------------------------

#: Time a pair by blocks of inputs, which add up their results, over that by blocks of outputs, which write them once.
IN_FAVOR = 1.1
#: Channels of a diagonal block of Theta below which products with the blocks cost more than with the whole matrix.
NARROW = 32
