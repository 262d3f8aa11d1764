# SPDX-License-Identifier: Apache-2.0
"""cistern-segdump on encrypted directories that the daemon wrote: with the root key every sealed byte
counts, without it or with another one it says so."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab import Peer, payload, prompt, smooth
from private_daemon import PrivateDaemon
from test_disk import LAYOUT, SMALL, put_all

TOOL = Path(os.environ["CST_BUILD_ROOT"]) / "tools" / "cistern-segdump"
BLOCKS = 24
CHUNK = 4096
PROBLEMS = {
    "meta": "wrong checksum of a record's meta",
    "payload": "wrong checksum of a record's payload",
    "entries": "wrong checksum of its entries",
}


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *args], capture_output=True, text=True, check=False)


def lines(*args: str | Path) -> tuple[int, list[dict[str, Any]]]:
    out = run("--json", *args)
    assert out.stderr == ""
    return out.returncode, [json.loads(line) for line in out.stdout.splitlines()]


@pytest.fixture(scope="module", params=["file", "ephemeral"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory after a clean stop, and its root key."""
    folder = tmp_path_factory.mktemp("segdump")
    disk, key, run_at = folder / "disk", folder / "root.key", None
    disk.mkdir(mode=0o700)
    more: list[str] = []
    if request.param == "file":
        key.write_text(os.urandom(32).hex() + "\n")
        key.chmod(0o600)
        more = ["--key-file", str(key)]
    else:
        run_at = Path(f"/dev/shm/cistern-{os.geteuid()}")
    with PrivateDaemon(*SMALL, "--directory", str(disk), "--segment", "1MiB", *more) as d:
        with Peer(d.socket, LAYOUT) as p:
            put_all(p, prompt("segdump", BLOCKS), payload)
            put_all(p, prompt("segdump, too", BLOCKS), smooth)
        assert d.stop() == 0, d.log()
    if run_at is not None:
        uuid = (disk / "cistern-store").read_bytes()[24:40].hex()
        key = run_at / f"root-{uuid}"
        request.addfinalizer(lambda: key.unlink(missing_ok=True))
        if not key.exists():
            pytest.skip("skipped: the daemon keeps its key elsewhere here")
    return disk, key


def test_with_the_key_all_is_checked(made: tuple[Path, Path]) -> None:
    disk, key = made
    status, out = lines("--records", "--key-file", key, disk)
    assert status == 0, [line for line in out if not line["ok"]]
    totals = [line for line in out if line["what"] == "total"]
    assert sum(line["records"] for line in totals) >= 2 * BLOCKS
    assert {line["encrypted_and_not_checked"] for line in totals} == {0}
    assert len({line["key"] for line in out if line["what"] == "block"}) == 2 * BLOCKS
    assert "were checked as far" not in run("--key-file", key, disk).stdout


def test_without_the_key_it_says_how_much_is_unchecked(made: tuple[Path, Path]) -> None:
    disk, _ = made
    status, out = lines(disk)
    totals = [line for line in out if line["what"] == "total"]
    assert status == 0
    n = sum(line["encrypted_and_not_checked"] for line in totals)
    assert n == sum(line["records"] for line in totals) >= 2 * BLOCKS
    assert f"\n{n} encrypted records of " in (text := run(disk).stdout)
    assert text.endswith("give the root key with --key-file\n")


def test_another_key_is_told_in_one_sentence(made: tuple[Path, Path], tmp_path: Path) -> None:
    disk, _ = made
    other, short = tmp_path / "other", tmp_path / "short"
    other.write_bytes(os.urandom(32))
    short.write_bytes(b"too short")
    for key, words in (
        (other, f"{disk} was encrypted with another root key: give that one with --key-file"),
        (short, f"{short} must hold 32 bytes or 64 hexadecimal digits: give the daemon's key file"),
        (tmp_path / "none", f"{tmp_path / 'none'}: No such file or directory"),
    ):
        out = run("--key-file", key, disk)
        assert (out.returncode, out.stderr) == (2, f"cistern-segdump: {words}\n")


def places(file: Path) -> list[tuple[int, int, str]]:
    """Where sealed bytes lie: (first, last + 1, of what) of metas, payloads and index bodies."""
    data, out, at = file.read_bytes(), [], CHUNK
    while data[at : at + 4] == b"CREC":
        n_chunks, meta, offset = (struct.unpack_from("<I", data, at + i)[0] for i in (36, 48, 52))
        (size,) = struct.unpack_from("<Q", data, at + 56)
        out += [(at + 128, at + 128 + meta, "meta"), (at + offset, at + offset + size, "payload")]
        at += n_chunks * CHUNK
    for at in range(at, len(data), CHUNK):
        if data[at : at + 4] == b"CIDX":
            (body,) = struct.unpack_from("<I", data, at + 64)
            out.append((at + 80, at + 80 + body, "entries"))
    return [place for place in out if place[0] < place[1]]


def test_no_flip_of_a_sealed_byte_passes(made: tuple[Path, Path]) -> None:
    """Of every kind of message, in random places of the segments."""
    disk, key = made
    rng = random.Random(5)
    segments = [f for f in sorted(disk.glob("seg-*")) if f.read_bytes()[:8] == b"CSTSEGMT"]
    spots = [(f, *place) for f in segments for place in places(f)]
    assert {kind for *_, kind in spots} == PROBLEMS.keys()
    chosen = [rng.choice([s for s in spots if s[3] == kind]) for kind in PROBLEMS for _ in range(12)]
    for file, first, end, kind in chosen:
        data = bytearray(file.read_bytes())
        at = rng.randrange(first, end)
        data[at] ^= 1 << rng.randrange(8)
        before = file.read_bytes()
        file.write_bytes(data)
        status, out = lines("--key-file", key, disk / "cistern-store", disk / "keys", file)
        file.write_bytes(before)
        problems = [line["problem"] for line in out if not line["ok"]]
        assert (status, problems[:1]) == (1, [PROBLEMS[kind]]), at
    assert lines("--key-file", key, disk)[0] == 0


def test_what_is_no_segment_does_not_hold(made: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "seg-00000000.old"
    copy.write_bytes((made[0] / "seg-00000000").read_bytes())
    done = run(copy)
    assert done.returncode == 2 and "is no file of a disk tier" in done.stderr


def test_lines_that_get_lost_are_no_success(made: tuple[Path, Path]) -> None:
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run([TOOL, made[0]], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and "standard output" in done.stderr
