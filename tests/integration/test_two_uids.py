# SPDX-License-Identifier: Apache-2.0
"""Users against each other: nobody writes into a slab, whatever way is tried, and nothing of one
user's namespace shows in another's, not even whether it is there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wire
from lab import Layout, Peer, as_user, ok, payload, prompt, run_as, smooth, until
from private_daemon import PrivateDaemon

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="skipped: needs root")

A, B = 61001, 61002
LAYOUT = Layout(16 << 10)
TOKENS = prompt("uid", 3)
KEYS = LAYOUT.chain(TOKENS)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = libc.mprotect.argtypes
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
PUNCH_HOLE, KEEP_SIZE, ZERO_RANGE, COLLAPSE = 2, 1, 16, 8
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 1, 2, 4, 16


def call(function: Any, *arguments: Any) -> None:
    """A libc call that raises its errno."""
    if function(*arguments) in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def map_then(fd: int, size: int, function: Any, argument: int) -> None:
    """Maps read-only, as clients do, then changes the mapping."""
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    assert at != ctypes.c_void_p(-1).value
    call(function, at, size, argument)
    ctypes.memset(at, 0xEE, 16)


def reopened(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags)


def copy_range(fd: int) -> None:
    source = os.memfd_create("source")
    os.write(source, b"\xee" * 4096)
    os.copy_file_range(source, fd, 4096, 0, 0)


def splice(fd: int) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\xee" * 64)
    os.splice(reader, fd, 64, offset_dst=0)


WRITE_PATHS: dict[str, Callable[[int, int], Any]] = {
    "write": lambda fd, size: os.write(fd, b"\xee"),
    "pwrite": lambda fd, size: os.pwrite(fd, b"\xee" * 64, 0),
    "pwritev": lambda fd, size: os.pwritev(fd, [b"\xee"], 0),
    "mmap": lambda fd, size: mmap.mmap(fd, size).__setitem__(0, 0xEE),
    "mprotect": lambda fd, size: map_then(fd, size, libc.mprotect, mmap.PROT_READ | mmap.PROT_WRITE),
    "madvise remove": lambda fd, size: map_then(fd, size, libc.madvise, mmap.MADV_REMOVE),
    "reopen and write": lambda fd, size: os.pwrite(reopened(fd, os.O_RDWR), b"\xee", 0),
    "reopen and mmap": lambda fd, size: mmap.mmap(reopened(fd, os.O_RDWR), size),
    "reopen to truncate": lambda fd, size: reopened(fd, os.O_RDWR | os.O_TRUNC),
    "punch hole": lambda fd, size: call(libc.fallocate, fd, PUNCH_HOLE | KEEP_SIZE, 0, 4096),
    "reopen and punch": lambda fd, size: call(
        libc.fallocate, reopened(fd, os.O_RDWR), PUNCH_HOLE | KEEP_SIZE, 0, 4096
    ),
    "zero range": lambda fd, size: call(libc.fallocate, fd, ZERO_RANGE | KEEP_SIZE, 0, 4096),
    "shrink": lambda fd, size: os.ftruncate(fd, 0),
    "grow": lambda fd, size: os.ftruncate(fd, size + 4096),
    "shrink by fallocate": lambda fd, size: call(libc.fallocate, fd, COLLAPSE, 0, 4096),
    "grow by fallocate": lambda fd, size: os.posix_fallocate(fd, size, 4096),
    "copy_file_range": lambda fd, size: copy_range(fd),
    "splice": lambda fd, size: splice(fd),
    "add a seal": lambda fd, size: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
}
REFUSALS = {errno.EPERM, errno.EACCES, errno.EBADF, errno.EOPNOTSUPP, errno.EINVAL, errno.ETXTBSY}


def not_refused(fd: int, size: int, paths: dict[str, Callable[[int, int], Any]]) -> list[str]:
    out = []
    for name, path in paths.items():
        try:
            path(fd, size)
            out.append(name)
        except OSError as error:
            if error.errno not in REFUSALS:
                out.append(f"{name}: {error}")
        except ValueError:
            pass  # Python's mmap refuses before the kernel is asked: the descriptor is read-only
    return out


@pytest.fixture(params=[0, A], ids=["root's daemon", "user's daemon"])
def daemon(request: pytest.FixtureRequest) -> Iterator[PrivateDaemon]:
    with PrivateDaemon("--class", "near-lossless", user=request.param) as d:
        yield d


def attack_slabs(path: str, mode: int, quality: int) -> list[str]:
    """Puts blocks, leases them and tries to write where they are."""
    with Peer(path, LAYOUT, quality=quality) as p:
        p.put(TOKENS, smooth)
        if mode == 1:  # encoding happens in the background
            until(lambda: p.space_stats()["encodes"] == 3, "the blocks are packed")
        lease = p.acquire(KEYS[:1], mode)[0]
        assert lease.status == "OK" and (lease.length < LAYOUT.size) == (mode == 1)
        before = p.read(lease)
        reply = ok(p.call("SlabGet", slabs=wire.u32s(lease.slab)))
        ((_, _, size),) = wire.records(wire.SLAB, reply.slabs)
        broken = not_refused(reply.fds[0], size, WRITE_PATHS)
        seals = fcntl.fcntl(reply.fds[0], fcntl.F_GET_SEALS)
        wanted = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE
        if seals & wanted != wanted:
            broken.append(f"seals {seals:#x}")
        if os.fstat(reply.fds[0]).st_size != size:
            broken.append("another size")
        if p.read(p.acquire(KEYS[:1], mode)[0]) != before:
            broken.append("other bytes")
        return broken


@pytest.mark.parametrize("uid", [A, B, 0])
@pytest.mark.parametrize("mode", [0, 1], ids=["hot", "packed"])
def test_no_write_path_into_a_slab(daemon: PrivateDaemon, uid: int, mode: int) -> None:
    assert run_as(uid, lambda: attack_slabs(daemon.socket, mode, 0)) == []


def attack_staging(path: str) -> list[str]:
    with Peer(path, LAYOUT) as p:
        memory = p.open_staging()
        size = len(memory)
        names = ("reopen to truncate", "shrink", "grow", "shrink by fallocate", "grow by fallocate", "add a seal")
        broken = not_refused(p.staging_fd, size, {name: WRITE_PATHS[name] for name in names})
        if os.fstat(p.staging_fd).st_size != size:
            broken.append("another size")
        if p.put(TOKENS) != ["OK"] * 3 or p.get(KEYS) != [payload(k, LAYOUT.size) for k in KEYS]:
            broken.append("no put or get afterwards")
        return broken


@pytest.mark.parametrize("uid", [A, B, 0])
def test_staging_keeps_its_size(daemon: PrivateDaemon, uid: int) -> None:
    assert run_as(uid, lambda: attack_staging(daemon.socket)) == []


def write_daemon_memory(pid: int) -> bool:
    """process_vm_writev and /proc/PID/mem into the daemon: True if any is allowed."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        return True
    except OSError:
        pass
    local = ctypes.create_string_buffer(b"\xee" * 8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(local), 8)
    with open(f"/proc/{os.getpid()}/maps") as maps:
        address = int(maps.readline().split("-")[0], 16)
    remote = (ctypes.c_size_t * 2)(address, 8)
    done = libc.process_vm_writev(pid, vector, 1, remote, 1, 0)
    return not (done == -1 and ctypes.get_errno() in (errno.EPERM, errno.EACCES))


@pytest.mark.skipif(
    os.environ.get("CST_SANITIZED") == "1", reason="skipped: the leak check needs a debuggable daemon"
)
@pytest.mark.parametrize("uid", [A, B])
def test_the_daemon_is_not_debuggable_by_users(daemon: PrivateDaemon, uid: int) -> None:
    pid = daemon.process.pid
    assert run_as(uid, lambda: write_daemon_memory(pid)) is False


# ---- namespaces ----

STRANGER = Layout(16 << 10, content=b"\x22" * 32)


def others_view(path: str) -> list[Any]:
    """What B sees of a daemon: the same whether A's blocks are there or not. Handles are named by
    their order, the epoch and times are left out; everything else is compared byte for byte."""
    seen: list[Any] = []
    names: dict[int, str] = {}

    def note(reply: wire.Packet, *leave_out: str) -> None:
        fields = {k: v for k, v in reply.fields.items() if k not in leave_out}
        fields = {k: v.hex() if isinstance(v, bytes) else v for k, v in fields.items()}
        seen.append([reply.name, reply.status, reply.text, fields])

    with Peer(path, LAYOUT, name="b") as p:
        note(p.hello_reply, "epoch")
        every = b"".join(KEYS)
        note(p.call("Lookup", space=p.space, keys=every))
        note(p.call("Lookup", space=p.space, keys=b"", parent=LAYOUT.root(), tail=wire.u32s(*TOKENS[:16])))
        note(p.call("LookupEach", space=p.space, keys=every))
        note(p.call("Acquire", space=p.space, keys=every, lease=1))
        note(p.call("Acquire", space=p.space, keys=every, lease=1, mode=1))
        note(p.call("Explain", space=p.space, keys=every))
        for message in ("Touch", "Unpin", "Erase"):
            note(p.call(message, space=p.space, keys=every))
        note(p.call("Pin", space=p.space, keys=every, ttl_ms=1000))
        note(p.call("Reserve", space=p.space, parent=KEYS[0], keys=KEYS[1], tokens=wire.u32s(*TOKENS[16:32])))
        note(p.call("Stats"))
        note(p.call("Stats", space=p.space))
        note(p.call("Spaces"))
        note(p.call("Blocks", space=p.space))
        slots = p.reserve(prompt("b's own", 2))
        seen.append([[s.status, s.id, s.offset, s.length] for s in slots])
        ok(p.call("Abort", slots=wire.u64s(*(s.id for s in slots))))
        seen.append(p.put(TOKENS))
        leases = p.acquire(KEYS)
        for lease in leases:
            names.setdefault(lease.slab, f"slab {len(names)}")
            seen.append([lease.status, lease.tier, names[lease.slab], lease.offset, lease.length, lease.crc])
        note(p.call("Lookup", space=p.space, keys=every), "cost_ns")
        note(p.call("Explain", space=p.space, keys=every))
    with Peer(path, STRANGER, name="b2") as p:  # another model: the nearest space is B's own
        note(p.call("Explain", space=p.space, keys=b"".join(STRANGER.chain(TOKENS))))
        note(p.call("Spaces"))
    return seen


def fill_as_victim(path: str) -> None:
    with as_user(A), Peer(path, LAYOUT, name="a") as p:
        p.put(TOKENS)
        p.put(prompt("more of a", 5))
    with as_user(A), Peer(path, STRANGER, name="a") as p:
        p.put(TOKENS)


def test_nothing_shows_of_another_namespace() -> None:
    with PrivateDaemon(user=0) as empty, as_user(B):
        without = others_view(empty.socket)
    with PrivateDaemon(user=0) as full:
        fill_as_victim(full.socket)
        with as_user(B):
            with_victim = others_view(full.socket)
    assert with_victim == without


def forge(p: Peer, slabs: list[int], leases: list[int], slots: list[int]) -> list[str]:
    """Uses another's handles and hundreds of guessed ones: what was accepted."""
    accepted = []
    guesses = slabs + [i for i in range(1, 400) if i not in slabs]
    for i in range(0, len(guesses), 16):
        reply = p.call("SlabGet", slabs=wire.u32s(*guesses[i : i + 16]))
        accepted += ["a descriptor"] * len(reply.fds)
        if reply.status == "OK":
            got = wire.records(wire.SLAB, reply.slabs)
            accepted += [f"slab {n}" for n, status, _ in got if status == 0]
        reply.close()
    for guess in slots + list(range(1, 400)):
        reply = p.call("Commit", slots=wire.u64s(guess))
        if reply.status == "OK" and "OK" in wire.statuses(reply.statuses):
            accepted.append(f"slot {guess}")
        p.call("Abort", slots=wire.u64s(guess))
    p.call("Release", leases=wire.u64s(*leases, *range(1, 400)))
    p.call("SlabDropped", slabs=wire.u32s(*slabs))
    for space in range(400):
        reply = p.call("Lookup", space=space, keys=b"".join(KEYS))
        if reply.status == "OK" and reply.present:
            accepted.append(f"space {space}")
    return accepted


@pytest.mark.parametrize("uid", [A, B], ids=["same user", "other user"])
def test_forged_handles_are_refused_and_change_nothing(uid: int) -> None:
    with PrivateDaemon(user=0) as d:
        with as_user(A):
            a = Peer(d.socket, LAYOUT, name="a")
        with as_user(uid):
            b = Peer(d.socket, None if uid == A else LAYOUT, name="b")
        a.put(TOKENS)
        leases = a.acquire(KEYS)
        data = [a.read(lease) for lease in leases]
        tokens = prompt("open", 2)
        keys = LAYOUT.chain(tokens)
        slots = a.reserve(tokens)
        for key, slot in zip(keys, slots, strict=True):
            a.fill(slot, payload(key, LAYOUT.size))
        handles = [[x.slab for x in leases], [x.id for x in leases], [x.id for x in slots]]
        accepted = forge(b, *handles)
        if uid == A:  # one trust domain: what the user may read anyway
            accepted = [what for what in accepted if what.startswith(("slot", "space"))]
        assert accepted == []
        assert data == [a.read(lease) for lease in leases] == [payload(k, LAYOUT.size) for k in KEYS]
        counters = a.namespace_stats()
        assert (counters["leases"], counters["reserved"]) == (3, 2)
        assert a.commit(slots) == ["OK", "OK"]
        assert a.get(keys) == [payload(k, LAYOUT.size) for k in keys]
        a.close()
        b.close()
