# SPDX-License-Identifier: Apache-2.0
"""kill -9 of clients at every step of put and get: the daemon forgets all that they held, at once,
even while a forked child keeps their socket open; everybody else notices nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
from lab import (
    Layout, Peer, Victim, Worker, anonymous_rss, client_fds, held, linger, payload, prompt, rounds, until,
    until_held,
)  # fmt: skip
from private_daemon import PrivateDaemon
from wire import Wire, u32s, u64s

LAYOUT = Layout(16 << 10)
STORED = prompt("stored", 4)  # in the daemon before any victim comes
WITNESS = prompt("witness", 3)

Step = Callable[[str, list[int]], object]


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon() as d:
        yield d


class Room:
    """A daemon with a monitor that holds nothing and a witness that holds leases of its blocks."""

    def __init__(self, daemon: PrivateDaemon) -> None:
        self.path = daemon.socket
        self.pid = daemon.process.pid
        self.monitor = Peer(self.path, LAYOUT, name="monitor")
        self.witness = Peer(self.path, LAYOUT, name="witness")
        self.witness.put(WITNESS)
        self.witness.put(STORED)
        self.keys = LAYOUT.chain(WITNESS)
        self.leases = self.witness.acquire(self.keys)
        for lease in self.leases:
            self.witness.read(lease)
        self.monitor.open_staging()  # now, so that it belongs to the base
        self.base = held(self.monitor)
        self.base_fds = client_fds(self.pid, self.monitor)

    def check(self) -> None:
        """All that the dead held is back, and the witness reads its blocks, leased and fresh."""
        until_held(self.monitor, self.base)
        until(
            lambda: client_fds(self.pid, self.monitor) <= self.base_fds,
            "the daemon closes the dead client's descriptors",
        )
        for key, lease in zip(self.keys, self.leases, strict=True):
            assert self.witness.read(lease) == payload(key, LAYOUT.size)
        assert self.witness.get(LAYOUT.chain(STORED)) == [
            payload(key, LAYOUT.size) for key in LAYOUT.chain(STORED)
        ]

    def close(self) -> None:
        self.witness.close()
        self.monitor.close()


@pytest.fixture(scope="module")
def room(daemon: PrivateDaemon) -> Iterator[Room]:
    r = Room(daemon)
    yield r
    r.close()


# ---- the steps: each leaves the connection in one state and returns what must stay open ----


def connected(path: str, tokens: list[int]) -> object:
    return Wire(path)


def greeted(path: str, tokens: list[int]) -> object:
    w = Wire(path)
    w.hello()
    return w


def space_open(path: str, tokens: list[int]) -> object:
    return Peer(path, LAYOUT)


def looked_up(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.lookup(STORED)
    return p


def subscribed(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.call("Subscribe", space=p.space)
    return p


def staging_open(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.open_staging()
    return p


def reserved(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    assert [s.status for s in p.reserve(tokens)] == ["OK"] * 3
    return p


def half_filled(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    for slot in p.reserve(tokens):
        p.fill(slot, b"x" * (slot.length // 2))
    return p


def filled(path: str, tokens: list[int]) -> tuple[Peer, list[int]]:
    p = Peer(path, LAYOUT)
    slots = p.reserve(tokens)
    for key, slot in zip(LAYOUT.chain(tokens), slots, strict=True):
        p.fill(slot, payload(key, LAYOUT.size))
    return p, [slot.id for slot in slots]


def commit_unread(path: str, tokens: list[int]) -> object:
    p, slots = filled(path, tokens)
    p.send("Commit", slots=u64s(*slots))
    return p


def commit_half(path: str, tokens: list[int]) -> object:
    p, slots = filled(path, tokens)
    p.call("Commit", slots=u64s(slots[0]))
    return p


def child_first(path: str, tokens: list[int]) -> object:
    """The children are committed and pending, the root's child never is."""
    p, slots = filled(path, tokens)
    p.call("Commit", slots=u64s(*slots[1:]))
    return p


def committed(path: str, tokens: list[int]) -> object:
    p, slots = filled(path, tokens)
    p.call("Commit", slots=u64s(*slots))
    return p


def aborted(path: str, tokens: list[int]) -> object:
    p, slots = filled(path, tokens)
    p.call("Abort", slots=u64s(*slots))
    return p


def acquire_unread(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.send("Acquire", space=p.space, keys=b"".join(LAYOUT.chain(STORED)), lease=1)
    return p


def leased(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.acquire(LAYOUT.chain(STORED))
    return p


def packed_leased(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    p.acquire(LAYOUT.chain(STORED), mode=1)
    return p


def slab_unread(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    (lease,) = p.acquire(LAYOUT.chain(STORED)[:1])
    p.send("SlabGet", slabs=u32s(lease.slab))
    return p


def mapped(path: str, tokens: list[int]) -> object:
    p = Peer(path, LAYOUT)
    for lease in p.acquire(LAYOUT.chain(STORED)):
        p.read(lease)
    return p


STEPS = (
    connected, greeted, space_open, looked_up, subscribed, staging_open, reserved, half_filled,
    commit_unread, commit_half, child_first, committed, aborted, acquire_unread, leased,
    packed_leased, slab_unread, mapped,
)  # fmt: skip


def body(step: Step, path: str, tokens: list[int], fork: bool) -> Callable[[Callable[[], None]], None]:
    def run(report: Callable[[], None]) -> None:
        keep = step(path, tokens)
        if fork:
            linger()
        report()
        signal.pause()
        del keep

    return run


@pytest.mark.parametrize("fork", [False, True], ids=["plain", "forked"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_client_killed_at_a_step_leaves_nothing(
    room: Room, step: Step, fork: bool
) -> None:
    tokens = prompt(f"{step.__name__} {fork}", 3)
    with Victim(body(step, room.path, tokens, fork)) as v:
        v.step()
        v.kill()
        room.check()
    room.check()
    present = room.monitor.lookup(tokens)
    got = room.monitor.get(LAYOUT.chain(tokens))
    assert got == [payload(k, LAYOUT.size) for k in LAYOUT.chain(tokens)[:present]] + [None] * (3 - present)
    if step is committed:
        assert present == 3
    elif step is commit_half:
        assert present == 1
    elif step is not commit_unread:
        assert present == 0
    assert room.monitor.put(tokens) == ["PRESENT"] * present + ["OK"] * (3 - present), "the keys are free"


def churn(path: str, seed: int) -> Callable[[Callable[[], None]], None]:
    """Puts and gets for ever, one report for each; sometimes a child keeps the socket."""

    def run(report: Callable[[], None]) -> None:
        draw = random.Random(seed)
        while True:
            keep: object = None
            with contextlib.suppress(AssertionError):  # keys that another victim holds or has stored
                keep = draw.choice(STEPS)(path, prompt(f"churn {draw.randrange(64)}", 3))
            if draw.random() < 0.2:
                linger()
            report()
            del keep

    return run


def test_random_kills_leak_nothing(room: Room) -> None:
    """Killed in the middle of whatever it was doing, 300 times (3,000 in the long run)."""
    seed = int(os.environ.get("CST_SEED", "1"))
    draw = random.Random(seed)
    n = rounds(300, 3000)
    rss = 0
    for i in range(n):
        with Victim(churn(room.path, draw.randrange(1 << 30))) as v:
            for _ in range(draw.randrange(1, 12)):
                v.step()
            v.kill()
            room.check()
        if i == n // 5:
            rss = anonymous_rss(room.pid)
    print(f"seed {seed}: {n} kills, RSS {anonymous_rss(room.pid) - rss:+} bytes after the first fifth")
    assert anonymous_rss(room.pid) - rss < 4 << 20
    for i in range(64):
        keys = LAYOUT.chain(prompt(f"churn {i}", 3))
        for key, block in zip(keys, room.monitor.get(keys), strict=True):
            assert block in (None, payload(key, LAYOUT.size))


def test_killed_users_of_the_library_leak_nothing() -> None:
    """The same with libcistern in the victim: any instruction of put and get may be its last."""
    seed = int(os.environ.get("CST_SEED", "1"))
    draw = random.Random(seed)
    print(f"seed {seed}")
    with PrivateDaemon() as d, Peer(d.socket, LAYOUT, name="monitor") as monitor:
        base, base_fds = held(monitor), client_fds(d.process.pid, monitor)
        survivor = Worker(d.socket, draw.randrange(1 << 32))
        survivor.carry_on(puts=1, gets=1)
        for _ in range(rounds(50, 500)):
            victims = [Worker(d.socket, draw.randrange(1 << 32)) for _ in range(2)]
            for victim in victims:
                victim.carry_on(puts=draw.randrange(1, 20), gets=0)
            for victim in victims:
                victim.end()
            survivor.carry_on(puts=5, gets=1)
        survivor.end()
        until_held(monitor, base)
        until(lambda: client_fds(d.process.pid, monitor) <= base_fds, "every descriptor is closed")
