# make demo   environment, install, the whole story on generated data: about a minute, no torch
# make demo-axolotl   the same with the real Axolotl
# make test   environment, install with everything the tests use, all tests
# make check  lint, format, types
# make pictures   the pictures of the README and the example report, from a real training; needs chromium
# make docs   the documentation as a site that opens offline: build/site/index.html
# make test-base   the tests that need neither torch nor Axolotl: any Python from 3.10 to 3.14
# make wheel  sdist and wheel in dist/, ready to publish; make release-check tries the wheel in an empty environment
# make axolotl-matrix   other releases of Axolotl, each with its own pins; OPTIONS="--stack 0.18.0" for one
# make bench-reader, bench-hash, bench-dedupe, bench-pack, bench-pad, bench-axolotl, bench-meter, bench-meter-gpu, bench-stacks, bench-traceml,
#      bench-preprocess-command, bench-trl-prepare, bench-protocol, bench-false-findings, bench-advice, bench-cluster, bench-trace-gpu, bench-memory-gpu   a race, see benchmarks/README.md; OPTIONS="--help" for its options

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
AXOLOTL ?= axolotl==0.19.0

BIN := $(VENV)/bin
# Tests start hundreds of interpreters: none of them compiles what another has compiled.
unexport PYTHONDONTWRITEBYTECODE
# A file of tests stays in one process: what it prepares, it prepares once. Tests wait for others a
# quarter of their time, so there is a process more than there are cores; conftest.py orders the files.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
SIDE_BY_SIDE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# What a race needs beside our package: peers of the reader, or the real Axolotl.
RACES := bench-reader bench-hash bench-dedupe bench-pack bench-pad bench-protocol bench-false-findings
AXOLOTL_RACES := bench-axolotl bench-preprocess-command bench-trl-prepare bench-advice bench-meter bench-meter-gpu bench-stacks bench-traceml bench-cluster bench-trace-gpu bench-memory-gpu

.PHONY: demo demo-axolotl test test-base check pictures docs format wheel release-check clean axolotl-matrix $(RACES) $(AXOLOTL_RACES)

demo: $(VENV)/.report
	$(BIN)/fast-axolotl demo

demo-axolotl: $(VENV)/.test
	$(BIN)/python -m benchmarks.demo_axolotl

# The tests of the kernels run a second time, with every index checked.
test: $(VENV)/.test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(abspath $(VENV))/boundscheck \
		$(BIN)/python -m pytest -m kernels $(SIDE_BY_SIDE) $$(grep -l mark.kernels tests/test_*.py)

BASE_TESTS := kernels hashing packing plan_packs contracts formats csv dedupe_files mixing record meter launch \
	run_measure cli protocol public_surface system sampler verdict live demo bench
test-base: $(VENV)/.dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(BASE_TESTS:%=tests/test_%.py)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# From the records of a real training; OPTIONS="--run FOLDER" makes such records first.
pictures: $(VENV)/.test
	$(BIN)/python tools/pictures.py $(OPTIONS)

# Broken links and pages that load from elsewhere are errors.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; search works when it is served: python3 -m http.server -d build/site"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(RACES): $(VENV)/.bench
$(AXOLOTL_RACES): $(VENV)/.test
OPERATIONS := bench-hash bench-dedupe bench-pack bench-pad
$(OPERATIONS): bench-%:
	$(BIN)/python -m benchmarks.operations $* $(OPTIONS)
bench-advice:
	$(BIN)/python -m benchmarks.advice_cases $(OPTIONS)
$(filter-out $(OPERATIONS) bench-advice,$(RACES) $(AXOLOTL_RACES)): bench-%:
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(OPTIONS)

axolotl-matrix: $(BIN)/python
	$(BIN)/python tools/axolotl_matrix.py $(OPTIONS)

wheel: build/venv/.build
	rm -rf dist
	build/venv/bin/python -m build --outdir dist
	build/venv/bin/python -m twine check --strict dist/*

release-check: wheel
	build/venv/bin/python tools/release_check.py

clean:
	rm -rf $(VENV) .venv-check .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.report: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[report]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[dev,docs]'
	touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[bench]'
	touch $@

# pip would compile in one process; the SDK of a cloud, a third of all files, is imported by nobody.
$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP) --no-compile '$(TORCH)'
	$(PIP) --no-compile '$(TORCH)' '$(AXOLOTL)' --editable '.[dev,test]'
	$(BIN)/python -m compileall -qq -j 0 -x /oci/ $(VENV)/lib || true
	touch $@

build/venv/.build:
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check build twine
	touch $@
