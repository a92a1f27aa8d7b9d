# The viewer's page: TypeScript in frontend/, built into the package. Included by the Makefile.
#
#   make frontend      build the page (needs Node.js 20 or newer)
#   make screenshots   take the pictures of docs/images

STATIC := src/torchtap/viewer/static
PAGE_SOURCES := $(shell find frontend -path frontend/node_modules -prune -o -type f -print)
NPM_CI := npm ci --no-audit --no-fund --loglevel=error

.PHONY: frontend page screenshots

frontend: $(STATIC)/app.js

$(STATIC)/app.js: $(PAGE_SOURCES)
	@command -v npm >/dev/null || { echo "the viewer's page needs npm (Node.js 20 or newer) to be built" >&2; exit 1; }
	cd frontend && $(NPM_CI) && npm run --silent build
	@touch $@

# Everything else works without the page: where it cannot be built, say so and go on.
page:
	@if [ -f $(STATIC)/app.js ] && [ -z "$$(find $(PAGE_SOURCES) -newer $(STATIC)/app.js)" ]; then :; \
	elif command -v npm >/dev/null; then $(MAKE) --no-print-directory frontend || \
	  echo "the viewer's page was not built; everything but 'torchtap view' and 'torchtap report' works"; \
	else echo "no npm: 'torchtap view' and 'torchtap report' will say that their page is missing"; fi

demo test wheel: page

screenshots: $(VENV)/.dev browser frontend
	$(BIN)/python -m tests.viewer.screenshots
