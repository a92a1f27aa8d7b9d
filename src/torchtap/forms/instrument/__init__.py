"""Taps that go with a model into a file or another process."""
