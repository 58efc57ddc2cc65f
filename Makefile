# Each target sets up what it needs: a virtual environment in .venv with everything pinned in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per process: the tests run side by side, and oversubscribed threads only slow them down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.PHONY: demo test test-oracles check format docs bench clean

demo: $(VENV)/installed
	$(BIN)/unrolled demo $(ARGS)

test: $(VENV)/installed
	$(PYTEST) -n auto

test-oracles: $(VENV)/oracles
	$(PYTEST) -m oracles -rs

check: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) tests/test_architecture.py

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/installed
	$(BIN)/python docs/build.py

bench: $(VENV)/oracles
	$(BIN)/unrolled bench $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# pytorch-fast-transformers is built from source and finds torch only without build isolation. With nvcc on
# the PATH it would try to build CUDA kernels, which a CPU build of torch cannot.
$(VENV)/oracles: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	PATH=$$(echo $$PATH | tr ':' '\n' | while read d; do [ -e "$$d/nvcc" ] || printf '%s:' "$$d"; done) \
		$(CURDIR)/$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps pytorch-fast-transformers==0.4.0
	$(BIN)/python -m pip install --quiet --no-deps fla-core==0.6.0
	$(BIN)/python -m pip install --quiet -c constraints.txt einops triton==3.9.0 'transformers>=5,<6' onnx onnxruntime
	touch $@
