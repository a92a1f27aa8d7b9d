"""A run in formats that other tools read."""
