"""All ranks of a training as one recording."""
