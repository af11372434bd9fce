# Two commands for a fresh machine (Python 3.11 or newer, nothing else):
#   make demo   the paper's algorithm and the default, on embedded digits
#   make test   lint, type check, tests
# More: make test-all adds the slow tests, make docs builds the documentation, make release-check
# builds the package and tries it in an empty environment, make reproduce renders the paper's tables
# and figures from the stored rows, and make soak spends a quarter of an hour on damaged inputs.
# Each does its own set-up in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# where `make demo` trains; a new temporary folder unless it is given
DEMO_OUT ?=
# the settings of Algorithm 1 on the embedded digits
TWIN := --batch-size 1024 --learning-rate 2 --schedule constant

.PHONY: demo test test-all docs release-check soak lint format reproduce clean

# The paper's Algorithm 1, the same run without its test of candidates, and the default.
demo: $(INSTALLED)
	@out="$(DEMO_OUT)"; out="$${out:-$$(mktemp -d)/dpsur-demo}"; set -ex; \
	$(BIN)/dpsur train --method dpsur --task mnist-5k --epsilon 3 --out "$$out/algorithm-1"; \
	$(BIN)/dpsur train --method dpsgd $(TWIN) --task mnist-5k --epsilon 3 --out "$$out/no-test"; \
	$(BIN)/dpsur train --task mnist-5k --epsilon 3 --out "$$out/auto"; \
	$(BIN)/dpsur evaluate "$$out/algorithm-1" "$$out/no-test" "$$out/auto"

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope -m "not slow"

test-all: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope

# Warnings are errors: a dead link, a page that is in no menu, a name without a docstring.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: build/site/index.html"

# What `pip install dpsur` will give: wheel and source archive, each in an empty environment.
CHECK := build/release-check
release-check: $(INSTALLED)
	rm -rf dist $(CHECK)
	$(BIN)/python -m build --quiet --outdir dist .
	for archive in dist/*.whl dist/*.tar.gz; do \
		rm -rf $(CHECK) && $(PYTHON) -m venv $(CHECK) && \
		$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch && \
		$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$archive[demo]" && \
		$(CHECK)/bin/python tests/release_check.py README.md || exit 1; \
	done

# Damaged inputs, deaths and kills; docs/tables/reliability.md shows what came of it.
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
	$(BIN)/python -m reproduction.page_tables --write
	$(BIN)/python -m reproduction.selection --write
	$(BIN)/python -m reproduction bench --rows results/bench_growth_gpu.jsonl --plot docs/figures/growth_gpu.svg
	$(BIN)/python -m reproduction bench-networks --rows results/bench_networks_gpu.jsonl --plot docs/figures/networks_gpu.svg --growth-plot docs/figures/networks_growth_gpu.svg

# pip compiles on one core; compileall does it on all of them, and leaves out what is hardly imported.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpsur needs Python 3.11 or newer; run: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests|transformers/models)/' $(VENV)/lib src reproduction || true
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
