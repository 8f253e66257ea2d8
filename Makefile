# `make demo` and `make test` do all of their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-slow study check coverage clean

$(VENV)/installed: pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing the package and what it needs into $(VENV) (a minute or two) ..."
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/installed  ## train the bundled model on three-digit addition, asynchronously, on the CPU
	@rm -rf runs/demo
	@$(BIN)/tba train run.folder=runs/demo $(DEMO)
	@$(BIN)/tba report runs/demo

test: $(VENV)/installed  ## the tests, under 10 minutes on two cores
	@$(BIN)/python -m pytest $(PYTEST)

test-slow: $(VENV)/installed  ## the long ones, on real pretrained models where they are at hand
	@$(BIN)/python -m pytest -m slow $(PYTEST)

study: $(VENV)/installed  ## the off-policy study: 412 runs in under two hours on two cores; continues where it was stopped
	@$(BIN)/tba sweep studies/off_policy/rates.toml
	@$(BIN)/tba sweep studies/off_policy/study.toml
	@$(BIN)/python studies/off_policy/gradient_variance.py runs/off_policy
	@$(BIN)/tba report runs/off_policy_rates
	@$(BIN)/tba report runs/off_policy

coverage: $(VENV)/installed  ## the tests with line coverage of tba/
	@$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered --cov-fail-under=85 $(PYTEST)

check: $(VENV)/installed  ## format, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache
