"""Fixtures and options of the test ladder.

Without options the tests run on NumPy and on the stand-in driver (tests/standin.py). With `--gpu` those
that use a CUDA device run again, on the real driver, and no others: the stand-in and the real library
have one name and never share a process.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_kernels
import gpu_results
import numpy as np
import order
import pytest
import standin as standin_module
import tally
import through_c
from checks import close

MARKERS = (
    "misuse: misuses the driver or leaks on purpose; the stand-in's errors and what is left are not checked after it",
    "at_once: leaves out an order on purpose; never in deferred mode, where that does harm",
    "not_through_c: counts what CudaDev does for itself; not run on devices of the C library",
)
# Files that run on CudaDevs and, in a second turn, through the C library (capi.CDev, through_c.py). Left out are those
# that look at CudaDev's own allocations, or at kernels that are the same whoever launches them.
THROUGH_C = {
    f"test_{name}"
    for name in (
        "attend_layers", "batch", "cache", "cache_sequence", "driver_faults", "driver_laws", "fault_ends",
        "fault_runs", "graph", "graph_rules", "graph_walk", "health", "health_matrix", "hostile_callers", "kernels",
        "kernels_batch", "kernels_recurrent", "kit", "late_reads", "many_layers", "ops", "ops_arguments", "ops_results",
        "pipeline", "programs", "recur_step", "replayed_clock", "rollback", "round", "round_calls", "round_rules",
        "snapshots", "special_values", "stages", "steps", "taps", "threads",
    )
}  # fmt: skip

_IS_RED = pytest.StashKey[bool]()  # of a test that has failed

# Files that run once more in deferred mode, where the whole run does not: what they are about is order.
DEFERRED = {f"test_{name}" for name in ("boundary", "late_reads", "pipeline", "threads")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="use the real CUDA driver and GPU instead of the stand-in")
    parser.addoption("--not-through-c", action="store_true", help="leaves out the second turn, through the C library")
    parser.addoption("--keep-kernels", action="store_true", help="with --gpu: what was loaded once stays, for tools")
    parser.addoption("--part", metavar="I/N", help="of all tests the I-th, and every N-th behind it")
    parser.addoption("--seed", type=int, help="of deferred mode, for the files that also run in it; drawn if not given")
    parser.addoption(
        "--deferred", metavar="SEED", type=int,
        help="the stand-in driver runs work when somebody waits for it, in an order that the seed (not 0) shuffles",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tally)
    config.pluginmanager.register(order)
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    # Compiled kernels are kept for all tests of this and later runs, apart from the user's own.
    os.environ["MEMRA_CACHE_DIR"] = str(standin_module.cache_dir() / "nvrtc")
    _keep_cubins()
    drawn = 1 + secrets.randbits(31)
    config.option.seed = getattr(config, "workerinput", {}).get("seed", config.getoption("--seed") or drawn)
    if config.getoption("--deferred"):
        os.environ["FAKE_CUDA_DEFERRED"] = str(config.getoption("--deferred"))  # programs that tests start see it, too
    if config.getoption("--gpu"):
        _begin_with_another_gpu()
        _keep_context()
        if config.getoption("--keep-kernels"):
            _keep_kernels()
        config.pluginmanager.register(gpu_results.GpuResults(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A process of xdist gets the seed that is printed at the end."""
    node.workerinput["seed"] = node.config.option.seed


def _keep_cubins() -> None:
    """Lets a process look for each cubin of the usual folders once, since every device would hash all the texts anew;
    and where several lack it, lets one compile it."""
    from memra_driver import nvrtc

    def folders() -> tuple[Path | None, ...]:
        return nvrtc.source_dir(), nvrtc.prebuilt_dir(), nvrtc.cache_dir()

    found, usual = nvrtc.compile_cubin, folders()

    @functools.cache
    def kept(source: str, arch: str) -> bytes:
        with open(standin_module.cache_dir() / f"{source}.{arch}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return found(source, arch)

    @functools.wraps(found)
    def compile_cubin(source: str, arch: str, folder: Path | None = None) -> bytes:
        return kept(source, arch) if folder is None and folders() == usual else found(source, arch, folder)

    nvrtc.compile_cubin = compile_cubin


def _begin_with_another_gpu() -> None:
    """Of MEMRA_TEST_GPUS GPUs each process of xdist has another one as its first."""
    count, worker = int(os.environ.get("MEMRA_TEST_GPUS", "1")), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if count > 1:
        turned = ((int(worker.removeprefix("gw")) + i) % count for i in range(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, turned))


def _keep_context() -> None:
    """Holds the primary context for the whole run: making it anew for every test would take most of the time."""
    from memra_driver import driver
    from memra_driver.errors import MemraError

    try:
        driver.init()
        for ordinal in range(min(driver.device_get_count(), 2)):  # as many as tests use
            driver.device_primary_ctx_retain(driver.device_get(ordinal))
    except MemraError as error:
        raise pytest.UsageError(f"--gpu: {error}") from None


def _keep_kernels() -> None:
    """Loads each cubin once a run: a tool that rewrites kernels when they are loaded would do so for every test."""
    from memra_driver import driver

    driver.library_load_data = functools.cache(driver.library_load_data)
    driver.library_unload = lambda library: None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a GPU a test begins as a thread does, with no context current: torch takes the device of that for its own."""
    if item.config.getoption("--gpu"):
        from memra_driver import driver

        driver.ctx_set_current(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    elsewhere = standin_module.SANITIZED or any(metafunc.config.getoption(name) for name in ("--gpu", "--deferred"))
    elsewhere |= any(metafunc.definition.iter_markers("at_once"))
    if metafunc.module.__name__ in DEFERRED and "make_dev" in metafunc.fixturenames and not elsewhere:
        turns = [pytest.param(False, id=pytest.HIDDEN_PARAM), pytest.param(True, id="deferred")]
        metafunc.parametrize("deferred", turns, indirect=True)
    twice = metafunc.module.__name__ in THROUGH_C and "make_dev" in metafunc.fixturenames
    if standin_module.SANITIZED or metafunc.config.getoption("--not-through-c"):
        twice = False  # tests of the library itself do
    named = any(marker.args[0] == "cuda_kind" for marker in metafunc.definition.iter_markers("parametrize"))
    if twice and not named and not any(metafunc.definition.iter_markers("not_through_c")):
        metafunc.parametrize("cuda_kind", [pytest.param("cuda", id=pytest.HIDDEN_PARAM), "c"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = config.getoption("--gpu")

    def belongs(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        devices = [value for name, value in params.items() if name != "by"]  # "by": who has a count, not where it runs
        on_host = any(isinstance(value, str) and value.partition(",")[0] == "host" for value in devices)
        if on_host and (params.get("cuda_kind") == "c" or params.get("deferred")):
            return False
        if not gpu:
            return item.get_closest_marker("gpu") is None
        fixtures = getattr(item, "fixturenames", ())
        uses_cuda = "make_dev" in fixtures or item.get_closest_marker("gpu") is not None
        return uses_cuda and not on_host and item.get_closest_marker("standin") is None and "standin" not in fixtures

    first, every = map(int, (config.getoption("--part") or "1/1").split("/"))
    kept = [item for item in items if belongs(item)][first - 1 :: every]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_IS_RED] = True
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    config = terminalreporter.config
    if not config.getoption("--gpu"):
        whole = config.getoption("--deferred")
        told = f"the whole run, --deferred {whole}" if whole else f"{len(DEFERRED)} files, --seed {config.option.seed}"
        terminalreporter.write_line(f"deferred mode: {told}")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # thousands of collected tests, which no collection between tests has to walk through


@pytest.fixture(scope="session")
def small_kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small conformance kit, exported once; not to be changed."""
    from memra_driver import kit

    folder = tmp_path_factory.mktemp("kit")
    kit.export(folder, small=True)
    return folder


@pytest.fixture
def standin(request: pytest.FixtureRequest) -> Iterator[standin_module.StandIn]:
    """The stand-in driver, fresh. After the test: no misuse, no broken guard, no memory, graph or context left.

    Of a test that failed only the first two are looked at: its traceback keeps alive what it had not closed yet.
    """
    if request.config.getoption("--gpu"):
        pytest.skip("the stand-in is not loaded with --gpu")
    reason = standin_module.missing()
    if reason:
        pytest.skip(reason)
    control = standin_module.load()
    control.reset()
    if request.node.get_closest_marker("at_once"):
        control.defer(0)
    yield control
    control.clear_failures()
    gc.collect()
    if request.node.get_closest_marker("misuse"):
        return
    if _IS_RED in request.node.stash:
        assert control.errors() == []
        return
    control.assert_clean()
    assert not control.live_contexts(), "a primary context was never released"


@pytest.fixture
def context(standin: standin_module.StandIn) -> Iterator[standin_module.StandIn]:
    """The stand-in, with a retained and current primary context of device 0 through the bare bindings."""
    from cuda.bindings import driver as cu
    from raw_driver import ok

    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    yield standin
    ok(cu.cuCtxSetCurrent(0))
    ok(cu.cuDevicePrimaryCtxRelease(0))


MakeDev = Callable[..., Any]


@pytest.fixture
def gpu_count(request: pytest.FixtureRequest) -> int:
    """How many GPUs there are; the stand-in has two."""
    from memra_driver import driver

    return driver.device_get_count() if request.config.getoption("--gpu") else 2


@pytest.fixture
def cuda_kind(request: pytest.FixtureRequest) -> str:
    """What make_dev("cuda") makes: "cuda" a CudaDev; "c" a device of the C library, which then does all it can."""
    return getattr(request, "param", "cuda")


@functools.cache
def c_library_missing() -> str | None:
    """Why there is no C library here, or None; the package's own is brought up to date.

    With MEMRA_CPU_SANITIZE=1 a sanitized one stands in for it.
    """
    from memra_driver import native
    from memra_driver.errors import CompileError

    try:
        if standin_module.SANITIZED:
            checked = native.build(standin_module.cache_dir() / "native-sanitized", standin_module.SANITIZERS)
            native.library = lambda: checked
        else:
            native.build()
    except CompileError as error:
        return str(error)
    return None


@pytest.fixture
def deferred(request: pytest.FixtureRequest) -> bool:
    """Whether the stand-in driver defers what the devices of make_dev do."""
    return getattr(request, "param", False)


@pytest.fixture
def make_dev(request: pytest.FixtureRequest, cuda_kind: str, deferred: bool) -> Iterator[MakeDev]:
    """make_dev("host" | "cuda", ordinal=0, **options) -> a device; all are closed after the test."""
    if not request.config.getoption("--gpu") and standin_module.missing() is None:
        control = request.getfixturevalue("standin")
        if deferred:
            control.defer(request.config.getoption("--seed"))
    made: list[Any] = []

    def make(kind: str, ordinal: int = 0, **options: Any) -> Any:
        from memra_driver.capi import CDev
        from memra_driver.kvdev import CudaDev, HostDev

        if kind == "host":
            made.append(HostDev(**options))
            return made[-1]
        if not request.config.getoption("--gpu"):
            request.getfixturevalue("standin")  # skips, with the reason, where it cannot be built
        if cuda_kind == "c":
            if c_library_missing():
                pytest.skip(c_library_missing())
            if not made:
                through_c.install(request.getfixturevalue("monkeypatch"))
        made.append((CDev if cuda_kind == "c" else CudaDev)(ordinal, **options))
        return made[-1]

    yield make
    while made:
        made.pop().close()


@pytest.fixture(params=["host", "cuda"])
def dev(request: pytest.FixtureRequest, make_dev: MakeDev) -> Any:
    """One device of each kind in turn."""
    return make_dev(request.param)


@pytest.fixture
def cuda(make_dev: MakeDev) -> Any:
    """A CUDA device: on the stand-in, or with --gpu on the GPU."""
    return make_dev("cuda")


@pytest.fixture
def as_recorded(request: pytest.FixtureRequest, cuda: Any) -> Callable[[Any, Any], bool]:
    """as_recorded(got, expected): the vectors' own bits where they were recorded, sm_90 with CUDA 13.0; else nearly."""
    from memra_driver import nvrtc

    if request.config.getoption("--gpu") and cuda.context.arch == "sm_90" and nvrtc.version() == (13, 0):
        return lambda got, expected: got.tobytes() == expected.tobytes()
    return close


@pytest.fixture
def host(make_dev: MakeDev) -> Any:
    return make_dev("host")


@pytest.fixture
def c_library(standin: standin_module.StandIn) -> Any:
    """The C library on the stand-in driver."""
    from memra_driver import capi

    reason = c_library_missing()
    if reason:
        pytest.skip(reason)
    return capi.load()


@pytest.fixture
def c_device(c_library: Any, standin: standin_module.StandIn) -> Iterator[Any]:
    """A device of the C library as C has it; the trace begins behind its birth."""
    from memra_driver.capi.device import LibraryDevice

    made = LibraryDevice(c_library, 0, stream=None)
    standin.clear_trace()
    yield made
    standin.clear_failures()
    made.close()


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that keep their arguments and compute nothing, for `standin.use_kernels`."""
    return echo_kernels.build(tmp_path_factory.mktemp("echo"))


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers; MEMRA_TEST_SEED repeats those of a run that failed."""
    seed = int(os.environ.get("MEMRA_TEST_SEED") or secrets.randbits(32))
    print(f"MEMRA_TEST_SEED={seed}")
    return np.random.default_rng(seed)
