PYTHON ?= python3
BIN := .venv/bin
# Pin the versions of all packages that pip installs below, and of their build requirements.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

.PHONY: help demo test docs lint wheel audit clean

help:
	@echo "make demo   set up .venv and compare optimizers on a small language model"
	@echo "make test   set up .venv and run the tests"
	@echo "make docs   build the documentation into build/site"
	@echo "make lint   ruff and mypy"
	@echo "make audit  look up known vulnerabilities of the packages that CI installs"
	@echo "make wheel  build the wheel, install it alone, and run the README's examples"

.venv/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[$*]"
	test $* != dev || $(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement tests/torchtitan.txt
	touch $@

demo: .venv/lab.stamp
	$(BIN)/kronbit compare

test: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8

docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: .venv/dev.stamp
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --no-compile dist/*.whl
	.venv-wheel/bin/python tests/support/markdown.py README.md

audit:
	env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT $(PYTHON) .ci/audit

clean:
	rm -rf .venv .venv-wheel .venv-audit build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
