"""One leaf file for each rule, or for a few that look at the same numbers. `registry` has them by name."""
