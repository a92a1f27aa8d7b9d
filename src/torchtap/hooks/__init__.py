"""The walker: how a visitor comes to see what goes in and out of a model's modules."""
