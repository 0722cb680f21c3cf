# Everything installs itself into .venv; a second run starts at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Threads that wait must not spin: on a busy machine they stop each other.
export OMP_WAIT_POLICY := passive

.PHONY: demo test lint bench docs clean
.DEFAULT_GOAL := demo

# torch first, and held by constraints.txt for everything after: another package must not pull another build.
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,lint]"
	@touch $@

demo: $(VENV)/.core  ## purify embedded images, attack them, and write a report to out/
	$(BIN)/diffpure demo --out out

test: $(VENV)/.test  ## the whole test suite, one worker a core
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --quiet

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test  ## side-by-side ratios against peers
	$(BIN)/python benchmarks/solver.py

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## the documentation as a site that needs no network, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site

clean:
	rm -rf $(VENV) out
