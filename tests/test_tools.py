"""Tools that go by the names of parameters, over every named layer: each finds the tensors that it asks for.

PEFT, transformers, Accelerate and Lightning are in the extra `tools`; a test is skipped where its package is missing.
"""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from structconv import Conv, DotProduct, LowRank, MultiheadAttention, Padding, RelativeBias
from tests.support.layers import COMPAT, EVERY, LAYERS, drawn, in_float32
from tools import compatibility

ALL = {**LAYERS, **COMPAT}
MADE = {name: make().layer for name, make in ALL.items()}
#: Layers with a state; pooling has none.
STATEFUL = [name for name, layer in MADE.items() if layer.state_dict()]
#: Layers that train something.
TRAINED = [name for name, layer in MADE.items() if any(p.requires_grad for p in layer.parameters())]
#: What LoRA is asked to adapt, by the names of projections; in drop-in layers every linear map.
TARGETS = ["query", "key", "value", "output"]


def targets_of(name):
    """The linear maps that have one of these names."""
    return [path for path, part in MADE[name].named_modules()
            if isinstance(part, nn.Linear) and (name in COMPAT or path.rpartition(".")[2] in TARGETS)]


#: Layers with such maps.
PROJECTED = [name for name in MADE if targets_of(name)]


def cleared(use):
    """A copy whose parameters are all zero, as those of another program before it loads a file."""
    twin = use.copied()
    with torch.no_grad():
        for parameter in twin.layer.parameters():
            parameter.zero_()
    return twin


def check(use, expected):
    torch.testing.assert_close(use().detach(), expected, rtol=1e-9, atol=1e-9)


def names_of(module):
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


#: What each tool is tried with below; `python tools/compatibility.py` runs it, and writes it into the docs.
MATRIX = {"functional_call": STATEFUL, "state dicts of DCP": STATEFUL, "FSDP2": STATEFUL, "DDP": TRAINED,
          "EMA": STATEFUL, "PEFT": PROJECTED, "Accelerate": STATEFUL, "from_pretrained": STATEFUL,
          "Lightning": STATEFUL, "Lightning bf16": STATEFUL, "Trainer": TRAINED, "Trainer bf16": TRAINED}
#: The tests of each tool, of all its layers or of the one that is their parameter.
TESTS = {"functional_call": "test_functional_call_takes_a_state", "state dicts of DCP": "test_distributed_checkpoints",
         "FSDP2": "test_two_processes", "DDP": "test_two_processes", "EMA": "test_a_moving_average",
         "PEFT": "test_peft", "Accelerate": "test_accelerate", "from_pretrained": "test_transformers",
         "Lightning": "test_lightning", "Lightning bf16": "test_lightning_in_mixed_precision",
         "Trainer": "test_trainer", "Trainer bf16": "test_trainer_in_mixed_precision"}


def test_the_table_of_the_docs_is_current():
    assert MATRIX.keys() == TESTS.keys() and set(TESTS.values()) <= globals().keys()
    assert compatibility.table(MATRIX) in compatibility.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", drawn(MATRIX["functional_call"], 3))
def test_functional_call_takes_a_state(name):
    use = ALL[name]()
    expected, state = use().detach(), use.layer.state_dict()
    twin = cleared(use)
    actual = twin.run(lambda *args, **options: functional_call(twin.layer, state, args, options, strict=True))
    torch.testing.assert_close(actual.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", drawn(MATRIX["state dicts of DCP"], 6))
def test_distributed_checkpoints(name):
    use = ALL[name]()
    expected, state = use().detach(), get_model_state_dict(use.layer)
    assert names_of(use.layer) <= state.keys()
    twin = cleared(use)
    loaded = set_model_state_dict(twin.layer, copy.deepcopy(state))
    assert not loaded.missing_keys and not loaded.unexpected_keys
    check(twin, expected)


@pytest.mark.parametrize("name", drawn(MATRIX["EMA"], 6))
def test_a_moving_average(name):
    use = ALL[name]()
    averaged = AveragedModel(use.layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(use.layer)
    expected = use().detach()
    with torch.no_grad():
        for parameter in use.layer.parameters():
            parameter.mul_(3)
    averaged.update_parameters(use.layer)
    state = {key.removeprefix("module."): t.clone() for key, t in averaged.state_dict().items() if key != "n_averaged"}
    for key, parameter in use.layer.named_parameters():
        torch.testing.assert_close(state[key], 2 / 3 * parameter, rtol=1e-9, atol=1e-9)
    use.layer.load_state_dict({key: t / 2 if key in names_of(use.layer) else t for key, t in state.items()})
    check(use, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_by_name():
    layer, x = Conv((DotProduct(2, 4)).softmax(), 8, 8), torch.randn(5, 8)
    layer.attention.query, projection = nn.Linear(8, 8, bias=False), layer.attention.query
    layer.attention.query.load_state_dict(projection.state_dict())
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no quantized kernels")
    quantized = torch.ao.quantization.quantize_dynamic(
        layer, {"attention.query": torch.ao.quantization.default_dynamic_qconfig})
    assert "quantized" in type(quantized.attention.query).__module__
    assert 0 < (quantized(x) - layer(x)).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_of_all_linear_layers():
    """torch compares classes exactly: our layers become torch's first, as docs/modules.md says."""
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no quantized kernels")
    layer, x = Conv(DotProduct(2, 4).softmax(), 8, 8, weight=LowRank(4)), torch.randn(5, 8)
    expected = layer(x)
    for name, part in list(layer.named_modules()):
        if isinstance(part, nn.Linear):
            linear = nn.Linear(part.in_features, part.out_features, part.bias is not None)
            linear.load_state_dict(part.state_dict())
            layer.set_submodule(name, linear)
    torch.testing.assert_close(layer(x), expected)
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    names = [name for name, part in quantized.named_modules()
             if isinstance(part, torch.ao.nn.quantized.dynamic.Linear)]
    assert names == ["weight.value", "weight.output", "attention.query", "attention.key"]
    for name in names:  # each of them computes its product: zeros change the result
        twin = copy.deepcopy(quantized)
        part = twin.get_submodule(name)
        twin.set_submodule(name, torch.ao.nn.quantized.dynamic.Linear(part.in_features, part.out_features))
        assert 0 < (quantized(x) - expected).abs().max() < 0.1 < 10 * (twin(x) - quantized(x)).abs().max()


def test_two_processes(tmp_path):
    script = Path(__file__).parent / "fully_sharded.py"
    started = [subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "store")], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=script.parents[1],
                                env={"PYTHONPATH": str(script.parents[1]), "OMP_NUM_THREADS": "1",
                                     **({"STRUCTCONV_EVERY_TEST": "1"} if EVERY else {})}) for rank in (0, 1)]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert json.loads(said[0].splitlines()[-1]) == {
        tool: [name for name in drawn(ALL, 10) if name in MATRIX[tool]] for tool in ("FSDP2", "DDP")}


class Holder(nn.Module):
    """A model with one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **options):
        return self.layer(*args, **options)


@pytest.mark.parametrize("name", drawn(MATRIX["PEFT"], 3))
def test_peft(name, tmp_path):
    """All projections at once and each alone: every adapter counts, is trained, saved, restored and merged."""
    peft = pytest.importorskip("peft", reason="peft is in the extra `tools`")
    use = ALL[name]()
    use.layer.eval()
    plain, targets = use().detach(), targets_of(name)
    whole = targets if name in COMPAT else TARGETS
    for names in [whole, *([path] for path in targets)]:
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        model = peft.get_peft_model(Holder(copy.deepcopy(use.layer)), config)
        adapted = use.run(model.eval())
        assert not torch.allclose(adapted, plain), names
        adapted.square().sum().backward()
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is not None and p.grad.any() for p in trained.values()), names
    model = peft.get_peft_model(Holder(copy.deepcopy(use.layer)), peft.LoraConfig(
        r=2, target_modules=whole, init_lora_weights=False))
    adapted = use.run(model.eval()).detach()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == {f"base_model.model.layer.{path}.lora_{side}.weight" for path in targets for side in "AB"}
    loaded = peft.PeftModel.from_pretrained(Holder(copy.deepcopy(use.layer)), tmp_path)
    torch.testing.assert_close(use.run(loaded).detach(), adapted, rtol=1e-9, atol=1e-9)
    merged = loaded.merge_and_unload()
    assert names_of(merged.layer) == names_of(use.layer)
    torch.testing.assert_close(use.run(merged).detach(), adapted, rtol=1e-6, atol=1e-6)


def test_peft_saves_a_whole_part():
    peft = pytest.importorskip("peft", reason="peft is in the extra `tools`")
    layer, x = Conv((DotProduct(2, 3) + RelativeBias(2)).softmax(), 4, 4), torch.randn(5, 4)
    before, state = layer(x), copy.deepcopy(layer.state_dict())
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["position_bias"])
    model = peft.get_peft_model(Holder(layer), config).eval()
    torch.testing.assert_close(model(x), before)
    (table,) = (p for name, p in model.named_parameters() if "modules_to_save" in name)
    with torch.no_grad():
        table.add_(1 + torch.arange(5.0))
    state["position_bias.table"] = table.detach()
    plain = Conv((DotProduct(2, 3) + RelativeBias(2)).softmax(), 4, 4)
    plain.load_state_dict(state)
    torch.testing.assert_close(model(x), plain(x))


def test_accelerate(tmp_path):
    """One model of all layers; its file fills another, and one without memory."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is in the extra `tools`")
    uses = {name: ALL[name]() for name in MATRIX["Accelerate"]}
    expected = {name: use().detach() for name, use in uses.items()}
    save_file({f"{name}.{key}": t for name, use in uses.items() for key, t in use.layer.state_dict().items()},
              tmp_path / "model.safetensors")
    twins = {name: cleared(use) for name, use in uses.items()}
    accelerate.load_checkpoint_in_model(nn.ModuleDict({name: use.layer for name, use in twins.items()}), tmp_path,
                                        strict=True)
    empty = {name: dataclasses.replace(use, layer=copy.deepcopy(use.layer).to("meta")) for name, use in uses.items()}
    accelerate.load_checkpoint_and_dispatch(nn.ModuleDict({name: use.layer for name, use in empty.items()}), tmp_path,
                                            device_map={"": "cpu"}, strict=True)
    for name in uses:
        check(twins[name], expected[name])
        check(empty[name], expected[name])


def parts(layers):
    """Copies of layers, and two that are made here, on whatever device modules are made."""
    masked = (DotProduct(2, 3) + RelativeBias(2)).masked(keep=Padding(torch.arange(5) < 4)).softmax() * torch.ones(2)
    return nn.ModuleDict({"masked": Conv(masked, 4, 4), "multihead": MultiheadAttention(4, 2, dropout=0.1),
                          **copy.deepcopy(layers)})


def call(model):
    torch.manual_seed(0)
    return torch.cat([model["masked"](torch.randn(5, 4)), model["multihead"](torch.randn(5, 4))])


@pytest.mark.filterwarnings("ignore")
def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra `tools`")

    class Config(transformers.PretrainedConfig):
        model_type = "structured"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.parts = parts(layers)
            self.post_init()

    layers = {f"of {name}": ALL[name]().layer.float() for name in MATRIX["from_pretrained"]}
    model = Model(Config()).eval()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert names_of(model) <= saved.keys()
    with torch.no_grad():
        for parameter in nn.ModuleDict(layers).parameters():
            parameter.zero_()
    loaded, info = Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for key, t in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], t), key
    torch.testing.assert_close(call(loaded.eval().parts), call(model.parts))


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is in the extra `tools`")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.parts = parts({f"of {name}": ALL[name]().layer.float() for name in MATRIX["Lightning"]})

        def training_step(self, batch, index):
            return call(self.parts).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parts["masked"].parameters(), lr=0.1)

    model = Model()
    with torch.no_grad():  # a new one is drawn alike
        for parameter in model.parameters():
            parameter.add_(0.25)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)
    trainer.fit(model, [torch.zeros(1)])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    held = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert names_of(model) <= held.keys()
    loaded = Model.load_from_checkpoint(tmp_path / "last.ckpt")
    for key, t in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], t), key
    torch.testing.assert_close(call(loaded.eval().parts), call(model.eval().parts))


@pytest.mark.filterwarnings("ignore")
def test_lightning_in_mixed_precision(tmp_path):
    """Each layer computes in bfloat16 if it multiplies; parameters, and the step that is taken, are in float32."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the extra `tools`")
    uses, outputs = {name: in_float32(ALL[name]) for name in MATRIX["Lightning bf16"]}, {}
    plain = {name: use().detach() for name, use in uses.items()}

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({f"of {name}": use.layer for name, use in uses.items()})

        def training_step(self, batch, index):
            outputs.update({name: use.run(self.parts[f"of {name}"]) for name, use in uses.items()})
            return sum(y.float().square().mean() for y in outputs.values())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Model()
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False,
                                precision="bf16-mixed", enable_progress_bar=False, enable_model_summary=False,
                                default_root_dir=tmp_path)
    trainer.fit(model, [torch.zeros(1)])
    assert sum(y.dtype == torch.bfloat16 for y in outputs.values()) > len(outputs) / 2
    for name, y in outputs.items():
        expected = plain[name]
        assert (y.float() - expected).abs().max() <= 0.05 * max(1.0, float(expected.abs().max())), name
    for name, use in uses.items():
        own = {key: p for key, p in model.named_parameters() if key.startswith(f"parts.of {name}.")}
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in own.values()), name
        trained = any(p.requires_grad for p in use.layer.parameters())
        assert not trained or any(not torch.equal(p, before[key]) for key, p in own.items()), name


def check_trainer(tool, folder, bf16):
    """One model of all layers that is saved after two steps and resumed ends as one that is trained for four.

    Returns the dtypes of the layers' outputs.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra `tools`")
    pytest.importorskip("accelerate", reason="accelerate is in the extra `tools`")
    dtypes = {}

    class Config(transformers.PretrainedConfig):
        model_type = "structured"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.uses = {name: in_float32(ALL[name]) for name in MATRIX[tool]}
            self.parts = nn.ModuleDict({f"of {name}": use.layer for name, use in self.uses.items()})
            self.post_init()

        def forward(self, factor):
            outputs = {name: use.run(self.parts[f"of {name}"]) for name, use in self.uses.items()}
            dtypes.update({name: y.dtype for name, y in outputs.items()})
            return {"loss": factor.mean() * sum(y.float().square().mean() for y in outputs.values())}

    def made():
        torch.manual_seed(0)  # transformers draws the weights of linear layers again
        return Model(Config())

    def trained(model, steps, to, resume=None):
        arguments = transformers.TrainingArguments(
            str(folder / to), max_steps=steps, per_device_train_batch_size=2, save_steps=2, learning_rate=1e-2,
            max_grad_norm=0.0, bf16=bf16, lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
            logging_strategy="no")
        data = [{"factor": torch.tensor(1.0 + i)} for i in range(8)]
        transformers.Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return dict(model.named_parameters())

    before, whole = dict(made().named_parameters()), trained(made(), 4, "whole")
    halfway, model = trained(made(), 2, "parts"), made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    resumed = trained(model, 4, "parts", str(folder / "parts" / "checkpoint-2"))
    assert whole.keys() == resumed.keys()
    for key, p in whole.items():
        assert p.dtype == resumed[key].dtype == torch.float32 and p.isfinite().all(), key
        assert torch.equal(resumed[key], p), key
    for name in MATRIX[tool]:
        own = [key for key in whole if key.startswith(f"parts.of {name}.")]
        for first, second in ((before, halfway), (halfway, whole)):
            assert any(not torch.equal(first[key], second[key]) for key in own), name
    return list(dtypes.values())


@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path):
    assert set(check_trainer("Trainer", tmp_path, bf16=False)) == {torch.float32}


@pytest.mark.filterwarnings("ignore")
def test_trainer_in_mixed_precision(tmp_path):
    dtypes = check_trainer("Trainer bf16", tmp_path, bf16=True)
    assert dtypes.count(torch.bfloat16) > len(dtypes) / 2
