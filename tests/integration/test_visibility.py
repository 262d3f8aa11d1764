# SPDX-License-Identifier: Apache-2.0
"""Parents first: a block is found when all its ancestors are, in whatever order two clients commit,
abort or die."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import wire
from lab import BLOCK_TOKENS, Layout, Peer, Slot, ok, payload, prompt, until
from private_daemon import PrivateDaemon

LAYOUT = Layout(16 << 10)


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon() as d:
        yield d


class Run:
    """A chain of three blocks: the first is A's to write, the other two are B's."""

    def __init__(self, path: str, name: str) -> None:
        self.a, self.b = Peer(path, LAYOUT, name="a"), Peer(path, LAYOUT, name="b")
        self.tokens = prompt(name, 3)
        self.keys = LAYOUT.chain(self.tokens)
        (self.first,) = self.a.reserve(self.tokens[:BLOCK_TOKENS])
        self.rest = self.b.reserve(self.tokens[BLOCK_TOKENS:], parent=self.keys[0])
        assert [s.status for s in (self.first, *self.rest)] == ["OK"] * 3
        self.a.fill(self.first, payload(self.keys[0], LAYOUT.size))
        for key, slot in zip(self.keys[1:], self.rest, strict=True):
            self.b.fill(slot, payload(key, LAYOUT.size))

    def visible(self) -> int:
        """Leading blocks, by bisection and key by key; they must agree."""
        leading = self.b.lookup(self.tokens)
        each = ok(self.b.call("LookupEach", space=self.b.space, keys=b"".join(self.keys)))
        assert [t != 0 for t in each.tiers] == [i < leading for i in range(3)]
        got = self.b.get(self.keys)
        assert got == [payload(k, LAYOUT.size) for k in self.keys[:leading]] + [None] * (3 - leading)
        return leading

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def run(daemon: PrivateDaemon, request: pytest.FixtureRequest) -> Iterator[Run]:
    r = Run(daemon.socket, request.node.name)
    yield r
    r.close()


def free_again(run: Run) -> None:
    """Nobody holds any of the keys: they can be stored by somebody else."""
    with Peer(run_path(run), LAYOUT) as other:
        until(lambda: other.space_stats()["reserved"] == 0, "open slots are gone")
        present = other.lookup(run.tokens)
        assert other.put(run.tokens) == ["PRESENT"] * present + ["OK"] * (3 - present)
        assert other.get(run.keys) == [payload(k, LAYOUT.size) for k in run.keys]


def run_path(run: Run) -> str:
    path = run.a.socket.getpeername()
    assert isinstance(path, str)
    return path


def test_parent_then_child(run: Run) -> None:
    assert run.a.commit([run.first]) == ["OK"]
    assert run.visible() == 1
    assert run.b.commit(run.rest) == ["OK", "OK"]
    assert run.visible() == 3


def test_child_then_parent(run: Run) -> None:
    assert run.b.commit(run.rest) == ["PENDING", "PENDING"]
    assert run.visible() == 0
    assert run.a.commit([run.first]) == ["OK"]
    assert run.visible() == 3


def test_grandchild_then_parent_then_child(run: Run) -> None:
    assert run.b.commit(run.rest[1:]) == ["PENDING"]
    assert run.a.commit([run.first]) == ["OK"]
    assert run.visible() == 1
    assert run.b.commit(run.rest[:1]) == ["OK"]
    assert run.visible() == 3


def test_parent_aborted_after_the_children_were_committed(run: Run) -> None:
    assert run.b.commit(run.rest) == ["PENDING", "PENDING"]
    ok(run.a.call("Abort", slots=wire.u64s(run.first.id)))
    assert run.visible() == 0
    free_again(run)


def test_parent_aborted_before_the_children_are_committed(run: Run) -> None:
    ok(run.a.call("Abort", slots=wire.u64s(run.first.id)))
    assert run.b.commit(run.rest) == ["PARENT_MISSING", "PARENT_MISSING"]
    assert run.visible() == 0
    free_again(run)


def test_the_parents_client_ends_after_the_children_were_committed(run: Run) -> None:
    assert run.b.commit(run.rest) == ["PENDING", "PENDING"]
    run.a.close()
    until(lambda: run.b.status_counters()["reserved"] == 0, "the slots of the dead are gone")
    assert run.visible() == 0
    run.a = Peer(run.b.socket.getpeername(), LAYOUT)
    free_again(run)


def test_the_parents_client_ends_before_the_children_are_committed(run: Run) -> None:
    run.a.close()
    until(lambda: run.b.status_counters()["clients"] == 1, "the daemon has noticed")
    assert run.b.commit(run.rest) == ["PARENT_MISSING", "PARENT_MISSING"]
    assert run.visible() == 0
    run.a = Peer(run.b.socket.getpeername(), LAYOUT)
    free_again(run)


def test_one_link_missing_hides_all_behind_it(run: Run) -> None:
    """The middle block is aborted: its committed child goes, the parent stays."""
    assert run.b.commit(run.rest[1:]) == ["PENDING"]
    assert run.a.commit([run.first]) == ["OK"]
    ok(run.b.call("Abort", slots=wire.u64s(run.rest[0].id)))
    assert run.visible() == 1
    free_again(run)


def test_a_block_without_its_parent_is_refused(daemon: PrivateDaemon) -> None:
    tokens = prompt("orphan", 2)
    with Peer(daemon.socket, LAYOUT) as p:
        (slot,) = p.reserve(tokens[BLOCK_TOKENS:], parent=LAYOUT.chain(tokens)[0])
        assert slot.status == "PARENT_MISSING"
        assert p.get(LAYOUT.chain(tokens)) == [None, None]


def second_writer(p: Peer, tokens: list[int], key: bytes) -> Slot:
    """Repeats Reserve until the first writer's time is over."""

    def given() -> Slot | None:
        (slot,) = p.reserve(tokens)
        return slot if slot.status != "KEY_BUSY" else None

    slot: Slot = until(given, "a second writer gets its own slot")
    assert slot.status == "OK"
    p.fill(slot, payload(key, LAYOUT.size))
    return slot


def test_of_two_writers_the_first_commit_wins(daemon: PrivateDaemon) -> None:
    tokens = prompt("two writers", 1)
    (key,) = LAYOUT.chain(tokens)
    with Peer(daemon.socket, LAYOUT) as a, Peer(daemon.socket, LAYOUT) as b:
        (first,) = a.reserve(tokens)
        (busy,) = b.reserve(tokens)
        assert first.status == "OK" and busy.status == "KEY_BUSY" and busy.busy_ms > 0
        second = second_writer(b, tokens, key)
        assert b.commit([second]) == ["OK"]
        a.fill(first, bytes(LAYOUT.size))
        assert a.commit([first]) == ["PRESENT"]
        assert a.get([key]) == [payload(key, LAYOUT.size)]


def test_two_paths_share_one_parent(daemon: PrivateDaemon) -> None:
    """Both clients extend the same open block; each child waits for it by itself."""
    base = prompt("shared base", 1)
    left, right = base + prompt("left", 1), base + prompt("right", 1)
    with Peer(daemon.socket, LAYOUT) as a, Peer(daemon.socket, LAYOUT) as b:
        (root,) = a.reserve(base)
        (l,) = a.reserve(left[BLOCK_TOKENS:], parent=LAYOUT.chain(base)[0])
        (r,) = b.reserve(right[BLOCK_TOKENS:], parent=LAYOUT.chain(base)[0])
        a.fill(root, payload(LAYOUT.chain(base)[0], LAYOUT.size))
        a.fill(l, payload(LAYOUT.chain(left)[1], LAYOUT.size))
        b.fill(r, payload(LAYOUT.chain(right)[1], LAYOUT.size))
        assert a.commit([l]) == ["PENDING"]
        assert b.commit([r]) == ["PENDING"]
        assert a.commit([root]) == ["OK"]
        for tokens in (left, right):
            assert a.lookup(tokens) == 2
            assert a.get(LAYOUT.chain(tokens)) == [payload(k, LAYOUT.size) for k in LAYOUT.chain(tokens)]
