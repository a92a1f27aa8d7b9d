"""From files to series, tables and tensors."""
