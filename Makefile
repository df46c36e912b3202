# make demo | test | test-all | bench | docs | lint | clean. Each makes .venv first and reuses it afterwards.
#
#   PYTHON=python3.12    the interpreter, >= 3.11; by default the first fit one of python3.11, python3.12, python3
#   PIP_FLAGS='...'      further options of `pip install`; pip's own configuration and variables hold as they are
#
#   ONLY='index crf'    the benchmarks that `make bench` runs; by default all
#
# From PyPI, torch for Linux comes with gigabytes of CUDA libraries. Without an NVIDIA GPU, take PyTorch's CPU builds:
#   make demo PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_FLAGS ?=
ONLY ?=
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3)

.PHONY: help install demo test test-all bench docs lint clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/mcis demo

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-all: lint
	$(BIN)/python -m pytest

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run_all.py $(ONLY)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

# mypy sees the four folders through links in .venv; its messages name them as the repository does.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	set -o pipefail; $(BIN)/mypy | sed 's|^$(VENV)/src/mcis/||'

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call fail,"found","expected","remedy"): no commas inside, make would split there.
fail = { printf '%s\n  expected: %s\n  remedy:   %s\n' $(1) $(2) $(3) >&2; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@for cxx in $$CXX c++ g++ clang++; do command -v $$cxx >/dev/null && exit; done; \
	$(call fail,"No C++ compiler: none of \$$CXX c++ g++ clang++ is on the PATH.", \
	  "one of them; pydensecrf2 (the dense CRF) is built from source", \
	  "install one (Debian and Ubuntu: apt-get install g++) and call make again")
	@header=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'); \
	test -e "$$header" || $(call fail,"No Python headers: $$header does not exist.", \
	  "that file; pydensecrf2 (the dense CRF) is built from source", \
	  "install them (Debian and Ubuntu: apt-get install python3-dev) and call make again")
	@echo "Installing into $(VENV): some minutes the first time."
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@mkdir -p $(VENV)/src/mcis
	@for room in datasets models platform tuning; do ln -sfn ../../../$$room $(VENV)/src/mcis/$$room; done
	@touch $@

# A name on the PATH is not yet an interpreter (version managers leave shims behind), so each candidate is run.
$(BIN)/python:
	@for python in $(CANDIDATES); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$($$python --version) ($$python)"; \
	    $$python -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }; \
	    exit; \
	  fi; \
	done; \
	$(call fail,"No fit Python among: $(CANDIDATES).", \
	  "Python >= 3.11 with its venv module", \
	  "install one (Debian and Ubuntu: apt-get install python3-venv python3-dev) or name one: make PYTHON=PATH")
