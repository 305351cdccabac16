"""`python -m memra_driver` is the `memra-driver` command, which needs more than the package itself does."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; says in one line what is missing where it cannot."""
    try:
        from .cli import main as run
    except ImportError as missing:
        print(f"memra-driver: {missing}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
