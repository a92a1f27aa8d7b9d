"""Which part of the whole each value of this rank is."""
