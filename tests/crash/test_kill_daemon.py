# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the daemon under load: every client carries on with the next one, and no read ever gives
a wrong byte. The workers check all they read; their exit is the verdict."""

from __future__ import annotations

import os
import random

from lab import Worker, rounds
from private_daemon import PrivateDaemon

WORKERS = 3
# Less memory than the prompts need: blocks are packed, evicted and decoded all the time.
OPTIONS = (
    "--memory", "48MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB",
)  # fmt: skip


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
