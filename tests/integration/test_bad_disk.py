# SPDX-License-Identifier: Apache-2.0
"""Directories that are not as a daemon left them: each start works or is refused with a sentence that
says what to do, and nothing that isn't understood is changed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import Peer, prompt
from private_daemon import PrivateDaemon
from test_disk import LAYOUT, SMALL, check, put_all
from test_stop import complained, run_daemon

sys.path.insert(0, str(Path(os.environ["CST_SOURCE_ROOT"]) / "tests" / "golden" / "segments"))
from make_segments import crc32c  # noqa: E402

BLOCKS = 24
TOKENS = prompt("bad disk", BLOCKS)
KEYS = LAYOUT.chain(TOKENS)
SEGMENT = 1 << 20


def args(disk: Path, *more: str) -> tuple[str, ...]:
    return (*SMALL, "--directory", str(disk), "--segment", str(SEGMENT), *more)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """24 blocks in a few segments, after a clean stop."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    fill(path, "--crypt", "off")
    yield path


def fill(path: Path, *more: str) -> None:
    with PrivateDaemon(*args(path, *more)) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, TOKENS)
        assert d.stop() == 0, d.log()


def found(path: Path, *more: str) -> tuple[int, str]:
    """How many blocks a start finds and serves, all of them exact, and its log."""
    with PrivateDaemon(*args(path, *more)) as d:
        with Peer(d.socket, LAYOUT) as p:
            n = p.lookup(TOKENS)
            assert check(p, KEYS[:n]) == n
        assert d.stop() == 0, d.log()
        return n, d.log()


def contents(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in path.iterdir()}


def patch(file: Path, at: int, data: bytes, size: int) -> None:
    """Changes a structure of `size` bytes at the start of a file, and makes its checksum right."""
    whole = bytearray(file.read_bytes())
    whole[at : at + len(data)] = data
    struct.pack_into("<I", whole, size - 4, crc32c(bytes(whole[: size - 4])))
    file.write_bytes(whole)


def used(path: Path) -> list[Path]:
    return [f for f in sorted(path.glob("seg-*")) if f.read_bytes()[:8] == b"CSTSEGMT"]


REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "newer format": (
        lambda d: patch(d / "cistern-store", 8, struct.pack("<I", 9), 128),
        ("written in format 9", "start the daemon that wrote it, or give another directory"),
    ),
    "unknown feature": (
        lambda d: patch(d / "cistern-store", 20, struct.pack("<I", 4), 128),
        ("features 0x4", "start the daemon that wrote it"),
    ),
    "damaged": (
        lambda d: (d / "cistern-store").write_bytes(b"no superblock"),
        ("cistern-store", "is damaged: restore it, or empty the directory"),
    ),
    "half copied": (
        lambda d: (d / "cistern-store").unlink(),
        ("half copied", "copy all of it again, or empty it"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_left_alone(disk: Path, tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    change(disk)
    before = contents(disk)
    done = run_daemon("--socket", str(tmp_path / "sock"), *args(disk, "--crypt", "off"))
    complained(done, *words)
    said = [line for line in done.stderr.splitlines() if "disk" in line]
    assert len([line for line in said if "instead of io_uring" not in line]) == 1, done.stderr
    assert contents(disk) == before


def test_another_directory_of_ours_is_not_taken_over(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    (other / "thesis.tex").write_text("not ours")
    done = run_daemon("--socket", str(tmp_path / "sock"), *args(other, "--crypt", "off"))
    complained(done, "holds other files: give it one of its own")
    assert contents(other) == {"thesis.tex": b"not ours"}


def test_a_segment_of_a_newer_format_is_left_alone(disk: Path) -> None:
    segment = used(disk)[1]
    patch(segment, 8, struct.pack("<I", 9), 512)
    before = segment.read_bytes()
    n, log = found(disk, "--crypt", "off")
    assert "isn't understood (a newer format, or of another directory): it is left alone" in log
    assert 0 < n < BLOCKS
    assert segment.read_bytes() == before
    patch(segment, 8, struct.pack("<I", 1), 512)
    n, _ = found(disk, "--crypt", "off")
    assert n > 0


def test_the_status_tells_what_can_not_be_used(disk: Path) -> None:
    foreign, damaged, *_ = used(disk)
    patch(foreign, 8, struct.pack("<I", 9), 512)
    whole = bytearray(damaged.read_bytes())
    (index,) = struct.unpack_from("<I", whole, len(whole) - 4096 + 12)
    whole[4096 * index + 100] ^= 1
    damaged.write_bytes(whole)
    with PrivateDaemon(*args(disk, "--crypt", "off")) as d, Peer(d.socket) as monitor:
        told = monitor.status_counters()
    assert told["disk_unused"] == SEGMENT
    assert told["disk_rejected"] > 0 and told["disk_recovered"] < BLOCKS
    assert told["disk_lost"] == told["disk_retries"] == told["disk_errors"] == 0


def test_cut_grown_and_deleted_files_cost_hits(disk: Path) -> None:
    first, second, *_ = used(disk)
    whole = first.read_bytes(), second.read_bytes()
    for change, words, least in (
        (lambda: os.truncate(second, 300_000), "are not as long as a segment (half copied", 1),
        (lambda: os.truncate(second, 100), "are not as long as a segment (half copied", 1),
        (lambda: os.truncate(second, 2 * SEGMENT), "are not as long as a segment (half copied", 1),
        (lambda: second.unlink(), "1 segments of the disk tier have no file any more", 1),
        (lambda: first.unlink(), "copy the directory again while no daemon uses it", 0),
    ):
        first.write_bytes(whole[0])
        second.write_bytes(whole[1])
        change()
        n, log = found(disk, "--crypt", "off")
        assert words in log
        assert least <= n <= BLOCKS, log


def test_two_segments_are_enough_to_be_warm(tmp_path: Path) -> None:
    """The start keeps one free for what comes, and doesn't empty the other for more."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    two = ("--crypt", "off", "--disk", "16MiB", "--segment", "8MiB")
    fill(path, *two)
    n, log = found(path, *two)
    assert n == BLOCKS, log


@pytest.mark.parametrize("lost", ["reboot", "another user's"])
def test_an_ephemeral_key_that_is_gone_frees_its_segments(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    fill(path)
    uuid = (path / "cistern-store").read_bytes()[24:40].hex()
    key = Path(f"/dev/shm/cistern-{os.geteuid()}/root-{uuid}")
    if not key.exists():
        pytest.skip("skipped: the daemon keeps its key elsewhere here")
    assert found(path)[0] == BLOCKS  # warm over restarts
    if lost == "reboot":
        key.unlink()
    else:
        key.chmod(0o644)
    n, log = found(path)
    assert n == 0
    assert "ephemeral key is gone (a reboot?)" in log
    assert "segments of the disk tier have no key any more: they are free" in log
    fill(path)
    assert found(path)[0] == BLOCKS
    key.unlink()


def test_without_o_direct_it_goes_through_the_page_cache(tmp_path: Path) -> None:
    """ramfs can't do it."""
    at = tmp_path / "ram"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "ramfs", "ram", at], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"skipped: no mount: {mounted.stderr.strip()}")
    try:
        path = at / "disk"
        path.mkdir(mode=0o700)
        more = ("--crypt", "off", "--disk", "16MiB")
        fill(path, *more)
        n, log = found(path, *more)
        assert n == BLOCKS
        assert f"the file system of {path} can't go past the page cache" in log
        assert "use another one, or say disk_direct = no" in log
        assert "page cache" not in found(path, *more, "--disk-direct", "no")[1]
    finally:
        subprocess.run(["umount", "-l", at], check=True)
