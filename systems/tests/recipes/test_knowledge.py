"""Recipes on knowledge graphs: train, evaluate on other files, resume, pictures, what is wrong in files and options."""

import json
import resource
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from structconv.cli import main
from structconv.structures import KnowledgeGraph
from structconv_systems.data.knowledge import Classes
from structconv_systems.recipes import links
from structconv_systems.recipes.links import Facts
from structconv_systems.recipes.options.knowledge import RGCNEntities, TypedWalks
from structconv_systems.recipes.rgcn_entities import EntityTask, without_types
from structconv_systems.recipes.walks import WalkTask
from structconv_systems.train.parts import TestReadEarly, final_evaluation
from systems.tests.recipes.runs import Runs, check_laws, evaluated, others, summary_of, trained

TINY = ["steps=4", "validate_every=2", "checkpoint_every=2", "seeds=1", "batch_size=4"]
TRAINED = {"rgcn-links": [*TINY, "triples=family", "channels=8", "bases=2"], "walks": [*TINY, "triples=family"],
           "rgcn-entities": ["facts=facts.nt", "train=train.tsv", "test=test.tsv", "seeds=2", "epochs=3"]}
EACH = pytest.mark.parametrize("name", list(TRAINED))


def family(folder, names):
    """Parents and children in three parts."""
    folder.mkdir()
    rows = [f"{a}\t{'older' if a < b else 'younger'}\t{b}" for a in names for b in names if a != b]
    for part, lines in (("train", rows[:-4]), ("valid", rows[-4:-2]), ("test", rows[-2:])):
        (folder / f"{part}.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Triples, the same kind of others, and RDF."""
    folder = tmp_path_factory.mktemp("data")
    family(folder / "family", "abcde")
    family(folder / "others", "vwxyz")
    facts = [f"<http://x/{a}> <http://x#in> <http://x/{'even' if a % 2 == 0 else 'odd'}> ." for a in range(12)]
    told = [f"<http://x/{a}> <http://x#employs> <http://x/{a % 2}> ." for a in range(12)]
    (folder / "facts.nt").write_text("\n".join([*facts, *told]))
    for name, numbers, turned in (("train", range(8), 0), ("test", range(8, 12), 0), ("turned", range(8, 12), 1)):
        rows = "".join(f"http://x/{a}\t{(a + turned) % 2}\n" for a in numbers)
        (folder / f"{name}.tsv").write_text("person\tlabel_kind\n" + rows)
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), lambda name: ["train", name, *TRAINED[name], "--data", str(data)])


@EACH
def test_a_run_keeps_the_laws(runs, name, tmp_path, capsys):
    check_laws(runs[name], tmp_path, capsys)


@pytest.mark.parametrize(("name", "test"), [("walks", "others"), ("rgcn-links", "family")])
def test_other_triples_are_ranked(runs, name, test, data, capsys):
    """The other family is the same but for the names, which walks do not know."""
    actual = evaluated(runs[name], capsys, "--test", str(data / test))
    assert actual["test"]["name"] == str(data / test)
    assert {Path(file).parent for file in actual["test"]["files"]} == {data / test}
    kept = json.loads((runs[name] / actual["test"]["file"]).read_text())
    assert (kept["groups"], kept["test"]) == (actual["groups"], actual["test"])
    assert str(data / test) in (runs[name] / "report.html").read_text()
    assert actual["groups"] == summary_of(runs[name])["groups"]


def accuracy(actual):
    return actual["groups"]["rgcn-entities"]["test_accuracy"]["mean"]


def test_other_classes_are_measured(runs, data, capsys):
    run = runs["rgcn-entities"]
    actual = evaluated(run, capsys, "--test", str(data / "turned.tsv"))
    assert accuracy(actual) == 100 - accuracy(summary_of(run))


def test_a_model_of_entities_knows_no_others(runs, data, capsys):
    assert main(["evaluate", str(runs["rgcn-links"]), "--test", str(data / "others")]) == 3
    assert "others: expected names of entity that the training has; got 'v'" in capsys.readouterr().err


def test_what_is_compared(runs):
    groups = {name: list(summary_of(runs[name])["groups"]) for name in TRAINED}
    assert groups == {"rgcn-links": ["rgcn", "distmult", "distmult-tuned"], "walks": ["walks", "relations"],
                      "rgcn-entities": ["rgcn-entities", "relation-dropout", "without-types"]}


def test_a_graph_without_types_joins_each_pair_once():
    graph = KnowledgeGraph(torch.tensor([[0, 0, 1], [0, 1, 1], [2, 1, 0]]), 3, ("likes", "knows"))
    plain = without_types(graph)
    assert plain.triples.tolist() == [[0, 0, 1], [2, 0, 0]] and plain.relations == ("related",)


def test_relations_are_left_out_both_ways_in_training_alone():
    own = KnowledgeGraph(torch.tensor([[m, k, (m + k + 1) % 9] for m in range(9) for k in range(4)]), 9, tuple("abcd"))
    nodes, labels = (dict.fromkeys(("train", "test"), torch.arange(9) % cut) for cut in (9, 2))
    data = Classes(graph=own.with_inverses(), nodes=nodes, labels=labels, classes=("0", "1"))
    task = EntityTask(RGCNEntities(data="."), data, seed=1, drop_relations=0.4)
    asked = []
    task.model.register_forward_pre_hook(lambda model, args: asked.append(args[0].triples))
    for step in range(30):
        task.train_step(step)
    sizes = {len(triples) for triples in asked}
    assert sizes <= {18 * count for count in range(5)} and len(sizes) > 2
    assert all(torch.equal(triples[:, 1].bincount(minlength=8)[:4], triples[:, 1].bincount(minlength=8)[4:])
               for triples in asked)
    with final_evaluation():
        task.test()
    assert torch.equal(asked[-1], data.graph.triples)


def test_walks_are_named_and_drawn(runs):
    walks = summary_of(runs["walks"])["walks"]
    assert sorted(walks) == ["older", "younger"]
    assert all(len(name.split(".")) == 2 for row in walks.values() for name in row)
    assert (runs["walks"] / "pictures" / "walks.png").read_bytes().startswith(b"\x89PNG")


def test_rdf_is_learned(data, tmp_path):
    words = others(TRAINED["rgcn-entities"], "epochs=30", "seeds=1")
    run = trained(tmp_path / "run", ["train", "rgcn-entities", *words, "--data", str(data)])
    assert accuracy(summary_of(run)) == 100


@pytest.mark.parametrize("name", ["rgcn-links", "walks"])
def test_trying_writes_nothing(data, name, tried):
    actual = tried(["train", name, *TRAINED[name], "--data", str(data)])
    assert actual["trainings"] == (2 if name == "walks" else 3)


def large(folder, triples):
    folder.mkdir()
    rows = "".join(f"e{m}\tr{k}\te{n}\n" for m, k, n in triples)
    for part, text in (("train", rows), ("valid", "e1\tr1\tnew\n"), ("test", "e2\tr1\te3\n")):
        (folder / f"{part}.txt").write_text(text)


def test_walks_in_a_large_graph_say_what_they_would_take(tmp_path, refused):
    """In one line, before anything of that size is allocated."""
    large(tmp_path / "hub", ((0, n % 11, n) for n in range(1, 10_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(["train", "walks", "--data", str(tmp_path), "--triples", "hub", "--unseen", "admit", "steps=1"],
            "walks of two relations must be at most 67,108,864, 1 GiB; got 99,990,000, 1.49 GiB")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_walks_in_a_graph_of_few_for_an_entity_need_no_table_of_all_pairs(tmp_path):
    """Of 22 relations and 20,000 entities, whose scores would take 35 GB, and counts of walks 780 GB."""
    large(tmp_path / "path", ((n, n % 11, n + 1) for n in range(20_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = ["train", "walks", "--data", str(tmp_path), "--triples", "path", "--unseen", "admit", "steps=2", "warmup=1",
             "seeds=1", "batch_size=16", "validate_every=1"]
    trained(tmp_path / "run", words)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


class Largest(TorchDispatchMode):
    """The entries of the largest tensor that is computed."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.entries = max([self.entries, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_a_batch_of_the_default_size_is_scored_in_parts(tmp_path):
    """Its scores of 10,000 entities would be 82 million numbers."""
    large(tmp_path / "path", ((n, n % 3, n + 1) for n in range(10_000)))
    recipe = TypedWalks(data=str(tmp_path), triples="path", unseen="admit")
    task = WalkTask(recipe, Facts.read(recipe, own_entities=False), length=2, seed=0)
    with Largest() as largest:
        task.train_step(1)
        task.validate()
    assert 10_000 < largest.entries <= links._ENTRIES


def test_parts_of_a_batch_have_the_gradient_of_the_whole(data, monkeypatch):
    monkeypatch.setattr("structconv_systems.models.walks._TABLE", 0)
    recipe = TypedWalks(data=str(data), triples="family", batch_size=8, clip=0.0)
    facts, results = Facts.read(recipe, own_entities=False), []
    for most, count in ((links._ENTRIES, 1), (60, 8), (200, 6)):
        monkeypatch.setattr(links, "_ENTRIES", most)
        torch.manual_seed(0)
        task = WalkTask(recipe, facts, 2, seed=0)
        task.model.double()
        for parameter in task.model.parameters():
            torch.nn.init.normal_(parameter)
        samples = task.batches.at(1)
        parts = task.split(samples)
        assert len(parts) == count and [one for part in parts for one in part] == samples
        loss = task.train_step(1)["loss"]
        results.append((loss, *(parameter.grad for parameter in task.model.parameters()), task.validate()["val_mrr"]))
    assert all(gradient.any() for gradient in results[0][1:-1])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_test_triples_count_as_wrong_in_validation(tmp_path):
    """By scores a < e < c < d < b of tails; (a, likes, .) is b in training, c in validation, d and e in the test."""
    (tmp_path / "few").mkdir()
    for part, tails in (("train", "b"), ("valid", "c"), ("test", "de")):
        (tmp_path / "few" / f"{part}.txt").write_text("".join(f"a\tlikes\t{tail}\n" for tail in tails))
    recipe = TypedWalks(data=str(tmp_path), triples="few", unseen="admit")
    facts = Facts.read(recipe, own_entities=False)
    task = WalkTask(recipe, facts, 1, seed=0)
    order = torch.tensor(["aecdb".index(name) for name in facts.graph.entities]).float()
    task.score = lambda questions: order.expand(len(questions), -1)
    assert task.figures("val")["val_mrr"] == pytest.approx(100 * (1 / 2 + 1 / 5) / 2)
    with pytest.raises(TestReadEarly):
        facts.known["test"]
    with final_evaluation():
        assert task.figures("test")["test_mrr"] == pytest.approx(100 * (1 + 1 / 5) / 2)


@pytest.mark.parametrize(("name", "options", "code", "said"), [
    ("walks", ["triples=family", "batch_size=1000000000"], 2, "the scores of a step must take at most 4,294,967,296 "
     "numbers, about a minute; got 10,000,000,000, about 2.33 minutes. Give --batch-size 429496729."),
    ("walks", ["triples=none"], 3, "got no such file"),
    ("walks", ["triples=bad"], 3, "bad/test.txt, line 1: expected three columns: head, relation, tail; got 'a older'"),
    ("rgcn-links", ["triples=facts.nt"], 3, "expected a folder, or a whole tar archive"),
    ("rgcn-links", ["unseen=maybe"], 2, "unseen must be error or admit"),
    ("walks", ["sparsity=1"], 2, "sparsity"),
    ("rgcn-entities", ["facts=train.tsv", "train=train.tsv"], 3, "train.tsv, line 1: expected a statement"),
    ("rgcn-entities", ["facts=facts.nt", "train=facts.nt"], 3, "facts.nt, line 1: expected a column label...")])
def test_bad_input(data, refused, name, options, code, said):
    if "triples=bad" in options:
        bad = data / "bad"
        bad.mkdir()
        for part in ("train", "valid"):
            (bad / f"{part}.txt").write_text("a older b\n")
        (bad / "test.txt").write_text("a older\n")
    refused(["train", name, *options, "--data", str(data)], said, code)
