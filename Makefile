# Everything installs itself into .venv; a second run starts at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What `make test` runs, and the folder of golden files that `make test-golden` reads.
TESTS ?= tests
GOLDEN ?= tests/golden
# torch first, and held by constraints.txt for everything after: another package must not pull another build.
INSTALL := $(BIN)/pip install --quiet --quiet --constraint constraints.txt
# Threads that wait must not spin: on a busy machine they stop each other.
export OMP_WAIT_POLICY := passive

.PHONY: demo test test-golden test-all lint dist bench docs clean
.DEFAULT_GOAL := demo

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) --editable ".[test,lint]"
	@touch $@

demo: $(VENV)/.core  ## purify embedded images, attack them, and write a report to out/
	$(BIN)/diffpure demo --out out

test: $(VENV)/.test  ## the whole test suite, one worker per core
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --quiet $(TESTS)

test-golden: $(VENV)/.test  ## the golden tests alone, on the files in GOLDEN=folder
	OMP_NUM_THREADS=1 DIFFPURE_GOLDEN="$(GOLDEN)" $(BIN)/pytest --quiet -k golden $(TESTS)

test-all:  ## the test suite with every optional package and a browser, in .venv-all
	PYTHON="$(PYTHON)" VENV="$(VENV)-all" .ci/test-all $(TESTS)

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

dist: $(VENV)/.test  ## the source distribution, and the wheel that is built from it, in dist/
	$(BIN)/python -m build --outdir dist

bench: $(VENV)/.test  ## side-by-side ratios against peers
	$(BIN)/python benchmarks/solver.py

$(VENV)/.docs: $(VENV)/.core
	$(INSTALL) --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## the documentation as a site that needs no network, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site

clean:
	rm -rf $(VENV) $(VENV)-all out dist
