#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd units: valid, and no more exposed than 1.0 of 10.

usage: test_units.py CISTERND SERVICE SOCKET...
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXPOSURE_MAX = 10  # in tenths


def analyze(folder, *args):
    """Every word of systemd-analyze is a finding: it says nothing about units that are right."""
    run = subprocess.run(["systemd-analyze", *args], capture_output=True, text=True,
                         env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "PAGER": "cat"})
    return run.returncode, run.stdout + run.stderr


def units_in(folder, cisternd, service, sockets):
    text = Path(service).read_text(encoding="utf-8")
    lines = [f"ExecStart={cisternd}" if line.startswith("ExecStart=") else line
             for line in text.splitlines()]
    (folder / "cisternd.service").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for socket in sockets:
        shutil.copy(socket, folder)
    return sorted(str(p) for p in folder.iterdir())


def main():
    if not shutil.which("systemd-analyze"):
        print("skipped: systemd-analyze is not installed")
        return 77
    cisternd, service, *sockets = (os.path.abspath(p) for p in sys.argv[1:])
    failed = 0
    with tempfile.TemporaryDirectory(prefix="cistern-units-") as name:
        folder = Path(name)
        units = units_in(folder, cisternd, service, sockets)
        status, text = analyze(folder, "verify", "--man=no", *units)
        ours = [line for line in text.splitlines() if "cistern" in line]
        if status or ours:
            print("verify:", text)
            failed = 1
        status, text = analyze(folder, "security", "--offline=yes", "--no-pager",
                               f"--threshold={EXPOSURE_MAX}", str(folder / "cisternd.service"))
        print(text.strip().splitlines()[-1] if text.strip() else "security: no answer")
        if status:
            print("security:", text)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
