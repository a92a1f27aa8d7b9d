"""Taps on live Python modules."""
