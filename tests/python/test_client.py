# SPDX-License-Identifier: Apache-2.0
"""The package against a private daemon: what a user of Client, Space, Lease and Slots relies on."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
from collections.abc import Iterator

import cistern
import numpy
import pytest
from cistern import Kind, Quality, Status, Tier
from lab import HANG_GUARD_S, Peer, Layout, payload, prompt, until
from private_daemon import PrivateDaemon

LAYOUT = cistern.Descriptor.rows(2, 1, 128, content_id=b"\x33" * 32, block_tokens=16)
SIZE = LAYOUT.block_bytes


@pytest.fixture(scope="module")
def daemon() -> Iterator[PrivateDaemon]:
    with PrivateDaemon() as d:
        yield d


@pytest.fixture
def client(daemon: PrivateDaemon) -> Iterator[cistern.Client]:
    with cistern.Client(daemon.socket, name="test") as c:
        yield c


@pytest.fixture
def space(client: cistern.Client) -> Iterator[cistern.Space]:
    with client.space(LAYOUT) as s:
        yield s


def blocks_of(keys: cistern.Keys) -> list[bytes]:
    return [payload(key, SIZE) for key in keys]


def leases_of(daemon: PrivateDaemon) -> int:
    with Peer(daemon.socket) as p:
        return int(p.status_counters()["leases"])


def test_a_prompt_is_stored_found_and_read(space: cistern.Space) -> None:
    tokens = prompt("whole", 3, tail=5)
    keys = space.keys(tokens)
    assert len(keys) == 4
    assert space.put(tokens, blocks_of(keys)) == [Status.OK] * 4
    assert space.put(tokens, blocks_of(keys)) == [Status.PRESENT] * 4
    match = space.lookup(tokens)
    assert (match.blocks, match.partial_tokens, match.tokens) == (3, 5, 53)
    assert match.partial_key == keys[3]
    with space.acquire(keys) as leases:
        assert [bytes(lease.data) for lease in leases] == blocks_of(keys)
        assert [lease.tokens for lease in leases] == [16, 16, 16, 5]
    with space.fetch(tokens) as hit:
        assert (hit.tokens, len(hit), hit.blocks) == (53, 4, 4)
    other = tokens[:40] + [1] * 20
    with space.fetch(other) as hit:
        assert (hit.tokens, len(hit), hit.blocks) == (40, 3, 2)
        assert [lease.key for lease in hit] == list(keys[:3])
    assert space.lookup(prompt("absent", 2)).tokens == 0


def test_each_prompt_stores_what_the_last_one_lacked(space: cistern.Space) -> None:
    """The loop of a worker: whatever the hit ends in, the rest can be stored below it."""
    base = prompt("worker", 4)
    for tokens in (base[:37], base[:37] + [1, 2, 3], base[:45], base, base[:20] + [9] * 30, base[:37]):
        with space.fetch(tokens) as hit:
            start = hit.blocks
        rest = blocks_of(space.keys(tokens)[start:])
        assert set(space.put(tokens, rest, start=start)) <= {Status.OK, Status.PRESENT}
        with space.fetch(tokens) as hit:
            assert hit.tokens == len(tokens)
            assert len(space.keys(tokens)) - hit.blocks in (0, 1)  # an equal tail may lie elsewhere


def test_keys_are_those_of_the_wire(space: cistern.Space) -> None:
    """hashlib is the oracle for the chain."""
    import wire

    tokens = prompt("keys", 2, tail=3)
    root = wire.key_root(LAYOUT.fingerprint())
    assert space.root == root
    assert list(space.keys(tokens)) == wire.chain(root, tokens, 16)
    assert cistern.key_block(root, tokens[:16]) == wire.key_block(root, tokens[:16])
    assert cistern.key_block(root, [1], b"image") == wire.key_block(root, [1], b"image")


def test_a_later_turn_stores_only_what_is_new(space: cistern.Space) -> None:
    tokens = prompt("turns", 4)
    keys = space.keys(tokens)
    assert space.put(tokens[:32], blocks_of(keys[:2])) == [Status.OK] * 2
    assert space.put(tokens, blocks_of(keys[2:]), start=2) == [Status.OK] * 2
    assert space.lookup(tokens).blocks == 4
    with pytest.raises(ValueError, match="not one of"):
        space.put(tokens, [], start=5)
    with pytest.raises(ValueError, match="2 blocks for 4 keys"):
        space.put(tokens, blocks_of(keys[:2]))
    with pytest.raises(ValueError, match="bytes instead of"):
        space.put(tokens, [b"short"] * 4)


def test_slots_are_filled_in_place(space: cistern.Space) -> None:
    tokens = prompt("slots", 2)
    keys = space.keys(tokens)
    with space.reserve(tokens) as slots:
        assert slots.statuses == [Status.OK] * 2
        for key, slot in zip(keys, slots, strict=True):
            slot.data[:] = payload(key, SIZE)
        assert space.lookup(tokens).blocks == 0
        surprisals = numpy.linspace(0, 8, 32).astype(numpy.float16)
        assert slots.commit(surprisals) == [Status.OK] * 2
        with pytest.raises(cistern.Misuse):
            slots[0].data
        with pytest.raises(cistern.Misuse):
            slots.commit()
    assert space.lookup(tokens).blocks == 2
    with space.acquire(keys) as leases:
        assert [bytes(lease.data) for lease in leases] == blocks_of(keys)


def test_slots_that_are_left_without_commit_are_aborted(space: cistern.Space) -> None:
    tokens = prompt("abort", 2)
    with pytest.raises(KeyError), space.reserve(tokens) as slots:
        assert slots.statuses == [Status.OK] * 2
        raise KeyError
    assert space.lookup(tokens).tokens == 0
    with space.reserve(tokens) as slots:
        assert slots.statuses == [Status.OK] * 2


def test_forgotten_slots_and_leases_are_given_back(space: cistern.Space, daemon: PrivateDaemon) -> None:
    keys = stored(space, "forgotten leases")
    slots, leases = space.reserve(prompt("forgotten", 2)), space.acquire(keys)
    with Peer(daemon.socket) as p:
        held = p.status_counters()
        assert (held["reserved"], held["leases"]) == (2, 2)
        del slots, leases
        gc.collect()
        until(lambda: p.status_counters()["reserved"] == 0, "the slots are aborted")
        until(lambda: p.status_counters()["leases"] == 0, "the leases are released")


def test_surprisals_of_a_wrong_number_are_the_callers_mistake(space: cistern.Space) -> None:
    with space.reserve(prompt("surprisals", 1)) as slots, pytest.raises(cistern.Misuse):
        slots.commit([1.0] * 3)


def stored(space: cistern.Space, name: str, n: int = 2) -> cistern.Keys:
    tokens = prompt(name, n)
    keys = space.keys(tokens)
    assert set(space.put(tokens, blocks_of(keys))) <= {Status.OK, Status.PRESENT}
    return keys


def test_leased_memory_is_read_only(space: cistern.Space) -> None:
    with space.acquire(stored(space, "read only")) as leases:
        data = leases[0].data
        assert data.readonly and data.nbytes == SIZE
        with pytest.raises(TypeError):
            data[0] = 1
        array = numpy.asarray(leases[0])
        assert not array.flags.writeable
        assert numpy.shares_memory(array, numpy.frombuffer(data, numpy.uint8))


def test_a_released_lease_raises(space: cistern.Space, daemon: PrivateDaemon) -> None:
    leases = space.acquire(stored(space, "released"))
    lease = leases[0]
    view = lease.data
    assert leases_of(daemon) == 2
    with lease:
        pass
    assert lease.released
    with pytest.raises(cistern.Misuse, match="released"):
        lease.data
    with pytest.raises(ValueError):
        view[0]
    assert leases_of(daemon) == 1
    lease.release()
    leases.release()
    leases.release()
    assert leases_of(daemon) == 0


def test_views_outlive_the_release_and_the_client(daemon: PrivateDaemon) -> None:
    """The memory is given back with the last view; nothing dangles, whatever is kept."""
    client = cistern.Client(daemon.socket)
    space = client.space(LAYOUT)
    keys = stored(space, "views")
    with space.acquire(keys) as leases:
        array = numpy.frombuffer(leases[0].data, numpy.float16)
        part = leases[1].data[100:200]
    want = payload(keys[0], SIZE)
    assert leases_of(daemon) == 2
    client.close()
    assert array.tobytes() == want and bytes(part) == payload(keys[1], SIZE)[100:200]
    del part
    half = array[: len(array) // 2]
    del array
    assert half.tobytes() == want[: SIZE // 2]
    del half, leases, space
    gc.collect()
    until(lambda: leases_of(daemon) == 0, "the last view gives the lease back")


def test_leases_can_be_given_back_in_the_next_acquire(space: cistern.Space, daemon: PrivateDaemon) -> None:
    keys = stored(space, "chained", 4)
    leases = space.acquire(keys[:2])
    leases2 = space.acquire(keys[2:], release=[lease for lease in leases if lease])
    assert leases[0].released and leases_of(daemon) == 2
    leases2.release()


def test_an_acquire_that_is_wrong_gives_nothing_back(space: cistern.Space, daemon: PrivateDaemon) -> None:
    keys = stored(space, "wrong")
    with space.acquire(keys) as leases:
        for wrong in ({"layers": range(1, 3)}, {"layers": range(-1, 1)}, {"timeout": 1e12}):
            with pytest.raises((ValueError, OverflowError)):
                space.acquire(keys, release=[leases[0]], **wrong)
            assert not leases[0].released
        assert leases_of(daemon) == 2
    assert leases_of(daemon) == 0


def test_absent_keys_are_none_with_a_status(space: cistern.Space) -> None:
    keys = stored(space, "some")
    absent = cistern.Keys(bytes(32))
    with space.acquire(keys + absent) as leases:
        assert leases.statuses == [Status.OK, Status.OK, Status.NOT_FOUND]
        assert leases[2] is None and len(leases.leading()) == 2


def test_get_into_copies(space: cistern.Space) -> None:
    keys = stored(space, "copy", 3)
    out = numpy.zeros((4, SIZE), numpy.uint8)
    statuses = space.get_into(keys + cistern.Keys(bytes(32)), out)
    assert statuses == [Status.OK] * 3 + [Status.NOT_FOUND]
    assert [row.tobytes() for row in out] == [*blocks_of(keys), bytes(SIZE)]
    head = bytearray(10)
    assert space.get_into(keys[:1], [head]) == [Status.OK]
    assert head == payload(keys[0], SIZE)[:10]


def test_packed_leases_are_decoded_here(space: cistern.Space) -> None:
    tokens = prompt("packed", 1)
    keys = space.keys(tokens)
    block = (numpy.arange(SIZE // 2) % 7).astype(numpy.float16).tobytes()
    space.put(tokens, [block])
    until(lambda: space.stats()["packed_bytes"] > 0, "the block is encoded in the background")

    def frame() -> bool:
        with space.acquire(keys, packed=True) as leases:
            return leases[0].packed

    until(frame, "a frame exists")
    with space.acquire(keys, packed=True) as leases:
        assert len(leases[0].data) < SIZE
        assert bytes(leases[0].decode()) == block
        into = bytearray(SIZE)
        leases[0].decode(into)
        assert into == block
        with pytest.raises(cistern.CisternError):
            leases[0].decode(bytearray(8))


def test_flat_spaces_take_any_keys(client: cistern.Client) -> None:
    with client.space(LAYOUT, kind=Kind.FLAT) as space:
        keys = cistern.Keys.of(cistern.key_from_bytes(b"engine %d" % i) for i in range(5))
        assert space.put_flat(keys[::2], blocks_of(keys[::2])) == [Status.OK] * 3
        assert [tier != Tier.NONE for tier in space.lookup_each(keys)] == [True, False, True, False, True]
        with space.reserve_flat(keys[1:2]) as slots:
            slots[0].data[:] = payload(keys[1], SIZE)
            assert slots.commit() == [Status.OK]
        with space.acquire(keys[:3]) as leases:
            assert [bytes(lease.data) for lease in leases] == blocks_of(keys[:3])


def test_erase_pin_touch_and_clear(space: cistern.Space, client: cistern.Client) -> None:
    with client.space(LAYOUT, salt=b"care") as own:
        tokens = prompt("care", 3)
        keys = own.keys(tokens)
        own.put(tokens, blocks_of(keys))
        own.touch(keys)
        own.pin(keys, ttl=60)
        own.unpin(keys)
        assert own.erase(keys[1:2]) == 2, "a block takes what is below it along"
        assert own.lookup(tokens).blocks == 1
        assert own.erase(keys[:0]) == 0
        assert own.lookup(tokens).blocks == 1
        assert own.clear() >= 1
        assert own.lookup(tokens).tokens == 0


def test_explain_says_why(space: cistern.Space, client: cistern.Client) -> None:
    tokens = prompt("explained", 2)
    space.put(tokens, blocks_of(space.keys(tokens)))
    assert space.explain(prompt("never seen", 2))
    other = cistern.Descriptor.rows(2, 1, 128, content_id=b"\x33" * 32, block_tokens=16, engine="other")
    with client.space(other) as near:
        assert "engine" in near.explain(tokens)


def test_stats_count(space: cistern.Space, client: cistern.Client) -> None:
    before = space.stats()
    with space.acquire(stored(space, "counted")) as leases:
        assert len(leases) == 2
    after = space.stats()
    assert after["served_blocks"] - before["served_blocks"] == 2
    assert client.stats()["stored_blocks"] >= after["stored_blocks"] > 0


def test_client_info(client: cistern.Client) -> None:
    client.ping()
    assert client.epoch != 0
    assert client.namespace == f"uid-{os.getuid()}"
    assert cistern.version().count(".") == 2


def test_salts_and_classes_are_spaces_of_their_own(client: cistern.Client) -> None:
    tokens = prompt("salted", 1)
    with client.space(LAYOUT, salt=b"a") as a, client.space(LAYOUT, salt=b"b") as b:
        keys = a.keys(tokens)
        a.put(tokens, blocks_of(keys))
        assert a.lookup(tokens).blocks == 1 and b.lookup(tokens).blocks == 0
        assert b.keys(tokens) != keys
    with pytest.raises(cistern.Refused):
        client.space(LAYOUT, quality=Quality.COLD)
    with pytest.raises(cistern.Misuse, match="salt"):
        client.space(LAYOUT, salt=bytes(65))


def test_a_bad_descriptor_names_its_field(client: cistern.Client) -> None:
    bad = cistern.Descriptor.rows(1, 1, 8, content_id=b"\x01" * 32, block_tokens=7)
    for call in (bad.fingerprint, lambda: client.space(bad)):
        with pytest.raises(cistern.Misuse, match="block_tokens"):
            call()


def test_a_closed_client_raises_and_closes_twice(daemon: PrivateDaemon) -> None:
    client = cistern.Client(daemon.socket)
    space = client.space(LAYOUT)
    slots = space.reserve(prompt("closed", 1))
    assert slots.statuses == [Status.OK]
    client.close()
    client.close()
    space.close()
    slots.abort()
    for call in (client.ping, lambda: space.lookup([1]), lambda: client.space(LAYOUT)):
        with pytest.raises(cistern.Misuse, match="closed"):
            call()


def test_threads_share_a_client(space: cistern.Space) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(40):
                tokens = prompt(f"thread {number % 2} {i}", 2)
                keys = space.keys(tokens)
                space.put(tokens, blocks_of(keys))
                with space.acquire(keys) as leases:
                    for key, lease in zip(keys, leases, strict=True):
                        assert lease is None or bytes(lease.data) == payload(key, SIZE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert errors == []


def test_a_forked_child_must_open_its_own(client: cistern.Client, space: cistern.Space) -> None:
    keys = stored(space, "forked")
    leases = space.acquire(keys)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                client.ping()
            except cistern.Forked:
                code = 2
            try:
                space.lookup([1] * 16)
            except cistern.Forked:
                code += 2
            leases.release()
            client.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    assert bytes(leases[0].data) == payload(keys[0], SIZE)
    client.ping()
    leases.release()


def test_a_forked_child_does_not_wait_for_a_thread_that_is_not_there(
    client: cistern.Client, space: cistern.Space
) -> None:
    """The package's own lock may be another thread's when the process forks."""
    leases = space.acquire(stored(space, "fork lock"))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with client.handle()._lock:
            held.set()
            done.wait(HANG_GUARD_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(HANG_GUARD_S)
    pid = os.fork()
    if pid == 0:
        leases.release()
        os._exit(0)
    done.set()
    thread.join(HANG_GUARD_S)
    try:
        until(lambda: os.waitpid(pid, os.WNOHANG)[0], "the child ends")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


# ---- submit and drain ----


def drain(client: cistern.Client, n: int) -> list[cistern.Submission]:
    done: list[cistern.Submission] = []
    while len(done) < n:
        ready, _, _ = select.select([client.fileno()], [], [], HANG_GUARD_S)
        assert ready, "no completion"
        done += client.drain()
    return done


def test_submissions_complete_through_the_event_descriptor(daemon: PrivateDaemon) -> None:
    with cistern.Client(daemon.socket, async_=True) as client, client.space(LAYOUT) as space:
        tokens = [prompt(f"async {i}", 2) for i in range(8)]
        puts = [space.submit_put(t, blocks_of(space.keys(t))) for t in tokens]
        gc.collect()  # nothing but the submissions keeps keys, ids and blocks alive
        done = drain(client, len(puts))
        assert {s.ticket for s in done} == {s.ticket for s in puts}
        assert all(s.done and s.statuses == [Status.OK] * 2 for s in puts)
        outs = [numpy.zeros((2, SIZE), numpy.uint8) for _ in tokens]
        gets = [space.submit_get_into(space.keys(t), out) for t, out in zip(tokens, outs, strict=True)]
        drain(client, len(gets))
        for t, out, get in zip(tokens, outs, gets, strict=True):
            assert get.statuses == [Status.OK] * 2
            assert [row.tobytes() for row in out] == blocks_of(space.keys(t))
        assert client.drain() == []


def test_lookup_each_in_the_background(daemon: PrivateDaemon) -> None:
    with cistern.Client(daemon.socket, async_=True) as client:
        with client.space(LAYOUT, kind=Kind.FLAT) as space:
            keys = cistern.Keys.of(cistern.key_from_bytes(b"bg %d" % i) for i in range(3))
            space.put_flat(keys[:1], blocks_of(keys[:1]))
            look = space.submit_lookup_each(keys)
            drain(client, 1)
            assert [tier != Tier.NONE for tier in look.tiers] == [True, False, False]


def test_a_client_without_async_has_no_event_descriptor(client: cistern.Client) -> None:
    with pytest.raises(cistern.CisternError):
        client.fileno()
