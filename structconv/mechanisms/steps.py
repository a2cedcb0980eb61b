"""Steps of an expression: an operator on one basis, applied to what comes before."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from structconv.bases.base import OPERATORS, Basis
from structconv.written import text as as_text

__all__ = ["Step", "shown", "taken"]


class Step(NamedTuple):
    """An operator on one basis: its name, its options, and whether it takes a leaf of the call."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: bool = False


def _plain(basis: Basis, step: Step, _: Any) -> Basis:
    return cast(Basis, OPERATORS[step.name](basis, **dict(step.options)))


def _masked(basis: Basis, step: Step, mask: Any) -> Basis:
    if mask is None:
        return basis
    return cast(Basis, OPERATORS["masked"](basis, **{"keep" if dict(step.options)["kept"] else "drop": mask}))


def _multiplied(basis: Basis, step: Step, factor: Any) -> Basis:
    return cast(Basis, OPERATORS["multiply"](basis, dict(step.options).get("factor", factor)))


def _dropped(basis: Basis, step: Step, seed: Any) -> Basis:
    return basis if seed is None else cast(Basis, OPERATORS["dropout"](basis, **dict(step.options), seed=seed))


def _mapped(basis: Basis, step: Step, module: Any) -> Basis:
    return cast(Basis, OPERATORS["map"](basis, dict(step.options).get("fn", module)))


def _mixed(basis: Basis, step: Step, matrix: Any) -> Basis:
    return cast(Basis, OPERATORS["mix"](basis, matrix))


def _with_sink(basis: Basis, step: Step, sink: Any) -> Basis:
    options = {"sink": sink, **dict(step.options)}
    return cast(Basis, OPERATORS["softmax_with_sink"](basis, **options))


_STEPS: dict[str, Any] = {"map": _mapped, "masked": _masked, "multiply": _multiplied, "dropout": _dropped,
                          "mix": _mixed, "softmax_with_sink": _with_sink}


def taken(basis: Basis, step: Step, leaf: Any) -> Basis:
    """The step on a basis, with its leaf of the call."""
    return cast(Basis, _STEPS.get(step.name, _plain)(basis, step, leaf))


def shown(text: str, step: Step, held: Any) -> str:
    """The step in the text of an expression."""
    options = {key: option for key, option in step.options if option is not None}
    if step.name == "multiply":
        return f"({text} * {options.get('factor', 'factor')})"
    if step.name == "masked":
        return f"{text}.masked({'keep' if options['kept'] else 'drop'}={held!r})"
    if step.name == "map":
        return f"{text}.map({as_text(options.get('fn', held))})"
    if step.name == "mix":
        return f"{text}.mix({options['heads']})"
    if step.name == "softmax_with_sink":
        return f"{text}.softmax(over={options['over']!r}, sink={options.get('sink', 'sink')})"
    name = step.name if options.get("kind") != "softmax" else options.pop("kind")
    return f"{text}.{name}({', '.join(f'{key}={option!r}' for key, option in options.items())})"
