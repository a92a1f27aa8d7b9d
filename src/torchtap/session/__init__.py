"""Sessions: a plan on a model, a clock, and what becomes of the values: `capture`, `watch`, `verify`."""
