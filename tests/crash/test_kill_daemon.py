# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the daemon under load: every client carries on with the next one, and no read ever gives
a wrong byte. The workers check all they read; their exit is the verdict."""

from __future__ import annotations

import os
import random
import select
import subprocess

from lab import HANG_GUARD_S, rounds
from private_daemon import PrivateDaemon

WORKERS = 3
# Less memory than the prompts need: blocks are packed, evicted and decoded all the time.
OPTIONS = (
    "--memory", "48MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB",
)  # fmt: skip


class Worker:
    def __init__(self, path: str, seed: int) -> None:
        program = os.path.join(os.environ["CST_BUILD_ROOT"], "tests", "crash", "load_worker")
        self.process = subprocess.Popen([program, path, str(seed)], stdout=subprocess.PIPE, bufsize=0)
        self.counts = {c: 0 for c in "pgmx"}

    def read(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANG_GUARD_S)
        assert ready, "a worker hangs"
        got = self.process.stdout.read(4096).decode()
        assert got, f"a worker ended with {self.process.wait()}"
        for c in got:
            self.counts[c] += 1
        return got

    def carry_on(self, puts: int, gets: int) -> None:
        """Until so many more of its puts were answered, and so many blocks read."""
        want = {"p": self.counts["p"] + puts, "g": self.counts["g"] + gets}
        while any(self.counts[c] < n for c, n in want.items()):
            self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_clients_carry_on_over_killed_daemons() -> None:
    seed = int(os.environ.get("CST_SEED", "1"))
    draw = random.Random(seed)
    print(f"seed {seed}")
    with PrivateDaemon(*OPTIONS) as daemon:
        workers = [Worker(daemon.socket, draw.randrange(1 << 32)) for _ in range(WORKERS)]
        try:
            for i in range(rounds(50, 500)):
                full = i % 10 == 9  # long enough to fill the memory
                for worker in workers:
                    worker.carry_on(puts=500 if full else 5, gets=500 if full else 2)
                for _ in range(draw.randrange(20)):
                    draw.choice(workers).read()
                daemon.kill()
                daemon.start()
            for worker in workers:
                worker.carry_on(puts=20, gets=20)
        finally:
            for worker in workers:
                worker.end()
