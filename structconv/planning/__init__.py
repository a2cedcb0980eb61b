"""Planning: compare the costs of the orders of eq. 8, choose one, and explain the choice."""

from __future__ import annotations

from structconv.planning.cost import Cost
from structconv.planning.counts import Sizes, application_cost, nonzero_count
from structconv.planning.kernel import Kernel, register, registered
from structconv.planning.machine import Machine, measure, rates
from structconv.planning.plan import Candidate, Plan, decide, plan_for
from structconv.planning.problem import Call, Problem, Run
from structconv.planning.tuning import autotune

__all__ = ["Call", "Candidate", "Cost", "Kernel", "Machine", "Plan", "Problem", "Run", "Sizes", "application_cost",
           "autotune", "decide", "measure", "nonzero_count", "plan_for", "rates", "register", "registered"]
