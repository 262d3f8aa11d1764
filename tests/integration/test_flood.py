# SPDX-License-Identifier: Apache-2.0
"""Overload is refused, not queued: a client that floods or never reads costs bounded memory and
nobody else's time; what is full says so at once."""

from __future__ import annotations

import resource
import socket
import threading

import pytest
import wire
from lab import HANG_GUARD_S, Layout, Peer, anonymous_rss, ok, payload, prompt, until
from private_daemon import PrivateDaemon

LAYOUT = Layout(16 << 10)
REQUESTS = 10_000


def flood(p: Peer, message: str, **fields: object) -> int:
    """Sends without ever reading until the daemon ends the connection; returns how many went out."""
    for i in range(REQUESTS):
        try:
            p.send(message, **fields)
        except (BrokenPipeError, ConnectionError):
            return i
    return REQUESTS


@pytest.mark.parametrize("message", ["Ping", "Status", "Lookup", "Explain", "Acquire"])
def test_a_client_that_never_reads_costs_little_and_is_ended(message: str) -> None:
    with PrivateDaemon("--send-timeout", "200ms") as d, Peer(d.socket, LAYOUT) as witness:
        tokens = prompt("flood", 4)
        keys = LAYOUT.chain(tokens)
        witness.put(tokens)
        want = [payload(key, LAYOUT.size) for key in keys]
        before = anonymous_rss(d.process.pid)
        hostile = Peer(d.socket, LAYOUT, name="hostile")
        hostile.socket.settimeout(HANG_GUARD_S)
        hostile.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        fields: dict[str, object] = {
            "Ping": {"payload": b"x" * 32768},
            "Status": {},
            "Lookup": {"space": hostile.space, "keys": b"".join(keys)},
            "Explain": {"space": hostile.space, "keys": b"".join(keys)},
            "Acquire": {"space": hostile.space, "keys": b"".join(keys), "lease": 1},
        }[message]  # type: ignore[assignment]
        sent: list[int] = []
        thread = threading.Thread(target=lambda: sent.append(flood(hostile, message, **fields)))
        thread.start()
        while thread.is_alive():
            assert witness.get(keys) == want
        thread.join()
        assert sent[0] < REQUESTS, "the daemon stops reading from who doesn't read, then ends it"
        assert anonymous_rss(d.process.pid) - before < 16 << 20
        until(lambda: witness.status_counters()["clients"] == 1, "the hostile client is ended")
        until(lambda: witness.status_counters()["leases"] == 0, "and holds nothing")
        assert witness.status_counters()["dropped_clients"] == 1
        hostile.close()


def test_a_slow_reader_gets_every_reply_in_the_end() -> None:
    """Back-pressure loses nothing: who reads late but reads is served in full."""
    with PrivateDaemon() as d, Peer(d.socket, LAYOUT) as p:
        sent = []
        for i in range(2000):
            try:
                sent.append(p.send("Ping", wait=False, payload=b"%d" % i))
            except BlockingIOError:
                break
        assert len(sent) > 10
        replies = {}
        while len(replies) < len(sent):
            reply = p.receive()
            replies[reply.request] = reply
        assert all(replies[r].status in ("OK", "BUSY") for r in sent)
        for i, r in enumerate(sent):
            if replies[r].status == "OK":
                assert replies[r].payload == b"%d" % i
        assert p.call("Ping", payload=b"after").payload == b"after"


def test_connections_beyond_the_limit_are_refused_with_a_sentence() -> None:
    with PrivateDaemon("--connections-per-uid", "3") as d:
        peers = [Peer(d.socket) for _ in range(3)]
        extra = wire.Wire(d.socket)
        try:
            reply = extra.hello()
            assert reply.status in ("BUSY", "QUOTA") and " " in reply.text
        except (wire.Closed, BrokenPipeError):
            pass
        extra.close()
        assert all(p.call("Ping").status == "OK" for p in peers)
        peers.pop().close()
        until(lambda: peers[0].status_counters()["clients"] == 2, "the closed one is gone")
        Peer(d.socket).close()
        for p in peers:
            p.close()


def test_leases_beyond_the_limit_are_refused_per_key() -> None:
    with PrivateDaemon("--leases", "3") as d, Peer(d.socket, LAYOUT) as p:
        tokens = prompt("leases", 5)
        p.put(tokens)
        leases = p.acquire(LAYOUT.chain(tokens))
        assert [x.status for x in leases[:3]] == ["OK"] * 3
        assert all(x.status in ("BUSY", "QUOTA") for x in leases[3:])
        p.release(leases)
        assert [x.status for x in p.acquire(LAYOUT.chain(tokens)[3:])] == ["OK"] * 2


def test_a_full_staging_says_busy_at_once_and_serves_after_a_commit() -> None:
    with PrivateDaemon("--staging", "1MiB") as d, Peer(d.socket, LAYOUT) as p:
        tokens = prompt("staging", 100)
        slots = p.reserve(tokens)
        given = [s for s in slots if s.status == "OK"]
        assert 4 <= len(given) < 100
        assert {s.status for s in slots[len(given) :]} == {"BUSY"}
        for key, slot in zip(LAYOUT.chain(tokens), given, strict=False):
            p.fill(slot, payload(key, LAYOUT.size))
        assert set(p.commit(given)) == {"OK"}
        more = p.reserve(tokens)
        assert [s.status for s in more[: len(given)]] == ["PRESENT"] * len(given)
        assert more[len(given)].status == "OK"


def test_full_memory_evicts_and_never_grows() -> None:
    limit = 24 << 20
    with PrivateDaemon("--memory", "24MiB", "--slab", "1MiB", "--staging", "1MiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            for i in range(3000):
                assert p.put(prompt(f"full {i}", 1)) == ["OK"], i
            status = p.status_counters()
            assert status["memory_used"] <= limit
            assert ok(p.call("Stats")).evicted_blocks > 0
            assert anonymous_rss(d.process.pid) < 64 << 20


def test_a_lack_of_files_is_busy_and_said_once() -> None:
    """Each slab is an open file."""
    with PrivateDaemon("--slab", "1MiB", "--staging", "1MiB") as d:
        with Peer(d.socket, LAYOUT) as p:
            pid, tokens = d.process.pid, prompt("files", 1)
            (slot,) = p.reserve(tokens)  # now it has its staging
            p.fill(slot, payload(LAYOUT.chain(tokens)[0], LAYOUT.size))
            files, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            assert p.commit([slot]) == ["BUSY"]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, hard))
            until(lambda: p.put(tokens) == ["OK"], "a slab can be had again")
        assert d.log().count("Too many open files; raise the limit (LimitNOFILE") == 1, d.log()
