# Two commands, each from nothing on a fresh machine:
#   make demo    environment, install, then the default pair writes code with and without speculation, and is timed in turns
#   make test    environment, install, then lint, types and every test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint check bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal  # two workers, a thread each: more would spin

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/outrider bench --wide --dtype float32 --dtype bfloat16 --out benchmarks/results/bench

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard src/outrider/kernels/native/*.[ch] src/outrider/kernels/native/*.inc)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
