"""`python -m memra_driver` is the `memra-driver` command, which needs more than the package itself does.

What the build of a C program asks for (--cflags, --libs, --cubins) is answered here, without that.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence

from . import errors, get_cubins, get_include, get_library


def main() -> int:
    """Runs the command line; says in one line what is missing where it cannot."""
    if sys.argv[1:2] and sys.argv[1].split("=")[0] in ("--cflags", "--libs", "--cubins"):
        try:
            return for_c_builds(sys.argv[1:])
        except (errors.MemraError, OSError) as error:
            print(f"memra-driver: {error}", file=sys.stderr)
            return 2
    try:
        from .cli import main as run
    except ImportError as missing:
        print(f"memra-driver: {missing}", file=sys.stderr)
        return 2
    return run()


def for_c_builds(argv: Sequence[str]) -> int:
    """Prints the flags on one line, quoted for a shell, and the folder of the cubins on another.

    What is compiled meanwhile is told on stderr.
    """
    parser = argparse.ArgumentParser(prog="memra-driver", description="What the build of a C program asks for.")
    parser.add_argument("--cflags", action="store_true", help="for the compiler: where the headers are")
    parser.add_argument("--libs", action="store_true", help="for the linker: the library, found later where it is now")
    parser.add_argument("--cubins", metavar="ARCH", help="a folder for memra_device_load_folder; may compile (sm_90)")
    asked = parser.parse_args(argv)
    flags = [f"-I{get_include()}"] if asked.cflags else []
    if asked.libs:
        library = get_library()
        if library is None:
            from .native import HOW_TO_GET

            raise errors.CompileError(f"the C library has not been built: {HOW_TO_GET}")
        folder = os.path.dirname(library)
        flags += [f"-L{folder}", "-lmemra_driver", f"-Wl,-rpath,{folder}"]
    if flags:
        print(shlex.join(flags))
    if asked.cubins is not None:
        logging.basicConfig(level=logging.INFO, format="memra-driver: %(message)s")
        print(os.path.dirname(get_cubins(asked.cubins)[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
