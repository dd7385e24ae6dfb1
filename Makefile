PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
# Seconds after which a test fails; and after which a worker that cannot even run Python writes down where it is, and ends.
TIMEOUT := 300
STUCK := 400
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout $(TIMEOUT) \
	-o faulthandler_timeout=$(STUCK) -o faulthandler_exit_on_timeout=true --doctest-modules pygraph tests

.PHONY: help demo test test-long check docs format wheel clean

help:
	@echo "make demo       embed real sentences eagerly and as a graph, and compare"
	@echo "make test       run the tests and the examples in docstrings, README and docs, in minutes"
	@echo "make test-long  run everything: slow tests, whole products, all samples of all operators, random examples"
	@echo "make check      format, lint, types, docs and tests: what CI runs"
	@echo "make docs       build the docs as a site in build/site, with warnings as errors"
	@echo "make format     format the sources and fix what ruff can fix"
	@echo "make wheel      build a wheel with the call path in C++, for the installed Python and torch"
	@echo "make clean      remove the virtual environment and caches"

demo: $(STAMP)
	$(BIN)/python -m pygraph demo

test: $(STAMP)
	$(PYTEST)

test-long: TIMEOUT := 1800
test-long: STUCK := 2400
test-long: $(STAMP)
	$(PYTEST) --long

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(MAKE) docs
	$(MAKE) test

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# For the installed Python and torch: with the call path in C++ ready-made, which other versions build on first use.
wheel: $(STAMP)
	PYGRAPH_PREBUILT=1 $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('pygraph needs Python 3.11 or newer, as in: make PYTHON=python3.12')"
	@echo "Setting up $(VENV); this happens once and takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[cuda,demo,dev,docs]"
	@touch $@
