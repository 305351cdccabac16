"""CUDA C to cubin with NVRTC: sources, options, the compiler's log, and a cache on disk.

A cubin comes from the first of: the package's own `cubins` folder (a wheel may bring it), the cache folder, NVRTC.
The cache folder is `MEMRA_CACHE_DIR`, else `memra_driver` in `XDG_CACHE_HOME`, else in `~/.cache`; one that is broken,
full or read-only costs time and never fails a run. Neither a GPU nor a driver is needed here. NVRTC is loaded by the
first compile, never by this import.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .driver import NEED_BINDINGS
from .errors import CompileError, ConfigError, DriverError, NoDriver

log = logging.getLogger("memra_driver")

SCHEMA = 1  # raise it when the shape of a key or of a cache entry changes
OPTIONS = ("--std=c++17",)
NEED_NVRTC = "'cuda-toolkit[nvrtc]==13.*' (or 12.*, as cuda-python)"
ELF = b"\x7fELF"
NOT_KEPT = "compiled kernels cannot be kept, every process compiles anew; set MEMRA_CACHE_DIR to a folder of yours"
DIGEST_BYTES = 32  # a cache entry is the cubin, then its SHA-256

PIPE_ARCH = "sm_90"  # the arch that attend_pipe.cu is for: others have the portable text of attention alone
OLDEST_ARCH = 80  # of sm_80: bf16 and f16 products, asynchronous copies
EARLY_ARCH = 90  # from here on a kernel can wait for the one in front of it (memra_begin() in device.cuh)
HOST_ONLY = ("memra_api.h",)  # which memra_driver.h includes for C compilers alone: no kernel depends on it
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ARCH = re.compile(r"sm_\d+[af]?")


def source_dir() -> Path:
    """The folder of kernel sources and headers: inside the package when installed, else beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"


def prebuilt_dir() -> Path:
    """The folder of cubins that came with the package, one folder per architecture; may not exist."""
    return Path(__file__).resolve().parent / "cubins"


def sources(folder: Path | None = None) -> list[str]:
    """The names of the kernel sources, sorted."""
    return sorted(path.name for path in (folder or source_dir()).glob("*.cu"))


def include_files(source: str, folder: Path | None = None) -> dict[str, bytes]:
    """Name -> bytes of every file of ours that `source` includes, directly or not."""
    root = folder or source_dir()
    found: dict[str, bytes] = {}
    todo = [read_source(root / source)]
    while todo:
        for name in _included(todo.pop()):
            if name not in (*found, *HOST_ONLY) and (root / name).is_file():  # the compiler reports one that it misses
                found[name] = read_source(root / name)
                todo.append(found[name])
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=256)
def _included(text: bytes) -> list[str]:
    """The names that a source or header includes; most headers are asked for with every source."""
    return [name.decode(errors="replace") for name in _INCLUDE.findall(text)]


def read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(f"{path}: {error.strerror}: there is no such source to read") from error


def hash_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 over the parts, each behind its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sources_hash(folder: Path | None = None) -> str:
    """SHA-256 (hex) over the names and bytes of all kernel sources and of what they include."""
    root = folder or source_dir()
    files = {name: read_source(root / name) for name in sources(root)}
    for source in sources(root):
        files |= include_files(source, root)
    return hash_parts(part for name in sorted(files) for part in (name.encode(), files[name]))


def text_key(source: str, arch: str, folder: Path | None = None) -> str:
    """SHA-256 (hex) of all that decides a cubin but the compiler: source, included files, options, architecture."""
    files = {source: read_source((folder or source_dir()) / source), **include_files(source, folder)}
    texts = [part for name, data in files.items() for part in (name.encode(), data)]
    decisive = (str(SCHEMA), _target(source, arch), *OPTIONS)
    return hash_parts([*(part.encode() for part in decisive), *texts])


def cache_key(source: str, arch: str, folder: Path | None = None) -> str:
    """`text_key` and the version of NVRTC: the name of the entry in the cache folder."""
    return _with_version(text_key(source, arch, folder))


def _with_version(key: str) -> str:
    return hash_parts([key.encode(), "{}.{}".format(*version()).encode()])


def prebuilt_path(source: str, arch: str, folder: Path | None = None) -> Path:
    """Where a wheel keeps this cubin. The name does not depend on NVRTC, so that none need be installed."""
    return _prebuilt(source, arch, text_key(source, arch, folder))


def _prebuilt(source: str, arch: str, key: str) -> Path:
    return prebuilt_dir() / arch / f"{Path(source).stem}.{key[:16]}.cubin"


# The cache on disk


def cache_dir() -> Path | None:
    """The cache folder by the environment of this moment; None where there is no home either."""
    own = os.environ.get("MEMRA_CACHE_DIR")
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "memra_driver"
    except RuntimeError:
        return None


def _entry(key: str) -> Path | None:
    """Where the cache keeps the cubin of this text_key; None where there is no cache."""
    cache = cache_dir()
    return None if cache is None else cache / f"{_with_version(key)}.cubin"


def _load_entry(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if cubin.startswith(ELF) and hashlib.sha256(cubin).digest() == digest:
        return cubin
    log.debug("%s is broken and is compiled again", path)
    return None


def _store_entry(path: Path, cubin: bytes) -> None:
    try:
        write_whole(path, cubin + hashlib.sha256(cubin).digest())
    except OSError as error:
        _tell_once(f"{path.parent}: {error.strerror or error}: {NOT_KEPT}")


@functools.cache
def _tell_once(text: str) -> None:
    log.warning(text)


def cache_trouble() -> str:
    """Why nothing can be kept in the cache folder, "" where it can. Makes the folder."""
    folder = cache_dir()
    if folder is None:
        return f"there is no home folder: {NOT_KEPT}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror or error}: {NOT_KEPT}"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: a reader, or another writer, never sees half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        fresh.write_bytes(data)
        os.replace(fresh, path)


def fill_folder(folder: Path, cubins: Mapping[str, bytes]) -> list[Path]:
    """Makes `cubins` (file name -> bytes) the only cubins in a folder; returns their paths, sorted. Raises OSError.

    What stands there already is not written again, and what is left over goes last: whoever reads meanwhile finds
    each file whole.
    """
    paths = sorted(folder / name for name in cubins)
    for path in paths:
        if not path.is_file() or path.read_bytes() != cubins[path.name]:
            write_whole(path, cubins[path.name])
    for path in set(folder.glob("*.cubin")) - set(paths):
        path.unlink(missing_ok=True)
    return paths


# NVRTC


def _nvrtc(name: str, *args: Any) -> tuple[Any, ...]:
    """Calls one function of NVRTC; returns (status, outputs...). Raises NoDriver where NVRTC is missing."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        need = f"{error}; {NEED_BINDINGS} and {NEED_NVRTC}"
        raise NoDriver("import cuda.bindings", -1, "no cuda-bindings", need) from error
    try:
        result: tuple[Any, ...] = getattr(nvrtc, name)(*args)
    except RuntimeError as error:  # pathfinder's DynamicLibNotFoundError, and what older bindings raise
        raise NoDriver(name, -1, "no libnvrtc", f"NVRTC was not found: pip install {NEED_NVRTC}") from error
    return result


def _output(name: str, *args: Any) -> Any:
    status, *outputs = _nvrtc(name, *args)
    if status:
        raise DriverError(name, int(status), status.name)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles. Raises NoDriver where there is none."""
    major, minor = _output("nvrtcVersion")
    return int(major), int(minor)


def supported_archs() -> list[int]:
    """What this NVRTC compiles for, as in 90 for sm_90, ascending. Raises NoDriver where there is none."""
    return sorted(map(int, _output("nvrtcGetSupportedArchs")))


def is_too_old(arch: str) -> bool:
    """Whether the kernels need a younger GPU than one of this architecture."""
    return _number(arch) < OLDEST_ARCH


def begins_early(arch: str) -> bool:
    """Whether a kernel on such a GPU may be started before the one in front of it has ended."""
    return _number(arch) >= EARLY_ARCH


def too_old(arch: str) -> str:
    """What to say of a GPU that is."""
    return f"{arch}; the kernels need sm_{OLDEST_ARCH} or newer (Ampere, 2020). HostDev needs no GPU"


def too_new(arch: str) -> str:
    """Why this NVRTC cannot compile for a GPU and what to do, "" where it can."""
    known = supported_archs()
    if _number(arch) in known:
        return ""
    return (
        f"NVRTC {'.'.join(map(str, version()))} compiles for sm_{known[0]} .. sm_{known[-1]}, not for {arch}: "
        f"pip install --upgrade {NEED_NVRTC}"
    )


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def library_path() -> str | None:
    """Where NVRTC was loaded from; None where that cannot be told. Raises NoDriver where there is none."""
    version()
    from cuda import pathfinder

    try:
        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except RuntimeError:
        return None
    return None if path is None else str(path)


def _bytes_of(program: Any, size: str, get: str) -> bytes:
    buffer = bytes(int(_output(size, program)))
    _output(get, program, buffer)
    return buffer


def _compile(source: str, target: str, get: str, folder: Path | None) -> bytes:
    """Compiles for `target`, and returns what `get` ("CUBIN", "PTX") names. Included files are handed over in memory,
    so a compile reads what its key was made of, and no path of this machine gets into it."""
    text = read_source((folder or source_dir()) / source)
    included = include_files(source, folder)
    options = [*OPTIONS, f"--gpu-architecture={target}"]
    if version() >= (12, 9):
        options.append("--no-cache")  # NVRTC's own cache; it is younger than that, and ours is enough
    names, headers = [name.encode() for name in included], list(included.values())
    started = time.perf_counter()
    program = _output("nvrtcCreateProgram", text, source.encode(), len(names), headers, names)
    try:
        status = _nvrtc("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])[0]
        if status:
            told = _bytes_of(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0 \n")
            new = too_new(target.replace("compute_", "sm_"))
            raise CompileError(
                f"NVRTC {version()[0]}.{version()[1]} refused {source} for {target}: {status.name}"
                + (f"; {new}" if new else ""),
                told.decode(errors="replace"),
                tuple(options),
            )
        code = _bytes_of(program, f"nvrtcGet{get}Size", f"nvrtcGet{get}")
    finally:
        _nvrtc("nvrtcDestroyProgram", program)
    log.info("compiled %s for %s in %.1f s", source, target, time.perf_counter() - started)
    return code


def _target(source: str, arch: str) -> str:
    """What a cubin is compiled for. The warps of attend_pipe share registers out, which sm_90a alone has words for."""
    return f"{arch}a" if arch == PIPE_ARCH and source.startswith("attend_pipe") else arch


def _check_arch(arch: str) -> None:
    if not _ARCH.fullmatch(arch):
        raise ConfigError(f"architecture {arch!r}: write it as sm_90, sm_90a or sm_100f")
    if is_too_old(arch):
        raise ConfigError(f"architecture {too_old(arch)}")


def compile_cubin(source: str, arch: str, folder: Path | None = None) -> bytes:
    """The cubin of one source file, from the package, the cache or the compiler. Raises CompileError, NoDriver."""
    _check_arch(arch)
    key = text_key(source, arch, folder)
    with contextlib.suppress(OSError):
        prebuilt = _prebuilt(source, arch, key).read_bytes()
        if prebuilt.startswith(ELF):
            log.debug("%s for %s came with the package", source, arch)
            return prebuilt
    entry = _entry(key)
    cubin = None if entry is None else _load_entry(entry)
    if cubin is not None:
        log.debug("%s for %s came from the cache", source, arch)
        return cubin
    cubin = _compile(source, _target(source, arch), "CUBIN", folder)
    if entry is not None:
        _store_entry(entry, cubin)
    return cubin


def compile_ptx(source: str, arch: str, folder: Path | None = None) -> str:
    """The PTX text of one source file; never cached. Raises CompileError, NoDriver."""
    _check_arch(arch)
    return _compile(source, arch.replace("sm_", "compute_"), "PTX", folder).rstrip(b"\0").decode()


def compile_all(
    archs: Iterable[str], jobs: int | None = None, folder: Path | None = None
) -> dict[tuple[str, str], bytes]:
    """Every source for every architecture: (source, arch) -> cubin. Raises the first CompileError.

    What is kept is read here, the rest compiled in threads.
    """
    pairs = [(source, arch) for arch in archs for source in sources(folder)]
    return dict(zip(pairs, _compiled(pairs, jobs, folder), strict=True))


def compile_sources(names: Sequence[str], arch: str) -> dict[str, bytes]:
    """These sources for one architecture, as compile_all: source -> cubin."""
    return dict(zip(names, _compiled([(name, arch) for name in names]), strict=True))


def _compiled(
    pairs: Sequence[tuple[str, str]], jobs: int | None = None, folder: Path | None = None
) -> list[bytes]:
    """The cubin of each (source, arch). What is kept already is read here: threads would wait for each other."""
    missing = [pair for pair in pairs if not _is_kept(pair[0], pair[1], folder)]
    made: dict[tuple[str, str], bytes] = {}
    if missing:
        with ThreadPoolExecutor(max_workers=jobs or os.cpu_count()) as pool:
            cubins = pool.map(lambda pair: compile_cubin(pair[0], pair[1], folder), missing)
            made = dict(zip(missing, cubins, strict=True))
    return [made.get(pair) or compile_cubin(pair[0], pair[1], folder) for pair in pairs]


def _is_kept(source: str, arch: str, folder: Path | None) -> bool:
    """Whether a file of this cubin came with the package or stands in the cache."""
    key = text_key(source, arch, folder)
    if _prebuilt(source, arch, key).is_file():
        return True
    entry = _entry(key)
    return entry is not None and entry.is_file()


def cubin_files(arch: str) -> list[Path]:
    """A file for each kernel source, sorted, in a folder without other cubins: what `get_cubins` answers."""
    _check_arch(arch)
    if not sources():
        raise CompileError(f"{source_dir()} has no kernels: reinstall memra-driver")
    shipped = sorted((prebuilt_dir() / arch).glob("*.cubin"))
    wanted = sorted(prebuilt_path(source, arch) for source in sources())
    if shipped == wanted and all(_is_cubin(path) for path in shipped):
        return shipped
    cache = cache_dir()
    if cache is None:
        raise ConfigError("no folder to keep compiled kernels in: set MEMRA_CACHE_DIR")
    # An entry of the cache has a digest behind the cubin, which is for us and not for a driver to read.
    keys = hash_parts(cache_key(source, arch).encode() for source in sources())
    cubins = {f"{Path(source).stem}.cubin": cubin for (source, _), cubin in compile_all([arch]).items()}
    try:
        return fill_folder(cache / f"{arch}.{keys[:16]}", cubins)
    except OSError as error:
        raise ConfigError(f"{cache}: {error.strerror}: set MEMRA_CACHE_DIR to a folder that can be written") from error


def _is_cubin(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(ELF)) == ELF


def prebuild(archs: Iterable[str], out: str | os.PathLike[str]) -> dict[str, dict[str, bytes]]:
    """Fills `out`/ARCH as `prebuilt_dir` is; returns arch -> file name -> cubin. Raises CompileError, OSError."""
    made: dict[str, dict[str, bytes]] = {}
    for (source, arch), cubin in compile_all(archs).items():
        made.setdefault(arch, {})[prebuilt_path(source, arch).name] = cubin
    for arch, cubins in made.items():
        fill_folder(Path(out) / arch, cubins)
    return made
