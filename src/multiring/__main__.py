"""``python -m multiring`` is the command ``multiring``."""

from multiring.cli import main

main()
