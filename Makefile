# make demo         memory and exactness on this machine, set-up included: one to four minutes after the downloads
# make test         set up, then all checks and tests
# make docs         the documentation's site, into site/
# make bench        speed and memory against rivals, into bench-results/; QUICK=1: two minutes; WRITE=1: into docs/ too
# make test-quick   lint, types and the core of every area, in about a minute
# All take PYTHON=python3.x, VENV=dir for another virtual environment, and CPU=1 for PyTorch without CUDA.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# PyTorch's own index of builds without CUDA, for where the usual index has only those with it.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_SIZE = 190 MB$(if $(CPU),, (if your index has it with CUDA only: several GB; add CPU=1 for the other))
CPU_TORCH = $(if $(CPU),$(PIP) --index-url $(CPU_INDEX) torch)

# Two suites at a time, one thread each: the machine they are sized for has two cores.
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
export FUZZ_SECONDS ?= 600
# Eight suites and the processes they start read the same sources: compiled once.
unexport PYTHONDONTWRITEBYTECODE
IN_PARALLEL := $(MAKE) --jobs=2 --keep-going --output-sync=target

# A suite is a process of its own: one for each of Keras' backends, five for the rest. The longest come first.
KERAS_SUITES := test-keras-jax test-keras-tensorflow test-keras-torch
SUITES := test-torch test-jax test-keras-tensorflow test-ranks test-centre test-keras-jax test-integrations \
	test-keras-torch
SELECT := not slow and not gpu and not fuzz
PYTEST = $(BIN)/python -m pytest -q -m "$(SELECT)"
RANKS := tests/torch/distributed tests/integrations/distributed
# The core of every area: equality with the large batch, on small problems.
QUICK_TORCH := $(filter-out tests/test_site.py,$(wildcard tests/test_[!d]*.py)) tests/core tests/compat/test_runai_torch.py tests/cli/test_commands.py \
	tests/torch/optimizer/test_contract.py tests/torch/train_step/test_train_step.py \
	tests/torch/chunking/test_chunked.py::test_any_rows_in_any_sizes \
	tests/torch/equivalence/test_equivalence.py::test_the_culprit_is_named_for
QUICK_KERAS := tests/keras/optimizer/test_fit.py::test_an_epoch_of_windows_matches_the_large_batches \
	tests/keras/train_step/test_micro_batched.py::test_ragged_batches_match_plain_fit
QUICK_JAX := tests/jax/train_step/test_value_and_grad.py::test_ragged_micro_batches_match_the_large_batch

.PHONY: bench demo docs test test-quick test-slow test-gpu test-fuzz quick-torch quick-keras quick-jax install install-dev clean lint $(SUITES)

demo: install
	$(BIN)/python -m examples.demo

test: install-dev
	$(IN_PARALLEL) $(SUITES) lint

test-quick: install-dev
	$(IN_PARALLEL) quick-torch quick-keras quick-jax lint

docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: install-dev
	HF_HUB_OFFLINE=1 env -u OMP_NUM_THREADS $(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(WRITE),--write) \
		$(if $(MINUTES),--minutes $(MINUTES))

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). To download: PyTorch, $(TORCH_SIZE), and about 90 MB of other packages."
	$(CPU_TORCH)
	$(PIP) --editable ".[torch,cli]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt compat/runai/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). To download: PyTorch, $(TORCH_SIZE), and about 1 GB of other packages, TensorFlow and JAX among them."
	$(CPU_TORCH)
	$(PIP) --editable ".[dev]" --editable compat/runai
	touch $@ $(VENV)/.installed

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Exit code 5: nothing of this suite is selected.
# Calls are counted in a process of its own, where no other test has left anything.
test-torch:
	$(PYTEST) tests/torch/test_calls.py || test $$? = 5
	$(PYTEST) tests/torch src/gradaccum/torch src/gradaccum/on_torch --ignore=tests/torch/test_calls.py $(RANKS:%=--ignore=%) \
		|| test $$? = 5

test-ranks:
	$(PYTEST) $(RANKS) || test $$? = 5

test-centre:
	$(PYTEST) tests src/gradaccum benchmarks/harness.py benchmarks/scaling_model.py --ignore=tests/torch --ignore=src/gradaccum/torch \
		--ignore=src/gradaccum/on_torch --ignore=tests/keras --ignore=src/gradaccum/keras \
		--ignore=tests/integrations --ignore=src/gradaccum/integrations \
		--ignore=tests/jax --ignore=src/gradaccum/jax --ignore=src/gradaccum/on_jax || test $$? = 5

# Nothing is downloaded: models are built from their configs.
test-integrations:
	HF_HUB_OFFLINE=1 $(PYTEST) tests/integrations src/gradaccum/integrations --ignore=tests/integrations/distributed \
		|| test $$? = 5

test-jax:
	$(PYTEST) tests/jax src/gradaccum/jax src/gradaccum/on_jax || test $$? = 5

$(KERAS_SUITES): test-keras-%:
	KERAS_BACKEND=$* $(PYTEST) tests/keras src/gradaccum/keras || test $$? = 5

quick-torch:
	$(PYTEST) -x $(QUICK_TORCH)

quick-keras:
	KERAS_BACKEND=torch $(PYTEST) -x $(QUICK_KERAS)

quick-jax:
	$(PYTEST) -x $(QUICK_JAX)

test-slow: install-dev
	$(IN_PARALLEL) SELECT="slow and not gpu and not fuzz" $(SUITES)

test-gpu: install-dev
	$(BIN)/python -m pytest -q -m gpu tests

test-fuzz: install-dev
	$(BIN)/python -m pytest -q -m fuzz tests/fuzz
	$(BIN)/python -m pytest -q -m fuzz tests/jax/fuzz
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m fuzz tests/integrations/fuzz
	for backend in torch jax tensorflow; do \
		KERAS_BACKEND=$$backend $(BIN)/python -m pytest -q -m fuzz tests/keras/fuzz || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist site gradaccum-demo
