"""The benchmark: layers of this package against every peer that is installed, in one process, in turns.

Floor by floor: `rates` measures what the machine can do, `memory` what a piece of work holds, `case` holds ours and the
peers of one case, `peers` finds the peers, `suites/` lists the cases, `runner` runs them into `records`, and `plot`
draws them. `structconv bench`, or `python -m benchmarks`, is the command. `python -m benchmarks.fit` fits the planner's
constants.
"""

__all__ = ()
