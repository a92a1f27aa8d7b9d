"""Probes see, while a training runs, what its numbers do not show: one leaf file for each sort of fact.

A probe listens, looks at a few tensors in the first live steps, and tells facts. It changes nothing of the training and
takes everything off again.
"""
