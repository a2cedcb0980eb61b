"""Recipes as frozen dataclasses: options with bounds, overrides by key, JSON in and out; no torch."""

import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from structconv.errors import ConfigError, nearest

__all__ = ["Recipe", "from_json", "option", "options", "presets", "resolve", "to_json", "written"]

R = TypeVar("R", bound="Recipe")

#: Names of the option `device`.
DEVICES = ("cpu", "cuda", "mps", "auto")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def option(default: Any, help: str, *, minimum: float | None = None, below: float | None = None,
           choices: Sequence[str] = (), fixed: bool = False) -> Any:
    """Return a dataclass field with its help line and, for numbers, bounds: minimum <= value < below; for texts, its
    choices. Users do not set a `fixed` one, which a run writes down.

    Example:

        >>> from structconv_systems.train.config import option
        >>> option(2.0, "Slope of the line.", minimum=0).default              # see `Recipe`
        2.0
    """
    return dataclasses.field(default=default, metadata={"help": help, "minimum": minimum, "below": below,
                                                        "choices": choices, "fixed": fixed})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of recipes: every field is checked against its type and bounds at construction.

    Field types may be int, float, bool, str and tuples of one of them. `threads` is part of a recipe, since sums over
    another number of threads round differently: with the same one, a run gives the same weights on the same machine.

    To change an inherited default, write ``class Line(Trained, steps=4000)`` or the field ``steps: int = 4000``; help
    line and bounds stay.

    Attributes:
        name: its name in the command.
        presets: values by key, by the preset's name; ``default`` always exists, and may change nothing.

    Raises:
        ConfigError: a value has the wrong type or lies outside its bounds.

    Example:

        >>> from dataclasses import dataclass
        >>> from structconv_systems.train.config import Recipe, option
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Line(Recipe):
        ...     name = "line"
        ...     presets = {"quick": {"slope": 1.0}}
        ...     slope: float = option(2.0, "Slope of the line.", minimum=0)
        >>> Line(slope=3).slope
        3.0
        >>> Line(slope=-1)
        Traceback (most recent call last):
        structconv.errors.ConfigError: line: slope must be at least 0; got -1.0.
    """

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    threads: int = option(1, "threads of torch; more pay only for large layers, and on idle cores", minimum=1)
    device: str = option("cpu", f"device of the trainings: {', '.join(DEVICES)}; auto: cuda or mps if present",
                         choices=DEVICES)
    compile: bool = option(False, "torch.compile the model; pays for long trainings only, and needs a C++ compiler")

    def __init_subclass__(cls, **defaults: Any) -> None:
        inherited, own = {field.name: field for field in dataclasses.fields(cls)}, inspect.get_annotations(cls)
        defaults |= {key: cls.__dict__.get(key, dataclasses.MISSING) for key in own if key in inherited}
        cls.__annotations__ = {**own, **{key: inherited[key].type for key in defaults}}
        for key, default in defaults.items():
            if not isinstance(default, dataclasses.Field):
                setattr(cls, key, dataclasses.field(default=default, metadata=inherited[key].metadata))

    def __post_init__(self) -> None:
        kinds = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _convert(self.name, field.name, kinds[field.name], getattr(self, field.name))
            _check_bounds(self.name, field, value)
            _check_choices(self.name, field, value)
            object.__setattr__(self, field.name, value)

    def check(self) -> None:
        """Raise `ConfigError` if its files cannot exist; not called for a run that is used, which reads no files."""

    def files(self, *keys: str) -> list[Path]:
        """Return the existing files that it reads; a run continues only if they are unchanged.

        Args:
            keys: options that name files, if only theirs are asked for.
        """
        return []


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a recipe: its name, type, default and help line."""

    key: str
    kind: str
    default: Any
    help: str


def options(recipe: type[Recipe]) -> list[Option]:
    """The keys of a recipe, in the order of its class body.

    Example:

        >>> from structconv_systems.recipes.options.comparisons import Pooling
        >>> from structconv_systems.train.config import options
        >>> [each.key for each in options(Pooling)][:5]
        ['threads', 'device', 'compile', 'seeds', 'steps']
    """
    return [Option(field.name, field.type.__name__ if isinstance(field.type, type) else str(field.type), field.default,
                   field.metadata.get("help", ""))
            for field in dataclasses.fields(recipe) if not field.metadata.get("fixed")]


def resolve(recipe: type[R], overrides: Iterable[str] | Mapping[str, Any] = (), preset: str = "default") -> R:
    """Replace some defaults of a recipe, first by a preset, then by what the user says.

    Args:
        recipe: the recipe's class.
        overrides: ``["hidden=32", ...]``, or a mapping from keys to values or to their text. Dashes in keys read as
            underscores. Tuples are written with commas: ``offset=2,4``.
        preset: one of the recipe's.

    Raises:
        ConfigError: an unknown preset or key (the nearest one is suggested), a key given twice, or a bad value.

    Example:

        >>> from structconv_systems.recipes.options.comparisons import Pooling
        >>> from structconv_systems.train.config import resolve
        >>> recipe = resolve(Pooling, ["classes=4"], preset="quick")
        >>> recipe.classes, recipe.steps, recipe.preset
        (4, 1000, 'quick')
        >>> resolve(Pooling, ["clases=4"])
        Traceback (most recent call last):
        structconv.errors.ConfigError: pooling: a key must be one of the recipe's; got 'clases'. Did you mean 'classes'?
    """
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else [_split(recipe, o) for o in overrides]
    known = [field.name for field in dataclasses.fields(recipe)
             if isinstance(overrides, Mapping) or not field.metadata.get("fixed")]
    values: dict[str, Any] = {}
    for raw, value in pairs:
        key = raw.replace("-", "_")
        if key not in known:
            raise ConfigError(recipe.name, "a key must be one of the recipe's", repr(raw),
                              nearest(key, known) or f"Known: {', '.join(known)}.")
        if key in values:
            raise ConfigError(recipe.name, f"{key} must be given once", "two values")
        values[key] = value
    return recipe(**{**_preset(recipe, preset), **values})


def to_json(recipe: Recipe) -> str:
    """A recipe and its name as a JSON object, indented.

    Example:

        >>> from structconv_systems.recipes.options.comparisons import Pooling
        >>> from structconv_systems.train.config import from_json, to_json
        >>> from_json(Pooling, to_json(Pooling(classes=4))) == Pooling(classes=4)
        True
    """
    return json.dumps({"recipe": recipe.name, **dataclasses.asdict(recipe)}, indent=2) + "\n"


def written(values: Mapping[str, Any]) -> str:
    """Return options as a user writes them: ``hidden=2 offset=2,4``."""
    return " ".join(f"{key}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
                    for key, value in sorted(values.items()))


def from_json(recipe: type[R], text: str) -> R:
    """The inverse of `to_json`; an option that the text lacks is that of its preset.

    Raises:
        ConfigError: not a JSON object, another recipe's, or unknown or bad keys.

    Example:

        >>> from structconv_systems.recipes.options.comparisons import Pooling
        >>> from structconv_systems.train.config import from_json
        >>> from_json(Pooling, '{"recipe": "pooling", "classes": 4}').classes
        4
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(recipe.name, "the configuration must be JSON", error) from error
    if not isinstance(values, dict) or values.pop("recipe", None) != recipe.name:
        raise ConfigError(recipe.name, f"the configuration must be an object with recipe {recipe.name!r}", text[:80])
    return resolve(recipe, values, str(values.get("preset", "default")))


def presets(recipe: type[Recipe]) -> dict[str, Mapping[str, Any]]:
    """Return the options that each preset changes, ``default`` included.

    Example:

        >>> from structconv_systems.recipes.options.comparisons import Pooling
        >>> from structconv_systems.train.config import presets
        >>> list(presets(Pooling))
        ['default', 'quick']
    """
    return {"default": {}, **recipe.presets}


def _preset(recipe: type[Recipe], name: str) -> Mapping[str, Any]:
    known = presets(recipe)
    if name not in known:
        raise ConfigError(recipe.name, f"preset must be one of {', '.join(known)}", repr(name))
    return {"preset": name, **known[name]} if recipe.presets else known[name]


def _split(recipe: type[Recipe], override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(recipe.name, "an override must read key=value", repr(override))
    return key, value


def _convert(owner: str, key: str, kind: Any, value: Any) -> Any:
    """Convert `value`, a text or a Python or JSON value, to the type of the field."""
    if typing.get_origin(kind) is tuple:
        parts = [part for part in value.split(",") if part] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)):
            raise ConfigError(owner, f"{key} must be a list, written a,b,c", repr(value))
        return tuple(_convert(owner, key, typing.get_args(kind)[0], part) for part in parts)
    try:
        return _scalar(kind, value)
    except (ValueError, KeyError, TypeError):
        noun = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ConfigError(owner, f"{key} must be {noun}", repr(value)) from None


def _scalar(kind: type, value: Any) -> Any:
    if kind is bool:
        return value if isinstance(value, bool) else _WORDS[str(value).lower()]
    if isinstance(value, bool) or (kind is str and not isinstance(value, str)):
        raise ValueError(value)
    if kind is int and isinstance(value, float):
        raise ValueError(value)
    if kind is int or kind is float:
        number = kind(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    return value


def _check_bounds(owner: str, field: dataclasses.Field[Any], value: Any) -> None:
    minimum, below = field.metadata.get("minimum"), field.metadata.get("below")
    for number in value if isinstance(value, tuple) else (value,):
        if minimum is not None and number < minimum:
            raise ConfigError(owner, f"{field.name} must be at least {minimum}", number)
        if below is not None and number >= below:
            raise ConfigError(owner, f"{field.name} must be below {below}", number)


def _check_choices(owner: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Check that a value is a choice, and a tuple some of the choices, each once."""
    choices = field.metadata.get("choices")
    if choices and isinstance(value, tuple):
        if not value or not set(value) <= set(choices) or len(set(value)) < len(value):
            raise ConfigError(owner, f"{field.name} must be some of {', '.join(choices)}, each once",
                              ",".join(value) or "none")
    elif choices and value not in choices:
        raise ConfigError(owner, f"{field.name} must be one of {', '.join(choices)}", repr(value))
