#!/usr/bin/env python3
"""One command from a fresh clone to a run: sets up what is missing, then runs, tests or compiles.

Needs nothing but a Python to start. This file has to parse on old Pythons, so that it can say which
one it needs. It is also the build hook of the wheel.
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterator, List, NoReturn, Optional, Sequence

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = os.path.dirname(os.path.abspath(__file__))
BUILD = os.path.join(ROOT, "build.py")
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
# In a .venv of ours. Empty while it is being made; what it was made from once it is complete.
STAMP = os.path.join(VENV, "memra-driver.stamp")
GUARD = "MEMRA_BUILD_SET_UP"  # set for the process that set-up has started, so that it cannot go round in circles

OLDEST = (3, 11)
RUN = ["cuda.bindings", "numpy", "rich", "typer"]
NEEDS = {
    "run": RUN,
    "bench": RUN,
    "test": [*RUN, "gguf", "hypothesis", "pytest", "xdist"],
    "kernels": ["cuda.bindings"],
    "native": [],
}
ARCHS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]

USAGE = """usage: python3 build.py COMMAND [ARGUMENT ...]

  run [ARGUMENT ...]                        memra-driver run: a speculative session, checked bit for bit
  test [PYTEST ARGUMENT ...]                the tests; with an NVIDIA GPU, those of the GPU as well
  bench [ARGUMENT ...]                      memra-driver bench: every operation on a GPU, beside what its memory can do
  kernels [--arch sm_90 ...] [--out DIR]    compile the CUDA kernels ahead of time
  native                                    build libmemra_driver.so, the C library; run, bench and test do it first

Each sets up what it needs, in .venv beside this file, unless the Python that runs it has it all.
`python3 build.py COMMAND --help` tells more.
"""
WHEEL_HINT = """To build a wheel: `pip wheel --no-deps -w dist .`, `pyproject-build`, or `python -P -m build`.
(In this folder `python -m build` finds this file, build.py, by its name.)
"""
HELP = {
    "run": """usage: python3 build.py run [MODEL] [ARGUMENT ...]

Runs a speculative session over the cache of MODEL and checks every round against plain decoding, bit for bit:
on the GPU where there is one, else on the host. The arguments are those of `memra-driver run`;
`python3 build.py run -- --help` lists them.
""",
    "test": """usage: python3 build.py test [PYTEST ARGUMENT ...]

Runs the tests. Where the NVIDIA driver shows a device, a second process then runs those that need it (--gpu).
The arguments go to pytest; `python3 build.py test -- --help` lists them.
""",
    "bench": """usage: python3 build.py bench [ARGUMENT ...]

Measures every operation of the cache on the GPU, beside what its memory can do and against what is asked of it.
The arguments are those of `memra-driver bench`; `python3 build.py bench -- --help` lists them.
""",
    "native": """usage: python3 build.py native

Builds libmemra_driver.so into memra_driver/lib with the C compiler that CC names, else the first of cc, gcc and clang,
unless it is there already, and prints its path. It needs nothing of Python's but the interpreter.
""",
}

# Run in a process of its own: a driver that has been initialised stays so, and a broken one may crash.
PROBE = """
import json
found = {"nvrtc": False, "devices": 0}
try:
    from cuda.bindings import driver, nvrtc
    found["nvrtc"] = nvrtc.nvrtcVersion()[0] == 0
except Exception:
    pass
try:
    if driver.cuInit(0)[0] == 0:
        found["devices"] = int(driver.cuDeviceGetCount()[1])
except Exception:
    pass
print(json.dumps(found))
"""


def say(text: str) -> None:
    print("build.py: " + text, file=sys.stderr, flush=True)


def die(text: str, status: int = 1) -> NoReturn:
    say(text)
    sys.exit(status)


def become(python: str, argv: Sequence[str]) -> NoReturn:
    """Goes on as `python build.py argv`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(python, [python, BUILD, *argv])


# What is there


def newer_python(path: str) -> Optional[str]:
    """The first Python on `path` that is new enough and starts (a shim of a version manager may refuse to)."""
    for name in ("python3.13", "python3.12", "python3.11", "python3.14"):
        for folder in path.split(os.pathsep):
            python = shutil.which(name, path=folder) if folder else None
            if python and output([python, "-c", f"import sys; print(sys.version_info[:2] >= {OLDEST})"]) == "True":
                return python
    return None


def output(argv: Sequence[str]) -> Optional[str]:
    """What a command prints; None where it cannot be started, fails, or hangs."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def missing(names: Sequence[str]) -> List[str]:
    """The modules that this interpreter cannot find. Asks for modules, since a distribution may go by another name."""
    lacking = []
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            lacking.append(name)
    return lacking


def missing_in(python: str, names: Sequence[str]) -> List[str]:
    """`missing`, asked of another interpreter; one that does not start lacks everything."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import build; print(*build.missing(sys.argv[2:]))"
    answer = output([python, "-c", code, ROOT, *names])
    return list(names) if answer is None else answer.split()


def probe() -> Dict[str, int]:
    """`nvrtc`: whether it loads; `devices`: how many GPUs the driver shows."""
    answer = output([sys.executable, "-c", PROBE])
    found: Dict[str, int] = json.loads(answer) if answer else {"nvrtc": False, "devices": 0}
    return found


def in_venv() -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(VENV)


def lacking(command: str, args: Sequence[str]) -> List[str]:
    """What this interpreter lacks for `command`."""
    needs = list(NEEDS[command])
    if command == "run" and any(arg.endswith(".gguf") for arg in args):
        needs.append("gguf")
    absent = missing(needs)
    if needs and not absent and not in_venv():
        found = probe()
        # The host needs no compiler.
        if not found["nvrtc"] and (command != "run" or found["devices"]):
            absent = ["NVRTC"]
    return absent


# Set-up


def cuda_extra() -> str:
    """The extra for this driver: kernels compiled by CUDA 13 do not load into a driver that ends at 12."""
    import ctypes

    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return "cu12" if 0 < version.value < 13000 else "cu13"


def recipe(extras: str) -> str:
    """Changes with whatever a finished .venv depends on."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        parts = [file.read(), extras.encode(), ROOT.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp() -> Optional[str]:
    try:
        with open(STAMP) as file:
            return file.read()
    except OSError:
        return None


def write_stamp(text: str) -> None:
    with open(STAMP, "w") as file:
        file.write(text)


@contextmanager
def alone() -> Iterator[None]:
    """Keeps out a second set-up of the same folder."""
    import fcntl

    with open(BUILD, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(absent: Sequence[str]) -> str:
    """Makes .venv, brings it up to date, or repairs it; returns its interpreter."""
    needs = [name for name in absent if name != "NVRTC"]
    extras = cuda_extra() + ",gguf,cli,test"
    with alone():
        stamp = read_stamp()
        if stamp is None and os.path.lexists(VENV) and not is_empty(VENV):
            # Somebody else's environment: used if it will do, and never changed.
            if missing_in(VENV_PYTHON, needs):
                die(
                    f".venv was not made by build.py and lacks {', '.join(needs)}: move it away, or install into it"
                    f" with `.venv/bin/python -m pip install -e '.[{extras}]'`"
                )
            return VENV_PYTHON
        want = recipe(extras)
        if stamp == want and not missing_in(VENV_PYTHON, needs):
            return VENV_PYTHON
        # A complete one of an older recipe is changed in place; anything else (interrupted, damaged,
        # its interpreter gone) is made anew.
        in_place = bool(stamp) and stamp != want and not missing_in(VENV_PYTHON, ["pip"])
        if not in_place:
            make_venv()
        write_stamp("")
        say(f"installing memra-driver[{extras}] into .venv")
        status = pip_install(f".[{extras}]")
        if status != 0:
            if in_place:
                write_stamp(stamp or "")
            die(
                f"pip could not install memra-driver[{extras}] (exit status {status}; its message is above).\n"
                f"Without a package index, run build.py with a Python that can import {', '.join(NEEDS['test'])}."
            )
        write_stamp(want)
    return VENV_PYTHON


def make_venv() -> None:
    """A new .venv, in place of the one that is there."""
    creator = getattr(sys, "_base_executable", None) or sys.executable
    say(f"making .venv with {creator} (once; it takes a minute or two)")
    try:
        discard(VENV)
        os.mkdir(VENV)
        write_stamp("")
        done = subprocess.run(
            [creator, "-m", "venv", VENV], env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        die(f"cannot make .venv: {error}")
    if done.returncode == 0:
        return
    if output([creator, "-c", "import ensurepip, venv"]) is None:
        major, minor = sys.version_info[:2]
        die(
            f"{creator} comes without venv or ensurepip, so it cannot make .venv.\n"
            f"On Debian and Ubuntu: apt-get install python{major}.{minor}-venv (elsewhere: a Python that has them)."
        )
    die(f"`{creator} -m venv` failed:\n{done.stdout.decode('utf-8', 'replace').rstrip()}")


def discard(folder: str) -> None:
    """Removes a folder; renamed first, so that an interruption leaves no part of it under its name."""
    old = folder + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.lexists(folder):
        os.rename(folder, old)
        shutil.rmtree(old, ignore_errors=True)


def is_empty(folder: str) -> bool:
    return os.path.isdir(folder) and not os.listdir(folder)


def clean_environment() -> Dict[str, str]:
    """The environment without what would send pip's work elsewhere than into .venv."""
    elsewhere = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME", "PYTHONPATH")
    return {key: value for key, value in os.environ.items() if key not in elsewhere}


def pip_install(requirement: str) -> int:
    argv = [VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stderr.isatty():
        argv.append("--quiet")
    return subprocess.call([*argv, "-e", requirement], cwd=ROOT, env=clean_environment(), stdout=sys.stderr)


# Commands


def run(args: List[str]) -> int:
    from memra_driver.cli import main as cli

    return cli(["run", *args]) or 0


def bench(args: List[str]) -> int:
    from memra_driver.cli import main as cli

    return cli(["bench", *args]) or 0


def test(args: List[str]) -> int:
    if "--gpu" in args:
        return pytest(args)
    devices = probe()["devices"]
    say(f"GPUs: {devices}" + ("" if devices else ", so the tests that need one are left out"))
    # A process per core; `-n0` among the arguments makes it one. Tests go to whoever is done with its own.
    statuses = [pytest(["-n", "auto", "--dist", "worksteal", *args])]
    if devices:
        statuses.append(pytest(["--gpu", *args]))
    # 5 is pytest's "no test selected": arguments may well name tests of one of the two only.
    ran = [status for status in statuses if status != 5]
    return max(ran) if ran else 5


def pytest(args: Sequence[str]) -> int:
    status = subprocess.call([sys.executable, "-m", "pytest", *args], cwd=ROOT)
    return status if status >= 0 else 128 - status  # ended by a signal: as a shell would put it


def kernels(args: List[str]) -> int:
    from memra_driver import nvrtc
    from memra_driver.errors import MemraError

    options = kernel_options(args)
    logging.basicConfig(level=logging.INFO, format="build.py: %(message)s")
    try:
        for arch, cubins in nvrtc.prebuild(options.arch, options.out).items():
            print(f"{os.path.join(options.out, arch)}: {len(cubins)} cubins, {sum(map(len, cubins.values()))} bytes")
    except (MemraError, OSError) as error:
        die(str(error))
    return 0


def kernel_options(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="build.py kernels",
        description="Compiles every kernel with NVRTC into DIR/ARCH, one cubin for each source.",
    )
    parser.add_argument("--arch", nargs="+", default=ARCHS, help=f"sm_80, sm_90a, ...; default: {' '.join(ARCHS)}")
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=os.path.join(ROOT, "memra_driver", "cubins"),
        help="default: memra_driver/cubins, where get_cubins() and the wheel look",
    )
    return parser.parse_args(args)


def native(args: List[str]) -> int:
    from memra_driver.native import build_if_possible

    if args:
        die(f"native takes no arguments, not {args[0]!r}", 2)
    print(build_if_possible(die))
    return 0


COMMANDS = {"run": run, "bench": bench, "test": test, "kernels": kernels, "native": native}


def main(argv: List[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE + "\n" + WHEEL_HINT, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    command, args = argv[0], argv[1:]
    if command not in COMMANDS:
        die(f"unknown argument {command!r}; commands are {', '.join(COMMANDS)}.\n{WHEEL_HINT}".rstrip(), 2)
    if command == "kernels":
        kernel_options(args)  # answers --help and refuses before anything is set up
    elif args and args[0] in ("-h", "--help"):
        print(HELP[command], end="")
        return 0
    if args and args[0] == "--":
        args = args[1:]
    if sys.version_info[:2] < OLDEST:
        python = newer_python(os.environ.get("PATH", ""))
        if python is None:
            die("this is Python {}.{}; Python {}.{} or newer is needed".format(*sys.version_info[:2], *OLDEST))
        become(python, argv)
    absent = lacking(command, args)
    if absent:
        if os.environ.get(GUARD):
            die(f"{sys.executable} still lacks {', '.join(absent)} after set-up")
        os.environ[GUARD] = "1"
        become(set_up(absent), argv)
    os.environ.pop(GUARD, None)
    sys.path.insert(0, ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    if command in ("run", "bench", "test"):
        from memra_driver.native import build_if_possible

        build_if_possible(say)
    return COMMANDS[command](args)


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """The wheel takes along the headers and kernels, the cubins that `build.py kernels` has left, and the C library
    where there is a compiler: it is of one platform then, and of any without."""

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        sys.path.insert(0, ROOT)
        from memra_driver import native

        library = native.build_if_possible(self.app.display_warning)
        if version == "editable":  # finds all of it where it lies
            return
        for path in native.shared_files():
            build_data["force_include"][str(path)] = f"memra_driver/cuda_src/{path.name}"
        build_data["artifacts"].append("/memra_driver/cubins/**/*.cubin")  # ignored by git, wanted here
        if library is not None:
            build_data["artifacts"] += [f"/memra_driver/lib/{name}" for name in (native.SONAME, native.LINK_NAME)]
            build_data["pure_python"] = False
            build_data["tag"] = native.wheel_tag()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
