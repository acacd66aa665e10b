# Every target sets up .venv first; a second call finds it ready.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow lint format clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter for .venv (3.11 or newer); ARGS=... is passed on by train and test."

setup: $(READY) ## Create .venv and install the project there.

train: $(READY) ## Train on 2 processes or all GPUs, save, resume on another mesh.
	$(BIN)/python -m recipes.first_run $(ARGS)

# Ranks share the cores: more than one thread each makes tests slower.
test test-slow: export OMP_NUM_THREADS ?= 1

test: $(READY) ## Run the tests, all but the long group.
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) ## Run the long group of tests.
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY) ## Check style, formatting, types and the import contract.
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: $(READY) ## Format, and fix what ruff can fix.
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

clean: ## Remove .venv, build outputs and caches.
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# The file appears last, so that an interrupted set-up is done again.
$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" > /dev/null || { \
	    echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1 | head -n 1), but meshwright needs Python 3.11 or newer:" \
	        "make PYTHON=/path/to/python ..." >&2; exit 1; }
	@echo "Setting up $(VENV); the first time downloads torch."
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[recipes,test]'
	@touch $@
