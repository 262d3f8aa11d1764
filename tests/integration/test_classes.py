# SPDX-License-Identifier: Apache-2.0
"""Quality classes don't mix: a space that was opened for exact bytes gives exact bytes or nothing, in
every order of puts, evictions and re-opens, whatever lies in the lossy spaces of the same model."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import pytest
from lab import Layout, Peer, crowd_out, error, ok, prompt, smooth, until
from private_daemon import PrivateDaemon

LAYOUT = Layout(64 << 10)
BOUNDS = (0.0, 0.05, 0.15, 0.30)  # lossless, near-lossless, small-loss, cold
TOKENS = prompt("class", 3)


def content(quality: int, key: bytes) -> bytes:
    """Another magnitude for each class, so that no class's bytes pass for another's."""
    return smooth(key, LAYOUT.size, 0x3C + 4 * quality)


OPTIONS = (
    "--memory", "40MiB", "--slab", "1MiB", "--staging", "1MiB", "--staging-total", "16MiB",
    "--staging-per-uid", "16MiB", "--class", "cold", "--policy", "lru",
)  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon(*OPTIONS) as d:
        yield d


class Spaces:
    """The space of each class, opened by its own client."""

    def __init__(self, path: str, salt: bytes) -> None:
        self.path, self.salt = path, salt
        self.keys = LAYOUT.chain(TOKENS, salt)
        self.peers: dict[int, Peer] = {}
        self.reopen()

    def __enter__(self) -> Spaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for p in self.peers.values():
            p.close()

    def reopen(self) -> None:
        self.close()
        self.peers = {
            q: Peer(self.path, LAYOUT, quality=q, salt=self.salt) for q in range(len(BOUNDS))
        }

    def put(self, quality: int) -> None:
        got = self.peers[quality].put(TOKENS, lambda key, size: content(quality, key))
        assert set(got) <= {"OK", "PRESENT"}

    def evict(self) -> None:
        """Until no block of ours is in memory as it came: gone, or only packed."""
        for p in self.peers.values():

            crowd_out(p, lambda p=p: 1 not in self.tiers(p), "hot copies are evicted")

    def tiers(self, p: Peer) -> set[int]:
        return set(ok(p.call("LookupEach", space=p.space, keys=b"".join(self.keys))).tiers)

    def check(self) -> set[int]:
        """Reads every class; returns those that answered."""
        answered = set()
        for quality, p in self.peers.items():
            for key, block in zip(self.keys, p.get(self.keys), strict=True):
                if block is None:
                    continue
                answered.add(quality)
                if quality == 0:
                    assert block == content(0, key)
                else:
                    assert error(block, content(quality, key)) <= BOUNDS[quality]
        return answered


ORDERS = list(itertools.permutations(["put exact", "put lossy", "evict", "reopen"]))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: ", ".join(order))
def test_exact_bytes_never_come_from_a_lossy_space(daemon: PrivateDaemon, order: tuple[str, ...]) -> None:
    with Spaces(daemon.socket, salt=hashlib.sha256(repr(order).encode()).digest()) as spaces:
        run(spaces, order)


def run(spaces: Spaces, order: tuple[str, ...]) -> None:
    stored: set[int] = set()
    for step in order:
        just_put = {"put exact": {0}, "put lossy": {1, 2, 3}}.get(step, set())
        for quality in just_put:
            spaces.put(quality)
        if step == "evict":
            spaces.evict()
        elif step == "reopen":
            spaces.reopen()
        stored |= just_put
        assert just_put <= spaces.check() <= stored


def test_lossy_spaces_do_lose_and_exact_ones_never() -> None:
    """What the orders above would not notice if nothing were ever packed: bytes that went through a
    frame differ within the bound in a lossy space, and not at all in an exact one."""
    with PrivateDaemon(*OPTIONS) as d, Spaces(d.socket, salt=b"packed") as spaces:
        for quality, p in spaces.peers.items():
            spaces.put(quality)
            until(lambda p=p: p.space_stats()["encodes"] == 3, "the blocks are encoded")
            ok(p.call("Pin", space=p.space, keys=b"".join(spaces.keys), ttl_ms=600_000))
        for quality, p in spaces.peers.items():
            crowd_out(p, lambda p=p: spaces.tiers(p) == {2}, "hot copies are evicted")
            for key, block in zip(spaces.keys, p.get(spaces.keys), strict=True):
                assert block is not None
                loss = error(block, content(quality, key))
                assert loss == 0 if quality == 0 else 0 < loss <= BOUNDS[quality]


def test_a_class_laxer_than_the_configuration_is_refused() -> None:
    with PrivateDaemon("--class", "near-lossless") as d, Peer(d.socket) as p:
        for quality, status in enumerate(("OK", "OK", "DENIED", "DENIED")):
            reply = p.call("SpaceOpen", descriptor=LAYOUT.descriptor, quality_class=quality)
            assert reply.status == status
