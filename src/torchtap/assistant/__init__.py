"""Runs for assistants: a few questions about a folder of runs, answered over the Model Context Protocol."""
