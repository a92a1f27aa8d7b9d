"""A run in, findings out: NaN and its origin, dead and saturated values, sizes that explode or vanish,
parameters without a gradient. Pure functions over the reader; no torch."""
