# SPDX-License-Identifier: Apache-2.0
"""Bad input at the socket: each row gets its status with a plain sentence, and leaves every other
client and every stored block as they were."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wire
from lab import BLOCK_TOKENS, Layout, Peer, fds, held, ok, payload, prompt, until, until_held
from private_daemon import PrivateDaemon
from wire import packet, u32s, u64s

LAYOUT = Layout(16 << 10)
TOKENS = prompt("bad input", 3)
KEYS = LAYOUT.chain(TOKENS)
EVERY = b"".join(KEYS)
NEW = prompt("new in bad input", 2)
NEW_KEYS = LAYOUT.chain(NEW)
PACKETS = Path(__file__).parents[1] / "golden" / "packets"


class Witness:
    """A client with a stored chain, a lease that it reads and an open slot, and a second client that
    only watches. check() after each row: all of that is as it was."""

    def __init__(self, path: str, pid: int) -> None:
        self.path, self.pid = path, pid
        self.peer = Peer(path, LAYOUT, name="witness")
        self.peer.put(TOKENS)
        self.leases = self.peer.acquire(KEYS)
        self.open_tokens = prompt("open slot of the witness", 1)
        (self.slot,) = self.peer.reserve(self.open_tokens)
        self.peer.fill(self.slot, payload(LAYOUT.chain(self.open_tokens)[0], LAYOUT.size))
        for lease in self.leases:
            self.peer.read(lease)
        self.base = held(self.peer)

    def check(self) -> None:
        until_held(self.peer, self.base)
        want = [payload(key, LAYOUT.size) for key in KEYS]
        assert [self.peer.read(lease) for lease in self.leases] == want
        assert self.peer.lookup(TOKENS) == 3
        assert self.peer.get(KEYS) == want

    def finish(self) -> None:
        """The slot that was open all the time still takes its block."""
        assert self.peer.commit([self.slot]) == ["OK"]
        key = LAYOUT.chain(self.open_tokens)[0]
        assert self.peer.get([key]) == [payload(key, LAYOUT.size)]


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    with PrivateDaemon() as d:
        w = Witness(d.socket, d.process.pid)
        yield w
        w.finish()
        w.peer.close()


def plain(reply: wire.Packet, status: str) -> None:
    """An error reply with this status and a sentence for a person."""
    assert reply.status == status, reply
    assert 10 <= len(reply.text) <= 500 and " " in reply.text and "\n" not in reply.text, reply.text


# ---- whole packets, before and after Hello ----

RAW = {
    "wrong magic": (packet(2, magic=0x12345678), "BAD_MAGIC", True),
    "wrong version": (packet(2, version=9), "BAD_VERSION", False),
    "shorter than a header": (b"CSTN\1\0\2", "BAD_LENGTH", True),
    "length beyond the packet": (packet(2, length=5), "BAD_LENGTH", True),
    "length short of the packet": (packet(2, b"1234", length=1), "BAD_LENGTH", True),
    "length of 4 GiB": (packet(2, length=2**32 - 1), "BAD_LENGTH", True),
    "unknown message": (packet(999), "BAD_TYPE", False),
    "a reserved number": (packet(26), "BAD_TYPE", False),
    "a push as a request": (packet(100), "BAD_TYPE", False),
    "not a protobuf message": (packet(2, b"\xff\xff\xff"), "BAD_MESSAGE", False),
    "a flood of unknown fields": (packet(2, b"\xf8\x07\x01" * 40_000), "BAD_MESSAGE", False),
    "an endless field": (packet(2, b"\x0a\xff\xff\xff\xff\x0f"), "BAD_MESSAGE", False),
    "a wrong wire type": (packet(2, b"\x08\x01"), "BAD_MESSAGE", False),
    "a field twice": (packet(2, b"\x0a\x00\x0a\x00"), "BAD_MESSAGE", False),
}


@pytest.mark.parametrize("greeted", [False, True], ids=["fresh", "greeted"])
@pytest.mark.parametrize("row", RAW)
def test_bad_packets(witness: Witness, row: str, greeted: bool) -> None:
    data, status, ends = RAW[row]
    with wire.Wire(witness.path) as w:
        if greeted:
            w.hello()
        w.send_raw(data)
        plain(w.receive(), status)
        if ends:
            assert w.closed()
        else:
            assert w.call("Ping", payload=b"still here").payload == b"still here"
    witness.check()


@pytest.mark.parametrize("size", [0, 16 + 128 * 1024, 150_000])
def test_packets_that_end_the_connection(witness: Witness, size: int) -> None:
    """An empty packet reads like the end of the connection; a larger one than the limit is no packet."""
    with wire.Wire(witness.path) as w:
        w.hello()
        w.send_raw(packet(2, bytes(size - 16)) if size else b"")
        assert w.closed()
    witness.check()


def golden() -> list[tuple[str, str]]:
    rows = [line.split() for line in (PACKETS / "expected.txt").read_text().splitlines()]
    return [(r[0], r[1]) for r in rows if len(r) >= 2 and r[0].startswith("bad-")]


@pytest.mark.parametrize(("name", "status"), golden())
def test_golden_bad_packets(witness: Witness, name: str, status: str) -> None:
    data = next(p for p in (PACKETS / name, PACKETS / f"{name}.bin") if p.exists()).read_bytes()
    with wire.Wire(witness.path) as w:
        w.hello()
        w.send_raw(data)
        if data:
            plain(w.receive(), status)
        else:
            assert w.closed()
    witness.check()


# ---- before Hello ----


@pytest.mark.parametrize("message", sorted(set(wire.NUMBERS) - {"Hello", "Ping", "Ready", "SlabRetire", "Event", "Goodbye"}))
def test_requests_before_hello(witness: Witness, message: str) -> None:
    with wire.Wire(witness.path) as w:
        plain(w.call(message), "BAD_STATE")
        assert w.hello().status == "OK"
    witness.check()


HELLO = {
    "no common version": ({"version_min": 7, "version_max": 9}, "BAD_VERSION"),
    "no version at all": ({"version_min": 0, "version_max": 0}, "BAD_VERSION"),
    "name too long": ({"version_min": 1, "version_max": 1, "client_name": "x" * 65}, "BAD_ARGUMENT"),
    "name not printable": ({"version_min": 1, "version_max": 1, "client_name": "a\tb"}, "BAD_ARGUMENT"),
}


@pytest.mark.parametrize("row", HELLO)
def test_bad_hello(witness: Witness, row: str) -> None:
    fields, status = HELLO[row]
    with wire.Wire(witness.path) as w:
        plain(w.call("Hello", **fields), status)
    witness.check()


def test_hello_twice(witness: Witness) -> None:
    with Peer(witness.path) as p:
        plain(p.hello(), "BAD_STATE")
        assert p.call("Ping").status == "OK"
    witness.check()


# ---- descriptors with requests ----

FDS: dict[str, Callable[[], list[int]]] = {
    "a file": lambda: [os.open("/dev/null", os.O_RDWR)],
    "a memfd": lambda: [os.memfd_create("x")],
    "a socket": lambda: [socket.socket(socket.AF_UNIX).detach()],
    "a pipe": lambda: list(os.pipe()),
    "seventeen": lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(17)],
    "two hundred": lambda: [os.open("/dev/null", os.O_RDONLY) for _ in range(200)],
}


@pytest.mark.parametrize("message", ["Ping", "Hello", "StagingGet", "Commit"])
@pytest.mark.parametrize("kind", FDS)
def test_descriptors_that_nobody_asked_for(witness: Witness, kind: str, message: str) -> None:
    """They don't pass, or are refused and closed and the connection ends."""
    sent = FDS[kind]()
    before = fds(witness.pid)
    with Peer(witness.path) as p:
        try:
            p.send(message, fds=sent)
            plain(p.receive(), "BAD_FDS")
            assert p.closed()
        except PermissionError:  # Linux 6.16: they don't even leave this process
            pass
    for fd in sent:
        os.close(fd)
    until(lambda: fds(witness.pid) <= before, "the daemon keeps none of them")
    witness.check()


# ---- SpaceOpen ----


def descriptor(**change: Any) -> bytes:
    fields: dict[str, Any] = {
        "segments": LAYOUT.segments,
        "layers": LAYOUT.layers,
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": LAYOUT.size,
        "content": LAYOUT.content,
    }
    return wire.descriptor(**(fields | change))


def moved(index: int, **change: int) -> list[tuple[Any, ...]]:
    names = ("layer", "tensor", "dtype", "offset", "length", "token", "head", "dim")
    segment = dict(zip(names, LAYOUT.segments[index], strict=True)) | change
    return [*LAYOUT.segments[:index], tuple(segment.values()), *LAYOUT.segments[index + 1 :]]


QUARTER = LAYOUT.size // 4
DESCRIPTORS = {
    "empty": b"",
    "another tag": b"cistern.descriptor.2" + descriptor()[20:],
    "cut short": descriptor()[:-1],
    "longer": descriptor() + b"\0",
    "no model": descriptor(content=bytes(32)),
    "no engine": descriptor(engine=b""),
    "engine with a zero byte": descriptor(engine=b"a\0b"),
    "engine too long": descriptor(engine=b"e" * 65),
    "segments overlap": descriptor(segments=moved(1, offset=QUARTER - 2)),
    "segments out of order": descriptor(segments=list(reversed(LAYOUT.segments))),
    "segment overruns the block": descriptor(segments=moved(3, length=QUARTER + 2)),
    "segment wraps around": descriptor(segments=moved(3, offset=2**64 - 2)),
    "elements overrun the segment": descriptor(segments=moved(0, token=QUARTER)),
    "elements share bytes": descriptor(segments=moved(0, token=2)),
    "zero stride": descriptor(segments=moved(0, dim=0)),
    "odd stride": descriptor(segments=moved(0, dim=3)),
    "unknown layer": descriptor(segments=moved(2, layer=2)),
    "K twice": descriptor(segments=moved(1, tensor=0)),
    "unknown tensor": descriptor(segments=moved(0, tensor=3)),
    "unknown dtype": descriptor(segments=moved(0, dtype=9)),
    "opaque type of a K": descriptor(segments=moved(0, dtype=0)),
    "too few tokens": descriptor(block_tokens=8),
    "too many tokens": descriptor(block_tokens=2048),
    "no bytes": descriptor(block_bytes=0),
    "too many bytes": descriptor(block_bytes=2**40),
    "four billion layers": descriptor(n_layers=2**32 - 1),
    "four billion segments": descriptor(n_segments=2**32 - 1),
    "fewer layers than counted": descriptor(n_layers=512),
    "no layers": descriptor(layers=[], segments=[], n_layers=0),
    "no segments": descriptor(segments=[]),
    "oversized": descriptor() + bytes(126_000),
}


@pytest.mark.parametrize("row", DESCRIPTORS)
def test_bad_model_descriptors(witness: Witness, row: str) -> None:
    with Peer(witness.path) as p:
        plain(p.call("SpaceOpen", descriptor=DESCRIPTORS[row]), "BAD_DESCRIPTOR")
        assert p.call("SpaceOpen", descriptor=descriptor()).status == "OK"
    witness.check()


SPACES = {
    "unknown kind": ({"kind": 2}, "BAD_ARGUMENT"),
    "unknown scope": ({"scope": 2}, "BAD_ARGUMENT"),
    "unknown class": ({"quality_class": 4}, "BAD_ARGUMENT"),
    "laxer class": ({"quality_class": 1}, "DENIED"),
    "salt too long": ({"salt": bytes(65)}, "BAD_ARGUMENT"),
}


@pytest.mark.parametrize("row", SPACES)
def test_bad_spaces(witness: Witness, row: str) -> None:
    fields, status = SPACES[row]
    with Peer(witness.path) as p:
        plain(p.call("SpaceOpen", descriptor=LAYOUT.descriptor, **fields), status)
    witness.check()


# ---- requests on a space ----

Request = tuple[str, dict[str, Any]]
LONG_LIST = {"offset": 0, "length": 32 * 70_000}
REQUESTS: dict[str, tuple[Request, str]] = {
    "lookup: half a key": (("Lookup", {"keys": EVERY[:-1]}), "BAD_ARGUMENT"),
    "lookup: half a token": (("Lookup", {"tail": b"\0\0\0"}), "BAD_ARGUMENT"),
    "lookup: tail longer than a block": (("Lookup", {"tail": bytes(4 * 17)}), "TOO_LARGE"),
    "lookup: parent of 31 bytes": (("Lookup", {"parent": bytes(31), "tail": bytes(4)}), "BAD_ARGUMENT"),
    "lookup: list without staging": (("Lookup", {"keys_ref": {"offset": 0, "length": 32}}), "BAD_ARGUMENT"),
    "lookup_each: half a key": (("LookupEach", {"keys": b"x"}), "BAD_ARGUMENT"),
    "acquire: half a key": (("Acquire", {"keys": EVERY[:40], "lease": 1}), "BAD_ARGUMENT"),
    "acquire: unknown mode": (("Acquire", {"keys": EVERY, "lease": 1, "mode": 2}), "BAD_ARGUMENT"),
    "acquire: half a lease to release": (("Acquire", {"keys": EVERY, "lease": 1, "release": b"123"}), "BAD_ARGUMENT"),
    "acquire: layer out of range": (
        ("Acquire", {"keys": EVERY, "lease": 1, "layer_first": 2, "layer_count": 1}),
        "BAD_ARGUMENT",
    ),
    "acquire: too many keys": (("Acquire", {"keys": bytes(32 * 3201), "lease": 1}), "TOO_LARGE"),
    "reserve: parent of 31 bytes": (
        ("Reserve", {"parent": bytes(31), "keys": NEW_KEYS[0], "tokens": u32s(*NEW[:16])}),
        "BAD_ARGUMENT",
    ),
    "reserve: fewer tokens than keys": (
        ("Reserve", {"parent": LAYOUT.root(), "keys": b"".join(NEW_KEYS), "tokens": u32s(*NEW[:16])}),
        "BAD_ARGUMENT",
    ),
    "reserve: more tokens than keys": (
        ("Reserve", {"parent": LAYOUT.root(), "keys": NEW_KEYS[0], "tokens": u32s(*NEW)}),
        "BAD_ARGUMENT",
    ),
    "reserve: half a token": (
        ("Reserve", {"parent": LAYOUT.root(), "keys": NEW_KEYS[0], "tokens": u32s(*NEW[:16]) + b"\0"}),
        "BAD_ARGUMENT",
    ),
    "touch: half a key": (("Touch", {"keys": EVERY[:33]}), "BAD_ARGUMENT"),
    "erase: all with keys": (("Erase", {"keys": EVERY, "all": 1}), "BAD_ARGUMENT"),
    "erase: all is 2": (("Erase", {"all": 2}), "BAD_ARGUMENT"),
    "explain: half a key": (("Explain", {"keys": EVERY[:33]}), "BAD_ARGUMENT"),
}
WITH_SPACE = (
    "Lookup", "LookupEach", "Acquire", "Reserve", "Touch", "Pin", "Unpin", "Erase", "Explain", "Subscribe",
    "Stats", "Blocks", "SpaceClose",
)  # fmt: skip


@pytest.mark.parametrize("row", REQUESTS)
def test_bad_requests(witness: Witness, row: str) -> None:
    (message, fields), status = REQUESTS[row]
    with Peer(witness.path, LAYOUT) as p:
        if message == "Reserve":
            p.open_staging()
        plain(p.call(message, space=p.space, **fields), status)
        assert p.lookup(TOKENS) == 3
    witness.check()


@pytest.mark.parametrize("message", WITH_SPACE)
@pytest.mark.parametrize("forged", [77, 1025, 2**32 - 1])
def test_forged_spaces(witness: Witness, message: str, forged: int) -> None:
    """The witness has spaces of its own; their numbers are nothing here."""
    with Peer(witness.path, LAYOUT) as p:
        p.open_staging()
        fields: dict[str, Any] = {}
        if message in ("Lookup", "LookupEach", "Acquire", "Touch", "Pin", "Unpin", "Explain"):
            fields["keys"] = EVERY
        if message == "Acquire":
            fields["lease"] = 1
        if message == "Reserve":
            fields = {"parent": LAYOUT.root(), "keys": NEW_KEYS[0], "tokens": u32s(*NEW[:16])}
        if message == "Erase":
            fields["all"] = 1
        plain(p.call(message, space=forged, **fields), "BAD_HANDLE")
    witness.check()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 31), (-32, 64), (2**64 - 32, 64), (2**63, 2**63), (0, 2**64 - 32), (-1, 32)],
)
def test_lists_outside_of_staging(witness: Witness, offset: int, length: int) -> None:
    """Negative offsets count from the end of the staging slab."""
    with Peer(witness.path, LAYOUT) as p:
        size = len(p.open_staging())
        ref = {"offset": offset + size if offset < 0 else offset, "length": length}
        reply = p.call("Lookup", space=p.space, keys_ref=ref)
        assert reply.status in ("BAD_ARGUMENT", "TOO_LARGE")
        plain(reply, reply.status)
    witness.check()


def test_a_list_beyond_the_limit_of_keys(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        p.open_staging()
        most = p.hello_reply.keys_max
        ref = {"offset": p.lists, "length": 32 * most}
        assert p.call("Lookup", space=p.space, keys_ref=ref).present == 0
        ref["length"] += 32
        reply = p.call("Lookup", space=p.space, keys_ref=ref)
        assert reply.status in ("TOO_LARGE", "BAD_ARGUMENT")
        plain(reply, reply.status)
    witness.check()


def test_staging_twice_and_too_large(witness: Witness) -> None:
    """The daemon gives less than was asked for, within the quota, and only once."""
    with Peer(witness.path, LAYOUT) as p:
        reply = ok(p.call("StagingGet", bytes=2**60))
        assert 0 < reply.lists < reply.size <= 1 << 30
        assert os.fstat(reply.fds[0]).st_size == reply.size
        reply.close()
        plain(p.call("StagingGet"), "BAD_STATE")
    witness.check()


def test_reserve_without_staging(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        fields = {"parent": LAYOUT.root(), "keys": NEW_KEYS[0], "tokens": u32s(*NEW[:16])}
        reply = p.call("Reserve", space=p.space, **fields)
        plain(reply, "BAD_STATE")
    witness.check()


# ---- keys ----


def reserve(p: Peer, parent: bytes, keys: list[bytes], tokens: list[int]) -> list[str]:
    p.open_staging()
    reply = ok(p.call("Reserve", space=p.space, parent=parent, keys=b"".join(keys), tokens=u32s(*tokens)))
    return [wire.STATUS[r[0]] for r in wire.records(wire.SLOT, reply.slots)]


def test_keys_that_do_not_match_their_tokens(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        root = LAYOUT.root()
        other = NEW[:15] + [NEW[15] + 1]
        assert reserve(p, root, [NEW_KEYS[0]], other) == ["KEY_MISMATCH"]
        assert reserve(p, root, [bytes(32)], NEW[:16]) == ["KEY_MISMATCH"]
        assert reserve(p, KEYS[0], [NEW_KEYS[0]], NEW[:16]) == ["KEY_MISMATCH"], "the parent is hashed"
        assert reserve(p, root, [NEW_KEYS[0]], NEW[:15]) == ["KEY_MISMATCH"], "the length is hashed"
        assert p.lookup(NEW) == 0
    witness.check()


def test_bytes_of_other_tokens_cannot_take_a_stored_key(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        assert p.put(TOKENS, lambda key, size: bytes(size)) == ["PRESENT"] * 3
    witness.check()


def test_a_key_without_its_parent(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        assert reserve(p, NEW_KEYS[0], [NEW_KEYS[1]], NEW[16:]) == ["PARENT_MISSING"]
        unknown = bytes(range(32))
        assert reserve(p, unknown, [wire.key_block(unknown, NEW[:16])], NEW[:16]) == ["PARENT_MISSING"]
    witness.check()


def test_foreign_keys_are_absent(witness: Witness) -> None:
    """Keys of the witness's space in a space of another model: the answer of any unknown key."""
    other = Layout(16 << 10, content=b"\x55" * 32)
    with Peer(witness.path, other) as p:
        assert p.get(KEYS) == [None] * 3
        foreign = p.acquire(KEYS)
        unknown = p.acquire([bytes([i]) * 32 for i in range(3)])
        for a, b in zip(foreign, unknown, strict=True):
            assert (a.status, a.tier, a.slab, a.offset, a.length) == (b.status, b.tier, b.slab, b.offset, b.length)
            assert a.status == "NOT_FOUND"
        assert ok(p.call("Lookup", space=p.space, keys=EVERY)).present == 0
        assert ok(p.call("LookupEach", space=p.space, keys=EVERY)).tiers == bytes(3)
        assert ok(p.call("Erase", space=p.space, keys=EVERY)).blocks == 0
    witness.check()


# ---- slots and leases ----


def commit_status(p: Peer, slot: int) -> str:
    reply = p.call("Commit", slots=u64s(slot))
    return wire.statuses(reply.statuses)[0] if reply.status == "OK" else reply.status


def test_double_commit(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        tokens = prompt("double", 1)
        (slot,) = p.reserve(tokens)
        p.fill(slot, payload(LAYOUT.chain(tokens)[0], LAYOUT.size))
        assert commit_status(p, slot.id) == "OK"
        p.fill(slot, bytes(LAYOUT.size))
        assert commit_status(p, slot.id) in ("BAD_HANDLE", "BAD_STATE")
        assert p.get(LAYOUT.chain(tokens)) == [payload(LAYOUT.chain(tokens)[0], LAYOUT.size)]
    witness.check()


def test_double_commit_in_one_packet(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        tokens = prompt("double at once", 1)
        (slot,) = p.reserve(tokens)
        p.fill(slot, payload(LAYOUT.chain(tokens)[0], LAYOUT.size))
        reply = p.call("Commit", slots=u64s(slot.id, slot.id))
        if reply.status == "OK":
            first, second = wire.statuses(reply.statuses)
            assert first == "OK" and second in ("BAD_HANDLE", "BAD_STATE")
    witness.check()


def test_commit_after_abort(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        tokens = prompt("aborted", 1)
        (slot,) = p.reserve(tokens)
        ok(p.call("Abort", slots=u64s(slot.id)))
        ok(p.call("Abort", slots=u64s(slot.id)))
        assert commit_status(p, slot.id) == "BAD_HANDLE"
        assert p.lookup(tokens) == 0
    witness.check()


def test_a_slot_of_another_client(witness: Witness) -> None:
    """Neither committed nor aborted by who doesn't own it: the witness commits it at the very end."""
    with Peer(witness.path, LAYOUT) as p:
        assert commit_status(p, witness.slot.id) == "BAD_HANDLE"
        ok(p.call("Abort", slots=u64s(witness.slot.id)))
        p.open_staging()
        assert commit_status(p, witness.slot.id) == "BAD_HANDLE"
    witness.check()


@pytest.mark.parametrize("slots", [b"1234567", u64s(0), u64s(2**64 - 1), u64s(*range(5000))])
def test_forged_slots(witness: Witness, slots: bytes) -> None:
    with Peer(witness.path, LAYOUT) as p:
        reply = p.call("Commit", slots=slots)
        if reply.status == "OK":
            assert set(wire.statuses(reply.statuses)) == {"BAD_HANDLE"}
        else:
            plain(reply, reply.status)
            assert reply.status in ("BAD_ARGUMENT", "TOO_LARGE", "BAD_HANDLE")
    witness.check()


def test_surprisals_of_a_wrong_length(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        tokens = prompt("surprisals", 1)
        (slot,) = p.reserve(tokens)
        for n in (1, 15, 17):
            plain(p.call("Commit", slots=u64s(slot.id), surprisals=bytes(2 * n)), "BAD_ARGUMENT")
            (slot,) = [s for s in p.reserve(tokens) if s.status == "OK"] or [slot]
    witness.check()


def test_a_lease_id_held_for_another_key(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        (lease,) = p.acquire(KEYS[:1])
        reply = ok(p.call("Acquire", space=p.space, keys=KEYS[1], lease=lease.id))
        (other,) = p.leases(reply.leases)
        assert other.status == "BAD_HANDLE"
        assert p.read(lease) == payload(KEYS[0], LAYOUT.size)
        (same,) = p.leases(ok(p.call("Acquire", space=p.space, keys=KEYS[0], lease=lease.id)).leases)
        assert (same.status, same.slab, same.offset) == ("OK", lease.slab, lease.offset)
        assert witness.peer.status_counters()["leases"] == witness.base["leases"] + 1
    witness.check()


def test_releasing_what_one_does_not_hold(witness: Witness) -> None:
    with Peer(witness.path, LAYOUT) as p:
        theirs = [lease.id for lease in witness.leases]
        ok(p.call("Release", leases=u64s(*theirs, 0, 2**64 - 1, *range(100))))
        plain(p.call("Release", leases=b"123"), "BAD_ARGUMENT")
    witness.check()


def test_slabs_that_no_lease_named(witness: Witness) -> None:
    """Within one namespace a guess may hit a slab that the user may read anyway; others get nothing
    (test_two_uids.py). What is no slab has no descriptor."""
    with Peer(witness.path, LAYOUT) as p:
        guesses = [0, 1000, 2**31, 2**32 - 1]
        reply = p.call("SlabGet", slabs=u32s(*guesses))
        assert not reply.fds
        if reply.status == "OK":
            assert {wire.STATUS[s] for _, s, _ in wire.records(wire.SLAB, reply.slabs)} <= {"BAD_HANDLE", "NOT_FOUND"}
        plain(p.call("SlabGet", slabs=bytes(4 * 17)), "TOO_LARGE")
        plain(p.call("SlabGet", slabs=b"123"), "BAD_ARGUMENT")
        ok(p.call("SlabDropped", slabs=u32s(*guesses, witness.leases[0].slab)))
    witness.check()


def test_a_lease_that_was_released_names_no_memory(witness: Witness) -> None:
    """After Release the slab can't be fetched by its number any more than a guessed one, unless the
    connection has it already."""
    with Peer(witness.path, LAYOUT) as p:
        (lease,) = p.acquire(KEYS[:1])
        p.release([lease])
        reply = p.call("SlabGet", slabs=u32s(lease.slab))
        assert reply.status == "OK" or reply.status == "BAD_HANDLE"
        reply.close()
    witness.check()


# ---- administration by a user ----


@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: needs root")
def test_administration_is_denied_to_users() -> None:
    from lab import as_user

    with PrivateDaemon(user=0) as d:
        with as_user(61001), Peer(d.socket, LAYOUT) as p:
            p.put(TOKENS)
            plain(p.call("Status"), "DENIED")
            plain(p.call("Purge", namespace="uid-0"), "DENIED")
            assert p.hello_reply.features & 1 == 0
        with Peer(d.socket, LAYOUT) as root:
            assert root.hello_reply.features & 1 == 1
            root.put(TOKENS)
            with as_user(61001), Peer(d.socket, LAYOUT) as p:
                assert ok(p.call("Purge")).blocks == 3
                assert p.lookup(TOKENS) == 0
            assert root.lookup(TOKENS) == 3


def test_a_floating_number_of_a_surprisal_is_never_trusted(witness: Witness) -> None:
    """NaN, infinite and negative surprisals neither crash nor poison the chain."""
    with Peer(witness.path, LAYOUT) as p:
        for name, value in (("nan", 0x7E00), ("inf", 0x7C00), ("negative", 0xBC00)):
            tokens = prompt(f"surprisal {name}", 1)
            (slot,) = p.reserve(tokens)
            p.fill(slot, payload(LAYOUT.chain(tokens)[0], LAYOUT.size))
            reply = p.call("Commit", slots=u64s(slot.id), surprisals=struct.pack("<16H", *[value] * 16))
            assert reply.status in ("OK", "BAD_ARGUMENT")
            if reply.status == "OK":
                assert p.get(LAYOUT.chain(tokens)) == [payload(LAYOUT.chain(tokens)[0], LAYOUT.size)]
            assert ok(p.call("Stats", space=p.space)).blocks >= 3
    witness.check()
