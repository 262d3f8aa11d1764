# SPDX-License-Identifier: Apache-2.0
"""A daemon under a seccomp filter that denies io_uring, as container runtimes have it: it says so once,
uses its threads, and blocks go to disk and come back as with io_uring."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

import pytest
from lab import Layout, Peer, ok, prompt, smooth
from private_daemon import PrivateDaemon
from test_stop import complained, run_daemon

LAYOUT = Layout(64 << 10)
COLD = 3
PROMPTS = [prompt(f"denied {i}", 4) for i in range(200)]  # 50 MiB
OPTIONS = (
    "--memory", "40MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB", "--disk", "256MiB", "--disk-buffers", "8MiB", "--crypt", "off",
)  # fmt: skip

# <linux/seccomp.h>, <linux/filter.h>, <linux/prctl.h>; the call's number is the same on all machines
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
IO_URING_SETUP = 425
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def deny(error: int) -> None:
    """From now on, io_uring_setup() of this process and its children fails so."""
    code = b"".join(
        struct.pack("=HBBI", *step)
        for step in (
            (LOAD_NUMBER, 0, 0, 0),
            (JUMP_IF_EQUAL, 0, 1, IO_URING_SETUP),
            (RETURN, 0, 0, RET_ERRNO | error),
            (RETURN, 0, 0, RET_ALLOW),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(code) // 8, code)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*call, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


class DeniedDaemon(PrivateDaemon):
    def __init__(self, error: int, *args: str) -> None:
        super().__init__(*args)
        self.error = error

    def _before_exec(self) -> None:
        super()._before_exec()
        deny(self.error)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    return str(disk)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_threads_take_over(directory: str, error: int) -> None:
    with DeniedDaemon(error, *OPTIONS, "--directory", directory) as d:
        with Peer(d.socket, LAYOUT) as p:
            for tokens in PROMPTS:
                assert set(p.put(tokens, smooth)) == {"OK"}
            assert p.space_stats()["cold_blocks"] > 0, "memory is smaller than what was stored"
            assert p.status_counters()["disk_io"] == "threads"
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            found = 0
            for tokens in PROMPTS:
                keys = LAYOUT.chain(tokens)[: p.lookup(tokens)]
                found += len(keys)
                tiers = ok(p.call("LookupEach", space=p.space, keys=b"".join(keys))).tiers
                assert set(tiers) <= {COLD}
                assert p.get(keys) == [smooth(key, LAYOUT.size) for key in keys]
            assert found >= 0.95 * 4 * len(PROMPTS), (found, d.log())
            assert p.status_counters()["disk_corrupt"] == 0
        lines = [line for line in d.log().splitlines() if "io_uring" in line]
        assert len(lines) == 2, d.log()  # one a start
        for line in lines:
            assert line.startswith("disk: using threads instead of io_uring: "), line
            assert line.endswith(f"({errno.errorcode[error]})"), line


def test_io_uring_alone_is_refused(directory: str, tmp_path: Path) -> None:
    """Who insists on it is told what to change."""
    args = ("--socket", str(tmp_path / "sock"), *OPTIONS, "--directory", directory, "--io", "io_uring")
    complained(
        run_daemon(*args, preexec_fn=lambda: deny(errno.EPERM)),
        "io = io_uring can't be had: ", "(EPERM); say io = auto",
    )  # fmt: skip
    assert os.listdir(directory) == []
