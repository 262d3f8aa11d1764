# SPDX-License-Identifier: Apache-2.0
"""Frames that need learned side data, on disk: under memory pressure, over a clean stop and a kill,
after a purge. What is read back is within the bound of its class, or a miss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import cistern
import pytest
from cistern import Quality, Status
from lab import until
from private_daemon import PrivateDaemon
from test_presets import CTL, Case, block_error, real_cases

pytestmark = pytest.mark.skipif(
    not os.environ.get("CISTERN_DATA"), reason="skipped: $CISTERN_DATA is not set (the excerpt is too short to learn from)"
)
BOUND = 0.30
PROMPTS = 32
KILLS = 60 if os.environ.get("CST_LONG") == "1" else 4
ASAN = os.environ.get("ASAN_OPTIONS", "")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return real_cases(512)


def arguments(folder: Path, crypt: str, size: str = "1GiB") -> tuple[str, ...]:
    key = folder / "root.key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    return (
        "--memory", "384MiB", "--slab", "1MiB", "--class", "cold", "--preset-cold", "deep:.4", "--learn-wait", "200ms",
        "--disk", size, "--directory", str(disk), "--crypt", crypt, "--key-file", str(key),
    )  # fmt: skip


@pytest.fixture(params=["aes", "off"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    return arguments(tmp_path, request.param)


def disk_has(folder: Path, needle: bytes) -> bool:
    return any(needle in path.read_bytes() for path in (folder / "disk").iterdir())


class Cold:
    def __init__(self, d: PrivateDaemon, cases: list[Case]) -> None:
        self.client = cistern.Client(d.socket)
        self.space = self.client.space(cases[0].descriptor, quality=Quality.COLD)
        self.cases = cases

    def tokens(self, i: int) -> list[int]:
        return [i] * self.cases[i % 2].n_tokens

    def store(self, prompts: range) -> None:
        for i in prompts:
            done = self.space.put(self.tokens(i), self.cases[i % 2].blocks())
            assert set(done) <= {Status.OK, Status.PRESENT}, done

    def read(self, prompts: range) -> int:
        """All that is there is right; returns how many blocks that is."""
        n = 0
        for i in prompts:
            case = self.cases[i % 2]
            with self.space.acquire(self.space.keys(self.tokens(i))) as leases:
                for k, (want, lease) in enumerate(zip(case.blocks(), leases, strict=True)):
                    if lease:
                        assert block_error(case.descriptor, want, bytes(lease.data), 64 * k, 64) <= BOUND
                        n += 1
        return n

    def close(self) -> None:
        self.space.close()
        self.client.close()


def learned(cold: Cold) -> None:
    cold.store(range(2))
    until(lambda: cold.space.stats()["sides_learned"] == 1 and cold.space.stats()["encodes"] >= 16, "it has learned")


def test_a_restart_keeps_them(options: tuple[str, ...], cases: list[Case]) -> None:
    with PrivateDaemon(*options) as d:
        cold = Cold(d, cases)
        learned(cold)
        before = cold.space.side_data()
        assert before is not None
        cold.close()
        for _ in range(2):
            assert d.stop() == 0, d.log()
            d.start()
            cold = Cold(d, cases)
            stats = cold.space.stats()
            assert stats["cold_blocks"] == 16, (stats, d.log())
            assert cold.space.side_data() == before
            assert cold.read(range(2)) == 16
            cold.close()


def test_pressure_a_kill_and_a_purge(options: tuple[str, ...], cases: list[Case], tmp_path: Path) -> None:
    with PrivateDaemon(*options) as d:
        cold = Cold(d, cases)
        learned(cold)
        side = cold.space.side_data()
        assert side is not None
        canary = side.data[len(side.data) // 2 :][:64]
        cold.store(range(2, PROMPTS))
        stats = cold.space.stats()
        assert stats["cold_blocks"] > 8, stats
        assert cold.read(range(PROMPTS)) >= 0.9 * 8 * PROMPTS, (cold.space.stats(), d.log())
        written = cold.space.stats()["cold_blocks"]
        cold.close()
        d.kill()
        d.start()
        cold = Cold(d, cases)
        stats = cold.space.stats()
        assert stats["cold_blocks"] >= 0.9 * written, (stats, written, d.log())
        assert stats["side_bytes"] > 0
        assert cold.read(range(PROMPTS)) >= 0.9 * written
        assert disk_has(tmp_path, canary) == ("off" in options)
        subprocess.run([CTL, "--socket", d.socket, "purge", "--yes"], check=True, timeout=60)
        assert cold.space.side_data() is None and cold.space.stats()["side_bytes"] == 0
        until(lambda: not disk_has(tmp_path, canary), "the segments were given back")
        cold.close()
        d.kill()
        d.start()
        cold = Cold(d, cases)
        assert cold.read(range(PROMPTS)) == 0
        assert cold.space.side_data() is None
        cold.close()


def test_kills_while_they_are_written(cases: list[Case], tmp_path: Path) -> None:
    """At marked points (tests/crash/kill_at.c) of a stop that writes a new version, then its frames."""
    draw = random.Random(1)
    layers = len(cases[0].descriptor.layers)
    library = os.path.join(os.environ["CST_BUILD_ROOT"], "tests", "crash", "kill_at.so")
    killed = 0
    with PrivateDaemon(*arguments(tmp_path, "aes")) as d:
        cold = Cold(d, cases)
        learned(cold)
        cold.close()
        for k in range(KILLS):
            assert d.process is None or d.stop() == 0, d.log()
            mark = f"{draw.choice(('payload', 'head'))} {draw.choice(('before', 'half', 'after'))} {draw.randint(1, 60)}"
            d.env = {"LD_PRELOAD": library, "CST_KILL_AT": mark, "ASAN_OPTIONS": ASAN + ":verify_asan_link_order=0"}
            try:
                d.start()
            except RuntimeError:  # it writes again what got lost
                process, d.process = d.process, None
                assert process is not None and process.wait() == -signal.SIGKILL, d.log()
                killed += 1
                continue
            cold = Cold(d, cases)
            cold.read(range(2 + k))
            if cold.space.side_data():
                cold.space.put_step_weights([0.9 - 0.02 * k] * layers, [0.9] * layers)
            encodes = cold.space.stats()["encodes"]
            cold.store(range(2 + k, 3 + k))
            until(lambda n=encodes: cold.space.stats()["encodes"] >= n + 8, "it is encoded")
            cold.close()
            d.process.terminate()
            status = d.process.wait(60)
            assert status in (0, -signal.SIGKILL), d.log()
            killed += status != 0
            d.process = None
        d.env = {}
        d.start()
        cold = Cold(d, cases)
        assert cold.read(range(2 + KILLS)) > 0, d.log()
        cold.close()
    assert killed >= KILLS // 2


def spoil_side_records(disk: Path) -> int:
    """Turns a byte over in each record of side data (docs/disk-format.md, section 4)."""
    n = 0
    for path in disk.glob("seg-*"):
        data = bytearray(path.read_bytes())
        for at in range(4096, len(data), 4096):
            if data[at : at + 4] == b"CREC" and data[at + 5] == 3:
                data[at + int.from_bytes(data[at + 52 : at + 56], "little") + 1000] ^= 1
                n += 1
        path.write_bytes(data)
    return n


def test_damaged_side_data_are_misses(cases: list[Case], tmp_path: Path) -> None:
    with PrivateDaemon(*arguments(tmp_path, "aes")) as d:
        cold = Cold(d, cases)
        learned(cold)
        cold.close()
        assert d.stop() == 0, d.log()
        assert spoil_side_records(tmp_path / "disk") > 0
        d.start()
        cold = Cold(d, cases)
        assert cold.space.stats()["cold_blocks"] == 0, d.log()
        assert cold.read(range(2)) == 0 and cold.space.side_data() is None
        cold.store(range(2))  # all anew, next to what is left of the old one
        until(lambda: cold.space.stats()["encodes"] >= 16, "it has learned again")
        side = cold.space.side_data()
        cold.close()
        assert d.stop() == 0, d.log()
        d.start()
        cold = Cold(d, cases)
        assert side is not None and cold.space.side_data() == side
        assert cold.read(range(2)) == 16
        cold.close()


def test_a_disk_that_is_too_small_says_so(cases: list[Case], tmp_path: Path) -> None:
    """Side data may take an eighth of the tier: these would fill most of it. Their frames stay in memory."""
    with PrivateDaemon(*arguments(tmp_path, "off", "24MiB")) as d:
        cold = Cold(d, cases)
        learned(cold)
        cold.store(range(2, PROMPTS))
        assert cold.read(range(PROMPTS)) > 16
        stats = cold.space.stats()
        assert stats["sides_off_disk"] == 1, stats
        assert "the disk tier is too small for a space's side data" in d.log()
        cold.close()
        assert d.stop() == 0, d.log()
        d.start()
        cold = Cold(d, cases)
        cold.read(range(PROMPTS))  # blocks that had no frame yet are there as they were
        assert cold.space.side_data() is None
        cold.close()
