"""Taps in FX graphs and exported programs."""
