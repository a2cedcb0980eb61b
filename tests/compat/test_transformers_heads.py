"""`replace`: other heads in models of transformers keep weights, masks, caches and files."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from structconv import ConfigError, Graph
from structconv.compat.transformers import replace, set_structure, with_heads
from structconv.compat.transformers.heads import _refusal
from tests.compat.test_transformers import FAMILIES, LENGTH, _model, _words
from tests.support.errors import check_refused

transformers = pytest.importorskip("transformers")

MODELS = ("llama", "bert", "gpt2", "t5", "mistral")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MIXED = [{"kind": "window", "heads": 1, "radius": 2}, {"kind": "relative", "heads": 1, "clip": 3},
         {"kind": "additive", "heads": 2}]


def _graph(length: int = 30) -> Graph:
    """Each query with itself, the first entry and the entry three before."""
    n = torch.arange(length)
    pairs = torch.cat([torch.stack([n, n]), torch.stack([0 * n, n])[:, 1:], torch.stack([n - 3, n])[:, 4:]], 1)
    return Graph(pairs, num_nodes=length)


KINDS: dict[str, Any] = {"additive": "additive", "relative": [{"kind": "relative", "heads": 4, "clip": 3}],
                         "window": [{"kind": "window", "heads": 4, "radius": 2}], "graph": "graph", "mixed": MIXED}


def _run(name: str, model: Any, words: Tensor, **options: Any) -> Tensor:
    more = {"decoder_input_ids": words} if FAMILIES[name][0] == "both" else {}
    return model(words, **more, **options)[0]


def _drawn(model: Any) -> Any:
    """The model with tables that are not zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith(("heads.0.table", "heads.1.table")):
                p.copy_(torch.randn(p.shape, generator=generator))
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_heads_of_the_models_own_kind_change_nothing(name: str) -> None:
    model, words = _model(name), _words()
    expected = _run(name, model, words)
    own, report = replace(model, [{"kind": "dot_product", "heads": 1}, {"kind": "relative", "heads": 3, "clip": 2}])
    torch.testing.assert_close(_run(name, own, words), expected, rtol=1e-4, atol=1e-4)
    assert report.converted and type(model) is not type(own)
    assert set(model.state_dict()) < set(own.state_dict())
    assert (name == "t5") == bool(report.refused)  # its cross-attention


def _by_hand(kind: str, group: Any, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The scores (B, k, N, M) of a group of heads."""
    m, n = torch.arange(key.shape[-2])[None], torch.arange(query.shape[-2])[:, None]
    if kind == "additive":
        return torch.einsum("kd,bknmd->bknm", group.vector, (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh())
    if kind == "relative":
        return scores + group.table[:, (m - n).clamp(-3, 3) + 3]
    keep = (m - n).abs() <= 2 if kind == "window" else (m == n) | (m == 0) | ((m == n - 3) & (m > 0))
    return scores.masked_fill(~keep, -torch.inf)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_scores_are_those_of_the_kind(name: str, kind: str, monkeypatch: Any) -> None:
    """The attention of the first layer, by hand from its queries, keys and values."""
    from structconv.compat.transformers import interface

    model, _ = replace(_model(name), KINDS[kind], structure=_graph() if kind == "graph" else None)
    calls: list[tuple[Any, ...]] = []
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :3] = 0
    original = interface.attention

    def seen(module: Any, *tensors: Any, **options: Any) -> Any:
        calls.append((module, *tensors[:3], options["scaling"], original(module, *tensors, **options)[0]))
        return original(module, *tensors, **options)

    transformers.AttentionInterface.register("structconv", seen)
    _run(name, _drawn(model), _words(), attention_mask=mask)
    transformers.AttentionInterface.register("structconv", original)
    module, query, key, value, scale, y = calls[0]
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores, at, parts = scale * query @ key.mT, 0, []
    for group in module.structured_heads:
        span = slice(at, at + group.heads)
        at = span.stop
        parts.append(_by_hand(group.kind, group, scores[:, span], query[:, span], key[:, span]))
    keep = mask[:, None, None].bool()
    if name == "llama":
        keep = keep & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = torch.cat(parts, 1).masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(y, (weights @ value).transpose(1, 2), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_steps_are_the_whole_sequence(name: str, kind: str) -> None:
    """Greedy generation with dynamic, static and no cache, of a padded batch, is one."""
    if (name, kind) == ("mistral", "graph"):
        with pytest.raises(ConfigError, match="its sliding cache forgets the positions"):
            replace(_model(name), "graph")
        return
    model, _ = replace(_model(name), KINDS[kind], structure=_graph() if kind == "graph" else None)
    model, words = _drawn(model), _words()
    mask = torch.ones_like(words)
    mask[1, :4] = 0
    expected = model.generate(words, attention_mask=mask, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(words, attention_mask=mask, **GREEDY), expected)
    static = model.generate(words, attention_mask=mask, cache_implementation="static", disable_compile=True, **GREEDY)
    assert torch.equal(static, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["relative", "window", "graph"])
@pytest.mark.parametrize("case", ["causal", "all", "prefix", "block", "hole", "padded"])
def test_positions_in_a_static_cache_are_those_without_one(case: str, kind: str) -> None:
    """The room of a static cache for more keys does not move the queries, whichever keys a table lets them read."""
    from structconv.compat.transformers.caching import _NAME

    model, _ = replace(_model("llama"), KINDS[kind], structure=_graph() if kind == "graph" else None)
    model, words, room, half = _drawn(model), _words(), LENGTH + 5, 6
    keep = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    keep = keep if case == "all" else keep.tril()
    if case == "prefix":
        keep[..., :4, :4] = True
    elif case == "block":  # a picture within a text
        keep[1, :, 7:10, 7:10] = True
    elif case == "hole":
        keep[0, :, :, 8] = False
    elif case == "padded":  # on the right, in each row
        keep[..., LENGTH - 2:] = False
    expected = model(words, attention_mask=keep, use_cache=False).logits
    table = torch.nn.functional.pad(keep, (0, room - LENGTH))
    least = torch.finfo(torch.float32).min
    for mask in (table, torch.zeros(table.shape).masked_fill(~table, least)):
        for parts in ((LENGTH,),) if case == "all" else ((LENGTH,), (half, LENGTH - half)):
            cache, at, actual = transformers.StaticCache(config=model.config, max_cache_len=room), 0, []
            for size in parts:
                span = slice(at, at + size)
                actual.append(model(words[:, span], attention_mask=mask[:, :, span], **{_NAME: cache}).logits)
                at = span.stop
            torch.testing.assert_close(torch.cat(actual, 1), expected, rtol=1e-5, atol=1e-5)


def test_t5_generates_and_trains() -> None:
    model, _ = replace(_model("t5"), MIXED)
    words = _words()
    whole = model.generate(words, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(words, **GREEDY), whole)
    model.train()
    model(words, labels=words).loss.backward()
    own = {key: p for key, p in model.named_parameters() if "structured_heads" in key}
    assert len(own) == 8 and all(p.grad is not None and p.grad.any() for p in own.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_weights_are_returned(name: str) -> None:
    model, _ = replace(_model(name), MIXED)
    words = _words()
    whole = model(words, output_attentions=True)
    assert whole.attentions[0].shape == (2, 4, LENGTH, LENGTH)
    torch.testing.assert_close(whole.attentions[0].sum(-1), torch.ones(2, 4, LENGTH))
    torch.testing.assert_close(whole[0], model(words)[0], rtol=1e-4, atol=1e-4)


def test_saved_and_loaded(tmp_path: Any) -> None:
    model, report = replace(_model("llama"), MIXED, layers=[1])
    assert list(report.converted) == ["model.layers.1.self_attn"]
    assert "1 window, radius=2 | 1 relative, clip=3 | 2 additive" in str(report)
    model, words = _drawn(model), _words()
    model.save_pretrained(tmp_path)
    for cls in (type(model), with_heads(transformers.LlamaForCausalLM)):
        again, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        again.set_attn_implementation("structconv")
        torch.testing.assert_close(again(words).logits, model(words).logits)
    base = transformers.LlamaForCausalLM(model.config)
    assert with_heads(type(base)) is type(model) and not hasattr(base.model.layers[1].self_attn, "structured_heads")
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(words).logits, model(words).logits)


@pytest.mark.parametrize("name", ["llama", "vit", "bert", "distilbert", "t5"])
def test_trained_heads_are_loaded_as_saved(name: str, tmp_path: Any) -> None:
    model, _ = replace(_model(name), MIXED)
    own = {key: part for key, part in _drawn(model).state_dict().items() if "structured_heads" in key}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="structconv").state_dict()
    assert own
    for key, part in own.items():
        torch.testing.assert_close(again[key], part, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "clip"])  # the second has a configuration for each part
def test_other_heads_are_not_left_out_silently(name: str, tmp_path: Any) -> None:
    """With another implementation they would be: it is refused, and not the default."""
    own, _ = replace(_model(name), "additive")
    own.save_pretrained(tmp_path)
    given = {"input_ids": _words(), **({"pixel_values": torch.ones(2, 3, 16, 16)} if name == "clip" else {})}
    torch.testing.assert_close(type(own).from_pretrained(tmp_path)(**given)[0], own(**given)[0])
    check_refused(
        (ConfigError, "eager", lambda: type(own).from_pretrained(tmp_path, attn_implementation="eager")),
        (ConfigError, "sdpa", lambda: own.set_attn_implementation("sdpa")))


def test_adapters_train_other_heads(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["structured_heads"])
    adapted, words = peft.get_peft_model(replace(_model("llama"), MIXED)[0], config), _words()
    trained = {name: part for name, part in adapted.named_parameters() if part.requires_grad and "structured" in name}
    assert len(trained) == 4  # a table and vectors in each of two layers
    adapted(input_ids=words).logits.square().mean().backward()
    for part in trained.values():
        assert part.grad is not None and part.grad.any()
        part.data.add_(0.3)
    expected = adapted.eval()(input_ids=words).logits
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(replace(_model("llama"), MIXED)[0], tmp_path).eval()
    torch.testing.assert_close(again(input_ids=words).logits, expected)
    torch.testing.assert_close(again.merge_and_unload()(input_ids=words).logits, expected, rtol=1e-4, atol=1e-4)


def test_errors_say_what_is_wrong() -> None:
    model = _model("llama")
    with pytest.raises(ConfigError, match="add up to the 4 of the model; got 3"):
        replace(model, [{"kind": "additive", "heads": 3}])
    with pytest.raises(ConfigError, match="kind must be one of"):
        replace(model, "additif")
    with pytest.raises(ConfigError, match='"window" must have radius; got size'):
        replace(model, [{"kind": "window", "heads": 4, "size": 3}])
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**FAMILIES["gpt2"][3]))
    check_refused(
        (ConfigError, "without transformers' interface", lambda: replace(falcon, "additive")),
        (ConfigError, "it has sinks", lambda: replace(_model("gpt_oss"), "additive")),
        (ConfigError, "must have self-attention", lambda: replace(torch.nn.Linear(2, 2), "additive")))
    own, _ = replace(model, "graph")
    with pytest.raises(ConfigError, match="set_structure"):
        own(_words())
    set_structure(own, _graph(5))
    with pytest.raises(ConfigError, match="all 11 positions; got 5"):
        own(_words())
    with pytest.raises(ConfigError, match='heads of kind "graph"'):
        set_structure(model, _graph())


@pytest.mark.parametrize(("file", "name", "reason"), [
    ("deepseek_v32", "DeepseekV32Attention", "an indexer selects its keys"),
    ("inkling2", "Inkling2FullAttention", "it has sinks")])
def test_what_other_heads_do_not_take_is_refused(file: str, name: str, reason: str) -> None:
    module = pytest.importorskip(f"transformers.models.{file}.modeling_{file}")
    attention = type(name, (torch.nn.Module,), {"forward": getattr(module, name).forward})()
    assert _refusal("attention", attention) == reason
