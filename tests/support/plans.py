"""What ran in a call: its plans, and what these hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from structconv.planning import Call, Plan


@contextmanager
def plans_that_run(outermost: bool = False) -> Iterator[list[Plan]]:
    """The plans whose `run` is taken, in order; `outermost` those alone that no other one runs."""
    ran: list[Plan] = []
    running: list[Plan] = []

    def run(plan: Plan) -> Any:
        if not (outermost and running):
            ran.append(plan)

        def noted(call: Call) -> Any:
            running.append(plan)
            try:
                return plan.__dict__["run"](call)
            finally:
                running.pop()

        return noted

    Plan.run = property(run, lambda plan, made: plan.__dict__.update(run=made))  # type: ignore[assignment]
    try:
        yield ran
    finally:
        del Plan.run


def check_plan_is_what_runs(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Raise `AssertionError` unless the plans that a layer shows for a call are those that run in it, the very objects.

    A layer has `plan`, or `plans` by name where it is made of several convolutions. What a plan runs inside (the parts
    of a `|`) comes after it.
    """
    shown = list(layer.plans(*args, **kwargs).values()) if hasattr(layer, "plans") else [layer.plan(*args, **kwargs)]
    with plans_that_run() as ran:
        layer(*args, **kwargs)
    assert ran, "no plan ran"
    for plan in shown:
        assert any(plan is other for other in ran), f"what is shown did not run:\n{plan}\nbut\n{ran[0]}"
    assert ran[0] is shown[0]


def check_plans_hold_no_tensor(call: Callable[[], Any]) -> None:
    """Raise `AssertionError` where a plan that runs in a call holds a tensor or a module, however deep."""
    with plans_that_run() as ran:
        call()
    assert ran, "no plan ran"
    for plan in ran:
        actual = list(held_by(plan, (Tensor, nn.Module)))
        assert not actual, f"{', '.join(actual)} in\n{plan}"


def held_by(value: Any, kinds: tuple[type, ...]) -> Iterator[str]:
    """Where a value holds something of these kinds: in attributes, containers, closures, defaults, bound arguments."""
    pending, seen = [("it", value)], {}
    while pending:
        name, part = pending.pop()
        if id(part) in seen or isinstance(part, _BARE):
            continue
        seen[id(part)] = part  # alive, so that no other object gets its number
        if isinstance(part, kinds):
            yield name
        else:
            pending += [(f"{name}.{key}", inner) for key, inner in _parts(part)]


#: What is one for all calls, or holds nothing.
_BARE = (type, ModuleType, str, bytes, int, float, type(None))


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [*((f"key {i}", key) for i, key in enumerate(value)), *((str(key), part) for key, part in value.items())]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [*cells, ("defaults", value.__defaults__), ("keywords", value.__kwdefaults__)]
    if isinstance(value, CellType):
        return [("cell", value.cell_contents)]
    if isinstance(value, MethodType | BuiltinFunctionType):
        return [("self", value.__self__), ("function", getattr(value, "__func__", None))]
    if isinstance(value, partial):
        return [("function", value.func), ("arguments", value.args), ("keywords", value.keywords)]
    items = value if isinstance(value, list | tuple | set | frozenset) else ()
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if name != "__weakref__"]
    return [*((str(i), item) for i, item in enumerate(items)), *getattr(value, "__dict__", {}).items(),
            *((name, getattr(value, name)) for name in slots if hasattr(value, name))]
