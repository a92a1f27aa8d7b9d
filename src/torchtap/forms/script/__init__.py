"""Taps in scripted and traced modules."""
