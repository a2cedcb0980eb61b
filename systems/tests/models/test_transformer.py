"""Transformers and models of characters: what is theirs alone beside the laws of `test_translators`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from structconv import Causal, ConfigError, ShapeError
from structconv.mechanisms import STRUCTURE_IF_GIVEN, ALiBi, DotProduct, Shifts
from structconv_systems.models.characters import CharacterModel
from structconv_systems.models.decoding import beam, greedy, sample
from structconv_systems.models.transformer import Transformer
from systems.tests.models.sequences import WORDS, batch, check_learns, check_saved, pairs
from systems.tests.models.test_translators import TRANSFORMERS, C, K
from tests.support.drawn import drawn, slow

SIZES = {"channels": C, "heads": K, "layers": 2, "hidden": 32}
SOURCE, TARGET = pairs()
PACKED = pytest.mark.parametrize("packed", [True, False])


def make(name="transformer", **options):
    torch.manual_seed(0)
    return TRANSFORMERS[name](**options)


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name != "transformer, shifts"])
def test_padded_sentences_are_those_side_by_side(name):
    model = make(name).eval()
    model.packed = True
    expected = model(SOURCE, TARGET)
    model.packed = False
    torch.testing.assert_close(model(SOURCE, TARGET), expected, atol=1e-5, rtol=1e-5)


@PACKED
def test_no_sentences_have_no_logits_and_padding_has_no_gradient(packed):
    assert make(packed=packed)(SOURCE[:0], TARGET[:0]).shape == (0, TARGET.shape[1], WORDS)
    grads = []
    for extra in (0, 3):
        model = make(packed=packed)
        source, target = F.pad(SOURCE, (0, extra)), F.pad(TARGET, (0, extra))
        loss = F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_cached_decoding_finds_what_full_passes_find():
    model = make("transformer, rotary").eval()
    target = torch.ones(3, 1).long()
    for _ in range(8):
        with torch.no_grad():
            target = torch.cat([target, model(SOURCE, target)[:, -1:].argmax(-1)], 1)
    assert greedy(model.begin(SOURCE), 3, begin=1, end=None, most=8) == target[:, 1:].tolist()
    actual = beam(model.begin(SOURCE), 3, width=3, begin=1, end=2, most=8)
    single = [beam(model.begin(row[row != 0][None]), 1, width=3, begin=1, end=2, most=8)[0] for row in SOURCE]
    assert actual == single


@pytest.mark.parametrize("name", ["plain", "rotary"])
def test_steps_run_in_one_kernel(name):
    model = make(f"transformer, {name}").eval()
    layer = model.decoder.blocks[0].attention
    x = torch.randn(2, 5, C)
    with torch.no_grad():
        cache = layer.prepare(x[:, :4])
        first = cache.length
        cache.reserve(x[:, 4:])
        assert layer.plan(cache, z=x[:, 4:], positions=first).kernel == "structconv.attention_step"


def test_vocabularies_are_tied_as_told():
    count = {key: len({id(p) for p in make(**options).parameters() if p.shape[0] in (WORDS, WORDS + 5)})
             for key, options in {"one": {}, "two": {"target_vocabulary": WORDS + 5}, "apart": {"tied": False}}.items()}
    assert count == {"one": 1, "two": 2, "apart": 3}
    assert make(target_vocabulary=WORDS + 5)(SOURCE, TARGET).shape == (3, TARGET.shape[1], WORDS + 5)


def test_recomputed_blocks_have_the_gradients_of_those_that_are_kept():
    grads = []
    for recompute in (False, True):
        model = make(dropout=0.5, recompute=recompute)
        torch.manual_seed(1)
        model(SOURCE, TARGET).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


def test_what_attends_like_torch_gives_what_torch_gives():
    model = make(norm="pre", positions="none").double()
    peer = nn.Transformer(C, K, 2, 2, 32, 0.0, batch_first=True, norm_first=True).double()
    _copy(model, peer)
    missing, e = SOURCE == 0, model.tokens[0].embedding.weight * C ** 0.5
    mask = nn.Transformer.generate_square_subsequent_mask(TARGET.shape[1], dtype=torch.float64)
    h = peer(e[SOURCE], e[TARGET], tgt_mask=mask, src_key_padding_mask=missing, memory_key_padding_mask=missing)
    exist = TARGET != 0
    expected = h @ model.tokens[0].embedding.weight.mT
    torch.testing.assert_close(model(SOURCE, TARGET)[exist], expected[exist])


@torch.no_grad()
def _copy(model, peer):
    for stack, other in ((model.encoder, peer.encoder), (model.decoder, peer.decoder)):
        for block, layer in zip(stack.blocks, other.layers, strict=True):
            others = [layer.self_attn] if block.source is None else [layer.self_attn, layer.multihead_attn]
            for own, attention in zip([block.attention, block.source], others, strict=False):
                dot = next(part for part in own.modules() if isinstance(part, DotProduct))
                values = own.weight.value.weight
                attention.in_proj_weight.copy_(torch.cat([dot.query.weight, dot.key.weight, values]))
                attention.out_proj.weight.copy_(own.weight.output.weight)
                attention.out_proj.bias.copy_(own.bias)
            layer.linear1.load_state_dict(block.network[0].state_dict())
            layer.linear2.load_state_dict(block.network[-1].state_dict())


@pytest.mark.parametrize("packed", drawn([True, False], 2))
def test_exported_for_any_batch_and_length(packed):
    model = make(packed=packed, layers=1).eval()
    samples, inputs, outputs = (torch.export.Dim(name, min=2, max=64) for name in ("samples", "inputs", "outputs"))
    program = torch.export.export(model, (SOURCE, TARGET), dynamic_shapes=(
        {0: samples, 1: inputs}, {0: samples, 1: outputs}))
    torch.testing.assert_close(program.module()(SOURCE, TARGET), model(SOURCE, TARGET), atol=1e-5, rtol=1e-5)
    source, target = batch((4, 9), seed=2), batch((8, 3), begin=True, seed=3)
    torch.testing.assert_close(program.module()(source, target), model(source, target), atol=1e-5, rtol=1e-5)


@slow
def test_compiled_whole():
    model = make().eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(SOURCE, TARGET), model(SOURCE, TARGET), atol=1e-5, rtol=1e-5)


def test_learned_positions_have_a_length():
    with pytest.raises(ShapeError, match="length=5"):
        make(positions="learned", length=5)(SOURCE, TARGET)


# -- characters -----------------------------------------------------------------------------------------------------

def characters(**options):
    torch.manual_seed(0)
    return CharacterModel(WORDS, **{**SIZES, "dropout": 0.0, **options})


TEXT = torch.randint(0, WORDS, (3, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("recompute", drawn([True, False], 2))
def test_a_small_text_is_learned(recompute):
    model = characters(recompute=recompute)
    check_learns(model, lambda: F.cross_entropy(model(TEXT[:, :-1]).flatten(0, 1), TEXT[:, 1:].flatten()), 80)


def test_a_window_sees_so_many_characters_with_the_same_weights():
    short, windowed = characters(layers=1).eval(), characters(window=4, layers=1).eval()
    windowed.load_state_dict(short.state_dict())
    torch.testing.assert_close(windowed(TEXT[:, :4]), short(TEXT[:, :4]), atol=1e-5, rtol=1e-5)
    changed = TEXT.clone()
    changed[:, 0] = (TEXT[:, 0] + 1) % WORDS
    assert torch.equal(windowed(changed)[:, 4:], windowed(TEXT)[:, 4:])
    assert not torch.allclose(short(changed)[:, 4:], short(TEXT)[:, 4:])


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"positions": "sinusoidal"}, {"positions": "learned"}], ids=str)
def test_characters_to_come_change_nothing_and_steps_are_the_full_pass(options):
    model, changed = characters(**options).eval(), TEXT.clone()
    changed[:, 7:] = 3
    whole = model(TEXT)
    torch.testing.assert_close(model(changed)[:, :7], whole[:, :7], atol=1e-5, rtol=1e-5)
    decoding = model.begin(3)
    steps = torch.stack([decoding.step(tokens) for tokens in TEXT.unbind(1)], 1)
    torch.testing.assert_close(steps, whole, atol=1e-5, rtol=1e-5)


def test_texts_go_on_behind_a_prompt():
    model = characters().eval()
    actual = greedy(model.begin(3), 3, begin=TEXT, end=None, most=5)
    whole = TEXT
    for _ in range(5):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    assert actual == whole[:, 12:].tolist()
    texts = sample(model.begin(3), 3, begin=TEXT, end=None, most=5, top_k=3, generator=torch.Generator().manual_seed(0))
    assert [len(text) for text in texts] == [5] * 3


def test_a_model_of_characters_is_saved_and_loaded():
    check_saved(characters().eval(), CharacterModel(WORDS, **SIZES).eval(), TEXT)


@slow
def test_a_model_of_characters_is_exported():
    model = characters().eval()
    samples, length = torch.export.Dim("samples", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(model, (TEXT,), dynamic_shapes=({0: samples, 1: length},))
    for text in (TEXT, TEXT[:2, :5]):
        torch.testing.assert_close(program.module()(text), model(text), atol=1e-5, rtol=1e-5)


def test_mechanisms_are_exchanged_and_a_decoder_must_not_see_ahead():
    tokens = torch.tensor([[4, 5, 6]])
    whole = DotProduct(2, 4).scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax()
    causal = (DotProduct(2, 4) + ALiBi()).masked(keep=Causal()).softmax()
    model = Transformer(9, channels=8, heads=2, hidden=8, layers=2, encoder_mechanism=whole, decoder_mechanism=causal,
                        source_mechanism=lambda layer: whole)
    assert model(tokens, tokens).shape == (1, 3, 9)
    assert "ALiBi" in repr(model.decoder) and "ALiBi" not in repr(model.encoder)
    for ahead in (whole, Shifts([-1, 0]), lambda layer: DotProduct(2, 4).softmax()):
        with pytest.raises(ConfigError, match="decoder_mechanism must be causal"):
            Transformer(9, channels=8, heads=2, hidden=8, layers=1, decoder_mechanism=ahead)
