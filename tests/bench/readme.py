"""Puts the run of record into the README: .venv/bin/python tests/bench/readme.py

The run is tests/bench/results/NVIDIA-H200.json, which `memra-driver bench --peers --json` wrote; its picture is drawn
beside it. A test holds the README against the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from memra_driver.bench import report  # noqa: E402

README = ROOT / "README.md"
RECORD = ROOT / "tests" / "bench" / "results" / "NVIDIA-H200.json"
PICTURE = RECORD.with_suffix(".png")
BEGIN, END = "<!-- tests/bench/readme.py writes what follows -->\n", "<!-- and no more -->\n"


def chapter() -> str:
    """What stands between BEGIN and END: the account of the run of record, and the picture."""
    if not RECORD.is_file():
        return "\nNo run is on record.\n\n"
    picture = f"![share of the ceiling over the bytes of a call]({PICTURE.relative_to(ROOT)})"
    return f"\n{report.markdown(report.read(RECORD))}\n\n{picture}\n\n"


def main() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{chapter()}{END}{after}")
    if RECORD.is_file():
        report.picture(PICTURE, report.read(RECORD))


if __name__ == "__main__":
    main()
