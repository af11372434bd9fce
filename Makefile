# Two commands for a fresh machine (Python 3.11 or newer, nothing else):
#   make demo   train a private model on embedded digits and test it
#   make test   lint, type check, tests
# Two more: make reproduce renders the paper's tables and figures from the stored rows, and
# make soak spends a quarter of an hour on looking for what dpsur does not survive.
# Each does its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# where `make demo` trains; a new temporary folder unless it is given
DEMO_OUT ?=

.PHONY: demo test soak lint format reproduce clean

demo: $(INSTALLED)
	out="$(DEMO_OUT)"; out="$${out:-$$(mktemp -d)/dpsur-demo}"; \
	$(BIN)/dpsur train --task mnist-5k --epsilon 3 --delta 1e-5 --out "$$out" && \
	$(BIN)/dpsur evaluate "$$out"

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope

# Damaged inputs, deaths and kills; docs/reliability.md shows what came of it.
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.robustness

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# All tables and figures, from the rows in results/, in about a minute. docs/tables/index.md lists
# them, with the command that regenerates the rows of each and the GPU time that it takes.
reproduce: $(INSTALLED)
	$(BIN)/python -m reproduction all --render-only
	$(BIN)/python -m reproduction bench --rows results/bench_growth_gpu.jsonl --plot docs/figures/growth_gpu.svg
	$(BIN)/python -m reproduction bench --rows results/bench_growth_gpu.jsonl --plot docs/figures/growth_gpu.png

# torch first and alone: a later range in pyproject.toml then finds it satisfied.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpsur needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
