"""A device of our own for tests, which runs behind the host (`lag`), and what torchtap does on it."""
