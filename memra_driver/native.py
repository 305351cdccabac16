"""libmemra_driver.so, the C library: its sources, flags and file names, and how it is built and found.

Needs a C compiler and nothing else; `build.py native` and the wheel's hook call it before anything is installed. The
library is `libmemra_driver.so.1`, and no other file can be loaded in its stead: `libmemra_driver.so`, which a linker
looks for, is a linker script with its name. Two copies in one process would not know each other's devices.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import CompileError
from .nvrtc import hash_parts, read_source, source_dir, write_whole

SONAME = "libmemra_driver.so.1"
LINK_NAME = "libmemra_driver.so"
LINKER_SCRIPT = f"/* -lmemra_driver */\nINPUT({SONAME})\n"
FLAGS = (
    "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-DMEMRA_BUILD", "-Wall", "-Wextra", "-pedantic", "-shared",
    "-Wl,-z,defs", f"-Wl,-soname,{SONAME}",
)  # fmt: skip
LIBRARIES = ("-Wl,--as-needed", "-ldl", "-lpthread")  # part of libc from glibc 2.34 on
COMPILERS = ("cc", "gcc", "clang")
HOW_TO_GET = "python3 build.py native in a checkout, or a wheel that was built where there is a C compiler"


def library_dir() -> Path:
    """The folder of the library, inside the package; may not exist."""
    return Path(__file__).resolve().parent / "lib"


def library() -> Path | None:
    """The built library; None where there is none."""
    path = library_dir() / SONAME
    return path if path.is_file() else None


def sources() -> list[Path]:
    """The C files, sorted; none in an installed package, which has the headers and the library only."""
    return sorted(source_dir().glob("memra_*.c"))


def shared_files() -> list[Path]:
    """What of the source folder is for users: kernels and headers, without the C files and what they share."""
    return sorted(path for path in source_dir().glob("*.[ch]*") if path.suffix != ".c" and "internal" not in path.stem)


def compiler() -> list[str]:
    """The C compiler as a command: what CC says, else the first of cc, gcc and clang. Raises CompileError."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for name in chosen[:1] or COMPILERS:
        path = shutil.which(name)
        if path:
            return [os.path.abspath(path), *chosen[1:]]
    if chosen:
        raise CompileError(f"CC names {chosen[0]}, which is not there")
    raise CompileError(f"there is no C compiler ({', '.join(COMPILERS)}): install one, or name it in CC")


def build(folder: Path | None = None, flags: Sequence[str] = ()) -> Path:
    """Builds the library into `folder`, by default the package's own, and returns its path.

    Nothing is done where it was built by the same compiler from the same texts and flags before. `flags` come behind
    ours. Safe in parallel. Raises CompileError: no compiler, no sources, what the compiler refused (with its log), a
    folder that cannot be written.
    """
    if platform.system() != "Linux":
        raise CompileError(f"the C library is for Linux, not {platform.system()}")
    files = sources()
    if not files:
        raise CompileError(f"{source_dir()} has no memra_*.c: the C library is built in a checkout")
    folder = folder or library_dir()
    output = folder / SONAME
    cc = compiler()
    command = [*cc, *FLAGS, *flags]
    words = [word.encode() for word in (*command, *LIBRARIES)]
    read = [*files, *sorted(source_dir().glob("*.h"))]
    texts = [part for path in read for part in (path.name.encode(), read_source(path))]
    key = hash_parts([_run([*cc, "--version"]), *words, *texts])[:40]
    try:
        # The key is the library's build id, so one file says what it was made of.
        if not (output.is_file() and bytes.fromhex(key) in output.read_bytes()):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fresh = Path(scratch) / SONAME
                names = [path.name for path in files]
                _run([*command, f"-Wl,--build-id=0x{key}", "-o", str(fresh.resolve()), *names, *LIBRARIES])
                os.replace(fresh, output)
        script = folder / LINK_NAME
        if not script.is_file() or script.read_bytes() != LINKER_SCRIPT.encode():
            write_whole(script, LINKER_SCRIPT.encode())
    except OSError as error:
        raise CompileError(f"{folder}: {error.strerror}: the C library cannot be written there") from error
    return output


def build_if_possible(say: Callable[[str], object]) -> Path | None:
    """`build` for who can do without: where nothing comes of it, says why and returns None."""
    try:
        return build()
    except CompileError as error:
        say(f"no C library: {error}")
        return None


def wheel_tag() -> str:
    """The tag of a wheel with the library: any Python 3, as no Python is linked, but one platform."""
    return "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())


def _run(command: Sequence[str]) -> bytes:
    """What the compiler prints, in the folder of the sources, so that no path of this machine gets into its output."""
    try:
        done = subprocess.run(command, cwd=source_dir(), env={**os.environ, "LC_ALL": "C"}, capture_output=True)
    except OSError as error:
        raise CompileError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        told = (done.stderr or done.stdout).decode(errors="replace").rstrip()
        raise CompileError(f"{command[0]} refused the C library", told, tuple(command[1:]))
    return done.stdout
