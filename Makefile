# dualform: everything you need is `make demo` and `make test`. `make help` lists the rest.
#
#   PYTHON=python3.12 make setup     another interpreter (3.11 or newer)
#   TORCH_INDEX= make setup          torch from pip's own index instead of PyTorch's CPU builds
#   ARGS=--again make paper-images   repeat runs that were finished before
#   ONLY=recording make bench        one benchmark; the other tables stay as they are

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := tables,demo,charts,paper,fast,programs,dev

# On Linux, pip's default torch carries gigabytes of CUDA libraries. Nothing here needs them, so
# setup asks PyTorch's own index for the CPU build first, and pip's index only if that fails.
ifeq ($(shell uname -s),Linux)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
endif

# One thread per worker: the machine's cores are shared out by xdist, not fought over by OpenMP.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest
WORKERS ?= 2
KILLS ?= 5000

.PHONY: help setup demo lint test test-long torture bench paper-images paper-images-quick clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
	  while IFS=$$'\t' read -r name text; do printf '  make %-18s %s\n' "$$name" "$$text"; done

setup: $(STAMP) ## make .venv and install dualform with all it needs here

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make setup: '$(PYTHON)' was not found. Install Python 3.11 or newer, or name one:" >&2; \
	  echo "  make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: dualform needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name a newer one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "make setup: $(PYTHON) has no venv/ensurepip module, so it cannot make a virtual environment." >&2; \
	  echo "On Debian and Ubuntu, install the package python$$v-venv:  apt install python$$v-venv" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); }
	@if [ -n "$(TORCH_INDEX)" ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  $(BIN)/python -m pip install --quiet --no-deps --retries 1 -c constraints.txt \
	    --index-url "$(TORCH_INDEX)" torch || \
	  echo "make setup: no torch from $(TORCH_INDEX); taking the one of pip's own index, which may be large." >&2; \
	fi
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $(STAMP)

demo: setup ## record, certify and look into a small network (scikit-learn's digits)
	$(BIN)/dualform demo

lint: setup ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-cache

test: setup lint ## lint and the tests (about ten minutes on two cores)
	$(PYTEST) -n $(WORKERS) -m "not long"

test-long: setup ## the tests marked `long`
	$(PYTEST) -n $(WORKERS) -m long || { code=$$?; \
	  [ $$code -eq 5 ] && echo "no test is marked long" || exit $$code; }  # 5: nothing collected

torture: setup ## kill and interrupt thousands of recordings (KILLS=5000), for hours
	DUALFORM_TORTURE=$(KILLS) $(PYTEST) -n $(WORKERS) -m long tests/recording/test_crashes.py

bench: setup ## measure recording and asking against the naive ways; one JSON line per row
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[bench]" || \
	  echo "make bench: no faiss; its rows are left out" >&2
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ONLY)

paper-images: setup ## the paper's image experiments: half an hour on two cores, 10 GB of disk meanwhile
	OMP_NUM_THREADS=1 $(BIN)/python experiments/paper_images.py $(ARGS)
	$(BIN)/python experiments/page.py

paper-images-quick: setup ## the same on a small scale, in two minutes: shapes, not the paper's numbers
	OMP_NUM_THREADS=1 $(BIN)/python experiments/paper_images.py --quick

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks experiments -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
