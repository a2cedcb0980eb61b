"""The README's table is what the script writes of the run that is recorded, and that run is of the present code."""

import json

import pytest

from structconv.analysis.flops import forward_flops
from structconv_systems.data.digits import load_digits
from structconv_systems.recipes.digits import network
from structconv_systems.recipes.options.images import CompareDigits
from tools import results

RESULTS = json.loads(results.RECORDED.read_text(encoding="utf-8"))


def test_the_readme_has_the_table_of_the_recorded_run():
    text = results.PAGE.read_text(encoding="utf-8")
    assert results.written(text, RESULTS) == text
    assert text.count(results.block(RESULTS)) == 1


def test_the_recorded_run_is_the_default_recipe():
    assert (RESULTS["recipe"], RESULTS["seeds"]) == (CompareDigits.name, CompareDigits().seeds)
    assert tuple(RESULTS["bases"]) == CompareDigits().bases


@pytest.mark.parametrize("basis", RESULTS["bases"])
def test_parameters_and_flops_are_those_of_the_present_code(basis):
    digits = load_digits()
    model = network(CompareDigits(), digits, basis)
    recorded = RESULTS["bases"][basis]
    assert sum(p.numel() for p in model.parameters()) == recorded["parameters"]
    assert forward_flops(model, digits.test.images[:1]) == recorded["flops"], "record a new run: make results"


def test_a_run_is_recorded_and_replaces_the_table(tmp_path, monkeypatch, written):
    run = tmp_path / "run"
    (run / "pictures").mkdir(parents=True)
    bases = {"shifts": {**RESULTS["bases"]["shifts"], "title": "a | b", "flops": 12_340_000}}
    summary = {"recipe": "digits", "seeds": 2, "bases": bases, "run": "/somewhere", "seconds": 1.0}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "environment.json").write_text(json.dumps({"structconv": "1", "torch": "2", "python": "3", "threads": 4,
                                                      "command": ["structconv"]}))
    for name in results.PICTURES:
        (run / "pictures" / name).write_bytes(name.encode())
    page = written("README.md", f"before\n{results.BEGIN}old\n{results.END}after\n")
    for name, place in {"PAGE": page, "RECORDED": tmp_path / "kept" / "run.json", "IMAGES": tmp_path}.items():
        monkeypatch.setattr(results, name, place)
    results.main([str(run)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "One run of 2 seeds on 4 threads" in text
    assert r"| a \| b | " in text
    assert "| 12.34 | 25 of 64 |" in text
    kept = (tmp_path / "kept" / "run.json").read_text()
    assert "somewhere" not in kept
    assert "command" not in kept
    assert (tmp_path / "basis-mixed.png").read_bytes() == b"basis-mixed.png"
