# Everything sets itself up: each target makes the virtual environment first if it is missing or out of date.
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-every test-oldest test-native ecosystem lint bench docs systems results clean
.DELETE_ON_ERROR:

PYTHON ?= python3
DATA ?= ../shared/data
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
READY_BENCH := $(VENV)/.ready-bench
READY_DOCS := $(VENV)/.ready-docs
OLDEST := .venv-oldest
# Bytecode is kept: without it every process, of which the tests start dozens, compiles all of torch anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(READY) ## make the virtual environment in .venv

$(READY): pyproject.toml systems/pyproject.toml constraints.txt
	@$(PYTHON) tools/bootstrap.py --venv $(VENV) --extras test,dev
	@touch $@

# Triton, 290 MB: without a GPU its interpreter and its compiler test the kernels for one. And the tools that go by the
# names of parameters (PEFT, transformers, Accelerate, Lightning), for tests/test_tools.py.
$(READY_TEST): $(READY)
	@$(PYTHON) tools/bootstrap.py --venv $(VENV) --extras gpu,tools
	@touch $@

$(READY_BENCH): $(READY)
	@$(PYTHON) tools/bootstrap.py --venv $(VENV) --extras bench
	@touch $@

$(READY_DOCS): $(READY_TEST)
	@$(PYTHON) tools/bootstrap.py --venv $(VENV) --extras docs
	@touch $@

demo: $(READY) ## learn one task through seven structures; report in runs/demo/report.html
	@if [ -e runs/demo ]; then to=runs/demo-$$(date +%Y%m%d-%H%M%S) && mv runs/demo $$to && echo "the demo before is now $$to"; fi
	$(BIN)/structconv compare digits --out runs/demo

test: $(READY_TEST) ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-every: $(READY_TEST) ## run the tests, and every near-equal case that they draw from
	STRUCTCONV_EVERY_TEST=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-oldest: $(OLDEST)/.ready ## run the tests with the oldest torch, NumPy, ... of pyproject.toml, in .venv-oldest
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal

$(OLDEST)/.ready: pyproject.toml systems/pyproject.toml
	@$(PYTHON) tools/bootstrap.py --venv $(OLDEST) --extras test,gpu,tools --oldest
	@touch $@

test-native: $(READY) ## run the native kernels under a memory checker
	$(BIN)/python -m tests.native.run

ecosystem: $(READY_TEST) ## run every layer under PEFT, FSDP2, DDP, Accelerate, Lightning, ...; print the table
	OMP_NUM_THREADS=1 $(BIN)/python tools/compatibility.py

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY_BENCH) ## time the layers against other libraries
	$(BIN)/python -m benchmarks --quick

docs: $(READY_DOCS) ## build the docs in docs/_build/html, run their examples and the notebooks, open pages in Chromium
	STRUCTCONV_DATA="$(abspath $(DATA))" $(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	$(BIN)/sphinx-build -q -W --keep-going -b doctest docs docs/_build/doctest
	$(BIN)/python -m pytest -rs tests/test_formulas.py tests/test_built_docs.py tests/test_browser.py

systems: $(READY) ## run the quick preset of every recipe; DATA=DIR is the folder with the data
	$(BIN)/structconv reproduce --all --preset quick --data "$(DATA)" --out runs/systems

results: $(READY) ## run the digits anew and write the table of docs/seven-structures.md
	rm -rf runs/results
	$(BIN)/structconv compare digits --out runs/results
	$(BIN)/python tools/results.py runs/results

clean: ## remove what tools left behind; keeps the environment and the runs
	rm -rf structconv/primitives/native/core-*.so structconv/primitives/native/core-*.sha256 structconv/primitives/native/core-*.lock build dist systems/build systems/dist docs/_build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find benchmarks docs examples structconv systems tests tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
