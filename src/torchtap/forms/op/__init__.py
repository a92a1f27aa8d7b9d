"""Taps by the op, for forms in which Python hooks do not survive."""
