"""``python -m torchtap.cli``: the same as the ``torchtap`` command."""

from torchtap.cli import main

main()
