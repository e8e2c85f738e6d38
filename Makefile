# make demo    the guide's experiment on this machine, set-up included
# make test    set up, then all checks and tests
# Both take PYTHON=python3.x, and VENV=dir for another virtual environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two suites at a time, one thread each: the machine they are sized for has two cores.
export OMP_NUM_THREADS ?= 1
KERAS_SUITES := test-keras-tensorflow test-keras-jax test-keras-torch
SUITES := test-keras-tensorflow test-keras-jax test-torch test-keras-torch lint  # the longest first
PYTEST := $(BIN)/python -m pytest -q
NOT_SLOW := -m "not slow and not gpu"

.PHONY: demo test test-slow test-gpu install install-dev clean $(SUITES)

demo: install
	$(BIN)/gradaccum demo

test: install-dev
	$(MAKE) --jobs=2 --keep-going --output-sync=target $(SUITES)

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): a few minutes, PyTorch is large"
	$(PIP) --editable ".[torch,cli]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt compat/runai/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): several minutes, PyTorch, TensorFlow and JAX are large"
	$(PIP) --editable ".[dev]" --editable compat/runai
	touch $@ $(VENV)/.installed

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-torch:
	$(PYTEST) $(NOT_SLOW) tests src/gradaccum benchmarks/harness.py --ignore=tests/keras --ignore=src/gradaccum/keras

$(KERAS_SUITES): test-keras-%:
	KERAS_BACKEND=$* $(PYTEST) $(NOT_SLOW) tests/keras src/gradaccum/keras

test-slow: install-dev
	$(PYTEST) -m "slow and not gpu" tests

test-gpu: install-dev
	$(PYTEST) -m gpu tests

clean:
	rm -rf $(VENV) build dist gradaccum-demo
