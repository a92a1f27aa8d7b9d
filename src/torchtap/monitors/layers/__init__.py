"""Hidden states, layer by layer."""
