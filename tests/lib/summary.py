# SPDX-License-Identifier: Apache-2.0
"""Sums meson's test logs of several build folders: what was skipped and why, what failed, one line.

usage: summary.py [--failed N] BUILD-DIR...   (--failed: failures outside of the tests)
Every meson test counts once per folder. Exit 1 when anything failed or nothing ran.
"""
import argparse
import json
import sys
from pathlib import Path

PASSED = {"OK", "EXPECTEDFAIL"}
SKIPPED = {"SKIP"}


def results(folder):
    """(name, result, output) of each test of the folder's last run; none if it did not run."""
    log = Path(folder) / "meson-logs" / "testlog.json"
    if log.exists():
        with open(log, encoding="utf-8") as lines:
            for line in lines:
                test = json.loads(line)
                yield test["name"], test["result"], test.get("stdout", "") + test.get("stderr", "")


def reason(output):
    """The line in which a skipped test says what is missing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.partition("skipped:")[2].strip() for line in lines if "skipped:" in line]
    return said[0] if said else lines[-1] if lines else "no reason given"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--failed", type=int, default=0)
    parser.add_argument("folders", nargs="*")
    args = parser.parse_args()
    passed, failed, skipped = 0, args.failed, 0
    for folder in args.folders:
        ran = list(results(folder))
        if not ran:
            failed += 1
            print(f"FAILED {folder}: no test ran")
        for name, result, output in ran:
            if result in PASSED:
                passed += 1
            elif result in SKIPPED:
                skipped += 1
                print(f"skipped {folder} {name}: {reason(output)}")
            else:
                failed += 1
                print(f"FAILED {folder} {name}: {result}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
