# SPDX-License-Identifier: Apache-2.0
"""Fetching and giving memory back: many clients that want one packed block cost one decode; a slab
whose blocks are gone is asked back, and stays readable for those who lease it."""

from __future__ import annotations

import os
import signal

import wire
from lab import Layout, Peer, crowd_out, ok, prompt, smooth, until
from private_daemon import PrivateDaemon

BIG = Layout(4 << 20)
SMALL = Layout(64 << 10)
OTHER = Layout(64 << 10, content=b"\x22" * 32)
CLIENTS = 8


def tier(p: Peer, key: bytes) -> int:
    return int(ok(p.call("LookupEach", space=p.space, keys=key)).tiers[0])


def pack(p: Peer, key: bytes) -> None:
    """Crowds the hot copy of a stored block out, so that only its frame is left, which is pinned."""
    until(lambda: p.space_stats()["packed_bytes"] > 0, "the block is encoded in the background")
    ok(p.call("Pin", space=p.space, keys=key, ttl_ms=600_000))
    crowd_out(p, lambda: tier(p, key) != 1, "the hot copy is evicted")
    assert tier(p, key) == 2


def test_fetches_of_one_block_are_merged() -> None:
    """All requests lie in the sockets before the daemon sees the first: one decode serves them."""
    with PrivateDaemon("--memory", "160MiB", "--slab", "32MiB") as d:
        peers = [Peer(d.socket, BIG, name=f"client {i}") for i in range(CLIENTS)]
        writer = peers[0]
        tokens = prompt("merged", 1)
        (key,) = BIG.chain(tokens)
        assert writer.put(tokens, smooth) == ["OK"]
        pack(writer, key)
        before = writer.space_stats()
        os.kill(d.process.pid, signal.SIGSTOP)
        firsts = [p.lease_ids(1) for p in peers]
        requests = [
            p.send("Acquire", space=p.space, keys=key, lease=first)
            for p, first in zip(peers, firsts, strict=True)
        ]
        os.kill(d.process.pid, signal.SIGCONT)
        for p, request in zip(peers, requests, strict=True):
            reply = ok(p.wait(request))
            (lease,) = p.settle(p.leases(reply.leases))
            assert lease.status == "OK" and lease.tier == 2
            assert p.read(lease) == smooth(key, BIG.size)
        after = writer.space_stats()
        assert after["decodes"] - before["decodes"] == 1
        assert after["merged_fetches"] - before["merged_fetches"] >= 1
        assert after["acquires"] - before["acquires"] == CLIENTS
        for p in peers:
            p.close()


def test_a_client_that_gives_up_does_not_take_the_fetch_along() -> None:
    with PrivateDaemon("--memory", "160MiB", "--slab", "32MiB") as d:
        writer, quitter, stayer = (Peer(d.socket, BIG) for _ in range(3))
        tokens = prompt("given up", 1)
        (key,) = BIG.chain(tokens)
        writer.put(tokens, smooth)
        pack(writer, key)
        os.kill(d.process.pid, signal.SIGSTOP)
        quitter.send("Acquire", space=quitter.space, keys=key, lease=1)
        request = stayer.send("Acquire", space=stayer.space, keys=key, lease=stayer.lease_ids(1))
        quitter.close()
        os.kill(d.process.pid, signal.SIGCONT)
        (lease,) = stayer.settle(stayer.leases(ok(stayer.wait(request)).leases))
        assert lease.status == "OK" and stayer.read(lease) == smooth(key, BIG.size)
        until(lambda: writer.status_counters()["leases"] == 1, "only the stayer's lease is left")
        stayer.close()
        writer.close()


def test_both_modes_of_one_block() -> None:
    """Packed: the frame; decoded: the bytes. The frame is smaller and the same for everybody."""
    with PrivateDaemon() as d, Peer(d.socket, SMALL) as p, Peer(d.socket, SMALL) as q:
        tokens = prompt("modes", 1)
        keys = SMALL.chain(tokens)
        p.put(tokens, smooth)
        until(lambda: p.space_stats()["packed_bytes"] > 0, "the block is encoded in the background")
        (packed,) = p.acquire(keys, mode=1)
        (decoded,) = p.acquire(keys, mode=0)
        (again,) = q.acquire(keys, mode=1)
        assert p.read(decoded) == smooth(keys[0], SMALL.size)
        assert packed.length < SMALL.size * 3 // 4
        assert q.read(again) == p.read(packed)


SMALL_MEMORY = ("--memory", "24MiB", "--slab", "1MiB", "--staging", "1MiB", "--policy", "lru")


def test_an_evicted_slab_is_asked_back_and_freed() -> None:
    """Another space needs the memory: whole slabs of the first are emptied and asked back."""
    with PrivateDaemon(*SMALL_MEMORY) as d:
        reader, writer = Peer(d.socket, SMALL, name="reader"), Peer(d.socket, OTHER, name="writer")
        tokens = prompt("retired", 1)
        (key,) = SMALL.chain(tokens)
        reader.put(tokens, smooth)
        (lease,) = reader.acquire([key])
        memory = reader.slab(lease.slab)
        assert reader.read(lease) == smooth(key, SMALL.size)

        # Leased: however full it gets, these bytes stay, and the block is found.
        for i in range(600):
            writer.put(prompt(f"press {i}", 1), smooth)
        assert reader.read(lease) == smooth(key, SMALL.size)
        assert tier(reader, key) == 1 and not retired(reader, lease.slab)

        # Given back: the slab is asked back; as long as it is mapped it is charged.
        reader.release([lease])
        crowd_out(writer, lambda: retired(reader, lease.slab), "the slab is asked back")
        assert reader.status_counters()["held_bytes"] == len(memory)
        reader.drop_slab(lease.slab)
        assert reader.status_counters()["held_bytes"] == 0
        assert not reader.call("SlabGet", slabs=wire.u32s(lease.slab)).fds
        assert reader.get([key]) in ([None], [smooth(key, SMALL.size)])
        assert writer.status_counters()["memory_used"] <= 24 << 20
        reader.close()
        writer.close()


def retired(p: Peer, slab: int) -> bool:
    """Whether a SlabRetire of this slab has come."""
    p.call("Ping")
    return any(push.name == "SlabRetire" and push.slab == slab for push in p.pushes)


def test_a_reader_that_never_answers_is_ended_only_over_its_quota() -> None:
    """held_per_uid is smaller than one slab: who keeps a retired slab is ended; others are not."""
    with PrivateDaemon(*SMALL_MEMORY, "--held-per-uid", "512KiB", "--retire-timeout", "100ms") as d:
        keeper, idle, writer = Peer(d.socket, SMALL), Peer(d.socket, SMALL), Peer(d.socket, OTHER)
        tokens = prompt("kept", 1)
        keeper.put(tokens, smooth)
        (lease,) = keeper.acquire(SMALL.chain(tokens))
        keeper.read(lease)
        keeper.release([lease])
        crowd_out(writer, lambda: writer.status_counters()["held_bytes"] > 0, "the slab is retired")
        assert keeper.closed()
        until(lambda: writer.status_counters()["held_bytes"] == 0, "its memory is given back")
        assert idle.call("Ping").status == "OK"
        idle.close()
        writer.close()
