# SPDX-License-Identifier: Apache-2.0
"""The README's quick start, run as it is written, against a private daemon."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import private_daemon
import pytest

ROOT = Path(os.environ["CST_SOURCE_ROOT"])
BUILD = Path(os.environ["CST_BUILD_ROOT"])
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture
def socket() -> Iterator[str]:
    with private_daemon.PrivateDaemon("--memory", "256MiB") as daemon:
        yield daemon.socket


def run(command: list[str], socket: str) -> str:
    done = subprocess.run(command, env={**os.environ, "CISTERN_SOCKET": socket}, text=True,
                          capture_output=True, check=True)  # fmt: skip
    return done.stdout


def test_python_finds_in_a_second_process_what_the_first_stored(socket: str) -> None:
    (code,) = blocks("python")
    assert run([sys.executable, "-c", code], socket) == "0 tokens found\n"
    assert run([sys.executable, "-c", code], socket) == "1000 tokens found\n"


def test_the_commands_of_the_quick_start_work(socket: str) -> None:
    commands = [line.split("#")[0].split() for line in "".join(blocks("")).splitlines()]
    programs = [c for c in commands if c and c[0].startswith("build/client/")]
    assert len(programs) == 3
    said = [run([str(BUILD / c[0].removeprefix("build/")), *c[1:]], socket) for c in programs]
    assert "stored before: 0 of 2" in said[0]
    assert "stored before: 2 of 2" in said[1]
    assert "example" in said[2]


def test_the_scripts_that_are_named_exist() -> None:
    named = set(re.findall(r"scripts/[\w-]+", README))
    assert {"scripts/demo", "scripts/test"} <= named
    for script in named:
        assert os.access(ROOT / script, os.X_OK), script
