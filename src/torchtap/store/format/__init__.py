"""What the bytes of a run mean."""
