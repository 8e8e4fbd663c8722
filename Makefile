# Two commands on a fresh machine: `make demo` runs the main job, `make test` passes the tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REPORT ?=
PYTEST_ARGS ?=
FUZZ_S ?= 20

.DEFAULT_GOAL := help
.PHONY: help demo test nightly fuzz lint types format ci lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/ready ## run the main job on simulated engines, about a minute after set-up
	$(BIN)/latencyprism demo $(if $(REPORT),--report $(REPORT))

test: $(VENV)/ready ## set up and pass the tests (without those marked slow)
	$(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

nightly: $(VENV)/ready ## all tests, the slow proofs included
	$(BIN)/pytest $(PYTEST_ARGS)

fuzz: $(VENV)/ready ## fuzz every parser with atheris, FUZZ_S seconds each
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_S)

lint: $(VENV)/ready ## ruff, format check included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready ## mypy --strict on the package and the tests
	$(BIN)/mypy -p latencyprism
	$(BIN)/mypy tests

format: $(VENV)/ready ## rewrite the sources as ruff has them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ci: ## exactly what CI runs
	bash .ci/run

lock: ## resolve the newest allowed versions into requirements.lock
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet --upgrade pip
	$(VENV)-lock/bin/pip install --quiet -e '.[dev]'
	$(VENV)-lock/bin/pip freeze --exclude-editable | grep -v '^latencyprism' > requirements.lock
	rm -rf $(VENV)-lock

clean: ## remove what was installed and built here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Twice quiet: setuptools warns of the links to the parts, which are meant; errors still show.
$(VENV)/ready: pyproject.toml requirements.lock deploy/prepare.sh
	sh deploy/prepare.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --quiet --no-deps -e .
	-$(BIN)/python -c 'from latencyprism.local.jars import ensure_jars; ensure_jars()'
	touch $@
