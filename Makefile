# TIDE: everything sets itself up; a fresh machine needs python3 (3.10 or later) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := requirements/cpu.txt

# torch goes in first and alone, exactly pinned: a range, or another package's wish, could bring another build.
TORCH := torch==2.13.0 triton==3.7.1

# Two workers: each test may start several ranks of its own.
WORKERS ?= 2
PYTEST_ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help venv demo test check format-check lint types pytest notebooks format clean distclean

help:
	@echo 'make demo       a plan of a real model, then TIDE beside FSDP2 on four CPU ranks'
	@echo 'make test       format, lint, types, tests and notebooks: what CI runs'
	@echo 'make check      the same without the tests'
	@echo 'make lint, make types, make pytest PYTEST_ARGS=...    one of them'
	@echo 'make format     rewrite the sources in the project style'
	@echo 'make notebooks  run the notebooks and store their outputs'
	@echo 'make venv       only the environment, in $(VENV)'
	@echo 'make clean      drop caches and build outputs; distclean: the environment too'

venv: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo 'TIDE needs Python 3.10 or later: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) hatchling editables
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[dev,notebook]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m tide.demo

# In this order, cheapest first, also under `make -j`.
test: $(STAMP)
	@$(MAKE) --no-print-directory check
	@$(MAKE) --no-print-directory pytest

check: $(STAMP)
	@$(MAKE) --no-print-directory format-check
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# tests/test_notebooks.py runs the notebooks
pytest: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP)
	$(BIN)/python notebooks/execute.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
