# farside: what can be made here. `make` alone prints this list.
#
#   make demo SIZE=1G   train at the hub, then 60 ms away, cold and warm; prints the comparison
#   make install        virtual environment with everything a developer needs, in .venv
#   make test           lint, types, then all tests
#   make bench          the figures of docs/benchmarks.md (root; about an hour; BENCH=NAME for one)
#   make lint           ruff and mypy alone
#   make lock           write the lock files anew from pyproject.toml
#   make clean          remove what was built here, except data sets in out/

PYTHON ?= python3
SIZE ?= 1G
BENCH ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK_VENV := build/lock-venv
UV_COMPILE := $(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 \
	--no-header --no-emit-index-url --generate-hashes

.PHONY: help install demo test lint bench lock clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "farside needs Python 3.11 or newer, and '$(PYTHON)' is not that: say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install python3-venv (apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What the product and the demo need.
$(VENV)/.installed: requirements.lock pyproject.toml | $(BIN)/python
	$(PIP) install --quiet -r requirements.lock
	$(PIP) install --quiet --no-deps -e .
	@touch $@

# What developers need on top of it.
$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	$(PIP) install --quiet -r requirements-dev.lock
	@touch $@

install: $(VENV)/.installed $(VENV)/.installed-dev

demo: $(VENV)/.installed
	@$(BIN)/python -m farside.bench.demo --size $(SIZE)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src benchmarks

test: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(BENCH)

$(LOCK_VENV)/bin/uv: | $(BIN)/python
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check install --quiet uv

lock: $(LOCK_VENV)/bin/uv
	$(UV_COMPILE) --extra bench pyproject.toml -o requirements.lock
	$(UV_COMPILE) --extra dev --constraint requirements.lock pyproject.toml -o requirements-dev.lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
