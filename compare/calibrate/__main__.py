"""Measures a suite's judge:

python -m compare.calibrate SUITE --cases 10000 --shapes 100 --seed 2026 --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compare.calibrate.calibrate import calibrate, calibration_of, table
from compare.suites.table import SUITES


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints and writes the measurement; exit status 1 if a right kernel raised an alarm."""
    parser = argparse.ArgumentParser(prog="python -m compare.calibrate", description=__doc__)
    parser.add_argument("suite", choices=[s.name for s in SUITES.values() if s.calibration])
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--shapes", type=int, default=20, help="at most this many distinct shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    suite = SUITES[options.suite]
    measured = calibrate(suite, options.cases, options.shapes, options.seed)
    if options.out:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured, calibration_of(suite).statistics))
    alarms = [alarm for row in measured["right"].values() for alarm in row["alarms"]]
    print(f"\n{measured['cases']} cases, {measured['seconds']} s, {len(alarms)} alarms")
    print("\n".join(alarms[:10]))
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
