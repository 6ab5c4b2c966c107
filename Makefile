# Everything a contributor runs. Needs git, make, Python 3.11+ and a network; the rest is set up in .venv.
.DEFAULT_GOAL := help
SHELL := /usr/bin/env bash
PYTHON ?=
VENV := .venv/bin
PYTEST_ARGS ?=
# How many test modules run at a time. A module starts servers of up to seven processes.
TEST_JOBS ?= 2
DEMO_ARGS ?=
STACK_ARGS ?=
SECONDS ?= 600
SOAK_ARGS ?=
PICTURES_ARGS ?=

# The environment's settings for other Pythons must not reach this one.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help setup demo test check fix bench soak pictures loadgen stack stack-down lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create or update .venv (no-op when up to date)
	@.ci/setup $(PYTHON)

demo: setup ## serve a real model, stall some requests, name each stall's stage (minutes)
	@$(VENV)/python -m server demo $(DEMO_ARGS)

test: setup ## run all tests; PYTEST_ARGS="tests/unit -k ring" narrows them
	@$(VENV)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

check: setup ## formatting, lint, types, import rules, generated files
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/pyright
	$(VENV)/python -m pytest -q tests/contract/test_imports.py
	$(VENV)/python -m pdtrace.glossary --check
	$(VENV)/python -m dashboards.build --check
	$(VENV)/python -m dashboards.lint
	$(VENV)/python -m tests.support.module_index --check

fix: setup ## format, repair what ruff can, regenerate docs
	$(VENV)/ruff check --fix-only .
	$(VENV)/ruff format .
	$(VENV)/python -m pdtrace.glossary
	$(VENV)/python -m dashboards.build
	$(VENV)/python -m tests.support.module_index

bench: setup ## run the benchmarks; each ends with one JSON line
	@for file in benchmarks/bench_*.py; do \
	  echo "$$file" >&2; $(VENV)/python -m benchmarks.$$(basename "$$file" .py) --json || exit 1; \
	done

soak: setup ## random faults under load, and what is left of it; 10 minutes, or SECONDS=60
	@$(VENV)/python -m tests.soak --seconds $(SECONDS) $(SOAK_ARGS)

pictures: setup ## take docs/images anew: the boards, of a real run with trouble in it (15 minutes)
	@.ci/programs
	@$(VENV)/python -m tests.pictures $(PICTURES_ARGS)

loadgen: setup ## create or update .venv-loadgen: aiperf, which the tests run against the server
	@.ci/loadgen

stack: setup ## install and start Jaeger, Prometheus and Alertmanager; servers started later join them
	@.ci/programs stack
	@$(VENV)/python -m server stack up $(STACK_ARGS)

stack-down: setup ## stop what make stack started; metrics stay in run/stack
	@$(VENV)/python -m server stack down

lock: setup ## resolve requirements/ anew from pyproject.toml
	$(VENV)/uv pip compile pyproject.toml --extra otlp --extra server --extra dashboards --extra dev --universal \
	  --python-version 3.11 --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --output-file requirements/dev.txt
	$(VENV)/uv pip compile --group loadgen --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --no-emit-index-url --output-file requirements/loadgen.txt

clean: ## remove environments and caches; recordings in run/ stay
	rm -rf .venv .venv-loadgen build dist *.egg-info pdtrace/native/_compiled*.so .pytest_cache .ruff_cache .hypothesis
	find pdtrace server dashboards tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	@[ ! -d run ] || echo "kept: run/ (recordings); remove it by hand"
