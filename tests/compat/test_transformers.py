"""`structconv.compat.transformers`: randomly drawn models of many families give what eager attention gives."""

import copy
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from structconv import Causal, ConfigError, ShapeError, Window
from structconv.compat.transformers import interface as compat
from tests.support.layers import drawn

transformers = pytest.importorskip("transformers")

TOLERANCE, WORDS, LENGTH = 1e-5, 99, 11
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2}
BOTH = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": None}
IMAGES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
          "image_size": 16, "patch_size": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}
WINDOW = {"sliding_window": 4}

#: Name -> the kind, the prefix of the configuration's class, the model's class, and the configuration.
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("decoder", "Llama", "LlamaForCausalLM", GROUPED),
    "mistral": ("decoder", "Mistral", "MistralForCausalLM", {**GROUPED, **WINDOW}),
    "mixtral": ("decoder", "Mixtral", "MixtralForCausalLM", EXPERTS),
    "qwen2": ("decoder", "Qwen2", "Qwen2ForCausalLM", {**GROUPED, **WINDOW, "use_sliding_window": True,
                                                       "max_window_layers": 1}),
    "qwen3": ("decoder", "Qwen3", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma": ("decoder", "Gemma", "GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": ("decoder", "Gemma2", "Gemma2ForCausalLM", {**GROUPED, **WINDOW, "head_dim": 8,
                                                          "attn_logit_softcapping": 2.0}),
    "gemma3": ("decoder", "Gemma3Text", "Gemma3ForCausalLM", {**GROUPED, **WINDOW, "head_dim": 8}),
    "phi": ("decoder", "Phi", "PhiForCausalLM", SIZES),
    "phi3": ("decoder", "Phi3", "Phi3ForCausalLM", GROUPED),
    "olmo2": ("decoder", "Olmo2", "Olmo2ForCausalLM", GROUPED),
    "cohere": ("decoder", "Cohere", "CohereForCausalLM", {**GROUPED, "logit_scale": 1.0}),
    "cohere2": ("decoder", "Cohere2", "Cohere2ForCausalLM", {**GROUPED, **WINDOW, "logit_scale": 1.0}),
    "gpt_oss": ("decoder", "GptOss", "GptOssForCausalLM", {**EXPERTS, **WINDOW, "head_dim": 8}),
    "gpt2": ("decoder", "GPT2", "GPT2LMHeadModel", SIZES),
    "gpt_neox": ("decoder", "GPTNeoX", "GPTNeoXForCausalLM", SIZES),
    "opt": ("decoder", "OPT", "OPTForCausalLM", {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    "starcoder2": ("decoder", "Starcoder2", "Starcoder2ForCausalLM", GROUPED),
    "bert": ("encoder", "Bert", "BertModel", SIZES),
    "roberta": ("encoder", "Roberta", "RobertaModel", SIZES),
    "electra": ("encoder", "Electra", "ElectraModel", SIZES),
    "distilbert": ("encoder", "DistilBert", "DistilBertModel", {
        "vocab_size": WORDS, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}),
    "modernbert": ("encoder", "ModernBert", "ModernBertModel", {
        **SIZES, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}),
    "vit": ("image", "ViT", "ViTModel", IMAGES),
    "clip": ("image and text", "CLIP", "CLIPModel", {
        "text_config": {**SIZES, "projection_dim": 16}, "vision_config": {**IMAGES, "projection_dim": 16},
        "projection_dim": 16}),
    "bart": ("both", "Bart", "BartForConditionalGeneration", BOTH),
    "marian": ("both", "Marian", "MarianMTModel", BOTH),
    "t5": ("both", "T5", "T5ForConditionalGeneration", {
        "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
        "eos_token_id": 2, "decoder_start_token_id": 0}),
    "whisper": ("speech", "Whisper", "WhisperForConditionalGeneration", {
        **BOTH, "max_source_positions": 10, "max_target_positions": 30, "num_mel_bins": 8, "suppress_tokens": None,
        "begin_suppress_tokens": None}),
}


@pytest.fixture(autouse=True)
def registration() -> compat.Registration:
    transformers.logging.set_verbosity_error()
    return compat.register()


def _model(name: str, **options: Any) -> Any:
    """A model of a family, its numbers drawn widely, so that attention is far from uniform."""
    _, config, model, own = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**{**copy.deepcopy(own), **options}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.4)
    return made.eval()


def _words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (2, length), generator=torch.Generator().manual_seed(1))


def _results(name: str, model: Any) -> dict[str, Any]:
    """The tensors by which a family is compared, one for each column of the table."""
    kind, words, keep = FAMILIES[name][0], _words(), torch.ones(2, LENGTH, dtype=torch.int64)
    image, sound = (torch.randn(*shape, generator=torch.Generator().manual_seed(2))
                    for shape in ((2, 3, 16, 16), (2, 8, 20)))
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if kind == "decoder":
        keep[1, :4] = 0
        return {"logits": model(words).logits, "padded": model(words, attention_mask=keep).logits[keep.bool()],
                "weights": torch.stack(model(words, output_attentions=True).attentions),
                "greedy": model.generate(words, attention_mask=keep, **greedy),
                "static cache": torch.cat([model.generate(words, attention_mask=mask, cache_implementation="static",
                                                          disable_compile=True, **greedy) for mask in (keep, None)])}
    keep[1, 7:] = 0
    if kind == "encoder":
        return {"logits": model(words)[0], "padded": model(words, attention_mask=keep)[0][keep.bool()],
                "weights": torch.stack(model(words, output_attentions=True).attentions)}
    if kind == "image":
        return {"logits": model(image)[0], "weights": torch.stack(model(image, output_attentions=True).attentions)}
    if kind == "image and text":
        return {"padded": model(input_ids=words, pixel_values=image, attention_mask=keep).logits_per_image}
    given: dict[str, Any] = ({"input_features": sound} if kind == "speech" else
                             {"input_ids": words, "attention_mask": keep})
    actual = model(**given, decoder_input_ids=_words(5), output_attentions=True)
    plain = model(**given, decoder_input_ids=_words(5))
    greedy |= {"decoder_input_ids": _words(1)} if kind == "speech" else {}
    return {"logits" if kind == "speech" else "padded": plain.logits, "weights": torch.stack(actual.cross_attentions),
            "greedy": model.generate(**given, **greedy)}


@torch.no_grad()
def test_families_give_what_eager_gives(capsys: Any, monkeypatch: Any, registration: compat.Registration) -> None:
    calls: list[int] = []
    for part in ("attend", "attend_plainly"):
        own = getattr(compat, part)
        monkeypatch.setattr(compat, part, lambda *args, own=own, **options: calls.append(1) or own(*args, **options))
    columns = ("logits", "padded", "weights", "greedy", "static cache")
    rows, failed = [], []
    for name in drawn(FAMILIES, 3):
        model, actual = _model(name), []
        for implementation in ("eager", "structconv"):
            model.set_attn_implementation(implementation)
            calls.clear()
            actual.append(_results(name, model))
            assert bool(calls) == (implementation == "structconv"), name
        cells = {}
        for column, expected in actual[0].items():
            own = actual[1][column]
            if own.is_floating_point():
                error = float((own - expected).abs().max()) / max(1.0, float(expected.abs().max()))
                good, cells[column] = error <= TOLERANCE, f"{error:.0e}"
            else:
                good = torch.equal(own, expected)
                cells[column] = "equal" if good else "differs"
            failed += [] if good else [f"{name}: {column}"]
        failed += [f"{name}: {apart}" for apart in registration.check(model)]
        rows.append(f"{name:12}" + "".join(f"{cells.get(column, '-'):>14}" for column in columns))
    with capsys.disabled():
        print("\n" + "\n".join([f"{'family':12}" + "".join(f"{column:>14}" for column in columns), *rows]))
    assert not failed


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "t5"])
def test_gradients_are_those_of_eager(name: str) -> None:
    actual = []
    for implementation in ("eager", "structconv"):
        model = _model(name)
        model.set_attn_implementation(implementation)
        given = {"decoder_input_ids": _words(5)} if FAMILIES[name][0] == "both" else {}
        model(_words(), **given)[0].square().mean().backward()
        actual.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(actual[0]) == len(actual[1])
    for expected, own in zip(*actual, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(expected.abs().max())))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("padding", [4, LENGTH])
def test_queries_without_keys_decode_as_by_eager_beside_a_position_bias(padding: int, options: dict[str, Any]) -> None:
    """A chunk of a prefill reads the first columns of the mask: those of padding to the left."""
    keep, model = torch.ones(2, LENGTH, dtype=torch.int64), _model("t5")
    keep[1, :padding] = 0
    actual = []
    for implementation in ("eager", "structconv"):
        model.set_attn_implementation(implementation)
        result = model.generate(_words(), attention_mask=keep, max_new_tokens=8, do_sample=False, eos_token_id=None,
                                prefill_chunk_size=4, output_logits=True, return_dict_in_generate=True, **options)
        actual.append([result.sequences, torch.stack(result.logits)])
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["packed", "prefix", "numbers"])
def test_masks_of_ones_own(kind: str) -> None:
    model, words = _model("llama"), _words()
    options: dict[str, Any] = {"use_cache": False}
    if kind == "packed":  # two sequences in each row
        options["position_ids"] = torch.tensor([[*range(4), *range(LENGTH - 4)]] * 2)
    else:
        allowed = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        allowed[:, :, :, :5] = True
        least = torch.finfo(torch.float32).min
        added = torch.zeros(allowed.shape).masked_fill(~allowed, least)
        options["attention_mask"] = allowed if kind == "prefix" else added
    actual = []
    for implementation in ("sdpa", "structconv"):
        model.set_attn_implementation(implementation)
        actual.append(model(words, **options).logits)
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(actual[0], model(words, use_cache=False).logits, atol=1e-2)


@pytest.mark.parametrize("case", ["whole", "table", "by head", "window", "soft cap"])
@pytest.mark.parametrize("weights", [False, True])
def test_sinks(case: str, weights: bool) -> None:
    """A sink is one more score, whose weight is thrown away; a query without keys has it alone."""
    module = torch.nn.Module()
    query, key, value, sink = (torch.randn(shape, dtype=torch.float64, requires_grad=True)
                               for shape in ((2, 4, 7, 3), (2, 2, 7, 3), (2, 2, 7, 5), (4,)))
    m, n = torch.arange(7).unsqueeze(0), torch.arange(7).unsqueeze(-1)
    keep, given = m <= n, None
    if case in ("table", "by head"):
        keep = given = torch.rand(2, 4 if case == "by head" else 1, 7, 7) < 0.5
        given[:, :, 2] = False
    elif case == "window":
        keep, given = keep & (n - m < 3), compat.StructureMask.of(Causal() & Window(2), (2, 1, 7, 7), "cpu")
    y, own = compat.attention(module, query, key, value, given, scaling=0.4, s_aux=sink, output_attentions=weights,
                              softcap=2.0 if case == "soft cap" else None)
    scores = 0.4 * query @ key.repeat_interleave(2, 1).mT
    scores = 2 * (scores / 2).tanh() if case == "soft cap" else scores
    scores = torch.cat([scores.masked_fill(~keep, -torch.inf), sink.view(4, 1, 1).expand(2, 4, 7, 1)], -1)
    expected = scores.softmax(-1)[..., :-1]
    if own is not None:
        torch.testing.assert_close(own, expected)
    assert (own is not None) == weights
    actual, reference = y, (expected @ value.repeat_interleave(2, 1)).transpose(1, 2)
    grads = [torch.autograd.grad(t.sin().sum(), (query, key, value, sink), retain_graph=True)
             for t in (actual, reference)]
    torch.testing.assert_close((actual, *grads[0]), (reference, *grads[1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["whole", "table", "by head", "window", "bias"])
@pytest.mark.parametrize("weights", [False, True])
def test_sinks_of_each_query(case: str, weights: bool) -> None:
    query, key, value, sinks, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
        (2, 4, 7, 3), (2, 2, 7, 3), (2, 2, 7, 5), (2, 4, 7, 1), (1, 4, 7, 7)))
    m, n = torch.arange(7).unsqueeze(0), torch.arange(7).unsqueeze(-1)
    keep, given = m <= n, None
    if case in ("table", "by head"):
        keep = given = torch.rand(2, 4 if case == "by head" else 1, 7, 7) < 0.5
    elif case == "window":
        keep, given = keep & (n - m < 3), compat.StructureMask.of(Causal() & Window(2), (2, 1, 7, 7), "cpu")
    y, own = compat.attention(torch.nn.Module(), query, key, value, given, scaling=0.4, sinks=sinks,
                              position_bias=bias if case == "bias" else None, output_attentions=weights)
    scores = 0.4 * query @ key.repeat_interleave(2, 1).mT
    scores = scores + bias if case == "bias" else scores
    expected = torch.cat([scores.masked_fill(~keep, -torch.inf), sinks], -1).softmax(-1)[..., :-1]
    if own is not None:
        torch.testing.assert_close(own, expected)
    reference = (expected @ value.repeat_interleave(2, 1)).transpose(1, 2)
    grads = [torch.autograd.grad(t.sin().sum(), (query, key, value, sinks)) for t in (y, reference)]
    torch.testing.assert_close((y, *grads[0]), (reference, *grads[1]), rtol=1e-10, atol=1e-10)
    with pytest.raises((ConfigError, ShapeError), match="sink"):
        compat.attention(torch.nn.Module(), query, key, value, given, sinks=sinks, softcap=2.0)


@pytest.mark.parametrize("case", ["whole", "booleans", "numbers", "window", "one query", "static cache"])
@pytest.mark.parametrize("size", [1, 3])
def test_keys_that_an_indexer_selects(case: str, size: int) -> None:
    """Single keys, or blocks of keys for each group of heads; -1 selects nothing."""
    module = torch.nn.Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = size
    outputs, inputs = {"one query": (1, 8), "static cache": (8, 11)}.get(case, (8, 8))
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in (
        (2, 4, outputs, 3), (2, 2, inputs, 3), (2, 2, inputs, 5)))
    m, n = torch.arange(inputs).unsqueeze(0), torch.arange(outputs).unsqueeze(-1)
    keep, given = torch.ones(outputs, inputs, dtype=torch.bool) if case == "one query" else m <= n, None
    if case in ("booleans", "numbers"):
        keep = torch.rand(2, 1, 8, 8) < 0.7
        given = keep if case == "booleans" else torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -1e300)
    elif case == "window":
        keep, given = keep & (n - m < 5), compat.StructureMask.of(Causal() & Window(4), (2, 1, 8, 8), "cpu")
    count = -(-inputs // size)
    chosen = torch.rand(2, 1 if size == 1 else 2, outputs, count) < 0.6
    chosen[..., 0] = True
    indices = torch.where(chosen, torch.arange(count), -1)
    options = {"indices": indices[:, 0]} if size == 1 else {"block_indices": indices}
    keep = keep & chosen.repeat_interleave(size, -1)[..., :inputs].repeat_interleave(4 // chosen.shape[1], 1)
    y, _ = compat.attention(module, query, key, value, given, scaling=0.4, **options)
    scores = 0.4 * query @ key.repeat_interleave(2, 1).mT
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
    exists = keep.any(-1).transpose(1, 2).expand(2, outputs, 4)
    torch.testing.assert_close(y[exists], (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)[exists])


LATENT = {**SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "index_topk": 4, "index_n_heads": 4,
          "index_head_dim": 16}


COMPRESSED = {**LATENT, "head_dim": 8, "o_lora_rank": 16, "sliding_window": 4, "mlp_layer_types": ["hash_moe", "moe"],
              "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]}


@pytest.mark.parametrize(("prefix", "cls", "config"), [
    ("AlignText", "AlignTextModel", SIZES), ("Splinter", "SplinterModel", SIZES), ("MarkupLM", "MarkupLMModel", SIZES),
    ("LayoutLM", "LayoutLMModel", SIZES), ("DeepseekV32", "DeepseekV32ForCausalLM", LATENT),
    ("DeepseekV4", "DeepseekV4ForCausalLM", COMPRESSED), ("NllbMoe", "NllbMoeModel", BOTH)])
@torch.no_grad()
def test_what_is_only_in_the_attention_of_eager(prefix: str, cls: str, config: dict[str, Any]) -> None:
    """Modules that do not declare if they are causal, an indexer's keys, and a mask that is extended by numbers."""
    if not hasattr(transformers, cls):
        pytest.skip(f"this version has no {cls}")
    model = getattr(transformers, cls)._from_config(
        getattr(transformers, f"{prefix}Config")(**config), attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.4)
    words, results = _words(), []
    for implementation in ("eager", "structconv"):
        model.set_attn_implementation(implementation)
        results.append(model(words, **({"decoder_input_ids": words} if config is BOTH else {}))[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("prefix", "cls", "config"), [
    ("Splinter", "SplinterModel", SIZES), ("DeepseekV4", "DeepseekV4ForCausalLM", COMPRESSED)])
def test_a_configuration_of_ones_own_is_the_one_it_extends(prefix: str, cls: str, config: dict[str, Any]) -> None:
    if not hasattr(transformers, cls):
        pytest.skip(f"this version has no {cls}")
    base = getattr(transformers, f"{prefix}Config")
    own = type("Own", (base,), {"model_type": f"own_{base.model_type}"})
    model = getattr(transformers, cls)(base(**config)).eval()
    for module in model.modules():
        if type(getattr(module, "config", None)) is base:
            module.config.__class__ = own
    words, results = _words(), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
        for implementation in ("eager", "structconv"):
            model.set_attn_implementation(implementation)
            results.append(model(words)[0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


OWN = """
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

class OwnAttention(nn.Module):
    def forward(self, x, mask):
        scores = x @ x.mT
        return (scores if mask is None else scores + mask[:, 0]).softmax(-1) @ x

class OwnModel(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.words, self.attention = nn.Embedding(config.vocab_size, config.hidden_size), OwnAttention()
        self.post_init()

    def forward(self, words, attention_mask=None):
        x = self.words(words)
        return self.attention(x, create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None))
"""


@pytest.mark.parametrize("kind", ["a file", "no source"])
@torch.no_grad()
def test_models_of_ones_own_that_share_a_configuration_get_numbers(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    """A configuration that was known for other models before, and attention without a source, both undeclared."""
    monkeypatch.setattr(compat, "_DECLARED", {})  # other tests shall not see the class
    model, words = _model("llama"), _words()
    model.set_attn_implementation("structconv")
    before = model(words).logits
    namespace: dict[str, Any] = {"__name__": "own_without_source"}
    if kind == "a file":
        (tmp_path / "own_in_a_file.py").write_text(OWN)
        monkeypatch.syspath_prepend(tmp_path)
        namespace = vars(importlib.import_module("own_in_a_file"))
    else:
        exec(OWN, namespace)
    cls = namespace["OwnModel"]
    config_class = type(model.config)
    monkeypatch.setattr(cls, "config_class", config_class)
    keep, results = torch.ones(2, LENGTH, dtype=torch.int64), []
    keep[1, 7:] = 0
    for implementation in ("eager", "structconv"):
        torch.manual_seed(0)
        own = cls._from_config(config_class(**GROUPED), attn_implementation=implementation).eval()
        assert own.config._attn_implementation == implementation
        results.append([own(words), own(words, attention_mask=keep)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(words).logits, before)


def test_a_model_is_saved_and_loaded(tmp_path: Any) -> None:
    model, words = _model("llama"), _words()
    model.set_attn_implementation("structconv")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="structconv")
    assert again.config._attn_implementation == "structconv"
    torch.testing.assert_close(again(words).logits, model(words).logits)


def test_windows_become_structures() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    function = sliding_window_causal_mask_function(4)
    mask = compat.mask(2, 9, 9, mask_function=function, local_size=4)
    assert isinstance(mask, compat.StructureMask)
    m, n = torch.arange(9).unsqueeze(0), torch.arange(9).unsqueeze(-1)
    table = ((m <= n) & (n - m < 4)).expand(2, 1, 9, 9)
    assert (mask.shape, mask.dtype, mask.ndim) == (table.shape, torch.bool, 4)
    for read in (lambda t: t[:, :, 2:], lambda t: ~t, lambda t: torch.cat([t, t], 1), lambda t: t.mT,
                 lambda t: torch.where(t, 1.0, -1.0), lambda t: t.to(torch.float64), copy.deepcopy):
        own = read(mask)
        assert type(own) is Tensor and torch.equal(own, read(table))
    with pytest.raises(ConfigError, match="in place"):  # which would have no effect
        mask[:, :, :, 0] = True
    with pytest.raises(ConfigError, match="in place"):
        mask.logical_not_()
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 0] = False
    padded = compat.mask(2, 9, 9, mask_function=function, local_size=4, attention_mask=keep)
    assert type(padded) is Tensor and torch.equal(padded, table & keep[:, None, None])


def test_training_with_dropout() -> None:
    model, words = _model("mistral", attention_dropout=0.3), _words()
    model.set_attn_implementation("structconv")
    whole = model(words).logits
    model.train()
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(model(words, labels=words).loss)
    losses[0].backward()
    assert torch.equal(*losses) and not torch.allclose(model(words).logits, whole)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", drawn(["mistral", "gemma2"], 2))
@torch.no_grad()
def test_generation_is_two_compiled_programs(name: str) -> None:
    model, words = _model(name, num_hidden_layers=1), _words()
    model.set_attn_implementation("structconv")
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "eos_token_id": None,
               "disable_compile": True}
    expected, programs = model.generate(words, **options), []
    model.forward = torch.compile(model.forward, fullgraph=True,
                                  backend=lambda graph, _: programs.append(graph) or graph.forward)
    assert torch.equal(model.generate(words, **options), expected)
    assert len(programs) == 2  # the prompt, and all steps


def test_compilation_does_not_warn() -> None:
    """In another process, since the compiler gives each of its warnings once."""
    program = f"""
import warnings
import torch, transformers
from structconv.compat.transformers import register
register()
words = torch.tensor([[1, 2, 3, 4, 5]])
for name in ("Splinter", "Mistral"):  # modules without `is_causal`, and with a window
    config = getattr(transformers, name + "Config")(**{ {**GROUPED, "num_hidden_layers": 1}!r}, sliding_window=2,
                                                    question_token_id=3)
    model = getattr(transformers, name + "Model")(config).eval()
    model.set_attn_implementation("structconv")
    expected = model(words)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = torch.compile(model, fullgraph=True, backend="eager")(words)[0]
    torch.testing.assert_close(actual, expected)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_does_not_use_the_interface_is_named(registration: compat.Registration) -> None:
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES))
    assert registration.check(model) == ["transformer.h.0.self_attention", "transformer.h.1.self_attention"]
    mixed = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGES))
    assert registration.check(mixed) == ["head.attention"]
    sizes = {"context_length": 16, "patch_length": 4, "d_model": 8}
    gates = transformers.PatchTSMixerModel(transformers.PatchTSMixerConfig(**sizes))
    assert registration.check(gates) == []  # "GatedAttention" multiplies its input by the softmax of a linear layer
    own = transformers.LxmertModel(transformers.LxmertConfig(**SIZES, l_layers=1, x_layers=1, r_layers=1))
    assert not any(name.endswith("output") for name in registration.check(own))  # "AttentionOutput" is a linear layer


@pytest.mark.parametrize("name", ["xglm", "blip text", "git"])
@torch.no_grad()
def test_what_does_not_use_the_interface_stays_as_it_is(name: str) -> None:
    """transformers takes the name for modules that add the mask to their scores themselves: it must be numbers then."""
    config, cls = {
        "xglm": (transformers.XGLMConfig(vocab_size=WORDS, d_model=32, num_layers=2, attention_heads=4, ffn_dim=40),
                 transformers.XGLMForCausalLM),
        "blip text": (transformers.BlipTextConfig(**SIZES, encoder_hidden_size=32), transformers.BlipTextModel),
        "git": (transformers.GitConfig(**SIZES, vision_config=IMAGES), transformers.GitModel)}[name]
    words, keep, results = _words(), torch.ones(2, LENGTH, dtype=torch.int64), []
    keep[1, :4] = 0
    for implementation in ("eager", "structconv"):
        torch.manual_seed(0)
        first = "eager" if name == "git" else implementation  # it can be set later only
        model = cls._from_config(copy.deepcopy(config), attn_implementation=first).eval()
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
        results.append([model(words, use_cache=False)[0], model(words, attention_mask=keep, use_cache=False)[0]])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_it_says_what_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install"):
        compat.register()
