# The README's commands. Needs Python 3.11 and make, nothing else: everything is installed into .venv.
PYTHON ?= python3
# Where no CPU build is at hand, a plain torch pulls gigabytes of CUDA: say which one you want with TORCH=…
TORCH ?= torch==2.13.0
ARGS ?=
BIN := .venv/bin

.PHONY: up test check unit e2e format clean

up: .venv/engine
	@$(BIN)/kvferry up $(ARGS)

test: check unit e2e

check: .venv/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: .venv/dev
	$(BIN)/coverage run -m pytest -m "not e2e"
	$(BIN)/coverage report --include="src/kvferry/plan/*,src/kvferry/wire/*,src/kvferry/session/*" --fail-under=97

e2e: .venv/dev
	$(BIN)/pytest -m e2e

format: .venv/dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf .venv

# Words go to stderr, so that `make up ARGS='… --json'` leaves stdout to the JSON.
.venv/engine: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once; a few minutes)" >&2
	@$(BIN)/pip install --quiet "$(TORCH)" >&2
	@$(BIN)/pip install --quiet --editable ".[engine,nixl]" >&2
	@touch $@

.venv/dev: .venv/engine
	@$(BIN)/pip install --quiet --editable ".[engine,nixl,dev]" >&2
	@touch $@
