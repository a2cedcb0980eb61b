"""Planning: what each order of (1) costs, which one is taken, and why."""

from __future__ import annotations

from structconv.planning.cost import Cost
from structconv.planning.counts import Sizes, application_cost, nonzero_count
from structconv.planning.machine import Machine, measure, rates
from structconv.planning.plan import Candidate, Plan, decide, plan_for
from structconv.planning.rules import Problem, Rule, Run, rule, rules_for
from structconv.planning.tuning import autotune

__all__ = ["Candidate", "Cost", "Machine", "Plan", "Problem", "Rule", "Run", "Sizes", "application_cost", "autotune",
           "decide", "measure", "nonzero_count", "plan_for", "rates", "rule", "rules_for"]
