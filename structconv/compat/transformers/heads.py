"""`replace`: other heads in a pretrained architecture. Its projections, rotary embeddings and caches stay."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structconv.bases.positions import Lookup
from structconv.compat.attending import Mask, attend
from structconv.compat.conversion import Report, Walk, pretrained_in, replaced
from structconv.compat.transformers.interface import NAME, register, source_of
from structconv.errors import ConfigError
from structconv.mechanisms.scores import drawn
from structconv.shapes import check_choice, check_natural, check_positive
from structconv.structures.graph import Graph
from structconv.structures.supports import EdgeSupport, Support, Window

__all__ = ["Heads", "replace", "set_structure", "with_heads"]

M = TypeVar("M", bound=nn.Module)
#: The child of an attention module that has other heads, and the entry of a configuration that names them.
CHILD, ENTRY = "structured_heads", "structconv_heads"
#: The required options of each kind of head.
KINDS: dict[str, tuple[str, ...]] = {"dot_product": (), "additive": (), "relative": ("clip",), "window": ("radius",),
                                     "graph": ()}
#: Where attention modules hold how many heads there are, and the channels of each.
_SIZES = ("num_heads", "num_attention_heads", "n_heads"), ("head_dim", "attention_head_size", "key_value_proj_dim")
_CROSS = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)


def replace(model: M, heads: str | Sequence[Mapping[str, Any]], *, layers: Collection[int] | None = None,
            structure: Any = None, example: Any = None, inplace: bool = False) -> tuple[M, Report]:
    """Give attention modules of a transformers model other heads; weights of queries, keys, values and outputs stay.

    - "dot_product": as the model has them.
    - "additive": v_k^T tanh(q_n + k_m), with a vector v_k (D) for each head (Bahdanau et al. 2015).
    - "relative": the dot product and a number for each offset m - n up to `clip`, zero at first (Shaw et al. 2018).
    - "window": the dot product with the entries at most `radius` away.
    - "graph": the dot product along the edges of `structure`.

    Each head also keeps the model's own mask, position bias, soft cap and dropout, and `generate` works as before. The
    choice is entered in `model.config`, so `save_pretrained` writes it, and `with_heads(cls).from_pretrained` reads it.

    Args:
        heads: a kind for all heads, "additive" say, or one mapping for each group of consecutive heads:
            `[{"kind": "window", "heads": 2, "radius": 64}, {"kind": "dot_product", "heads": 2}]`.
        layers: the numbers of the attention modules, in order; all where absent.
        structure: of heads of kind "graph"; see `set_structure`.
        example, inplace: as in `convert`.

    Returns:
        The model, and the `Report`: what was replaced, and why other attention modules were not (cross-attention,
        modules without transformers' interface).

    Raises:
        ConfigError: no attention module can be replaced; unknown kinds or options; numbers of heads that do not add up.

    Example:

        >>> from structconv.compat.transformers import replace
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model, report = replace(LlamaForCausalLM(config), "additive")
        >>> list(report.converted)
        ['model.layers.0.self_attn']
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 32])
    """
    def turn(walk: Walk, within: nn.Module) -> None:
        for name, pretrained in pretrained_in(within):
            _replace_in(walk, name, pretrained, heads, layers)
        if not walk.converted and layers is not None:
            raise ConfigError("replace", "layers must have the number of an attention module that can be replaced",
                              sorted(layers), "Numbers count from 0; leave layers out to replace all.")
        if not walk.converted:
            why = "; ".join(f"{name}: {reason}" for name, reason in walk.refused.items())
            raise ConfigError("replace", "model must have self-attention of transformers' interface", why or
                              type(within).__name__, "register().check(model) names the modules without it.")
        if structure is not None:
            set_structure(within, structure)

    return replaced(model, example, inplace, turn)


def set_structure(model: nn.Module, structure: Graph | Support | Tensor | None) -> None:
    """Set the pairs that heads of kind "graph" keep, for all later calls.

    Args:
        structure: a `Graph` of the positions, or a `Support`, of which pairs (m, n) are an input and an output; or
            booleans (N, M), (B, N, M), True where query n reads key m. To `generate`, it must have all positions.

    Raises:
        ConfigError: the model has no such heads.

    Example:

        >>> from structconv import Graph
        >>> from structconv.compat.transformers import replace, set_structure
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model, _ = replace(LlamaForCausalLM(config), "graph")
        >>> set_structure(model, Graph(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]]), num_nodes=3))
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 32])
    """
    groups = [part for part in model.modules() if isinstance(part, Group) and part.kind == "graph"]
    if not groups:
        raise ConfigError("set_structure", 'model must have heads of kind "graph"', type(model).__name__,
                          'Make them: replace(model, heads="graph", structure=graph).')
    for group in groups:
        group.structure = EdgeSupport(structure) if isinstance(structure, Graph) else structure


def with_heads(cls: type[M]) -> type[M]:
    """The class of a transformers model whose instances have the heads that their configuration names.

    `with_heads(LlamaForCausalLM).from_pretrained(folder)` reads what `save_pretrained` of a model with other heads
    wrote. So does `type(model)` of such a model.

    Example:

        >>> from structconv.compat.transformers import replace, with_heads
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model, _ = replace(LlamaForCausalLM(config), "additive")
        >>> type(model) is with_heads(LlamaForCausalLM)
        True
    """
    if not isinstance(cls, type):
        raise ConfigError("with_heads", "cls must be a class", type(cls).__name__, "Pass type(model).")
    if ENTRY in vars(cls):
        return cls
    if cls not in _CLASSES:
        members = {"__module__": cls.__module__, "__doc__": cls.__doc__, ENTRY: cls}
        _CLASSES[cls] = type(cls.__name__, (_OtherHeads, cls), members)
    return _CLASSES[cls]


class _OtherHeads:
    """Mixin of a model with other heads."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        if getattr(config, ENTRY, None):
            register()
            if config._attn_implementation is None:  # the default of transformers would leave the heads out
                config._attn_implementation = NAME
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        _install(cast(nn.Module, self), getattr(config, ENTRY, None) or {})
        _check_implementation(self)

    def set_attn_implementation(self, *args: Any, **options: Any) -> None:
        super().set_attn_implementation(*args, **options)  # type: ignore[misc]
        _check_implementation(self)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Group):  # transformers also calls it for modules whose parameters it has loaded
            if not any(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]


_CLASSES: dict[type, Any] = {}


class Group(nn.Module):
    """Consecutive heads of one kind, of given queries, keys and values.

    Args:
        kind: see `replace`. heads: how many. dim: channels of a head. options: of the kind.
    """

    structure: Support | Tensor | None = None

    def __init__(self, kind: str, heads: int, dim: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind, self.heads, self.dim, self.options = kind, heads, dim, dict(options)
        if kind == "additive":
            self.vector = nn.Parameter(torch.empty(heads, dim))
        if kind == "relative":
            self.table = nn.Parameter(torch.empty(heads, 2 * options["clip"] + 1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters again."""
        if self.kind == "additive":
            self.vector.copy_(drawn((self.heads, self.dim), self.dim))
        if self.kind == "relative":
            self.table.zero_()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, positions: Tensor | None, **options: Any
                ) -> tuple[Tensor, Tensor | None]:
        """(B, heads, N, C) and the weights (B, heads, N, M) or `None`; `positions` (N) where they are not 0, 1, ..."""
        outputs, inputs = query.shape[-2], key.shape[-2]
        vector, term = None, None
        if self.kind == "additive":
            vector = self.vector.to(query.dtype)
        elif self.kind == "relative":
            clip, table = self.options["clip"], self.table.to(query.dtype)
            if positions is None and not options["weights"]:
                term = Lookup(table.unsqueeze(1), "clip", clip, inputs, outputs)
            else:
                m, n = _pairs(inputs, outputs, positions, query)
                mask = mask.joined(bias=table[:, (m - n).clamp(-clip, clip) + clip])
        elif self.kind == "window":
            mask = _kept(mask, Window(self.options["radius"]), inputs, outputs, positions, query)
        elif self.kind == "graph":
            if self.structure is None:
                raise ConfigError("replace", 'heads of kind "graph" must have a structure', "none",
                                  "Set it: set_structure(model, graph).")
            mask = _kept(mask, self.structure, inputs, outputs, positions, query)
        return attend(query, key, value, mask, vector=vector, term=term, **options)

    def extra_repr(self) -> str:
        return ", ".join([f"{self.heads} {self.kind}", *(f"{name}={value}" for name, value in self.options.items())])


class Heads(nn.Module):
    """The groups of heads of one attention module, in order: a `|` of their bases over the model's own projections.

    It is no `ModuleList`, which PEFT refuses as one of `modules_to_save`.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__()
        for number, group in enumerate(groups):
            self.add_module(str(number), group)

    def __iter__(self) -> Iterator[Group]:
        return iter(cast(Iterable[Group], self._modules.values()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, **options: Any
                ) -> tuple[Tensor, Tensor | None]:
        """(B, K, N, C), and the weights (B, K, N, M) or `None`."""
        mask = Mask() if mask is None else mask
        shared_by, results, at, several = query.shape[1] // key.shape[1], [], 0, len(self._modules) > 1
        if shared_by > 1 and several:
            key, value = (t.repeat_interleave(shared_by, 1) for t in (key, value))
        positions = _positions(mask, query.shape[-2], key.shape[-2])
        for group in self:
            span = slice(at, at + group.heads)
            at = span.stop
            own = (query[:, span], key[:, span], value[:, span]) if several else (query, key, value)
            keep, bias = (t if t is None or t.dim() < 3 or t.shape[-3] == 1 else t[..., span, :, :]
                          for t in (mask.keep, mask.bias))
            results.append(group(*own, mask._replace(keep=keep, bias=bias), positions, **options))
        y, weights = zip(*results, strict=True)
        return torch.cat(y, 1), None if weights[0] is None else torch.cat(weights, 1)


def _positions(mask: Mask, outputs: int, inputs: int) -> Tensor | None:
    """Where the queries are among the keys, `None` for 0, 1, ...: the last ones. A static cache has room for more keys.

    There the table decides. A query that reads a key that no query before it reads is that key, or begins a block whose
    queries read each other, so that the least difference of key and query is the number of keys before the first query.
    Where all queries read the same keys, the last query is the last of them.
    """
    if outputs == inputs:
        return None
    table = mask.keep
    if table is None and mask.bias is not None:
        table = mask.bias > torch.finfo(mask.bias.dtype).min
    if table is None or table.shape[-2] != outputs:
        device = None if table is None else table.device
        return torch.arange(inputs - outputs, inputs, device=device)
    readable = table.reshape(-1, *table.shape[-2:])
    if outputs == 1:
        return inputs - 1 - readable.any(0).flip(-1).int().argmax(-1)
    rows = torch.arange(outputs, device=table.device)
    last = (readable * torch.arange(1, inputs + 1, device=table.device)).amax(-1) - 1
    before = F.pad(last.cummax(-1).values[:, :-1], (1, 0), value=inputs)
    first = torch.where(last > before, last - rows, inputs).amin()
    return torch.where(first < inputs, first, (last.amax() + 1 - outputs).clamp(min=0)) + rows


def _pairs(inputs: int, outputs: int, positions: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """m (1, M) and n (N, 1) of all pairs."""
    m = torch.arange(inputs, device=like.device)
    n = torch.arange(outputs, device=like.device) if positions is None else positions.to(like.device)
    return m.unsqueeze(0), n.unsqueeze(-1)


def _kept(mask: Mask, support: Support | Tensor, inputs: int, outputs: int, positions: Tensor | None, like: Tensor
          ) -> Mask:
    """The mask without the pairs outside a support: as a structure if it has no table, else as a table."""
    if isinstance(support, Tensor):
        rows = support.to(like.device)
        rows = rows[..., :inputs] if positions is None else rows[..., positions.to(like.device), :inputs]
        return mask.joined(keep=rows[..., :outputs, :].unsqueeze(-3))
    whole = support.num_inputs
    if whole is not None and whole < inputs:
        raise ConfigError("replace", f"the structure of heads must have all {inputs} positions", whole)
    if positions is None and mask.keep is None and mask.bias is None and whole in (None, inputs):
        return mask._replace(support=support if mask.support is None else mask.support & support)
    return mask.joined(keep=support.to(like.device).contains(*_pairs(inputs, outputs, positions, like)))


# -- replacing heads ----------------------------------------------------------------------------------------------

def _replace_in(walk: Walk, name: str, model: Any, heads: Any, layers: Collection[int] | None) -> None:
    registration, prefix = register(), f"{name}." if name else ""
    walk.refuse_others(prefix, model, registration)
    chosen: dict[str, list[dict[str, Any]]] = {}
    for number, path in enumerate(registration.routed(model)):
        module = model.get_submodule(path)
        reason = _refusal(path, module)
        if reason is not None:
            walk.refused[prefix + path] = f"{type(module).__name__}: {reason}"
        elif layers is None or number in layers:
            groups = _checked(heads, _sizes(module)[0])  # type: ignore[index]
            window = getattr(module, "sliding_window", getattr(model.config, "sliding_window", None))
            if window is not None and "graph" in [group["kind"] for group in groups]:
                walk.refused[prefix + path] = f"{type(module).__name__}: its sliding cache forgets the positions " \
                    "that a graph names"
            else:
                chosen[path] = groups
    if not chosen or not walk.set_attention(name, model):
        return
    _install(model, chosen)
    setattr(model.config, ENTRY, {**(getattr(model.config, ENTRY, None) or {}), **chosen})
    model.__class__ = with_heads(type(model))
    for path in chosen:
        module = model.get_submodule(path)
        words = " | ".join(group.extra_repr() for group in getattr(module, CHILD))
        walk.converted[prefix + path] = type(module).__name__, words, ""


def _install(model: nn.Module, chosen: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add the groups to the attention modules of these names."""
    for path, groups in chosen.items():
        module = model.get_submodule(path)
        _, dim = _sizes(module)  # type: ignore[misc]
        heads_of_group = Heads(Group(dim=dim, kind=group["kind"], heads=group["heads"],
                           options={name: group[name] for name in KINDS[group["kind"]]}) for group in groups)
        like = next(p for p in module.parameters() if p.is_floating_point())
        setattr(module, CHILD, heads_of_group.to(like.device, like.dtype).train(module.training))


def _check_implementation(model: Any) -> None:
    """Raise an error if an attention module runs another implementation, which would leave its heads out silently."""
    for path in getattr(model.config, ENTRY, None) or {}:
        own = getattr(model.get_submodule(path), "config", model.config)._attn_implementation
        if own != NAME:
            raise ConfigError("with_heads", f'attention with other heads must run on "{NAME}"', repr(own),
                              f'Pass attn_implementation="{NAME}", or use the model from before `replace`.')


def _refusal(path: str, module: nn.Module) -> str | None:
    """The reason why an attention module cannot have other heads, or `None`."""
    if _CROSS.search(path) or getattr(module, "is_cross_attention", False) is True:
        return "it attends to another sequence"
    forward = source_of(type(module).forward)
    if getattr(module, "sinks", None) is not None or " sinks=" in forward:
        return "it has sinks"
    if "indices=" in forward:
        return "an indexer selects its keys"
    return None if _sizes(module) is not None else "it does not say how many heads it has, of how many channels"


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """How many heads an attention module has, and channels of each."""
    config = getattr(module, "config", None)
    sizes = [next((value for place in (module, config) for name in names
                   if type(value := getattr(place, name, None)) is int), None) for names in _SIZES]
    return None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1])


def _checked(heads: Any, size: int) -> list[dict[str, Any]]:
    """The groups of the heads of an attention module, `size` in all."""
    if isinstance(heads, str):
        heads = [{"kind": heads}]
    if not isinstance(heads, list | tuple) or not heads or not all(isinstance(group, Mapping) for group in heads):
        raise ConfigError("replace", "heads must be the name of a kind or a list of mappings", repr(heads),
                          f'Say heads=[{{"kind": "additive", "heads": {size}}}].')
    groups = []
    for entry in heads:
        group = dict(entry)
        kind = group.pop("kind", None)
        check_choice("replace", "kind", kind, tuple(KINDS))
        count = check_positive("replace", "heads", group.pop("heads", size if len(heads) == 1 else None))
        missing, unknown = [name for name in KINDS[kind] if name not in group], sorted(group.keys() - {*KINDS[kind]})
        if missing or unknown:
            raise ConfigError("replace", f'heads of kind "{kind}" must have {", ".join(KINDS[kind]) or "no options"}',
                              ", ".join(group) or "none")
        for name, value in group.items():
            check_natural("replace", name, value)
        groups.append({"kind": kind, "heads": count, **group})
    total = sum(group["heads"] for group in groups)
    if total != size:
        raise ConfigError("replace", f"heads must add up to the {size} of the model", total)
    return groups
