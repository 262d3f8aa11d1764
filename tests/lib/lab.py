# SPDX-License-Identifier: Apache-2.0
"""What the integration and crash tests share: a block layout, payloads that identify themselves, a
peer that walks the steps of put and get one by one, counters, processes to kill.

Nothing here waits for a time to pass: until() polls a condition and fails after a hang guard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import random
import select
import signal
import subprocess
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import wire

HANG_GUARD_S = 60
BLOCK_TOKENS = 16

# ---- layout, tokens, payloads ----


class Layout:
    """Blocks [layer][K, V][token][head][dim] of f16, 16 tokens; `size` bytes in all."""

    def __init__(self, size: int = 64 << 10, *, content: bytes = b"\x11" * 32, n_layers: int = 2) -> None:
        dim = size // (n_layers * 2 * BLOCK_TOKENS * 2)
        length = BLOCK_TOKENS * dim * 2
        self.size, self.dim, self.n_layers, self.content = size, dim, n_layers, content
        assert length * n_layers * 2 == size
        self.segments = [
            (i // 2, i % 2, 2, i * length, length, dim * 2, dim * 2, 2) for i in range(2 * n_layers)
        ]
        self.layers = [(1, dim, dim)] * n_layers
        self.descriptor = wire.descriptor(
            self.segments, layers=self.layers, block_tokens=BLOCK_TOKENS, block_bytes=size, content=content
        )
        self.fingerprint = hashlib.sha256(self.descriptor).digest()

    def root(self, salt: bytes = b"") -> bytes:
        return wire.key_root(self.fingerprint, salt)

    def chain(self, tokens: list[int], salt: bytes = b"") -> list[bytes]:
        return wire.chain(self.root(salt), tokens, BLOCK_TOKENS)


def prompt(seed: int | str, blocks: int, tail: int = 0) -> list[int]:
    """Token ids of a prompt; equal seeds give equal prefixes."""
    ids = random.Random(f"prompt {seed}")
    return [ids.randrange(128_000) for _ in range(blocks * BLOCK_TOKENS + tail)]


def payload(key: bytes, size: int) -> bytes:
    """The bytes that belong to a key and to no other: any mix-up shows."""
    return hashlib.shake_256(b"payload" + key).digest(size)


def smooth(key: bytes, size: int, high: int = 0x3C) -> bytes:
    """Like payload(), but compressible as real K and V are: f16 of one magnitude (0x3C: 1 to 1.25)."""
    out = bytearray(size)
    out[0::2] = payload(key, size // 2)
    out[1::2] = bytes([high]) * (size // 2)
    return bytes(out)


def error(got: bytes, want: bytes) -> float:
    """rms error of f16 data over its rms deviation from the mean."""
    import numpy

    a, b = (numpy.frombuffer(x, numpy.float16).astype(numpy.float64) for x in (got, want))
    return float(numpy.sqrt(((a - b) ** 2).sum() / ((b - b.mean()) ** 2).sum()))


# ---- a peer ----


class Lease:
    def __init__(self, record: tuple[Any, ...]) -> None:
        number, self.tier, self.preset, self.slab, self.id, self.offset, self.length, self.tokens, self.crc = record
        self.status = wire.STATUS[number]


class Slot:
    def __init__(self, record: tuple[Any, ...]) -> None:
        number, _, self.busy_ms, self.id, self.offset, self.length = record
        self.status = wire.STATUS[number]


class Peer(wire.Wire):
    """One connection with one space of one layout."""

    def __init__(
        self,
        path: str,
        layout: Layout | None = None,
        *,
        kind: int = 0,
        quality: int = 0,
        scope: int = 0,
        salt: bytes = b"",
        name: str = "peer",
    ) -> None:
        super().__init__(path)
        self.salt = salt
        self.hello_reply = ok(self.hello(name))
        self.staging: mmap.mmap | None = None
        self.slabs: dict[int, mmap.mmap] = {}
        self._lease = 0
        if layout is not None:
            self.layout = layout
            self.space: int = ok(
                self.call(
                    "SpaceOpen", descriptor=layout.descriptor, kind=kind, quality_class=quality,
                    scope=scope, salt=salt,
                )
            ).space  # fmt: skip

    # put

    def open_staging(self) -> mmap.mmap:
        if self.staging is None:
            reply = ok(self.call("StagingGet"))
            assert len(reply.fds) == 1
            self.staging = mmap.mmap(reply.fds[0], reply.size)
            self.staging_fd = reply.fds[0]
            self.lists = reply.lists
        return self.staging

    def reserve(self, tokens: list[int], parent: bytes | None = None) -> list[Slot]:
        """Slots for the run of blocks with these tokens under parent (default: the root)."""
        self.open_staging()
        parent = self.layout.root(self.salt) if parent is None else parent
        keys = wire.chain(parent, tokens, BLOCK_TOKENS)
        reply = ok(
            self.call(
                "Reserve", space=self.space, parent=parent, keys=b"".join(keys), tokens=wire.u32s(*tokens)
            )
        )
        return [Slot(r) for r in wire.records(wire.SLOT, reply.slots)]

    def fill(self, slot: Slot, data: bytes) -> None:
        assert self.staging is not None
        self.staging[slot.offset : slot.offset + len(data)] = data

    def commit(self, slots: list[Slot]) -> list[str]:
        reply = ok(self.call("Commit", slots=wire.u64s(*(s.id for s in slots))))
        return wire.statuses(reply.statuses)

    def put(
        self, tokens: list[int], data: Callable[[bytes, int], bytes] = payload, parent: bytes | None = None
    ) -> list[str]:
        """Stores a run of blocks with their own payloads; a status per block."""
        keys = wire.chain(self.layout.root(self.salt) if parent is None else parent, tokens, BLOCK_TOKENS)
        slots = self.reserve(tokens, parent)
        given = [s for s in slots if s.status == "OK"]
        for key, slot in zip(keys, slots, strict=True):
            if slot.status == "OK":
                self.fill(slot, data(key, self.layout.size))
        results = iter(self.commit(given) if given else [])
        return [next(results) if s.status == "OK" else s.status for s in slots]

    # get

    def lookup(self, tokens: list[int]) -> int:
        """Leading full blocks of a prompt that are stored."""
        keys = self.layout.chain(tokens, self.salt)[: len(tokens) // BLOCK_TOKENS]
        present: int = ok(self.call("Lookup", space=self.space, keys=b"".join(keys))).present
        return present

    def lease_ids(self, n: int) -> int:
        first = self._lease + 1
        self._lease += n
        return first

    def acquire(self, keys: list[bytes], mode: int = 0) -> list[Lease]:
        """Final records: waits for the Ready of those that are pending."""
        first = self.lease_ids(len(keys))
        reply = ok(
            self.call("Acquire", space=self.space, keys=b"".join(keys), mode=mode, lease=first)
        )
        return self.settle(self.leases(reply.leases))

    def leases(self, data: bytes) -> list[Lease]:
        return [Lease(record) for record in wire.records(wire.LEASE, data)]

    def settle(self, leases: list[Lease]) -> list[Lease]:
        waiting = {lease.id for lease in leases if lease.status == "PENDING"}
        late: dict[int, Lease] = {}
        while waiting - late.keys():
            for lease in self.leases(self.wait_push("Ready").leases):
                late[lease.id] = lease
        return [late.get(lease.id, lease) for lease in leases]

    def slab(self, number: int) -> mmap.mmap:
        """The slab's memory, mapped read-only once."""
        if number not in self.slabs:
            reply = ok(self.call("SlabGet", slabs=wire.u32s(number)))
            ((got, status, size),) = wire.records(wire.SLAB, reply.slabs)
            assert (got, wire.STATUS[status], len(reply.fds)) == (number, "OK", 1)
            self.slabs[number] = mmap.mmap(reply.fds[0], size, prot=mmap.PROT_READ)
            reply.close()
        return self.slabs[number]

    def read(self, lease: Lease) -> bytes:
        return self.slab(lease.slab)[lease.offset : lease.offset + lease.length]

    def release(self, leases: list[Lease]) -> None:
        ids = [lease.id for lease in leases if lease.status == "OK"]
        ok(self.call("Release", leases=wire.u64s(*ids)))

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Blocks of keys, None for a miss."""
        leases = self.acquire(keys)
        out = [self.read(lease) if lease.status == "OK" else None for lease in leases]
        self.release(leases)
        return out

    def drop_slab(self, number: int) -> None:
        """Unmaps and answers a SlabRetire."""
        memory = self.slabs.pop(number, None)
        if memory is not None:
            memory.close()
        ok(self.call("SlabDropped", slabs=wire.u32s(number)))

    def close(self) -> None:
        """Ends the connection and unmaps everything but what somebody still looks at."""
        super().close()
        maps = list(self.slabs.values())
        if self.staging is not None:
            maps.append(self.staging)
            os.close(self.staging_fd)
        self.slabs, self.staging = {}, None
        for memory in maps:
            with contextlib.suppress(BufferError):
                memory.close()

    # counters

    def status_counters(self) -> dict[str, Any]:
        return dict(ok(self.call("Status")).fields)

    def space_stats(self) -> dict[str, int]:
        return dict(ok(self.call("Stats", space=self.space)).fields)

    def namespace_stats(self) -> dict[str, int]:
        return dict(ok(self.call("Stats")).fields)


def ok(reply: wire.Packet) -> wire.Packet:
    assert reply.status == "OK", reply
    return reply


def crowd_out(p: Peer, gone: Callable[[], bool], what: str) -> None:
    """Stores other prompts in p's space until the condition holds: small memories must evict. How
    many that takes depends on the machine, as packing that found no room rests for a second or more."""
    answers: Counter[str] = Counter()
    end = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end:
        if gone():
            return
        answers.update(p.put(prompt(f"crowd {os.getpid()} {id(p)} {answers.total()}", 1), smooth))
    raise AssertionError(f"never happened: {what}; the puts: {dict(answers)}; {p.space_stats()}")


# ---- conditions ----


def until(condition: Callable[[], Any], what: str) -> Any:
    """Polls until the condition is true and returns its value; fails after the hang guard."""
    end = time.monotonic() + HANG_GUARD_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.002)


HELD = ("clients", "leases", "reserved", "staging_bytes", "held_bytes")


def held(monitor: Peer) -> dict[str, int]:
    """What connections hold of the daemon, in all."""
    counters = monitor.status_counters()
    return {name: counters[name] for name in HELD}


def until_held(monitor: Peer, want: dict[str, int]) -> None:
    last: dict[str, int] = {}

    def same() -> bool:
        last.update(held(monitor))
        return last == want

    try:
        until(same, "held counters go back")
    except AssertionError:
        raise AssertionError(f"held {last} instead of {want}") from None


def fds(pid: int) -> int:
    """Open descriptors of a process; 0 where the kernel doesn't tell (daemons hide from users)."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return 0


def client_fds(pid: int, monitor: Peer) -> int:
    """Descriptors of a daemon that are not slabs."""
    return fds(pid) - int(monitor.status_counters()["slabs"])


def anonymous_rss(pid: int) -> int:
    """Private memory of a process in bytes, shared slabs left out. Always 0 in a sanitizer build,
    which keeps freed memory."""
    if os.environ.get("CST_SANITIZED") == "1":
        return 0
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def mapping(pid: int, address: int) -> tuple[str, int, int]:
    """(device, inode, offset in the file) of an address of a process."""
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            area, _, offset, device, inode = line.split()[:5]
            start, end = (int(x, 16) for x in area.split("-"))
            if start <= address < end:
                return device, int(inode), int(offset, 16) + address - start
    raise AssertionError(f"process {pid} has nothing at {address:#x}")


def frames(pid: int, address: int, size: int) -> list[int]:
    """Physical page numbers behind an address range; zeroes where the kernel doesn't tell. The
    process must have touched the pages."""
    page = mmap.PAGESIZE
    first, last = address // page, (address + size - 1) // page
    with open(f"/proc/{pid}/pagemap", "rb") as f:
        f.seek(first * 8)
        raw = f.read((last - first + 1) * 8)
    return [int.from_bytes(raw[i : i + 8], "little") & ((1 << 55) - 1) for i in range(0, len(raw), 8)]


# ---- processes to kill ----


class Victim:
    """A forked process that runs `body(report)` and then sleeps for ever. `report()` sends one byte
    that step() here awaits. linger() inside it forks a child that keeps every descriptor open until
    close() here, however the victim ends."""

    def __init__(self, body: Callable[[Callable[[], None]], None]) -> None:
        self.pipe, report = os.pipe()
        life, self.life = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(report, _HIGH)
                os.dup2(life, _HIGH + 1)
                os.closerange(3, _HIGH)
                os.closerange(_HIGH + 2, 4096)
                body(_report)
                while True:
                    signal.pause()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        os.close(report)
        os.close(life)

    def step(self) -> None:
        """Waits for its next report. Fails if it ended instead."""
        assert os.read(self.pipe, 1), "the victim failed; see its output"

    def kill(self) -> None:
        """kill -9, and reaps it. Its lingering children stay."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self) -> None:
        """Ends everything."""
        self.kill()
        os.close(self.pipe)
        os.close(self.life)

    def __enter__(self) -> Victim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


_HIGH = 1000  # the victim's report pipe and its life line


def _report() -> None:
    os.write(_HIGH, b".")


def linger() -> None:
    """In a victim: forks a child that holds all its descriptors until the test lets go."""
    if os.fork() == 0:
        os.close(_HIGH)
        os.read(_HIGH + 1, 1)
        os._exit(0)


class Worker:
    """tests/crash/load_worker: puts and gets through libcistern and checks every byte it reads."""

    def __init__(self, path: str, seed: int, prompts: int = 1500) -> None:
        program = os.path.join(os.environ["CST_BUILD_ROOT"], "tests", "crash", "load_worker")
        self.process = subprocess.Popen(
            [program, path, str(seed), str(prompts)], stdout=subprocess.PIPE, bufsize=0
        )
        self.counts = {c: 0 for c in "pgmx"}

    def read(self, wait: bool = True) -> str:
        """What it has done since the last time; waits for something, or "" if there is nothing yet."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANG_GUARD_S if wait else 0)
        assert ready or not wait, "a worker hangs"
        if not ready:
            return ""
        got = self.process.stdout.read(4096).decode()
        assert got, f"a worker ended with {self.process.wait()}"
        for c in got:
            self.counts[c] += 1
        return got

    def carry_on(self, puts: int, gets: int) -> None:
        """Until so many more of its puts were answered, and so many blocks read."""
        want = {"p": self.counts["p"] + puts, "g": self.counts["g"] + gets}
        while any(self.counts[c] < n for c, n in want.items()):
            self.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Connections made inside belong to this uid: the kernel notes it at connect()."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def run_as(uid: int, body: Callable[[], Any]) -> Any:
    """Runs body() in a process of this uid and returns what it returns (as JSON carries it)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with os.fdopen(writer, "w") as out:
                json.dump(body(), out)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    os.close(writer)
    with os.fdopen(reader) as f:
        text = f.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the process failed; see its output"
    return json.loads(text)


def rounds(default: int, long: int) -> int:
    """How often a random test repeats: more with $CST_LONG=1 (scripts/test --long), ten times that
    with 10, fewer in the slower sanitizer builds."""
    times = int(os.environ.get("CST_LONG") or 0)
    if times:
        return long * times
    return default // 5 if os.environ.get("CST_SANITIZED") == "1" else default
