# SPDX-License-Identifier: Apache-2.0
"""Blocks outlive memory and the daemon: they go to disk under pressure and at a clean stop, are found
after a restart, and are exact or a miss."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import wire
from lab import BLOCK_TOKENS, Layout, Peer, ok, payload, prompt, smooth, until
from private_daemon import PrivateDaemon
from test_stop import complained, run_daemon

LAYOUT = Layout(64 << 10)
COLD = 3
SMALL = (
    "--memory", "40MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB", "--disk", "256MiB", "--disk-buffers", "8MiB",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """On a real file system; pytest's own may be memory."""
    yield tmp_path


@pytest.fixture(params=[("aes", "auto"), ("off", "auto"), ("aes", "threads")], ids="-".join)
def options(request: pytest.FixtureRequest, folder: Path) -> tuple[str, ...]:
    crypt, io = request.param
    key = folder / "root.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    return (*SMALL, "--directory", str(disk), "--crypt", crypt, "--io", io, "--key-file", str(key))


def tiers(p: Peer, keys: list[bytes]) -> list[int]:
    return list(ok(p.call("LookupEach", space=p.space, keys=b"".join(keys))).tiers)


def put_all(p: Peer, tokens: list[int], content=payload) -> None:
    """In pieces that fit the staging memory."""
    step, parent = 4 * BLOCK_TOKENS, None
    for at in range(0, len(tokens), step):
        piece = tokens[at : at + step]
        assert set(p.put(piece, content, parent)) <= {"OK", "PRESENT"}
        parent = wire.chain(p.layout.root() if parent is None else parent, piece, BLOCK_TOKENS)[-1]


def check(p: Peer, keys: list[bytes], content=payload) -> int:
    """All that is there is exact; returns how much that is."""
    got = p.get(keys)
    for key, data in zip(keys, got, strict=True):
        assert data in (None, content(key, LAYOUT.size))
    return sum(data is not None for data in got)


def test_a_prompt_is_warm_after_a_clean_restart(options: tuple[str, ...]) -> None:
    tokens = prompt("restart", 40)
    keys = LAYOUT.chain(tokens)
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens)
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert p.lookup(tokens) == 40, d.log()
            assert tiers(p, keys) == [COLD] * 40
            assert check(p, keys) == 40
            assert COLD not in tiers(p, keys)
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert check(p, keys) == 40, d.log()


def test_memory_overflows_to_disk(options: tuple[str, ...]) -> None:
    """Four times as much as memory holds: nothing is lost, all of it exact."""
    prompts = [prompt(f"overflow {i}", 64) for i in range(20)]
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            for tokens in prompts:
                put_all(p, tokens, smooth)
            found = [p.lookup(tokens) for tokens in prompts]
            print(found, p.space_stats(), p.status_counters(), d.log())
            assert sum(found) >= 0.95 * 20 * 64
            stats = p.space_stats()
            assert stats["cold_blocks"] > 0.5 * 20 * 64, stats
            for tokens in prompts:
                assert check(p, LAYOUT.chain(tokens)[: p.lookup(tokens)], smooth) == p.lookup(tokens)
            print(p.space_stats())


def test_a_kill_loses_little(options: tuple[str, ...]) -> None:
    prompts = [prompt(f"kill {i}", 64) for i in range(20)]
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            for tokens in prompts:
                put_all(p, tokens, smooth)
            written = p.space_stats()["cold_blocks"]
        d.kill()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            found = sum(p.lookup(tokens) for tokens in prompts)
            assert found >= 0.95 * written > 0, (found, written, d.log())
            for tokens in prompts:
                n = p.lookup(tokens)
                assert check(p, LAYOUT.chain(tokens)[:n], smooth) == n
