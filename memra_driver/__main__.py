"""`python -m memra_driver` is the `memra-driver` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
