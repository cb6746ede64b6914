# make setup | train | test | test-all | check | docs | site | bench | gpu-test | gpu-nccl | gpu-bench
PYTHON ?= python3
BIN := .venv/bin
# Another build of torch, on machines with GPUs: make setup TORCH="torch --index-url ..."
TORCH ?= torch
CONSTRAINTS := constraints.txt
# Python compiles what is imported when it is imported first, which is a small part of what is installed.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
# Without bytecode that stays, each of many processes would compile all of it anew.
unexport PYTHONDONTWRITEBYTECODE

# What a newcomer runs: the decisions, the numbers against each other, and the commands' first path and mistakes.
FIRST_TESTS := tests/launch/test_train.py tests/launch/test_mistakes.py tests/distributed/test_equivalence.py \
	tests/distributed/test_placement.py tests/unit
TIMED_TEST := tests/cluster/test_clock.py
# Five files at a time, on two cores too: most tests wait for processes, and for what these wait for. Files keep the
# order of tests/conftest.py, the longest first.
PYTEST := $(BIN)/python -m pytest -n 5 --dist loadfile --no-loadscope-reorder --durations=50

.PHONY: setup train test test-rest test-all check lint types docs site bench gpu-test gpu-nccl gpu-bench clean

setup: .venv/ready

# What trains; what checks it, and what it is compared with, comes in a second step.
.venv/trains: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: PYTHON=$(PYTHON) is older than 3.11: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH)
	$(INSTALL) -e .
	@touch $@

.venv/ready: .venv/trains
	$(INSTALL) -e '.[dev,bench]'
	@touch $@

# What pays: two machines on a slow link beside one alone and beside DistributedDataParallel.
train: .venv/trains
	$(BIN)/python launch/demo.py $(ARGS)

test: setup
	$(PYTEST) $(FIRST_TESTS) $(ARGS)

# What compares seconds comes when no other test takes the processor from it.
test-rest: setup
	$(PYTEST) tests $(FIRST_TESTS:%=--ignore=%) --ignore=$(TIMED_TEST) $(ARGS)
	$(BIN)/python -m pytest $(TIMED_TEST)

test-all: test test-rest

# With -j 2 types are checked while the site is built.
check: types lint site

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright

docs: setup
	$(BIN)/python docs/generate_settings.py

# Pages that the index does not list, links that lead nowhere and types that do not exist are errors.
site: setup
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs . build/site

bench: setup
	$(BIN)/python bench/inner_loop.py $(ARGS)
	$(BIN)/python bench/outer_step.py $(ARGS)
	$(BIN)/python bench/memory.py $(ARGS)
	$(BIN)/python bench/sharded.py $(ARGS)
	$(BIN)/python bench/batch_test.py $(ARGS)
	$(BIN)/python bench/noise.py $(ARGS)
	$(BIN)/python bench/library.py $(ARGS)
	$(BIN)/python bench/regroup.py $(ARGS)
	$(BIN)/python bench/coordinator.py $(ARGS)
	$(BIN)/python bench/instances.py $(ARGS)
	$(BIN)/python bench/data.py $(ARGS)
	$(BIN)/python bench/throughput.py $(ARGS)
	$(BIN)/python bench/survive.py $(ARGS)
	$(BIN)/python bench/wire.py $(ARGS)
	$(BIN)/python bench/unequal.py $(ARGS)
	$(BIN)/python bench/far.py $(ARGS)
	$(BIN)/python bench/weather.py $(ARGS)
	$(BIN)/python bench/report.py $(ARGS)
	$(BIN)/python bench/method.py $(ARGS)

# With a GPU, nine minutes each; docs/guide/gpus.md. They run without make, too: python gpu/test.py
gpu-test gpu-nccl gpu-bench: setup
	$(BIN)/python gpu/$(@:gpu-%=%).py $(ARGS)

clean:
	rm -rf .venv build dist src/*.egg-info
