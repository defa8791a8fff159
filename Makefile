# Two commands do it all on a fresh machine: `make run` and `make test`. They need Python 3.11+ with venv, or uv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)
MANIFESTS := pyproject.toml clients/python/pyproject.toml
# Which smoke tests `make smoke` runs.
SMOKE ?= agent llm
# Seeds and profiles of `make sim`.
SEEDS ?= 0-9
PROFILE ?= all

.DEFAULT_GOAL := help
.PHONY: help run smoke bench test lint format types proto proto-check sim clean

help:  ## show these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# An environment of our own, made with uv when it is there and with venv otherwise.
$(BIN)/python:
ifneq ($(UV),)
	@$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
else
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Tenure needs Python 3.11 or later; say which with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
endif

# $(call install,EXTRAS): both packages, editable. The marks below are newer than the manifests when that has been done.
ifneq ($(UV),)
install = $(UV) pip install --quiet --python $(BIN)/python --editable clients/python --editable '.$(1)'
else
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable clients/python --editable '.$(1)'
endif

$(VENV)/.run: $(MANIFESTS) | $(BIN)/python
	@echo "installing into $(VENV)"
	@$(call install,)
	@touch $@

$(VENV)/.dev: $(MANIFESTS) | $(BIN)/python
	@echo "installing into $(VENV), with what tests need"
	@$(call install,[dev])
	@touch $@ $(VENV)/.run

$(VENV)/.bench: $(MANIFESTS) | $(BIN)/python
	@echo "installing into $(VENV), with what is compared"
	@$(call install,[bench])
	@touch $@ $(VENV)/.run

run: $(VENV)/.run  ## three sidecars, three agents and their jobs on this machine, with a live view
	@$(BIN)/tenure dev

smoke: $(VENV)/.run  ## the same without a person: kills, a partition, a kill switch; three counts (SMOKE="agent llm lease")
	@$(BIN)/python -m chaos smoke $(SMOKE)

bench: $(VENV)/.bench  ## due to started, beside APScheduler and a Redis lock loop
	@$(BIN)/python -m bench jobs

test: $(VENV)/.dev  ## all tests
	@$(BIN)/python -m pytest -q

lint: $(VENV)/.dev  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## put the code into its format
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict
	@$(BIN)/mypy

proto: $(VENV)/.dev  ## generate the stubs again
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_stubs.py

proto-check: $(VENV)/.dev  ## lint the .proto files; fail when the stubs are not theirs
	@cd proto && ../$(BIN)/buf lint
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_stubs.py --check

sim: $(VENV)/.dev  ## a short simulation (SEEDS=0-99 PROFILE=all)
	@$(BIN)/python -m chaos sim --profile $(PROFILE) --seeds $(SEEDS)

clean:  ## remove what the targets above have made
	rm -rf $(VENV) .tenure .mypy_cache .ruff_cache .pytest_cache .hypothesis
