"""Compare two recordings or two models: how far apart, since where, and whose fault it is."""
