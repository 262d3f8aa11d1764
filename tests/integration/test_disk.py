# SPDX-License-Identifier: Apache-2.0
"""Blocks outlive memory and the daemon: they go to disk under pressure and at a clean stop, are found
after a restart, and are exact or a miss."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import wire
from lab import BLOCK_TOKENS, Layout, Peer, Slot, error, ok, payload, prompt, smooth
from private_daemon import PrivateDaemon
from test_stop import complained, run_daemon

LAYOUT = Layout(64 << 10)
COLD = 3
FLAT = 1
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


def put_all(p: Peer, tokens: list[int], content=payload, full: bool = False) -> None:
    """In pieces that fit the staging memory. Where neither memory nor a full disk has room for all,
    what was stored may be gone before its children come."""
    step, parent = 4 * BLOCK_TOKENS, None
    for at in range(0, len(tokens), step):
        piece = tokens[at : at + step]
        statuses = set(p.put(piece, content, parent))
        if full and "PARENT_MISSING" in statuses:
            return
        assert statuses <= {"OK", "PRESENT"}
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


def test_flat_blocks_are_warm_after_a_restart(options: tuple[str, ...]) -> None:
    keys = [bytes([i]) * 32 for i in range(1, 5)]
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT, kind=FLAT) as p:
            p.open_staging()
            reply = ok(p.call("Reserve", space=p.space, keys=b"".join(keys)))
            slots = [Slot(r) for r in wire.records(wire.SLOT, reply.slots)]
            for key, slot in zip(keys, slots, strict=True):
                p.fill(slot, payload(key, LAYOUT.size))
            assert p.commit(slots) == ["OK"] * 4
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT, kind=FLAT) as p:
            assert tiers(p, keys) == [COLD] * 4, d.log()
            assert check(p, keys) == 4


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


# ---- what is in the files ----

CANARY = b"a canary in the coal mine of one block"


def canary(key: bytes, size: int) -> bytes:
    """Not compressible, so that a block goes to disk as it is."""
    data = payload(key, size)
    return data[:1000] + CANARY + data[1000 + len(CANARY) :]


def raw(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "disk").iterdir()))


def test_files_do_not_show_what_is_stored(options: tuple[str, ...], folder: Path) -> None:
    tokens = prompt("canary", 4)
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens, canary)
        assert d.stop() == 0, d.log()
        data = raw(folder)
        ids = struct.pack(f"<{BLOCK_TOKENS}I", *tokens[:BLOCK_TOKENS])
        hidden = "aes" in options
        assert (CANARY in data, ids in data) == (not hidden, not hidden)
        assert LAYOUT.chain(tokens)[0] not in data or not hidden
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert check(p, LAYOUT.chain(tokens), canary) == 4


def test_a_purge_says_what_is_true(options: tuple[str, ...], folder: Path) -> None:
    tokens = prompt("purge", 16)
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens, canary)
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert check(p, LAYOUT.chain(tokens), canary) == 16
            reply = ok(p.call("Purge"))
            assert (reply.blocks, reply.result) == (16, "unlinked")  # the root key is a file of ours
            assert p.lookup(tokens) == 0
        d.kill()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert p.lookup(tokens) == 0, d.log()
            put_all(p, tokens)
            ok(p.call("Purge"))
            put_all(p, tokens, smooth)  # the space goes on, under another key
            assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert tiers(p, LAYOUT.chain(tokens)) == [COLD] * 16, d.log()
            assert check(p, LAYOUT.chain(tokens), smooth) == 16


def test_an_erased_block_does_not_come_back(options: tuple[str, ...]) -> None:
    tokens = prompt("erase", 8)
    keys = LAYOUT.chain(tokens)
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens)
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert p.lookup(tokens) == 8
            ok(p.call("Erase", space=p.space, keys=keys[4]))
            assert p.lookup(tokens) == 4
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert p.lookup(tokens) == 4
            assert check(p, keys[:4]) == 4


def test_classes_do_not_mix_on_disk(options: tuple[str, ...]) -> None:
    """Both spaces of a model that differ only in class."""
    tokens = prompt("class", 8)
    keys = LAYOUT.chain(tokens)

    def other(key: bytes, size: int) -> bytes:
        return smooth(key, size, 0x44)

    with PrivateDaemon(*options, "--class", "cold") as d:
        with Peer(d.socket, LAYOUT) as exact, Peer(d.socket, LAYOUT, quality=3) as lossy:
            put_all(exact, tokens, smooth)
            put_all(lossy, tokens, other)
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as exact, Peer(d.socket, LAYOUT, quality=3) as lossy:
            assert check(exact, keys, smooth) == 8
            for key, data in zip(keys, lossy.get(keys), strict=True):
                assert data is not None and error(data, other(key, LAYOUT.size)) <= 0.30


def test_pins_come_back(options: tuple[str, ...]) -> None:
    tokens = prompt("pin", 4)
    keys = LAYOUT.chain(tokens)
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens)
            ok(p.call("Pin", space=p.space, keys=keys[-1], ttl_ms=0))
            assert p.space_stats()["pinned_blocks"] == 4
        assert d.stop() == 0, d.log()
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert p.space_stats()["pinned_blocks"] == 4, d.log()


# ---- directories that can't be used ----


def test_directories_that_cannot_be_used(folder: Path) -> None:
    (folder / "file").write_text("no directory")
    sock = str(folder / "sock")
    for name, words in (("none", ("none", "make it")), ("file", ("file", "directory"))):
        complained(run_daemon("--socket", sock, "--directory", str(folder / name)), *words)
    if os.geteuid() == 0:
        locked = folder / "locked"
        locked.mkdir(mode=0o700)
        folder.chmod(0o755)
        with pytest.raises(RuntimeError, match="owner|writable"):
            PrivateDaemon("--directory", str(locked), user=65534).start()


def test_a_directory_in_use_is_refused(options: tuple[str, ...], folder: Path) -> None:
    with PrivateDaemon(*options) as d:
        complained(run_daemon("--socket", str(folder / "sock"), *options), "another daemon")
        Peer(d.socket).close()


def test_a_missing_or_wrong_key_refuses_and_deletes_nothing(
    options: tuple[str, ...], folder: Path
) -> None:
    if "off" in options:
        return
    tokens = prompt("key", 4)
    key = folder / "root.key"
    with PrivateDaemon(*options) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, tokens)
        assert d.stop() == 0, d.log()
        right, before = key.read_bytes(), raw(folder)
        for wrong in (b"short", os.urandom(32)):
            key.write_bytes(wrong)
            complained(run_daemon("--socket", str(folder / "sock"), *options), "key")
        key.unlink()
        complained(run_daemon("--socket", str(folder / "sock"), *options), "key")
        os.mkfifo(key, 0o600)
        complained(run_daemon("--socket", str(folder / "sock"), *options), "key")
        key.unlink()
        assert raw(folder) == before
        key.write_bytes(right)
        key.chmod(0o600)
        d.start()
        with Peer(d.socket, LAYOUT) as p:
            assert check(p, LAYOUT.chain(tokens)) == 4, d.log()


# ---- a disk that is full ----


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """24 MiB of ext4 on a loop device."""
    image, at = folder / "image", folder / "mnt"
    at.mkdir()
    with image.open("wb") as f:
        f.truncate(24 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True, text=True)
    mounted = made.returncode == 0 and subprocess.run(
        ["mount", "-o", "loop", image, at], capture_output=True, text=True
    )
    if not mounted or mounted.returncode:
        pytest.skip(f"no loop mount: {(made if not mounted else mounted).stderr.strip()}")
    try:
        (at / "disk").mkdir(mode=0o700)
        yield at / "disk"
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def test_a_full_disk_costs_hits_only(small_disk: Path, folder: Path) -> None:
    prompts = [prompt(f"full {i}", 64) for i in range(20)]
    args = (*SMALL, "--directory", str(small_disk), "--crypt", "off", "--segment", "4MiB")
    with PrivateDaemon(*args) as d:
        for _ in range(2):
            with Peer(d.socket, LAYOUT) as p:
                for tokens in prompts:
                    put_all(p, tokens, smooth, full=True)
                for tokens in prompts:
                    check(p, LAYOUT.chain(tokens)[: p.lookup(tokens)], smooth)
                assert p.space_stats()["cold_blocks"] > 64
            assert d.stop() == 0, d.log()
            d.start()
        with Peer(d.socket, LAYOUT) as p:
            # Of five segments a stop may empty all but one for what was in memory.
            assert any(p.lookup(tokens) for tokens in prompts), d.log()


def test_a_purge_on_a_full_disk_is_a_purge(small_disk: Path, folder: Path) -> None:
    """The file of the keys can't be replaced there before segments have given room back."""
    key = folder / "root.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    args = (*SMALL, "--directory", str(small_disk), "--key-file", str(key), "--segment", "4MiB")
    prompts = [prompt(f"full {i}", 64) for i in range(12)]
    with PrivateDaemon(*args) as d:
        for end in (d.kill, d.stop):
            with Peer(d.socket, LAYOUT) as p:
                for tokens in prompts:
                    put_all(p, tokens, smooth, full=True)
                assert p.space_stats()["cold_blocks"] > 64
                fill = small_disk.parent / "fill"
                with contextlib.suppress(OSError), fill.open("wb", buffering=0) as f:
                    while True:
                        f.write(bytes(4096))
                ok(p.call("Purge"))
                assert not any(p.lookup(tokens) for tokens in prompts)
            assert not end(), d.log()
            d.start()
            with Peer(d.socket, LAYOUT) as p:
                assert not any(p.lookup(tokens) for tokens in prompts), d.log()
            fill.unlink()
