"""What held in good runs, kept as a readable file, and what of it no longer holds in another run."""
