# SPDX-License-Identifier: Apache-2.0
"""Programs of different kinds read one block: the same file, the same offset, the same physical pages.
Nothing was copied for any of them."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cistern
import wire
from lab import HANG_GUARD_S, Layout, Peer, frames, mapping, payload, prompt, until
from private_daemon import PrivateDaemon

LAYOUT = Layout(256 << 10)
PROGRAMS = os.path.join(os.environ["CST_BUILD_ROOT"], "tests", "integration")


@contextmanager
def running(name: str, *args: str) -> Iterator[tuple[int, list[str]]]:
    """A program that says one line and waits for the end of its input: its pid and that line."""
    command = [os.path.join(PROGRAMS, name), *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdin and p.stdout
        yield p.pid, p.stdout.readline().split()
        p.stdin.close()
        assert p.wait(HANG_GUARD_S) == 0


def python_descriptor(canonical: bytes) -> cistern.Descriptor:
    fields = wire.parse_descriptor(canonical)
    layers = [
        cistern.Layer(
            **layer | {
                "rope": cistern.Rope(layer["rope"]),
                "k_rotated": bool(layer["k_rotated"]),
                "rope_scaling": cistern.Scaling(layer["rope_scaling"]),
            }
        )
        for layer in fields.pop("layers")
    ]
    segments = [
        cistern.Segment(
            **s | {"tensor": cistern.Tensor(s["tensor"]), "dtype": cistern.DType(s["dtype"])}
        )
        for s in fields.pop("segments")
    ]
    return cistern.Descriptor(layers=layers, segments=segments, **fields)


def same_memory(places: list[tuple[int, int]], size: int) -> None:
    """(pid, address) pairs that all show the same bytes of the same file, read-only."""
    files = [mapping(pid, at) for pid, at in places]
    assert all(file == files[0] for file in files)
    assert all(read_only(pid, at) for pid, at in places)
    pages = [frames(pid, at, size) for pid, at in places]
    if any(pages[0]):  # only a privileged reader is shown page numbers
        assert 0 not in pages[0] and len(set(pages[0])) == len(pages[0])
        assert all(page == pages[0] for page in pages)
    else:
        assert os.geteuid() != 0, "root sees physical pages"


def read_only(pid: int, address: int) -> bool:
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            area, permissions = line.split()[:2]
            start, end = (int(x, 16) for x in area.split("-"))
            if start <= address < end:
                return permissions == "r--s"
    return False


def address_of(buffer: object) -> int:
    ffi = cistern._ffi.ffi
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


def test_three_programs_read_one_memory(tmp_path: Path) -> None:
    tokens = prompt("three programs", 2)
    keys = LAYOUT.chain(tokens)
    want = payload(keys[1], LAYOUT.size)
    described = tmp_path / "descriptor"
    described.write_bytes(LAYOUT.descriptor)
    with PrivateDaemon() as d:
        with Peer(d.socket, LAYOUT, name="writer") as writer:
            writer.put(tokens)
        with running("hold_block", d.socket, str(described), keys[1].hex()) as (c_pid, said):
            assert said[1:] == [str(LAYOUT.size), hashlib.sha256(want).hexdigest()]
            client = cistern.Client(d.socket)
            leases = client.space(python_descriptor(LAYOUT.descriptor)).acquire([keys[1]])
            lease = leases[0]
            assert lease is not None and bytes(lease.data) == want
            raw = Peer(d.socket, LAYOUT, name="its own implementation")
            (record,) = raw.acquire([keys[1]])
            assert raw.read(record) == want
            raw_address = address_of(raw.slab(record.slab)) + record.offset
            same_memory(
                [(c_pid, int(said[0], 16)), (os.getpid(), lease.address), (os.getpid(), raw_address)],
                LAYOUT.size,
            )
            leases.release()
            raw.release([record])
            client.close()
        until(lambda: raw.status_counters()["leases"] == 0, "every lease is given back")
        raw.close()


def space_that_is_opened(path: str, result: list[bytes]) -> None:
    """A daemon that says hello, notes the descriptor of the first space and hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(HANG_GUARD_S)
        result.append(b"")  # it listens
        peer, _ = listener.accept()
        with peer:
            while data := peer.recv(wire.PACKET_MAX):
                _, _, _, kind, _, request = wire.HEADER.unpack(data[:16])
                name = wire.NAMES[kind]
                if name == "SpaceOpen":
                    result.append(wire.decode(name, data[16:])["descriptor"])
                    return
                body = wire.encode("HelloReply", {"version": 1, "epoch": 1, "packet_max": 131072,
                    "keys_max": 65536, "requests_max": 64, "staging_bytes": 1 << 26,
                    "namespace": "x"} if name == "Hello" else {})  # fmt: skip
                peer.send(wire.packet(kind, body, request, flags=wire.REPLY))


def llama_descriptor(tmp_path: Path, model: Path) -> bytes:
    seen: list[bytes] = []
    path = str(tmp_path / "recorder")
    thread = threading.Thread(target=space_that_is_opened, args=(path, seen))
    thread.start()
    until(lambda: seen, "the recorder listens")
    command = [os.path.join(PROGRAMS, "hold_llama"), path, str(model)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=HANG_GUARD_S)
    thread.join(HANG_GUARD_S)
    return seen[1]


def test_the_llama_adapter_a_c_program_and_python_read_one_memory(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF a model")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path)
    canonical = llama_descriptor(tmp_path, model)
    described = tmp_path / "descriptor"
    described.write_bytes(canonical)
    with PrivateDaemon() as d, running("hold_llama", d.socket, str(model)) as (llama_pid, said):
        assert said == ["47"], "all but the token that must be computed"
        client = cistern.Client(d.socket)
        space = client.space(python_descriptor(canonical))
        keys = space.keys(range(100, 148))
        assert space.lookup(range(100, 148)).blocks == 3
        lease = space.acquire(keys[:1])[0]
        assert lease is not None
        digest = hashlib.sha256(lease.data).hexdigest()
        with running("hold_block", d.socket, str(described), keys[0].hex()) as (c_pid, held):
            assert held[1:] == [str(space.block_bytes), digest]
            here = lease.address
            llama_at = address_in(llama_pid, *mapping(os.getpid(), here))
            size = space.block_bytes
            same_memory([(os.getpid(), here), (c_pid, int(held[0], 16)), (llama_pid, llama_at)], size)
        lease.release()
        client.close()


def address_in(pid: int, device: str, inode: int, offset: int) -> int:
    """Where a process maps this offset of this file."""
    with open(f"/proc/{pid}/maps") as lines:
        for line in lines:
            area, _, start, dev, ino = line.split()[:5]
            begin, end = (int(x, 16) for x in area.split("-"))
            if (dev, int(ino)) == (device, inode) and 0 <= offset - int(start, 16) < end - begin:
                return begin + offset - int(start, 16)
    raise AssertionError(f"process {pid} does not map the slab")


def test_the_example_shares_with_its_next_run() -> None:
    """The C example of the documentation, run twice: the second process finds what the first stored."""
    program = os.path.join(os.environ["CST_BUILD_ROOT"], "client", "examples", "cistern-example")
    with PrivateDaemon() as d:
        env = {**os.environ, "CISTERN_SOCKET": d.socket}
        runs = [
            subprocess.run([program], env=env, capture_output=True, text=True, timeout=HANG_GUARD_S)
            for _ in range(2)
        ]
        assert [run.returncode for run in runs] == [0, 0], runs
        assert "stored before: 0 of 2 blocks" in runs[0].stdout
        assert "stored before: 2 of 2 blocks" in runs[1].stdout
        for run in runs:
            assert run.stdout.count("the same bytes") == 2 and "other bytes" not in run.stdout
