# make demo | test | test-torch TORCH=2.14.1 | test-all | test-gpu | test-browser | test-trl | fuzz | bench | bench-gpu | lint | docs | notebooks
# Each target first makes .venv and installs what constraints.txt pins (only Python 3.11 and pip are
# needed). On Linux, plain pip installs torch's CUDA build; for the smaller CPU build say
#     make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
PYTEST_ARGS ?=
FUZZ_DIR ?= out/fuzz

HARDLY_IMPORTED := site-packages/.*/tests?/|/transformers/models/|/diffusers/pipelines/|site-packages/(debugpy|fontTools|mypyc?|pip|playwright|setuptools|sqlalchemy)/

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# -qq: only errors; pip warns about every package index that lacks a package. --no-compile: all that
# is installed is compiled at the end, on every core, so that no process does it when it imports (one
# that may not write bytecode, as in many containers, would do it each time, for 5 seconds).
PIP := $(BIN)/python -m pip install -qq --no-compile -c constraints.txt
# pip works on one core: two at once install the halves of what is pinned, one of them with torch.
PINS := grep -v '^torch==' constraints.txt
# Each of the test workers is one thread of torch.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
FAST := "not slow and not gpu and not browser"

.PHONY: demo test test-torch test-all test-gpu test-browser test-trl fuzz mutation coverage bench bench-gpu lint format docs notebooks install constraints clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch$(if $(TORCH_INDEX), from $(TORCH_INDEX)) and what constraints.txt pins"
	@# Another index need not have the pinned versions of what torch needs: those are in the halves.
	@# What is pinned and not to be had on this system is left to the next line, if it is needed.
	@{ $(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch; \
	   $(PIP) --no-deps $$($(PINS) | sed -n 'n;p'); } & half=$$!; \
	 $(PIP) --no-deps $$($(PINS) | sed -n 'p;n'); wait $$half || true
	@echo "installing memopt with its development tools"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e '.[dev]' torch
	@# torchvision pins another build of torch; of timm only the models are needed.
	@$(PIP) --no-deps torchvision timm
	@echo "compiling what was installed"
	@# Not what hardly anything imports. Templates among the files are no Python, and fail.
	@find $(VENV)/lib memopt tests examples -name '*.py' | grep -vE '$(HARDLY_IMPORTED)' | tr '\n' '\0' \
	 | xargs -0 -P $(WORKERS) -n 300 $(BIN)/python -m compileall -qq || true
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# pytest rewrites assertions to explain those that fail, which takes each worker 18 seconds: only
# tests that failed run again that way.
test: $(STAMP)
	$(PYTEST) --assert=plain -m $(FAST) $(PYTEST_ARGS) \
	 || { $(PYTEST) --last-failed --last-failed-no-failures none -m $(FAST) $(PYTEST_ARGS); exit 1; }

# The fast suite, or a part of it (SUITE=tests/torch_private), with another torch (2.11.0, 2.13.0,
# 2.14.1, 2.15.0) or Python (PYTHON=python3.13) in an environment of its own.
TORCH ?= 2.13.0
SUITE ?= tests
TORCH_VENV := .venv-torch-$(TORCH)-$(notdir $(PYTHON))

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m memopt doctor
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup \
		-m $(FAST) $(SUITE) $(PYTEST_ARGS)

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	@grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	@$(TORCH_VENV)/bin/python -m pip install -qq $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch==$(TORCH)
	@$(TORCH_VENV)/bin/python -m pip install -qq -c $(TORCH_VENV)/constraints.txt -e '.[dev]' torch==$(TORCH)
	@$(TORCH_VENV)/bin/python -m pip install -qq -c $(TORCH_VENV)/constraints.txt --no-deps torchvision timm
	@touch $@

test-all: $(STAMP)
	$(PYTEST) --timeout 3600 $(PYTEST_ARGS)

# Seven minutes at most; with bench-gpu's eighteen, a GPU is needed for twenty-five. Both with the
# allocator that counts exactly (docs/execution.md).
test-gpu: $(STAMP)
	PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python -m pytest -m gpu --session-timeout 420 $(PYTEST_ARGS)

# The pages of reports, driven in a browser that is installed already (nothing is downloaded):
# Chromium or Chrome on the path, or at MEMOPT_CHROMIUM (Debian: apt-get install chromium).
test-browser: $(STAMP)
	@$(BIN)/python -c "from tests.browser.chromium import chromium; print('browser:', chromium())"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser $(PYTEST_ARGS)

# TRL's trainers, 20 steps each, with and without memopt.
test-trl: $(STAMP)
	@$(PIP) -e '.[trl]'
	$(PYTEST) tests/users/test_trl.py $(PYTEST_ARGS)

# Random modules and cost models against every law; hours. What is done is kept in FUZZ_DIR.
fuzz: $(STAMP)
	mkdir -p $(FUZZ_DIR)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz plans --count 6000 --out $(FUZZ_DIR)/plans.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz modules --count 2000 --out $(FUZZ_DIR)/modules.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz values --count 2000 --out $(FUZZ_DIR)/values.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz compiled --count 500 --out $(FUZZ_DIR)/compiled.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz loops --count 500 --out $(FUZZ_DIR)/loops.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz budgets --count 300 --out $(FUZZ_DIR)/budgets.jsonl
	HYPOTHESIS_PROFILE=long $(PYTEST) tests/fuzz --timeout 36000 $(PYTEST_ARGS)
	$(BIN)/python -m tests.fuzz report --out $(FUZZ_DIR)/plans.jsonl
	$(BIN)/python -m tests.fuzz report --out $(FUZZ_DIR)/modules.jsonl
	$(BIN)/python -m tests.fuzz report --out $(FUZZ_DIR)/compiled.jsonl
	$(BIN)/python -m tests.fuzz report --out $(FUZZ_DIR)/loops.jsonl
	$(BIN)/python -m tests.fuzz report --out $(FUZZ_DIR)/budgets.jsonl

# Mutants of what everything rests on; hours for all of them, so a sample (SAMPLE= of each module).
SAMPLE ?= 40
mutation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation --sample $(SAMPLE) --results mutation.jsonl

# Branches of the cost model and the strategies that the tests take, kernels as plain Python.
coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation.coverage

bench: $(STAMP)
	$(BIN)/python -m benchmarks

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict memopt

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every notebook of the documentation, from top to bottom.
notebooks: $(STAMP)
	$(PYTEST) tests/docs/test_notebooks.py $(PYTEST_ARGS)

# Pin what is installed in $(VENV) now.
constraints: $(STAMP)
	$(BIN)/python -m pip freeze --exclude memopt | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
