"""The fuzzers for longer than the tests run them: C library, config files and saved kits, one after the other.

    .venv/bin/python tests/fuzz/long.py --minutes 20 --seed 7

Other seeds than those of the tests; what breaks a law ends it and is printed with its seed or input.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import cfuzz  # noqa: E402
import fuzz_configs  # noqa: E402
import fuzz_kits  # noqa: E402

from memra_driver import kit  # noqa: E402

SHARES = {"C library": 0.6, "GGUF files": 0.12, "config.json files": 0.08, "saved kits": 0.2}


def c_library(folder: Path, seconds: float, seed: int) -> int:
    done = cfuzz.run(cfuzz.build(folder), "--seconds", str(round(seconds)), "--seed", str(seed))
    assert done.returncode == 0, done.stderr
    print(done.stdout.splitlines()[-1])
    return cfuzz.read(done.stdout)[1]


def seeds(what: Callable[[int], object], seconds: float, seed: int) -> int:
    """How many seeds had their turn."""
    begin, n = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        number = (seed << 32) + n
        try:
            what(number)
        except BaseException:
            print(f"seed {number}")
            raise
        n += 1
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kit.export(folder / "small", small=True)
        tiny = fuzz_kits.tiny_kit(folder / "small", folder / "tiny")
        (folder / "work").mkdir()
        of_seed: dict[str, Callable[[int], object]] = {
            "GGUF files": lambda number: fuzz_configs.try_gguf(folder / "a.gguf", number),
            "config.json files": lambda number: fuzz_configs.try_hf(folder / "config.json", number),
            "saved kits": lambda number: fuzz_kits.try_kit(tiny, folder / "work", number),
        }
        fuzz_configs.warm(folder / "a.gguf")
        for what, share in SHARES.items():
            begin, seconds = time.monotonic(), 60 * options.minutes * share
            run = of_seed.get(what)
            n = seeds(run, seconds, options.seed) if run else c_library(folder, seconds, options.seed)
            print(f"| {what} | {n:,} | {time.monotonic() - begin:.0f} |", flush=True)


if __name__ == "__main__":
    main()
