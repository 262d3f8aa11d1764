# SPDX-License-Identifier: Apache-2.0
"""The package is typed: mypy --strict has nothing to say."""

import subprocess
import sys

import pytest
from cdef_from_header import ROOT


def test_mypy_strict_is_clean() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir=/dev/null"]
    done = subprocess.run(command, cwd=ROOT / "python", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
