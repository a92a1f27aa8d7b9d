# The viewer's page: TypeScript in frontend/, built into the package. Included by the Makefile.
#
#   make frontend      build the page (needs Node.js 20 or newer)
#   make screenshots   take the pictures of docs/images

STATIC := src/torchtap/viewer/static
NPM_CI := npm ci --no-audit --no-fund --loglevel=error

.PHONY: frontend page screenshots

# The built page is part of the repository, with a note of the sources that it was built from.
UP_TO_DATE := $(PYTHON) packaging/fingerprint.py --check

frontend:
	@command -v npm >/dev/null || { echo "the viewer's page needs npm (Node.js 20 or newer) to be built" >&2; exit 1; }
	cd frontend && $(NPM_CI) && npm run --silent build
	$(PYTHON) packaging/fingerprint.py --write

# Only where its sources were changed; everything else works without the page.
page:
	@if $(UP_TO_DATE); then :; \
	elif command -v npm >/dev/null; then $(MAKE) --no-print-directory frontend || \
	  echo "the viewer's page was not built anew; it is of older sources"; \
	else echo "no npm: the viewer's page is of older sources"; fi

demo test: page

screenshots: $(VENV)/.dev browser frontend
	$(BIN)/python -m tests.viewer.screenshots
