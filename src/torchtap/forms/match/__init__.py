"""Which value of a form is which site of the eager model."""
