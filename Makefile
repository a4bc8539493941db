# make demo | test | test-all | test-versions | lint | docs | venv: each does all set-up on a fresh machine.
# A second run reinstalls nothing.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

# One tested set of versions; FBGEMM is built against one torch release and must match it.
TORCH := torch==2.13.0
TORCHREC := torchrec==1.9.2
STACK ?= $(shell command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1 && echo cuda || echo cpu)
FBGEMM_cpu := fbgemm-gpu-cpu==1.8.0
FBGEMM_cuda := fbgemm-gpu==1.8.0

.PHONY: demo test test-all test-versions lint docs venv clean

demo: venv
	$(BIN)/freescale demo

test: venv
	$(BIN)/python -m tests -m "not slow"

test-all: venv  # with the tests that take long: the wheel, the site, more sanitizers, other releases, whole benchmarks
	$(BIN)/python -m tests

test-versions: venv  # a short suite for each supported set of versions, in environments of their own; writes the table in docs/
	$(BIN)/python -m tests.versions --output benchmarks/results/versions_cpu.json
	$(BIN)/python -m benchmarks.tables

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the documentation is in site/: $(BIN)/python -m http.server --directory site"

venv: $(VENV)/.built

$(VENV)/.stack: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or later: make PYTHON=python3.12")'
	@command -v $(CXX) > /dev/null || { echo "needs a C++ compiler, $(CXX)"; exit 1; }
	@echo "installing $(TORCH), $(FBGEMM_$(STACK)) and $(TORCHREC) into $(VENV), which takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(TORCH) $(FBGEMM_$(STACK)) setuptools pybind11
	$(PIP) --no-deps $(TORCHREC)  # its metadata asks for a CUDA build of FBGEMM and an old torchmetrics
	@touch $@

$(VENV)/.built: $(VENV)/.stack pyproject.toml setup.py $(wildcard csrc/* csrc/*/*)
	PYTHONWARNINGS="ignore:Editable installation" \
	$(PIP) --no-warn-conflicts --no-build-isolation --editable ".[$(STACK),dev]"
	@# pip would compile the modules on one core, and the tests of packages, too; some files are templates, which cannot be compiled.
	@# An editable installation compiles none of ours, and where Python writes no bytecode, each process would compile them again.
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/testing/_internal/' $(VENV)/lib lightning_freescale > /dev/null || true
	@touch $@

clean:
	rm -rf $(VENV) .versions build site lightning_freescale.egg-info lightning_freescale/_C*.so
