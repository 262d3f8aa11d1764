# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a daemon with a disk tier, under load: the next one finds at least 95 % of what was
written, and no read ever gives a wrong byte. The workers check all they read; their exit is the
verdict."""

from __future__ import annotations

import os
import random
from pathlib import Path

from lab import Peer, Worker, rounds
from private_daemon import PrivateDaemon

WORKERS = 2
# Less memory than the prompts need, and disk for all of them.
OPTIONS = (
    "--memory", "48MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB", "--disk", "512MiB", "--disk-buffers", "8MiB",
)  # fmt: skip


def status(daemon: PrivateDaemon) -> dict[str, int]:
    with Peer(daemon.socket) as monitor:
        return monitor.status_counters()


def test_what_was_written_is_found(tmp_path: Path) -> None:
    seed = int(os.environ.get("CST_SEED", "1"))
    draw = random.Random(seed)
    print(f"seed {seed}")
    disk, key = tmp_path / "disk", tmp_path / "root.key"
    disk.mkdir(mode=0o700)
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    kills = rounds(30, 300)
    found = written = read = 0
    with PrivateDaemon(*OPTIONS, "--directory", str(disk), "--key-file", str(key)) as daemon:
        workers = [Worker(daemon.socket, draw.randrange(1 << 32)) for _ in range(WORKERS)]
        try:
            for i in range(kills):
                full = i % 6 == 0  # long enough to fill the memory
                for worker in workers:
                    worker.carry_on(puts=500 if full else 10, gets=500 if full else 10)
                for _ in range(draw.randrange(20)):
                    draw.choice(workers).read()
                before = status(daemon)
                daemon.kill()
                daemon.start()
                after = status(daemon)
                assert after["disk_recovered"] >= 0.95 * before["disk_records"], (i, before, after)
                assert before["disk_corrupt"] == before["disk_errors"] == 0, before
                written += before["disk_records"]
                found += after["disk_recovered"]
                read += before["disk_read_bytes"]
            for worker in workers:
                worker.carry_on(puts=20, gets=20)
        finally:
            for worker in workers:
                worker.end()
    print(f"{kills} kills: {found} records found of {written} written, {read >> 20} MiB read")
    assert written and read
