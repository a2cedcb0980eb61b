"""`convert` and back: outputs, states and a step of training of whole models; what is refused; `merge_linear`."""

import copy
import json
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import is_parametrized

from structconv import Adjacency, ConfigError, Conv, Grid, convert, mechanisms, merge_linear
from structconv import Conv2d as OwnConv2d
from structconv.compat import Report, to_pyg, to_torch
from structconv.compat import torch as compat


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs),
                                  nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                                  nn.BatchNorm2d(outputs))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8, 8, 1), Block(8, 12, 2), nn.AvgPool2d(2), nn.Flatten(),
                          nn.Linear(12 * 4, 5))
    model(torch.randn(4, 3, 8, 8))  # running statistics
    return model, torch.randn(2, 3, 8, 8)


def transformer() -> tuple[nn.Module, Any]:
    padding = torch.arange(6).expand(2, 6) >= torch.tensor([[6], [4]])
    return (nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True),
            {"src": torch.randn(2, 6, 16), "tgt": torch.randn(2, 5, 16), "src_key_padding_mask": padding,
             "memory_key_padding_mask": padding,  # torch's fused encoder puts out zeros at padding
             "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5)})


def _tiny(family: str, kind: str, **more: Any) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, pad_token_id=0, attention_dropout=0.0, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0, use_cache=False, **more)
    ids = torch.randint(1, 50, (2, 7))
    return getattr(transformers, kind)(config), {"input_ids": ids, "attention_mask": (torch.arange(7) < 6).long()
                                                 .expand(2, 7)}


class GAT(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.first, self.second = library.GATConv(20, 8, heads=8), library.GATConv(64, 7, concat=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edges).relu(), edges)


def gat() -> tuple[nn.Module, Any]:
    model = GAT(pytest.importorskip("torch_geometric.nn"))
    return model, {"x": torch.randn(300, 20), "edges": torch.randint(300, (2, 1500))}


MODELS = {"Transformer": transformer, "ResNet": resnet, "BERT": lambda: _tiny("Bert", "BertForMaskedLM"),
          "Llama": lambda: _tiny("Llama", "LlamaForCausalLM", num_key_value_heads=2), "GAT": gat}


def outputs(model: nn.Module, example: Any) -> torch.Tensor:
    actual = model(**example) if isinstance(example, dict) else model(example)
    return getattr(actual, "logits", actual)


def trained(model: nn.Module, example: Any) -> dict[str, torch.Tensor]:
    """The state after a step of training."""
    model.train()
    y = outputs(model, example)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return model.state_dict()


def alike(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(state) == list(other)
    for name, t in state.items():
        torch.testing.assert_close(other[name], t, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name: str) -> None:
    model, example = MODELS[name]()
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    ours, report = convert(model, example=example)
    assert report.converted and not report.refused and report.difference is not None and report.difference < 1e-5
    assert report.scale is not None and report.scale > 0.01 and report.parameters[0] == report.parameters[1] > 0
    assert [type(m) for m in model.modules()] == kinds and ours is not model  # a copy
    assert ours.training == model.training
    back, returned = (to_pyg if name == "GAT" else to_torch)(ours, example=example)
    assert [type(m) for m in back.modules()] == kinds and returned.difference is not None
    assert returned.difference < 1e-5
    for one in (ours, back, pickle.loads(pickle.dumps(ours))):
        assert list(one.state_dict()) == list(state)
        assert all(torch.equal(t, state[key]) for key, t in one.state_dict().items())
    states = [trained(one, example) for one in (model, ours, back)]
    alike(states[0], states[1])
    alike(states[0], states[2])


def _mlp(inputs: int = 4, outputs: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


TYPES = (["author", "paper"],
         [("author", "cites", "paper"), ("paper", "rev.cites", "author"), ("author", "to", "author")])
PYG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "GCNConv": ((4, 6), {"improved": True, "bias": False}), "SAGEConv": ((4, 6), {"aggr": "max", "project": True}),
    "GraphConv": ((-1, 6), {"aggr": "mean", "bias": False}), "GINConv": ((_mlp,), {"eps": 0.3, "train_eps": True}),
    "GATConv": ((4, 6), {"heads": 2, "residual": True, "negative_slope": 0.1, "bias": False}),
    "GATv2Conv": ((-1, 6), {"heads": 2, "share_weights": True}), "TransformerConv": ((4, 6), {"beta": True}),
    "AGNNConv": ((), {}), "ChebConv": ((4, 6, 3), {"bias": False}), "TAGConv": ((4, 6), {"K": 2}),
    "SGConv": ((4, 6), {"K": 2, "bias": False}), "SSGConv": ((4, 6, 0.2), {"K": 2}), "MixHopConv": ((4, 6), {}),
    "APPNP": ((3, 0.2), {"add_self_loops": False}), "NNConv": ((4, 6, lambda: _mlp(3, 24)), {"aggr": "mean"}),
    "GINEConv": ((_mlp,), {"edge_dim": 3}), "RGCNConv": ((4, 6, 3), {"num_bases": 2, "root_weight": False}),
    "ClusterGCNConv": ((4, 6), {"diag_lambda": 0.5, "bias": False}), "ARMAConv": ((4, 6, 2, 2), {"bias": False}),
    "FeaStConv": ((4, 6), {"heads": 2, "bias": False}), "GMMConv": ((4, 6, 3, 2), {"separate_gaussians": True}),
    "FAConv": ((4,), {"eps": 0.3}), "HGTConv": ((4, 6, TYPES), {"heads": 2}),
    "HGTConv, lazy": ((-1, 6, TYPES), {"heads": 2}),
}


@pytest.mark.parametrize("name", PYG)
def test_each_layer_of_pyg(name: str) -> None:
    library = pytest.importorskip("torch_geometric.nn")
    args, options = PYG[name]
    torch.manual_seed(0)
    layer = getattr(library, name.partition(",")[0])(*(a() if callable(a) else a for a in args), **options)
    x, edges, attr = torch.randn(9, 4), torch.randint(9, (2, 20)), torch.randn(20, 3)
    if name.startswith("HGTConv"):
        x, edges = {"author": x, "paper": torch.randn(9, 3 if args[0] == -1 else 4)}, dict.fromkeys(TYPES[1], edges)
    more = {"RGCNConv": (torch.randint(3, (20,)),)}.get(
        name, (attr,) if name in ("NNConv", "GINEConv", "GMMConv") else ())
    edges = (x, edges) if name == "FAConv" else (edges,)
    layer(x, *edges, *more)  # unknown channels
    calls = []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    layer.note = "of a user"
    if name == "GCNConv":
        layer.lin.weight.requires_grad_(False)
    model = nn.ModuleDict({"layer": layer.eval(), "again": layer, "image": nn.Conv1d(2, 2, 1)})
    ours, there = convert(model)
    back, report = to_pyg(ours)
    assert not there.refused and not report.refused and set(there.converted) - set(report.converted) == {"image"}
    assert ours["layer"] is ours["again"]
    assert [(type(part), part.training) for part in back["layer"].modules()] == [
        (type(part), False) for part in layer.modules()]
    assert type(ours["layer"]).__module__.startswith("structconv.compat.pyg")
    for one in (ours, back):
        calls.clear()
        torch.testing.assert_close(one["layer"](x, *edges, *more), layer(x, *edges, *more), rtol=1e-5, atol=1e-5)
        assert len(calls) == 2 and one["layer"].note == "of a user" and repr(one) == repr(model)
        assert [(n, p.requires_grad) for n, p in one.named_parameters()] == [
            (n, p.requires_grad) for n, p in model.named_parameters()]
        assert all(torch.equal(t, model.state_dict()[key]) for key, t in one.state_dict().items())
    handle.remove()


def test_a_layer_that_cannot_be_built_again_is_refused() -> None:
    library = pytest.importorskip("torch_geometric.nn")
    broken = library.HGTConv(4, 4, (["a"], [("a", "to", "a")]))
    del broken.node_types
    ours, report = convert(nn.ModuleList([broken, library.GCNConv(4, 4)]))
    assert list(report.refused) == ["0"] and list(report.converted) == ["1"] and type(ours[0]) is library.HGTConv
    assert "HGTConv: it cannot be built again from its attributes: AttributeError: " in report.refused["0"]


def test_children_buffers_and_hooks_on_a_layer_of_pyg_stay() -> None:
    library = pytest.importorskip("torch_geometric.nn")
    layer, calls = library.GCNConv(4, 3), list[str]()
    layer.dropout = nn.Dropout(0.5)
    layer.lin.scale = nn.ReLU()
    layer.register_forward_hook(lambda module, _, y: module.dropout(module.lin.scale(y)))
    layer.register_buffer("running", torch.ones(3), persistent=False)
    layer.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    layer.register_state_dict_post_hook(lambda *_: calls.append("save"))
    layer.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    layer.lin.register_load_state_dict_post_hook(lambda *_: calls.append("load"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    x, edges = torch.randn(5, 4, requires_grad=True), torch.randint(5, (2, 9))
    ours, report = convert(layer, example=(x, edges))
    back, returned = to_pyg(ours, example=(x, edges))
    assert not report.refused and not returned.refused and type(back) is library.GCNConv
    for one in (ours, back):
        assert [name for name, _ in one.named_modules()] == [name for name, _ in layer.named_modules()
                                                             if name != "aggr_module" or one is back]
        calls.clear()
        one.load_state_dict(layer.state_dict())
        one(x, edges).sum().backward()
        assert calls == ["before save", "save", "before load", "load", "backward"]
    assert report.difference is not None and report.difference < 1e-6 and returned.difference < 1e-6


def test_a_pruned_layer_of_pyg_is_refused() -> None:
    library = pytest.importorskip("torch_geometric.nn")
    layer = library.GCNConv(4, 3)
    prune.l1_unstructured(layer.lin, "weight", 0.5)
    assert "its parameter 'lin.weight_orig' was changed" in convert(layer, inplace=True)[1].refused[""]


class Wider(nn.Conv1d):
    """A class of a user's."""


def test_what_is_refused_is_named() -> None:
    patched = nn.Conv1d(2, 2, 1)
    patched.forward = lambda x: x
    repadded = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
    repadded.padding = (0,)
    model = nn.ModuleDict({"derived": Wider(2, 2, 1), "patched": patched, "repadded": repadded})
    ours, report = convert(model)
    assert set(report.refused) == set(model) and not report.converted and type(ours["derived"]) is Wider
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module; got Tensor"):
        convert(torch.ones(2))


def test_a_model_with_a_function_of_its_modules_is_not_copied() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = self.conv = nn.Conv1d(2, 2, 1)
            self.run = lambda x: conv(x).relu()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    model, x = nn.Sequential(Block()), torch.randn(1, 2, 3)
    with pytest.raises(ConfigError, match=r"a copy of Sequential: .* got 0\.run\. Pass inplace=True"):
        convert(model)
    expected = model(x)
    ours, report = convert(model, inplace=True)
    assert [*report.converted] == ["0.conv"]
    torch.testing.assert_close(ours(x), expected)


def test_what_is_refused_of_pyg_is_named() -> None:
    library = pytest.importorskip("torch_geometric.nn")

    class Own(library.GCNConv):
        def message(self, x_j: torch.Tensor) -> torch.Tensor:
            return 2 * x_j

    changed, hooked = library.GCNConv(4, 4), library.GCNConv(4, 4)
    changed.node_dim = 0
    hooked.register_message_forward_hook(lambda *_: None)
    model = nn.ModuleDict({"own": Own(4, 4), "changed": changed, "hooked": hooked, "lazy": library.GCNConv(-1, 4),
                           "none": library.ResGatedGraphConv(4, 4), "no parameters": library.LGConv()})
    _, report = convert(model)
    assert set(model) == set(report.refused) and not report.converted


def test_ties_hooks_parametrizations_and_modes_stay() -> None:
    conv, twin = parametrizations.weight_norm(nn.Conv2d(3, 3, 3, padding=1)), nn.Conv2d(3, 3, 3, padding=1)
    tied = nn.Conv2d(3, 3, 3, padding=1)
    tied.weight = twin.weight
    model = nn.Sequential(conv, twin, tied, twin, nn.Dropout()).double().eval()
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    model[4].train()
    twin.bias.requires_grad_(False)
    kept = list(model.parameters())
    before = model[:4](torch.ones(1, 3, 5, 5, dtype=torch.float64))
    ours, report = convert(model, inplace=True, example=torch.randn(1, 3, 5, 5, dtype=torch.float64))
    assert ours is model and all(a is b for a, b in zip(kept, ours.parameters(), strict=True))
    assert ours[2].weight is ours[1].weight and ours[3] is ours[1] and is_parametrized(ours[0])
    assert isinstance(ours[0], compat.Conv2d) and not ours[0].training and ours[4].training
    assert not ours[1].bias.requires_grad and report.difference < 1e-12 and seen
    back, _ = to_torch(copy.deepcopy(ours), inplace=True)
    for one in (ours, back):
        torch.testing.assert_close(one[:4](torch.ones(1, 3, 5, 5, dtype=torch.float64)), before)
    assert not isinstance(back[0], compat.Conv2d) and is_parametrized(back[0])


@pytest.mark.parametrize("options", [{}, {"enable_nested_tensor": False}])
def test_torchs_fused_encoder_is_back_after_conversion(options: dict[str, bool]) -> None:
    fused = "activation_relu_or_gelu", "use_nested_tensor", "enable_nested_tensor"
    encoders = [kind.TransformerEncoder(kind.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True), 1,
                                        **options) for kind in (nn, compat)]
    models = [encoders[0], to_torch(encoders[1])[0], to_torch(convert(encoders[0])[0])[0]]
    expected, *actual = ([module.__dict__.get(name) for module in model.modules() for name in fused]
                         for model in models)
    assert 2 in expected and actual == [expected, expected]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_parts_have_their_former_attention_again() -> None:
    """A model that refuses another attention beside a backbone that takes it, and a configuration of no model."""
    import transformers as t

    swin = t.SwinConfig(embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2, image_size=64, patch_size=4,
                        out_features=["stage1", "stage2", "stage3", "stage4"])
    vision = {"hidden_size": 32, "output_channels": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
              "mlp_dim": 48, "image_size": 32, "patch_size": 4, "window_size": 4, "global_attn_indexes": [0]}
    masks = t.Mask2FormerConfig(backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32,
                                encoder_feedforward_dim=32, encoder_layers=1, decoder_layers=2, num_attention_heads=4,
                                dim_feedforward=32)
    segments = t.SamConfig(vision_config=vision, prompt_encoder_config={"image_size": 32, "patch_size": 4},
                           mask_decoder_config={"num_hidden_layers": 1})
    for model in (t.Mask2FormerForUniversalSegmentation(masks), t.SamModel(segments)):
        before, ours = attention_of(model), convert(model)[0]
        assert "structconv" in attention_of(ours).values()
        back, report = to_torch(ours)
        assert attention_of(back) == before and report.converted


def attention_of(model: Any) -> dict[str, Any]:
    parts = {name: getattr(model.config, name) for name in model.config.sub_configs}
    return {"": model.config._attn_implementation,
            **{name: part._attn_implementation for name, part in parts.items() if part is not None}}


def pruned_twice(module: nn.Module, name: str) -> None:
    """Pruned, with a computed weight whose gradient torch does not copy."""
    prune.l1_unstructured(module, name, 0.5)
    prune.random_unstructured(module, name, 0.3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_pruned_model_is_converted_and_trains_with_its_masks() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(1), nn.Linear(40, 40), nn.Unflatten(1, (5, 8)),
                          nn.MultiheadAttention(8, 2, batch_first=True), nn.utils.weight_norm(nn.Linear(8, 3)))
    pruned_twice(model[0], "weight")
    pruned_twice(model[2], "weight")
    pruned_twice(model[4], "in_proj_weight")
    x = torch.randn(2, 4, 5)

    def run(layers: Any) -> torch.Tensor:
        h = layers[3](layers[2](layers[1](layers[0](x))))
        return layers[5](layers[4](h, h, h)[0]).square().sum()

    assert model[0].weight.grad_fn is not None
    masks = copy.deepcopy(dict(model.named_buffers()))
    ours, report = convert(model)
    assert set(report.converted) == {"0", "4"} and "weight_mask" in dict(ours[0].named_buffers())
    run(model).backward()
    run(ours).backward()
    torch.testing.assert_close(run(ours), run(model))
    for (name, one), two in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
        if f"{name.removesuffix('_orig')}_mask" in masks:
            assert not two.grad[masks[f"{name.removesuffix('_orig')}_mask"] == 0].any()
    assert all(torch.equal(value, masks[name]) for name, value in ours.named_buffers())
    back, _ = to_torch(ours)
    torch.testing.assert_close(run(back), run(model))
    prune.remove(ours[0], "weight")
    torch.testing.assert_close(run(ours), run(model))
    chain = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4))
    pruned_twice(chain[0], "weight")
    assert not merge_linear(chain)[1].converted
    if find_spec("torch_geometric") is not None:
        layer = pytest.importorskip("torch_geometric.nn").GINConv(nn.Linear(4, 4))
        pruned_twice(layer.nn, "weight")
        assert list(convert(layer)[1].converted) == [""]


def test_the_report_is_plain_and_its_expressions_build() -> None:
    model = nn.ModuleList([nn.Conv2d(3, 4, 3, stride=2), nn.ConvTranspose1d(2, 2, 3), nn.AvgPool1d(2),
                           nn.MultiheadAttention(8, 2)])
    if find_spec("torch_geometric") is not None:
        library = pytest.importorskip("torch_geometric.nn")
        model.extend([library.GATConv(4, 2, 2, edge_dim=3), library.GCNConv(4, 2), library.TransformerConv(4, 2, 2),
                      library.ChebConv(4, 2, 3), library.RGCNConv(4, 2, 3), library.SAGEConv(4, 2)])
    _, report = convert(model)
    assert json.loads(json.dumps(report.dict()))["converted"][0]["expression"] == repr(mechanisms.Cuboid(
        (3, 3), stride=2, padding="valid"))
    for _, after, expression in report.converted.values():
        actual = eval(expression, {name: getattr(mechanisms, name) for name in mechanisms.__all__})
        assert isinstance(actual, mechanisms.Mechanism) and expression in str(report) and after in str(report)
    with_difference = Report(difference=float("nan"), scale=1.0)
    assert "nan" in str(with_difference)


def test_a_difference_of_outputs_is_found() -> None:
    class Differs(nn.Module):
        """It computes otherwise when its layer is converted."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 3 * (type(self.layer) is not nn.Conv1d)

    _, report = convert(Differs(), example=(torch.ones(1, 1, 2),))
    assert (report.difference, report.scale) == (3.0, 1.0)


def test_layers_whose_weight_and_options_were_replaced() -> None:
    gray, wider = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
    gray.weight = nn.Parameter(gray.weight.detach().sum(1, keepdim=True))
    wider.stride, wider.padding, wider.dilation = 1, 2, 2  # type: ignore[assignment]
    _, report = convert(nn.Sequential(gray, wider), example=torch.randn(2, 1, 9, 9))
    assert len(report.converted) == 2 and report.difference is not None and report.difference < 1e-5


def test_an_example_is_not_changed() -> None:
    x = torch.randn(2, 3)
    model, before = nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(3, 3)), x.clone()
    for function in (convert, merge_linear):
        assert function(model, example=x)[1].difference == 0 and torch.equal(x, before)


def test_each_part_of_a_composite_model_gets_its_former_attention() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.CLIPConfig(text_config={"vocab_size": 50, "eos_token_id": 2, **small}, projection_dim=8,
                                     vision_config={"image_size": 8, "patch_size": 4, **small})
    model = transformers.CLIPModel(config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    ours, _ = convert(model)
    assert ours.config.text_config._attn_implementation == "structconv"
    back = to_torch(ours)[0].config
    assert [part._attn_implementation for part in (back.text_config, back.vision_config)] == ["eager", "sdpa"]


# -- merge_linear -------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: (nn.Linear(6, 20), nn.Linear(20, 5, bias=False)), (3, 6)),
    "replaced weight": (lambda: replaced(nn.Linear), (2, 5)),
    "pointwise last": (lambda: (nn.Conv2d(3, 9, 3, 2, 1, 2, padding_mode="circular"), nn.Conv2d(9, 2, 1, 2)),
                       (2, 3, 11, 11)),
    "pointwise first": (lambda: (nn.Conv1d(3, 30, 1, bias=False), nn.Conv1d(30, 4, 3, 2, 2, 2)), (2, 3, 11)),
    "strided": (lambda: (nn.Conv2d(2, 30, (2, 3), (2, 1), 1), nn.Conv2d(30, 2, 3, (1, 2))), (1, 2, 16, 17)),
    "ours": (lambda: (OwnConv2d(3, 30, 3), OwnConv2d(30, 2, 3)), (1, 3, 9, 9)),
    "compat": (lambda: (compat.Conv1d(3, 30, 3), compat.Conv1d(30, 2, 2)), (1, 3, 9)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_merged_layers_compute_the_same(name: str) -> None:
    make, shape = PAIRS[name]
    torch.manual_seed(0)
    model = nn.Sequential(*make(), nn.ReLU()).double()
    merged, report = merge_linear(model, example=torch.randn(shape, dtype=torch.float64))
    assert list(report.converted) == ["0", "1"] and report.difference < 1e-12 and report.scale > 0.1
    assert report.parameters[1] < report.parameters[0]
    assert type(merged[1]) is nn.Identity and type(model[1]) is not nn.Identity
    assert not any(module.training for module in merge_linear(model.eval())[0].modules())


def test_complex_layers_are_merged() -> None:
    model = nn.Sequential(nn.Linear(4, 9, dtype=torch.complex64), nn.Linear(9, 3, dtype=torch.complex64))
    x = torch.randn(5, 4, dtype=torch.complex64)
    merged, report = merge_linear(model, example=x)
    assert report.difference is not None and report.difference < 1e-5
    assert type(merged[1]) is nn.Identity
    torch.testing.assert_close(merged(x), model(x))


def test_named_pairs_and_chains() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 30), nn.Linear(30, 30)
            self.rest = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(self.second(self.first(x)))

    merged, report = merge_linear(Net(), pairs=[("first", "second")], example=torch.randn(3, 4))
    assert merged.rest[0].weight.shape == (2, 30) and merged.first.weight.shape == (30, 4)
    assert report.parameters == (4 * 30 + 30 + 3 * 930 + 62, 4 * 30 + 30 + 62) and report.difference < 1e-5
    with pytest.raises(ConfigError, match=r"pairs must name modules of the model; got 'none'"):
        merge_linear(Net(), pairs=[("first", "none")])


def test_chains_are_merged_as_a_whole() -> None:
    for _ in range(20):  # new layers get the addresses of old ones at random
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 32), nn.Linear(32, 16), nn.Linear(16, 2))
        merged, report = merge_linear(model)
        assert not report.refused and merged[0].weight.shape == (2, 8)


def test_merged_layers_on_a_graph_take_its_structure() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Conv(Adjacency("sym"), 8, 64, bias=False), Conv(Adjacency("row"), 64, 4)

        def forward(self, x: torch.Tensor, graph: Any) -> torch.Tensor:
            return self.second(x=self.first(x, graph), structure=graph) + 0 * self.second(self.first(x, graph), graph)

    example = torch.randn(9, 8), Grid((3, 3)).graph()
    merged, report = merge_linear(Net(), pairs=[("first", "second")], example=example)
    assert report.difference is not None and report.difference < 1e-5 and isinstance(merged.second, nn.Identity)
    assert torch.equal(pickle.loads(pickle.dumps(merged.second))(*example), example[0])
    with pytest.raises(ConfigError, match="return_weights must be False for a layer that was merged"):
        merged.second(*example, return_weights=True)


def shared() -> nn.Sequential:
    layer = nn.Linear(9, 9)
    return nn.Sequential(layer, layer)


def changed(change: Callable[[nn.Module], Any]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4))
    change(model[0])
    return model


def replaced(kind: Any, option: int = 1) -> nn.Sequential:
    """Two layers, the first with the weight of fewer inputs."""
    model = nn.Sequential(kind(8, 64, option), kind(64, 4, option))
    model[0].weight = nn.Parameter(model[0].weight.detach()[:, :5].clone())
    return model


def with_child(path: str, layer: nn.Module) -> nn.Sequential:
    """A layer of ours with a child without parameters that its user added."""
    last = OwnConv2d(40, 4, 1) if isinstance(layer, OwnConv2d) else Conv(mechanisms.Identity(), 40, 4)
    model = nn.Sequential(layer, last)
    model.get_submodule(path).own = nn.Identity()
    return model


class Doubled(Conv):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_a_layer_of_an_own_class_stays() -> None:
    model = nn.Sequential(Doubled(mechanisms.Identity(), 4, 40, bias=False), Conv(mechanisms.Identity(), 40, 4))
    merged, report = merge_linear(model, example=torch.randn(3, 4))
    assert not report.converted and type(merged[0]) is Doubled and report.difference == 0


KEPT = {
    "more than once": shared, "hooks": lambda: changed(lambda layer: layer.register_forward_hook(lambda *_: None)),
    "frozen": lambda: changed(lambda layer: layer.requires_grad_(False)),
    "would cost": lambda: nn.Sequential(nn.Linear(40, 4), nn.Linear(4, 40)),
    "pads": lambda: nn.Sequential(nn.Conv1d(2, 50, 3), nn.Conv1d(50, 2, 3, padding=1)),
    "groups": lambda: nn.Sequential(nn.Conv1d(2, 50, 3), nn.Conv1d(50, 2, 1, groups=2)),
    "replaced": lambda: replaced(nn.Conv1d),
    "has hooks": lambda: changed(lambda layer: layer.register_state_dict_post_hook(lambda *_: None)),
    "parametrization": lambda: changed(parametrizations.weight_norm),
    "'extra' was added": lambda: changed(lambda layer: layer.register_buffer("extra", torch.ones(1))),
    "'drop' was added": lambda: changed(lambda layer: layer.add_module("drop", nn.Dropout())),
    "'own' was added": lambda: with_child("0", Conv(mechanisms.Identity(), 4, 40)),
    "'own' was added to": lambda: with_child("0", OwnConv2d(4, 40, 1)),
    "'own' was added to a": lambda: with_child("0.cuboid", OwnConv2d(4, 40, 1)),
    "'own' was added to a layer": lambda: with_child("0.identity", Conv(mechanisms.Identity(), 4, 40)),
    "dtypes": lambda: nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4).double()),
}


@pytest.mark.parametrize("reason", KEPT)
def test_layers_that_stay_apart(reason: str) -> None:
    model = KEPT[reason]()
    merged, report = merge_linear(model)
    assert reason in " ".join(report.refused.values()) and not report.converted
    assert [type(m) for m in merged] == [type(m) for m in model]
    assert report.parameters[0] == report.parameters[1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_models_that_share_a_configuration_are_all_in_the_report(implementation: str) -> None:
    library = pytest.importorskip("transformers")
    config = library.BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                num_attention_heads=2, attn_implementation=implementation)
    model = nn.ModuleDict({name: library.BertModel(config) for name in ("one", "two")})
    ours, report = convert(model)
    assert [*report.converted] == [f"{name}.encoder.layer.0.attention.self" for name in model]
    back, report = to_torch(ours)
    assert {name: after for name, (_, after, _) in report.converted.items()} == dict.fromkeys(
        model, f'attn_implementation="{implementation}"')
    assert back["two"].config._attn_implementation == model["two"].config._attn_implementation == implementation


def test_layers_of_unknown_channels_say_so():
    _, report = convert(nn.Sequential(nn.LazyConv1d(4, 3)))
    assert report.refused == {"0": "LazyConv1d: its channels are still unknown. Call the model once before"}
