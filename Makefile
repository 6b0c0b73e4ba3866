# Two commands, each from nothing on a fresh machine:
#   make demo    environment, install, then the default pair writes code with and without speculation, and is timed in turns
#   make test    environment, install, then lint, types and the tests, in 20 minutes at most on two cores
# and two for those who have longer:
#   make test-all    every test, also those marked slow. Tests beside other programs skip themselves unless these are there:
#                    .venv/bin/python -m pip install -c constraints.txt -e '.[dev,peers,harness]'
#   make soak        200 streaming clients on a real server for 5 minutes; a table and a plot go to results/soak/
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Two workers, a thread each: more would spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: install demo test test-all soak lint bench clean

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) lint
	$(PYTEST) -m "not slow"

test-all: $(STAMP) lint
	$(PYTEST)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.soak

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/outrider bench --wide --dtype float32 --dtype bfloat16 --out results/bench

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/outrider/kernels/native/*.[ch] src/outrider/kernels/native/*.inc)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
