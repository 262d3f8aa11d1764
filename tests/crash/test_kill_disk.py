# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a daemon with a disk tier, at random and at marked points of what it does to its disk,
under load and with less memory than the load needs: the next one finds at least 95 % of what was
written, and no read ever gives a wrong byte or a block that was never committed. The workers check
all they read; their exit is the verdict."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest
from lab import HANG_GUARD_S, Peer, Worker, rounds
from private_daemon import PrivateDaemon
from wire import Closed

WORKERS = 2
# 10 MiB of blocks in memory and 48 on disk, for prompts of 96: blocks leave memory for the disk, and
# the disk for good, all the time.
PROMPTS = 2400
OPTIONS = (
    "--memory", "26MiB", "--index", "4MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "4MiB",
    "--staging-per-uid", "4MiB", "--disk-buffers", "8MiB", "--disk", "48MiB", "--segment", "1MiB",
)  # fmt: skip
# What evictions between the last look and the end may take: a stop writes all that is in memory.
SLACK, STOP_SLACK = 64, 256
MODES = [("aes", "auto"), ("off", "auto"), ("aes", "threads"), ("off", "threads")]

# Marks (kill_at.c), and about how often a daemon comes to them while it starts, serves and stops.
SERVING = {
    "payload": 100, "head": 100, "read": 100, "segment": 3, "index": 3, "footer": 3, "discard": 3,
    "allocate": 3,
}  # fmt: skip
STOPPING = {"checkpoint": 1, "rename": 1, "index": 2, "footer": 2, "payload": 200, "head": 200}
WHEN = ("before", "half", "after")


class Ended(Exception):
    """The daemon came to its mark."""


class Lives:
    """A directory and its daemons, one after the other, with workers that outlive them."""

    def __init__(self, folder: Path, crypt: str, io: str, draw: random.Random) -> None:
        disk, key = folder / "disk", folder / "root.key"
        disk.mkdir(mode=0o700)
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        self.draw = draw
        self.daemon = PrivateDaemon(
            *OPTIONS, "--directory", str(disk), "--key-file", str(key), "--crypt", crypt, "--io", io
        )
        self.last: dict[str, int] = {}  # what the daemon told last
        self.slack = SLACK
        self.n: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self.monitor: Peer | None = None

    def start(self, mark: str | None) -> None:
        """The next daemon; it finds what the last one had written."""
        self.daemon.env = {}
        if mark:
            library = os.path.join(os.environ["CST_BUILD_ROOT"], "tests", "crash", "kill_at.so")
            asan = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
            self.daemon.env = {"LD_PRELOAD": library, "CST_KILL_AT": mark, "ASAN_OPTIONS": asan}
        try:
            self.daemon.start()
        except RuntimeError:
            self.ended()
        written = self.last.get("disk_records", 0)
        self.monitor = None
        found = self.look()["disk_recovered"]
        assert found >= 0.95 * written - self.slack, (found, written, self.n, self.daemon.log())
        self.slack = SLACK
        self.n["written"] += written
        self.n["found"] += found

    def ended(self) -> NoReturn:
        """By its mark, and by nothing else."""
        process, self.daemon.process = self.daemon.process, None
        assert process.wait() == -signal.SIGKILL, self.daemon.log()
        raise Ended

    def look(self) -> dict[str, int]:
        try:
            if self.monitor is None:
                self.monitor = Peer(self.daemon.socket)
            self.last = self.monitor.status_counters()
        except (OSError, Closed):
            self.ended()
        assert self.last["disk_errors"] == 0, self.last
        torn = self.n["head half"]  # a head whose chunk, where the payload begins, is half there
        assert self.last["disk_corrupt"] <= torn, (torn, self.last, self.n)
        return self.last

    def done(self, what: str) -> int:
        return sum(worker.counts[what] for worker in self.workers)

    def serve(self, mib: float) -> None:
        """Until it has written so much for want of memory, and workers have stored and read."""
        puts, gets, end = self.done("p") + 10, self.done("g") + 10, time.monotonic() + HANG_GUARD_S
        while self.last["disk_written_bytes"] < mib * (1 << 20) or self.done("p") < puts or self.done("g") < gets:
            assert time.monotonic() < end, ("it writes nothing", self.last, self.daemon.log())
            for worker in self.workers:
                worker.read()
            self.look()

    def random_end(self) -> str:
        self.start(None)
        self.serve(0.1 + self.draw.random() * 2)
        self.daemon.kill()
        return "at random"

    def marked_end(self, marks: dict[str, int], stop: bool) -> str:
        """At a mark; at random if it does not come there."""
        what = self.draw.choice(list(marks))
        when = self.draw.choice(WHEN)
        try:
            self.start(f"{what} {when} {self.draw.randint(1, marks[what])}")
            self.serve(0.1 + self.draw.random() * 2 if stop else 6)
            if not stop:
                self.daemon.kill()
                return "at random"
            self.slack = STOP_SLACK
            self.daemon.process.terminate()
            if self.daemon.process.wait(HANG_GUARD_S) == 0:
                self.daemon.process = None
                return "clean stop"
            self.ended()
        except Ended:
            return f"{what} {when}"

    def live(self) -> None:
        """One life. Most are to end at a mark, a third of those in a clean stop; not all come to theirs."""
        if self.draw.random() < 0.3:
            end = self.random_end()
        else:
            stop = self.draw.random() < 1 / 3
            end = self.marked_end(STOPPING if stop else SERVING, stop)
        self.n[end] += 1
        self.n["kills"] += end != "clean stop"
        self.n["read"] += self.last.get("disk_read_bytes", 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.daemon.kill()


@pytest.mark.parametrize(("crypt", "io"), MODES)
def test_what_was_written_is_found(tmp_path: Path, crypt: str, io: str) -> None:
    seed = int(os.environ.get("CST_SEED", "1"))
    draw = random.Random(f"{seed} {crypt} {io}")
    print(f"seed {seed}")
    kills = rounds(8, 75)
    lives = Lives(tmp_path, crypt, io, draw)
    try:
        lives.start(None)
        lives.workers = [
            Worker(lives.daemon.socket, draw.randrange(1 << 32), PROMPTS) for _ in range(WORKERS)
        ]
        lives.serve(1)
        lives.daemon.kill()
        while lives.n["kills"] < kills:
            lives.live()
        lives.start(None)
        lives.serve(1)
    finally:
        lives.close()
    n = lives.n
    print(f"{n['kills']} kills: {n['found']} records found of {n['written']} written, {n['read'] >> 20} MiB read")
    print(sorted(n.items()))
    # In one life or two little may have left memory.
    assert n["written"] and (n["read"] or kills < 8)
