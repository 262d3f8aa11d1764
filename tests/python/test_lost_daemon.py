# SPDX-License-Identifier: Apache-2.0
"""A lost daemon is a miss: generation goes on, and goes on better when the daemon is back."""

from __future__ import annotations

import os

import cistern
import pytest
from cistern import Status
from lab import payload, prompt, until
from private_daemon import PrivateDaemon

LAYOUT = cistern.Descriptor.rows(1, 1, 64, content_id=b"\x44" * 32, block_tokens=16)
SIZE = LAYOUT.block_bytes


def test_no_daemon_at_all() -> None:
    with pytest.raises(cistern.Disconnected):
        cistern.Client("/nonexistent/cistern.sock")


def test_a_path_that_is_too_long_is_named() -> None:
    with pytest.raises(cistern.CisternError, match="107"):
        cistern.Client("/tmp/" + "x" * 200)


@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: needs root")
def test_a_stranger_behind_the_socket_is_refused_unless_named() -> None:
    """Who squats on the path gets nothing: the server's uid is the kernel's word."""
    with PrivateDaemon(user=61001) as d:
        with pytest.raises(cistern.Refused):
            cistern.Client(d.socket)
        with cistern.Client(d.socket, server_uid=61001) as client:
            client.ping()


def test_a_lazy_client_misses_until_a_daemon_comes() -> None:
    d = PrivateDaemon()
    with cistern.Client(d.socket, lazy=True) as client, client.space(LAYOUT) as space:
        tokens = prompt("lazy", 2)
        keys = space.keys(tokens)
        blocks = [payload(key, SIZE) for key in keys]
        misses(space, tokens, keys, blocks)
        with d:
            until(lambda: space.put(tokens, blocks) in ([Status.OK] * 2, [Status.PRESENT] * 2), "it reconnects")
            assert space.lookup(tokens).blocks == 2


def misses(space: cistern.Space, tokens: list[int], keys: cistern.Keys, blocks: list[bytes]) -> None:
    """Every call on the path of a request answers at once and does not raise."""
    assert space.lookup(tokens).tokens == 0
    assert set(space.lookup_each(keys)) == {cistern.Tier.NONE}
    with space.fetch(tokens) as hit:
        assert hit.tokens == 0 and len(hit) == 0
    with space.acquire(keys) as leases:
        assert list(leases) == [None, None]
        assert set(leases.statuses) == {Status.DISCONNECTED}
    assert set(space.get_into(keys, [bytearray(SIZE) for _ in keys])) == {Status.DISCONNECTED}
    assert set(space.put(tokens, blocks)) == {Status.DISCONNECTED}
    with space.reserve(tokens) as slots:
        assert list(slots) == [None, None]
        assert set(slots.commit()) == {Status.DISCONNECTED}
    space.touch(keys)
    for call in (lambda: space.erase(keys), space.stats, lambda: space.pin(keys, 1.0)):
        with pytest.raises(cistern.Disconnected):
            call()


def test_a_killed_daemon_is_a_miss_and_the_next_one_a_new_start() -> None:
    with PrivateDaemon() as d, cistern.Client(d.socket) as client, client.space(LAYOUT) as space:
        tokens = prompt("killed", 2)
        keys = space.keys(tokens)
        blocks = [payload(key, SIZE) for key in keys]
        assert space.put(tokens, blocks) == [Status.OK] * 2
        leases = space.acquire(keys)
        slots = space.reserve(prompt("open slot", 1))
        epoch = client.epoch
        d.kill()
        misses(space, tokens, keys, blocks)
        assert [bytes(lease.data) for lease in leases] == blocks, "leased memory stays readable"
        slots[0].data[:] = bytes(SIZE)
        assert slots.commit()[0] != Status.OK
        d.start()
        until(lambda: space.put(tokens, blocks)[0] != Status.DISCONNECTED, "it reconnects")
        assert client.epoch != epoch
        assert [bytes(lease.data) for lease in leases] == blocks, "memory of the old epoch too"
        leases.release()
        with space.fetch(tokens) as hit:
            assert [bytes(lease.data) for lease in hit] == blocks


def test_submissions_of_a_lost_daemon_complete() -> None:
    with PrivateDaemon() as d:
        with cistern.Client(d.socket, async_=True) as client, client.space(LAYOUT) as space:
            tokens = prompt("lost", 2)
            keys = space.keys(tokens)
            space.put(tokens, [payload(key, SIZE) for key in keys])
            d.kill()
            gets = [space.submit_get_into(keys, [bytearray(SIZE), bytearray(SIZE)]) for _ in range(4)]
            done: list[cistern.Submission] = []
            until(lambda: done.extend(client.drain()) or len(done) == 4, "every submission completes")
            assert all(Status.OK not in get.statuses for get in gets)
            d.start()
