# Each target makes the environment it needs. `make` alone lists the targets.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
PYTEST_ARGS ?= -n 2

# On the CPU, offline and quiet, unless the caller's environment says otherwise (PJRT_DEVICE=TPU make bench).
export PJRT_DEVICE ?= CPU
export JAX_PLATFORMS ?= cpu
export HF_HUB_OFFLINE ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 2

TORCHAX := 0.0.13
SITE = $(@D)/lib/python3.11/site-packages

.PHONY: help demo test lint conformance bench env newest dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: .venv/.stamp ## compile a first model and compare it with eager
	.venv/bin/python examples/quickstart.py

test: .venv/.stamp .venv-latest/.stamp ## run the suite in both environments, two tests at a time (PYTEST_ARGS="-k rng -x")
	.venv/bin/python -m pytest $(PYTEST_ARGS)
	.venv-latest/bin/python -m pytest -m "not xla" $(PYTEST_ARGS)

lint: .venv/.stamp ## check format, lint and types
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/pyright pure_backend

conformance: .venv/.stamp ## run torch's operator database against eager (40 minutes) and write docs/conformance.md
	PYTHONPATH=tests .venv/bin/python -m conformance $(CONFORMANCE_ARGS)

bench: .venv/.stamp ## run every benchmark (15 minutes) and write docs/benchmarks (BENCH_ARGS=--quick, "--only run_time hlo")
	.venv/bin/python benchmarks $(BENCH_ARGS)

env: .venv/.stamp .venv-latest/.stamp ## make both environments and report what they hold
	.venv/bin/python -m pure_backend env
	.venv-latest/bin/python -m pure_backend env

newest: ## make .venv-newest of whatever torch and jax are newest today, and run the suite in it
	$(PYTHON) -m venv .venv-newest
	sed -n 's/==.*//p' requirements/latest.lock | .venv-newest/bin/python -m pip install --quiet --upgrade -r /dev/stdin
	.venv-newest/bin/python -m pip install --quiet --upgrade --force-reinstall --no-deps torchax
	.venv-newest/bin/python -m pip install --quiet --no-deps -e .
	.venv-newest/bin/python -m pure_backend env
	.venv-newest/bin/python -m pytest -m "not xla" $(PYTEST_ARGS)

dist: ## build the wheel and the source distribution, install the wheel into an empty environment, and check it there
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build
	.venv-dist/bin/python -m build
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../.venv-dist/bin/python -m pure_backend check

clean: ## remove caches and build products; the environments stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -exec rm -rf {} +

# Every step may be repeated, and the stamp comes last, so an interrupted build is taken up again by the next `make`.
# pip writes INSTALLER at the end of each package: one without it was cut short, and is forgotten so that pip repeats it.
# torchax comes after the lock file, because the torch_xla wheel overwrites it with a copy of torchax 0.0.6.
.venv/.stamp: requirements/xla.lock setup.py
.venv-latest/.stamp: requirements/latest.lock setup.py
.venv/.stamp .venv-latest/.stamp:
	$(PYTHON) -m venv $(@D)
	rm -rf $(SITE)/~*
	for info in $(SITE)/*.dist-info; do test -e "$$info/INSTALLER" || rm -r "$$info"; done
	$(@D)/bin/python -m pip install --quiet -r $<
	test -e $(SITE)/torchax-$(TORCHAX).dist-info && grep -qs '^__version__ = "$(TORCHAX)"' $(SITE)/torchax/__init__.py || \
	  $(@D)/bin/python -m pip install --quiet --force-reinstall --no-deps torchax==$(TORCHAX)
	$(@D)/bin/python -m pip install --quiet --no-deps -e .
	touch $@
