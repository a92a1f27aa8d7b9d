"""Which site of one side is which of the other."""
