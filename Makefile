# Everything is installed into .venv; `make venv` is cheap when pyproject.toml and constraints.txt are unchanged.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
# The CUDA builds of torch bring a Triton of their own; a CPU build gets this one, to compile and interpret with.
TRITON := triton==3.6.0; platform_system == 'Linux'

export HF_HUB_OFFLINE := 1

.PHONY: help venv demo test check format gpu-test bench docs clean

help:
	@echo "make venv      install everything into $(VENV)"
	@echo "make demo      a real sentence encoder on peakattn: checked, timed, and what its GPU kernels compile to"
	@echo "make test      the test suite, no GPU needed"
	@echo "make check     ruff, ruff format, mypy, import rules"
	@echo "make format    rewrite the sources as ruff formats them"
	@echo "make gpu-test  the tests that need a CUDA device, with a record of what passed"
	@echo "make bench     peakattn against its rivals on this machine, recorded under benchmarks/results/"
	@echo "make docs      regenerate the tables and pictures of the documents from the records"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile "$(TRITON)"
	@# pip would compile one file after another, for a minute. Some packages bring files that no Python takes.
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@

venv: $(STAMP)

demo: venv
	$(BIN)/peakattn demo

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu"

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: venv
	$(BIN)/peakattn selftest

bench: venv
	$(BIN)/peakattn bench

docs: venv
	$(BIN)/peakattn docs

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
