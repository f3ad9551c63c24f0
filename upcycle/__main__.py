"""`python -m upcycle`."""

from upcycle.cli import main

main()
