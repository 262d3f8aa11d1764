# SPDX-License-Identifier: Apache-2.0
"""With disk_prefetch a Lookup brings what it finds on disk to memory: within its bounds, at nobody's
cost, and only for the one who asks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab import Layout, Peer, as_user, ok, payload, prompt, smooth, until
from private_daemon import PrivateDaemon
from test_disk import COLD, LAYOUT, SMALL, check, put_all, tiers

BLOCKS = 16
TOKENS = prompt("prefetch", BLOCKS)
KEYS = LAYOUT.chain(TOKENS)
CONTENTS = pytest.mark.parametrize("content", [smooth, payload], ids=["packed", "raw"])


def counts(p: Peer) -> tuple[int, int, int]:
    stats = p.space_stats()
    return stats["prefetched_blocks"], stats["prefetch_used"], stats["cold_reads"]


def daemon(folder: Path, prefetch: str, *more: str) -> PrivateDaemon:
    """With a disk; restarts find it again."""
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    return PrivateDaemon(
        *SMALL, "--directory", str(disk), "--crypt", "off", "--disk-prefetch", prefetch, *more
    )


def restart(d: PrivateDaemon) -> None:
    assert d.stop() == 0, d.log()
    d.start()


@CONTENTS
def test_a_fetch_finds_what_the_lookup_began_to_read(tmp_path: Path, content) -> None:
    with daemon(tmp_path, "64MiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS, content)
        restart(d)
        with Peer(d.socket, LAYOUT) as p:
            assert tiers(p, KEYS) == [COLD] * BLOCKS
            assert counts(p) == (0, 0, 0)  # LookupEach reads nothing
            assert p.lookup(TOKENS) == BLOCKS
            until(lambda: COLD not in tiers(p, KEYS), "all is in memory")
            assert counts(p) == (BLOCKS, 0, BLOCKS)
            assert check(p, KEYS, content) == BLOCKS
            assert counts(p) == (BLOCKS, BLOCKS, BLOCKS)
            assert check(p, KEYS, content) == BLOCKS  # and a second one is none of the Lookup's
            assert p.lookup(TOKENS) == BLOCKS
            assert counts(p) == (BLOCKS, BLOCKS, BLOCKS)


@CONTENTS
def test_a_fetch_joins_what_is_on_its_way(tmp_path: Path, content) -> None:
    """Acquire follows the Lookup at once, and again by another client: each block is read once."""
    with daemon(tmp_path, "64MiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS, content)
        for _ in range(8):
            restart(d)
            with Peer(d.socket, LAYOUT) as p, Peer(d.socket, LAYOUT) as other:
                p.send("Lookup", space=p.space, keys=b"".join(KEYS))
                assert check(other, KEYS, content) == BLOCKS
                assert check(p, KEYS, content) == BLOCKS
                prefetched, used, reads = counts(p)
                assert used == prefetched <= reads == BLOCKS


def test_without_the_setting_a_lookup_reads_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path, "0") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS)
        restart(d)
        with Peer(d.socket, LAYOUT) as p:
            for _ in range(3):
                assert p.lookup(TOKENS) == BLOCKS
            assert tiers(p, KEYS) == [COLD] * BLOCKS
            assert counts(p) == (0, 0, 0)


def test_a_lookup_reads_no_more_than_it_may(tmp_path: Path) -> None:
    """Records are a little larger than blocks: three of them fit, from the start of the prompt."""
    with daemon(tmp_path, "256KiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS)
        restart(d)
        with Peer(d.socket, LAYOUT) as p:
            assert p.lookup(TOKENS) == BLOCKS
            until(lambda: COLD not in tiers(p, KEYS[:3]), "the first ones are in memory")
            assert tiers(p, KEYS[3:]) == [COLD] * (BLOCKS - 3)
            assert counts(p) == (3, 0, 3)


def test_nobody_loses_memory_for_it(tmp_path: Path) -> None:
    """With memory full of others' blocks, a Lookup leaves them where they are."""
    mine = prompt("mine", 64)
    with daemon(tmp_path, "64MiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, mine)
        restart(d)
        other = Layout(64 << 10, content=b"\x22" * 32)
        with Peer(d.socket, LAYOUT) as p, Peer(d.socket, other) as q:
            for i in range(8):
                put_all(q, prompt(f"other {i}", 64))
            theirs = [key for i in range(8) for key in other.chain(prompt(f"other {i}", 64))]
            before = tiers(q, theirs)
            assert before.count(COLD) > 64  # memory is full
            assert p.lookup(mine) == 64
            assert counts(p) == (0, 0, 0)
            assert tiers(q, theirs) == before
            until(lambda: check(p, LAYOUT.chain(mine)) == 64, "all of it is read, when there is room")


def test_a_lookup_tells_what_the_disk_costs(tmp_path: Path) -> None:
    def cost(p: Peer, brief: int) -> int:
        return int(ok(p.call("Lookup", space=p.space, keys=b"".join(KEYS), brief=brief)).cost_ns)

    with daemon(tmp_path, "0") as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS)
            assert cost(p, 0) == cost(p, 1) == 0
        restart(d)
        with Peer(d.socket, LAYOUT) as p:
            # nothing is measured yet: 1 GB/s from disk, and again for the decode
            assert cost(p, 0) == cost(p, 1) == 2 * BLOCKS * LAYOUT.size
            assert check(p, KEYS[:8]) == 8
            measured = cost(p, 0)
            assert 0 < measured != BLOCKS * LAYOUT.size
            assert check(p, KEYS) == BLOCKS
            assert cost(p, 0) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: needs root")
def test_it_reads_nothing_of_another_namespace(tmp_path: Path) -> None:
    with daemon(tmp_path, "64MiB", "--socket-mode", "0666") as d:
        os.chmod(d.dir, 0o755)
        with as_user(61001), Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS)
        restart(d)
        with as_user(61002), Peer(d.socket, LAYOUT) as p:
            assert (p.lookup(TOKENS), counts(p)) == (0, (0, 0, 0))
        with as_user(61001), Peer(d.socket, LAYOUT) as p:
            assert counts(p) == (0, 0, 0)
            assert p.lookup(TOKENS) == BLOCKS
            until(lambda: counts(p)[0] == BLOCKS, "all of it is read")
