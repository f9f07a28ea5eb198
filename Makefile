# Two commands need nothing but Python, pip and make: `make demo` and `make test`.
# Each one creates the environment if it is missing and reuses it afterwards.

PYTHON ?= python3
JOBS   ?= 2
ARGS   ?=

# The pins keep a run repeatable. Without them pip may also choose another torch.
# With TORCH, that one is installed, in an environment of its own.
TORCH ?=
ifeq ($(TORCH),)
VENV ?= .venv
PINS := constraints.txt
else
VENV ?= .venv-torch-$(TORCH)
PINS := $(VENV)/constraints.txt
endif

PY  := $(VENV)/bin/python
BIN := $(VENV)/bin
# Python compiles a module when it is first imported, and keeps the result. pip would
# compile all of torch, which takes as long as the rest of an installation.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PY) -m pip install -q --no-compile --disable-pip-version-check -c $(PINS)
TEST := $(PY) -m pytest -n $(JOBS) --dist worksteal

# The versions of torch that remat is run with beside the one in constraints.txt.
TORCHES := 2.14.1
# The other versions of Python, each with the last of these, where they are installed.
PYTHONS := python3.13
# What `make full` runs with those: the transform, what it keeps and counts, keys.
ROOMS := $(addprefix tests/,torch transform reach policies random parity compat nn scope)
# What `make core` runs with another torch: what the shims expect, and ten files on what
# is built on them.
CORE := $(addprefix tests/,torch parity/test_golden.py transform/test_every_transform.py \
	transform/test_plain_graph.py transform/test_orders.py transform/test_traced_golden.py \
	reach/test_capture.py reach/test_own_objects.py policies/test_policies.py \
	random/test_random_keys.py scope/test_scope.py)

# The tests for the loop of changing and trying: files of every room, but for those that
# compile, start programs, or run thousands of combinations. A new file is among them.
SLOW := ambient/test_streams.py chain/test_compiled.py chain/test_counts.py \
	chain/test_budgets.py \
	chain/test_schedules.py compat/%_compiled.py \
	compat/test_compat_patch.py fit/test_fit.py fit/test_kernels.py \
	fit/test_simulated.py fit/test_step_plans.py fit/test_places.py fit/test_loops.py \
	fit/test_choices.py offload/test_offload_files.py \
	parity/test_opinfo.py parity/test_nestings.py parity/test_opinfo_forward.py \
	partial/test_pruning_draws.py \
	partial/test_pruning_properties.py partial/test_pruning_safety.py \
	partial/test_pruning_state.py partial/test_under_transforms.py \
	partial/test_pruning_failures.py partial/test_plan_random.py \
	partial/test_pruning_signatures.py partial/test_pruning_interop.py \
	partial/test_pruning_calls.py \
	policies/test_policies_transforms.py policies/test_within.py random/%_compiled.py \
	random/test_random_keys_transforms.py \
	random/test_random_samplers.py random/test_random_sharded.py \
	random/test_random_stream.py report/test_compare.py \
	report/test_explain_peak.py report/test_comparison.py \
	scope/test_scope_compiled.py torch/test_versions.py transform/test_traced_% \
	transform/test_adversarial.py transform/test_every_transform.py transform/test_api.py \
	transform/test_compile.py transform/test_tracebacks.py \
	transform/test_type_checkers.py transform/test_import.py \
	transform/test_growth.py transform/test_orders.py \
	reach/test_module_changes.py chain/test_disk.py chain/test_surroundings.py \
	nn/test_applied.py parity/test_interpreter.py parity/test_policy_savings.py \
	random/test_random_bind.py random/test_random_stream_ops.py \
	testing/test_client_helpers.py whole/%
QUICK := $(filter-out $(addprefix tests/,$(SLOW)),$(wildcard tests/*/test_*.py)) \
	tests/whole/test_docs_limits.py tests/whole/test_rooms.py

.DEFAULT_GOAL := help
.PHONY: help demo test quick core core-here torches clients faults full cov check format docs dist clone notebooks bench model fit gpu clean

help:
	@echo "make demo       train a small language model plain and with remat, and compare"
	@echo "make test       run the tests, doctests and examples that are not slow; with"
	@echo "                TORCH=2.14.1 in an environment that has that version of torch"
	@echo "make quick      run fast tests of every room, in less than two minutes"
	@echo "make core       run ten files of tests, and those of shims, with every other torch"
	@echo "make clients    train small models of more than 70 architectures, of others"
	@echo "make faults     plant 40 faults, one at a time, and show that a test catches each"
	@echo "make full       run everything: slow tests, clients, torch's operator database,"
	@echo "                with every version of torch, and most tests with every other"
	@echo "                Python that is installed; before a release"
	@echo "make check      ruff, pyrefly, import-linter"
	@echo "make docs       build docs/_build/html"
	@echo "make dist       build a wheel and an sdist into out/dist, and try both in a fresh"
	@echo "                environment, with the oldest torch and without extras"
	@echo "make clone      run \`make demo\` in a fresh clone, and import every benchmark there"
	@echo "make bench      run every benchmark, and make docs/benchmarks.md from them"
	@echo "make model      bytes of a model under each policy, as a table and a plot"
	@echo "make fit        models in budgets of bytes, beside SAC and torch.compile"
	@echo "make gpu        measure and test what needs a GPU, with the torch that is there;"
	@echo "                PY=python3 for an environment of your own"
	@echo "make notebooks  run the notebooks and store their outputs; ARGS='04 05' for some"
	@echo "make format     format the code;  make cov: tests with coverage;  make clean"
	@echo "Pass options with ARGS, as in: make demo ARGS='--help'"

comma := ,

# A stamp is as new as the last install; the installed package itself is editable.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "remat needs Python 3.11 or newer; try make PYTHON=python3.11")'
	@$(PY) -m pip --version >/dev/null 2>&1 || \
		{ echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(1) into $(VENV) (once; a few minutes the first time)"
	$(INSTALL) -e $(1)
endef

$(VENV)/constraints.txt: constraints.txt
	@mkdir -p $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' $< > $@

$(VENV)/.demo: pyproject.toml $(PINS)
	$(call environment,'.[viz]')
	@touch $@

# For what `make core` runs, where nothing else is tried.
$(VENV)/.core: pyproject.toml $(PINS)
	$(call environment,'.[viz$(comma)test]')
	@touch $(VENV)/.demo $@

$(VENV)/.dev: pyproject.toml $(PINS)
	$(call environment,'.[dev]')
	@touch $(VENV)/.demo $(VENV)/.core $@

# For tests/whole/clients/test_timm.py: where a torchvision loads beside that torch.
$(VENV)/.vision: $(VENV)/.dev
	$(call environment,'.[dev$(comma)vision]')
	@touch $@

demo: $(VENV)/.demo
	@$(PY) benchmarks/demo.py $(ARGS)

test: $(VENV)/.dev
	@$(TEST) $(ARGS)

quick: $(VENV)/.dev
	@$(TEST) $(QUICK) $(ARGS)

# Each torch in a make of its own, which chooses the environment.
core torches:
	@for torch in $(TORCHES); do echo "== torch $$torch"; \
		$(MAKE) --no-print-directory $(if $(filter core,$@),core-here,.venv-torch-$$torch/.core) \
			TORCH=$$torch VENV=.venv-torch-$$torch || exit 1; \
	done

core-here: $(VENV)/.core
	@$(TEST) $(CORE) $(ARGS)

# Each architecture once; `make full` trains each in every setting.
clients: $(VENV)/.dev
	@$(TEST) -m "clients and not slow" tests/whole/clients/test_sweep.py $(ARGS)

faults: $(VENV)/.dev
	@PYTHONPATH=tests $(PY) tests/plant_faults.py $(ARGS)

# `-m ""` takes back what pyproject.toml leaves out.
full: check docs
	@$(MAKE) --no-print-directory test ARGS='-m "" $(ARGS)'
	@for torch in $(TORCHES); do echo "== torch $$torch"; \
		$(MAKE) --no-print-directory .venv-torch-$$torch/.vision test \
			TORCH=$$torch VENV=.venv-torch-$$torch ARGS='-m "" $(ARGS)' || exit 1; \
	done
	@for python in $(PYTHONS); do \
		command -v $$python >/dev/null || { echo "== no $$python here"; continue; }; \
		echo "== $$python"; \
		$(MAKE) --no-print-directory test PYTHON=$$python VENV=.venv-$$python \
			TORCH=$(lastword $(TORCHES)) ARGS="$(ROOMS) $(ARGS)" || exit 1; \
	done

cov: $(VENV)/.dev
	@$(TEST) --cov --cov-report=term-missing $(ARGS)

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

# They make environments of their own, and delete them.
dist:
	@$(PYTHON) tests/check_dist.py

clone:
	@$(PYTHON) tests/check_clone.py

notebooks: $(VENV)/.dev
	$(PY) tests/whole/test_notebooks.py $(ARGS)

model: $(VENV)/.dev
	@RESULTS=out $(PY) benchmarks/model.py $(ARGS)

fit: $(VENV)/.dev
	@RESULTS=out $(PY) benchmarks/fit.py $(ARGS)

# With PY, nothing is installed: torch for a GPU may be there already.
gpu: $(if $(findstring command,$(origin PY)),,$(VENV)/.dev)
	@$(PY) benchmarks/gpu.py $(ARGS)

# A target that is missed is no failure: the page says what was reached.
bench: $(VENV)/.dev
	@failed=; for script in benchmarks/*.py; do \
		case $$script in */architectures.py|*/demo.py|*/gpu.py|*/picture.py|*/_*) continue ;; esac; echo "== $$script"; \
		RESULTS=benchmarks/results $(PY) $$script $(ARGS) || failed="$$failed $$script"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }
	@$(PY) benchmarks/_page.py

clean:
	rm -rf $(VENV) .venv-torch-* .venv-python* out docs/_build docs/notebooks .pytest_cache .ruff_cache .hypothesis
