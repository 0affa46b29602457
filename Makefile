# The menu. CI, README and CONTRIBUTING use these targets and nothing else.
# Everything lives in $(VENV) and build/; stamps in $(VENV) make a second call cheap.

VENV       ?= .venv
BUILD_DIR  ?= build
DOCS_VENV  := $(BUILD_DIR)/docs-venv
CPP_PRESET ?= release
ARGS       ?=
PYTEST_ARGS ?=
# Each process may hold torch: a few are enough, however many cores there are. A worker gets tests
# that stand together, whose fixtures are then made once, and takes from the others when it is done.
TEST_WORKERS ?= -n auto --maxprocesses 4 --dist worksteal
# Tests that start processes wait for them: three at a time keep two cores busy.
WAITING_WORKERS ?= -n 3 --dist worksteal

# One file a room, quick ones: what an edit breaks first.
QUICK := $(addprefix tests/unit/,house/test_public_names.py run/test_legality.py \
  rates/test_stacks.py price/test_memory_recipes.py pipeline/test_placement.py \
  documents/test_specs.py command/test_options.py training/test_throughput.py \
  engines/test_megatron_names.py planning/layered/test_cost_time.py request/test_places.py \
  closed_form/test_quirks_tensor2d.py profiler/hardware/test_cells.py) \
  tests/unit/house/test_house_rules.py

# The first interpreter that runs and is new enough; looked up only when a venv is made.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

export PATH := $(abspath $(VENV))/bin:$(PATH)
PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
# What the caller has activated must not leak in; without byte code, every process compiles anew.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE

CORE := $(shell find csrc/planner csrc/closed_form csrc/bindings -type f 2>/dev/null)
CPP  := $(shell find csrc -name third_party -prune -o \( -name '*.cpp' -o -name '*.hpp' \) -print 2>/dev/null)

LAYOUT := $(VENV)/.stamp-layout-$(shell find autopar search profiler -name '*.py' | sort | cksum | cut -d' ' -f1)

# torch stands before the development tools: see the note at its stamp.
TEST_READY := $(VENV)/.stamp-torch $(VENV)/.stamp-built $(VENV)/.stamp-dev

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help search setup build check test test-py test-cpp build-cpp test-ranks test-whole test-slow test-gpu quick asan fuzz e2e bench golden models docs docs-schemas docs-reference gallery format clean

help: ## show this menu
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

search: $(VENV)/.stamp-built ## plan the shipped default (ARGS="..." for your own); needs no torch
	@$(VENV)/bin/autopar-search $(ARGS)

setup: $(TEST_READY) ## everything for development, torch included, and the git hooks
	@git rev-parse --git-dir >/dev/null 2>&1 && $(VENV)/bin/pre-commit install || true

build: ## rebuild the extension (seconds after a C++ edit)
	@rm -f $(VENV)/.stamp-built && $(MAKE) --no-print-directory $(VENV)/.stamp-built

check: $(VENV)/.stamp-built $(VENV)/.stamp-dev ## ruff, mypy --strict, clang-format, wording
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) docs/words.py --check
	$(if $(CPP),$(VENV)/bin/clang-format --dry-run -Werror $(CPP))

quick: $(TEST_READY) ## house rules and one test file a room, for the inner loop
	$(PY) -m pytest -q -n 2 -m "not gpu and not slow and not ranks and not whole" $(QUICK)

test: $(TEST_READY) test-py test-cpp ## pytest (not gpu, whole, slow, ranks) and ctest

test-py: $(TEST_READY)
	$(PY) -m pytest $(TEST_WORKERS) -m "not gpu and not whole and not slow and not ranks" $(PYTEST_ARGS)

test-whole: $(TEST_READY) ## whole commands, searches and dry runs
	$(PY) -m pytest $(WAITING_WORKERS) -m "whole and not gpu and not slow and not ranks" --durations=10 $(PYTEST_ARGS)

# Processes that start, wait and are killed leave room for others; what is compared with the rate of
# a link or with a clock runs alone.
test-ranks: $(TEST_READY) ## runs under torchrun that are watched, killed and interrupted
	$(PY) -m pytest $(WAITING_WORKERS) -m "ranks and not alone and not gpu and not slow" --durations=10 $(PYTEST_ARGS)
	$(PY) -m pytest -m "alone and not gpu and not slow" --durations=10 $(PYTEST_ARGS)

test-slow: $(TEST_READY) ## what takes more than a few seconds a test
	$(PY) -m pytest $(TEST_WORKERS) -m "slow and not gpu" --durations=10 $(PYTEST_ARGS)

test-gpu: $(TEST_READY) ## every test that needs a CUDA device, one after the other
	$(PY) -m pytest -m gpu --durations=10 $(PYTEST_ARGS)

test-cpp: build-cpp ## ctest (CPP_PRESET=dev: debug build, warnings are errors)
	ctest --preset $(CPP_PRESET)

build-cpp: $(VENV)/.stamp-dev
	cmake --preset $(CPP_PRESET) >$(VENV)/cmake.log 2>&1 || { cat $(VENV)/cmake.log; exit 1; }
	cmake --build --preset $(CPP_PRESET) --target autopar_tests

asan: ## ctest with address and undefined-behaviour sanitizers
	@$(MAKE) --no-print-directory test-cpp CPP_PRESET=asan

fuzz: $(VENV)/.stamp-dev ## hostile planning problems under the sanitizers (SECONDS=600 SEED=1)
	cmake --preset asan >$(VENV)/cmake.log 2>&1 || { cat $(VENV)/cmake.log; exit 1; }
	cmake --build --preset asan
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 AUTOPAR_FUZZ_SECONDS=$(or $(SECONDS),600) \
	  AUTOPAR_FUZZ_SEED=$(or $(SEED),$(shell date +%s)) \
	  build/asan/autopar_tests '--source-file=*test_fuzz.cpp'

e2e: $(VENV)/.stamp-built ## build the wheel, install it in a fresh venv, use it outside the repository
	bash tests/e2e/wheel.sh $(PY) $(BUILD_DIR)/e2e

bench: $(VENV)/.stamp-built $(VENV)/.stamp-dev ## speed of the planner; see benchmarks/README.md
	cmake --preset release >$(VENV)/cmake.log 2>&1 || { cat $(VENV)/cmake.log; exit 1; }
	cmake --build --preset release
	$(if $(wildcard csrc/bench/*.cpp),build/release/autopar_bench $(ARGS))
	$(foreach f,$(sort $(wildcard benchmarks/bench_*.py)),$(PY) -m benchmarks.$(basename $(notdir $(f))) &&) true

golden: $(VENV)/.stamp-built $(VENV)/.stamp-dev ## rewrite the golden files and show what changed
	$(PY) -m pytest -q -k golden --update-golden
	git --no-pager diff --stat -- tests/golden

models: $(TEST_READY) ## count the memory of the shipped models again (MODELS="..." for some)
	$(PY) -m profiler.model.shipped $(MODELS)

docs: $(DOCS_VENV)/.stamp ## build the documentation as a site, build/site/index.html; dead links are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --site-dir $(abspath $(BUILD_DIR))/site

docs-schemas: $(VENV)/.stamp-built ## write the JSON Schemas of the documents to docs/schemas
	$(PY) docs/make_schemas.py

docs-reference: $(VENV)/.stamp-built ## write docs/reference: options, exit codes, rules, keys
	$(PY) docs/make_reference.py

gallery: $(VENV)/.stamp-built ## run the commands of docs/guides again, draw docs/assets
	$(PY) -m docs.make_answers

format: $(VENV)/.stamp-dev ## rewrite Python and C++ in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(if $(CPP),$(VENV)/bin/clang-format -i $(CPP))

clean: ## remove build products, keep the venv
	rm -rf $(BUILD_DIR) dist $(VENV)/.stamp-built

# Stamps -----------------------------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "make: found no Python >= 3.11; install one or say make PYTHON=python3.11"; exit 1; }
	@echo "setting up $(VENV) (once)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: could not make $(VENV); on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(PIP) install "pip>=25.1"
	@touch $@

$(VENV)/.stamp-base: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@$(PIP) install -c constraints.txt --group build
	@touch $@

# An editable install knows the modules by name: it is made again where files came, went or moved.
$(LAYOUT): $(VENV)/.stamp-base
	@rm -f $(VENV)/.stamp-layout-*
	@touch $@

# Without build isolation, so that build/ stays warm and only changed files are compiled again.
$(VENV)/.stamp-built: $(VENV)/.stamp-base $(LAYOUT) CMakeLists.txt $(CORE)
	@echo "building the planner core"
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-base
	@echo "installing the development tools"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

# torch first and by its exact pin, so that nothing that depends on it can pull in another one.
$(VENV)/.stamp-torch: $(VENV)/.stamp-base
	@pin="$$(grep '^torch==' constraints.txt)" && echo "installing $$pin" && $(PIP) install "$$pin"
	@touch $@

# The site needs nothing of the package, and the package nothing of the site.
$(DOCS_VENV)/.stamp: constraints.txt
	@test -n "$(PYTHON)" || { echo "make: found no Python >= 3.11; say make PYTHON=python3.11"; exit 1; }
	@echo "installing what builds the documentation"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -qq install -c constraints.txt mkdocs-material
	@touch $@
