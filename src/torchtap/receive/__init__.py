"""Where values arrive, are folded and are handed on."""
