# Two commands do it all on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run smoke test lint types proto proto-check sim clean

# Installed once, and again whenever a manifest changes; uv when it is there, pip otherwise.
$(VENV)/.run: pyproject.toml clients/python/pyproject.toml
	@command -v uv >/dev/null 2>&1 && uv venv -q --allow-existing --python $(PYTHON) $(VENV) || $(PYTHON) -m venv $(VENV)
	@command -v uv >/dev/null 2>&1 \
	  && uv pip install -q --python $(BIN)/python -e clients/python -e . \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check -e clients/python -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@command -v uv >/dev/null 2>&1 \
	  && uv pip install -q --python $(BIN)/python -e clients/python -e '.[dev]' \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check -e clients/python -e '.[dev]'
	@touch $@

run: $(VENV)/.run  ## three sidecars and three agents on this machine, with a live view
	@$(BIN)/tenure dev

smoke: $(VENV)/.run  ## the same without a person: kills and partitions, then three counts
	@$(BIN)/python -m chaos smoke

test: $(VENV)/.dev  ## all tests
	@$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev
	@$(BIN)/mypy

proto: $(VENV)/.dev  ## generate the stubs again
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_stubs.py

proto-check: $(VENV)/.dev
	@cd proto && ../$(BIN)/buf lint
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_stubs.py --check

sim: $(VENV)/.dev  ## a short simulation
	@$(BIN)/python -m chaos sim --profile all --seeds 0-9

clean:
	rm -rf $(VENV) .tenure .mypy_cache .ruff_cache .pytest_cache .hypothesis
