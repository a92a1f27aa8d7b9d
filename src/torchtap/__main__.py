"""``python -m torchtap``: the same as the ``torchtap`` command."""

from torchtap.cli import main

main()
