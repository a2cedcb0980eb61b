"""A transformers model of our layers (`examples/language_model.py`): files, PEFT, Accelerate, generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

transformers = pytest.importorskip("transformers")

from examples import language_model as MODULE  # noqa: E402
from structconv.compat.transformers import PreparedCache  # noqa: E402
from structconv.errors import ConfigError  # noqa: E402

GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def _model(**options: Any) -> Any:
    torch.manual_seed(0)
    model = MODULE.LanguageModel(MODULE.LanguageModelConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def _words() -> Tensor:
    return torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2},
                                     {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache_is_that_without(options: dict[str, Any], padded: bool) -> None:
    model, words = _model(), _words()
    mask = torch.ones_like(words)
    if padded:
        mask[1, :4] = 0
    if "prompt_lookup_num_tokens" in options:  # of one sequence
        words, mask = words[1:], mask[1:]
    plain = {key: value for key, value in options.items() if key != "prompt_lookup_num_tokens"}
    expected = model.generate(words, attention_mask=mask, use_cache=False, **plain, **GREEDY)
    assert torch.equal(model.generate(words, attention_mask=mask, **options, **GREEDY), expected)


@torch.no_grad()
def test_each_step_appends_to_what_is_prepared() -> None:
    model, words, calls = _model(), _words(), []
    model.tokens.register_forward_hook(lambda module, args, y: calls.append(args[0].shape[1]))
    cache = PreparedCache(2)
    model.generate(words, cache=cache, **GREEDY)
    assert calls == [9, *[1] * 6] and cache.get_seq_length() == 15
    cache.crop(-5)
    assert [layer.cache.length for layer in cache.layers] == [10, 10]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert [layer.cache.x.shape[0] for layer in cache.layers] == [2, 2]
    step = model(words[:, :1], cache=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    whole = torch.cat([words, model.generate(words, **GREEDY)[:, 9:10], words[:, :1]], 1)
    torch.testing.assert_close(step, model(whole).logits[:, -1:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="step"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, words = _model(), _words()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == dict(model.named_parameters()).keys()
    again, info = MODULE.LanguageModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(again(words).logits, model(words).logits)
    half = MODULE.LanguageModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(words).logits.dtype == torch.bfloat16


def test_big_models_are_loaded_part_by_part(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, words = _model(num_hidden_layers=3), _words()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    places = {"tokens": "cpu", "head": "cpu", "norm": "cpu", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk"}
    again = MODULE.LanguageModel.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    assert again.hf_device_map == places and again.blocks[2].attention.weight.value.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(again(words).logits, model(words).logits)


def test_adapters_of_all_projections(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, words = _model(), _words()
    expected = model(words).logits.detach()
    config = peft.LoraConfig(r=2, target_modules=["query", "key", "value", "output"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(words).logits, expected, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(words, labels=words).loss.backward()
        optimizer.step()
    moved = {key for key, p in adapted.named_parameters() if "lora_B" in key and bool(p.any())}
    assert len(moved) == 8  # four of each of two layers
    trained = adapted.eval()(words).logits.detach()
    assert not torch.allclose(trained, expected, atol=1e-2)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(_model(), tmp_path).eval()
    torch.testing.assert_close(loaded(words).logits, trained, rtol=1e-4, atol=1e-4)
    own = loaded.generate(input_ids=words, **GREEDY)
    assert torch.equal(own, loaded.generate(input_ids=words, use_cache=False, **GREEDY))
    assert torch.equal(loaded.merge_and_unload().generate(words, **GREEDY), own)
