"""Folders, local and remote, and the names in them."""
