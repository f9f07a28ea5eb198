# Two commands need nothing but Python, pip and make: `make demo` and `make test`.
# Each one creates the environment if it is missing and reuses it afterwards.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

PY  := $(VENV)/bin/python
BIN := $(VENV)/bin
# The pins keep a run repeatable. Without them pip may also choose another torch.
INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test cov check format docs notebooks bench model clean

help:
	@echo "make demo       train a small language model plain and with remat, and compare"
	@echo "make test       run the tests, doctests, docs examples and notebooks"
	@echo "make check      ruff, pyrefly, import-linter"
	@echo "make docs       build docs/_build/html"
	@echo "make bench      run every benchmark"
	@echo "make model      bytes of a model under each policy, as a table and a plot"
	@echo "make notebooks  run the notebooks and store their outputs"
	@echo "make format     format the code;  make cov: tests with coverage;  make clean"
	@echo "Pass options with ARGS, as in: make demo ARGS='--help'"

# A stamp is as new as the last install; the installed package itself is editable.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "remat needs Python 3.11 or newer; try make PYTHON=python3.11")'
	@$(PY) -m pip --version >/dev/null 2>&1 || \
		{ echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(1) into $(VENV) (once; a few minutes the first time)"
	$(INSTALL) -e $(1)
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call environment,'.[viz]')
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call environment,'.[dev]')
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	@$(PY) benchmarks/demo.py $(ARGS)

test: $(VENV)/.dev
	@$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

cov: $(VENV)/.dev
	@$(PY) -m pytest -n $(JOBS) --dist worksteal --cov --cov-report=term-missing $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(PY)
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	$(PY) -m sphinx -W --keep-going -b html docs docs/_build/html

notebooks: $(VENV)/.dev
	$(PY) tests/test_notebooks.py

model: $(VENV)/.dev
	@$(PY) benchmarks/model.py $(ARGS)

bench: $(VENV)/.dev
	@missed=; for script in benchmarks/*.py; do \
		case $$script in */demo.py|*/_*) continue ;; esac; \
		echo "== $$script"; $(PY) $$script $(ARGS) || missed="$$missed $$script"; \
	done; [ -z "$$missed" ] || { echo "failed or missed a target:$$missed"; exit 1; }

clean:
	rm -rf $(VENV) out docs/_build docs/notebooks .pytest_cache .ruff_cache .hypothesis
