"""The benchmark: layers of this package against every peer that is installed, in one process, in turns.

Floor by floor: `rates` measures what the machine can do, `timing` and `memory` one piece of work each, `case` holds
ours and the peers of one case, `peers` finds the peers, `suites/` lists the cases, `runner` runs them into `records`,
and `plot` draws them. `structconv bench` is the command; `python -m benchmarks` in a checkout is the same.
"""

__all__ = ()
