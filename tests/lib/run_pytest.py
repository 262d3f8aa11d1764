#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs pytest on files for meson: `run_pytest.py FILE...`.

The interpreter is the checkout's .venv, else this one; 77 if neither has pytest and cffi. Exit codes
are those of the test protocol: 0 passed, 77 everything skipped, else failed.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interpreter() -> str | None:
    for python in (ROOT / ".venv" / "bin" / "python", Path(sys.executable)):
        if python.exists():
            found = subprocess.run([python, "-c", "import cffi, pytest"], capture_output=True)
            if found.returncode == 0:
                return str(python)
    return None


def main() -> int:
    python = interpreter()
    if python is None:
        print("skipped: no Python with pytest and cffi (scripts/test makes .venv with them)")
        return 77
    paths = [str(ROOT / "python"), str(ROOT / "tests" / "lib"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.setdefault("CST_SOURCE_ROOT", str(ROOT))
    os.environ.setdefault("CST_BUILD_ROOT", str(ROOT / "build"))
    os.execv(python, [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir",
                      str(ROOT / "tests"), "-rs", *sys.argv[1:]])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
