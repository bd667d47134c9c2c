# One file of commands. CI calls the same ones. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECK_BUILD := build/check

.PHONY: demo test test-gpu check bench docs model audit mutations fuzz wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[test]"
	touch $@

model: $(VENV)/.installed
	$(BIN)/zipage models pull smollm2-135m

demo: model
	$(BIN)/python examples/self_consistency.py

# A file's tests stay together: they share engines. The long files come first, as they are listed.
# A worker that dies ends the run: with a new one in its place the rest can wait for ever.
# The deciding rooms' coverage (pyproject.toml, tests/conftest.py) is printed, and held to a bound.
test: check docs model audit
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
		--cov --cov-config=pyproject.toml --cov-report=term-missing:skip-covered

# Pins against known vulnerabilities; one that is found fails, a service that is not there does not.
audit: $(VENV)/.installed-audit
	$(BIN)/python packaging/audit.py

$(VENV)/.installed-audit: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[audit]"
	touch $@

# Each planted fault of tests/mutations must be caught by the tests that it names (minutes).
mutations: model $(VENV)/.installed-test
	$(BIN)/python tests/mutations/run.py

# All fuzzing targets in turn, FUZZ_SECONDS each; guided by coverage where atheris can be installed.
FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.installed-test
	-$(BIN)/pip install -q -c constraints.txt -e ".[fuzz]"
	for target in $$($(BIN)/python tests/fuzz/run.py --list); do \
		$(BIN)/python tests/fuzz/run.py $$target --seconds $(FUZZ_SECONDS) || exit 1; done

# On a machine with a card and its packages (extra `gpu`): the tests that the default run leaves out,
# on inputs of their own each time. A bare card machine runs benchmarks/card/test_gpu.sh instead.
test-gpu: model $(VENV)/.installed-test
	$(BIN)/pytest -m gpu --fresh-seed $$(date +%j%H%M) --soak-seconds 30 --durations=15

bench: model
	$(BIN)/python bench.py

# mypy and import-linter do not follow the package mapping in place, so they look at a plain install.
check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(CHECK_BUILD) build/lib build/bdist* && mkdir -p $(CHECK_BUILD)
	$(BIN)/pip install -q --no-deps --target $(CHECK_BUILD) .
	cd $(CHECK_BUILD) && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p zipage_lang
	cd $(CHECK_BUILD) && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../.importlinter --no-cache

# The site, in build/site. A broken link or a missing page ends it (with --quiet nothing would).
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	touch $@

# Archives in build/dist, from a copy of the tree; tried in a fresh environment (gigabytes, minutes).
wheel:
	PYTHON=$(PYTHON) bash packaging/check_wheel.sh

clean:
	rm -rf build *.egg-info $(VENV)
