# `make` lists the targets. Everything runs from .venv, which the first target that needs it builds.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2

# Files in their order: by default those of few tests come last, and a file of one long test would end alone.
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(STAMP) ## Train on real ratings, start the service, and play a new user through it
	$(BIN)/python demo/run.py

.PHONY: serve
serve: $(STAMP) ## Serve the model of the last `make demo`, with an embedded Valkey, until Ctrl-C
	@test -e runs/demo/registry || { echo "There is no model to serve yet: run 'make demo' first." >&2; exit 1; }
	$(BIN)/python demo/serve.py

.PHONY: test
test: $(STAMP) ## Run the tests
	$(BIN)/pytest $(XDIST)

.PHONY: test-full
test-full: $(STAMP) ## Run the tests, those that take minutes too
	$(BIN)/pytest $(XDIST) -m ""

.PHONY: docs-test
docs-test: $(STAMP) ## Run every command of the README in an empty folder (minutes; KNOWN=FOLDER with Beauty.txt runs more)
	$(BIN)/python tests/readme.py $(if $(KNOWN),--known $(KNOWN))

.PHONY: lint
lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(STAMP) ## Check types
	$(BIN)/mypy

.PHONY: imports
imports: $(STAMP) ## Check who imports whom
	$(BIN)/lint-imports

.PHONY: check
check: lint types imports test ## Everything CI checks: lint, types, imports, test

.PHONY: clean
clean: ## Remove caches and build outputs; .venv and runs/ stay
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

# The first Python that is new enough makes the environment; the constraints make it the tested one.
$(STAMP): pyproject.toml constraints.txt
	@if ! test -x $(BIN)/pip; then \
	  for python in $(PYTHON) python3.11 python3.12 python3.13; do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "Making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "No Python 3.11 or newer with the venv module here (Debian: apt-get install python3 python3-venv)." >&2; \
	  echo "If yours has another name: make PYTHON=/path/to/python3 ..." >&2; \
	  exit 1; \
	fi
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[train,serve,dev]'
	@touch $@
