# SPDX-License-Identifier: Apache-2.0
"""A second implementation of the protocol, in the standard library alone.

It reads the field numbers from cistern.proto, the message numbers from message.def and the status
numbers from status.def, and does the rest by docs/protocol.md: header, protobuf, records, canonical
descriptors, keys. Nothing here is polite: a test may send any bytes in any order.

    with Wire(path) as w:
        w.hello()
        reply = w.call("Lookup", space=1, keys=keys)
        assert reply.status == "OK" and reply.present == 3
"""

from __future__ import annotations

import array
import hashlib
import os
import re
import select
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any

PROTO = Path(__file__).resolve().parents[2] / "proto"
MAGIC, VERSION = 0x4E545343, 1
HEADER = struct.Struct("<IBBHII")  # magic, version, flags, type, length, request
REPLY, ERROR, PUSH = 1, 2, 4
PACKET_MAX, FDS_MAX = 128 * 1024, 16
HANG_GUARD_S = 60

# ---- the schema ----


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _schema() -> tuple[dict[str, dict[str, tuple[int, str]]], dict[str, tuple[int, str]]]:
    """Fields of each message: name -> (number, type); requests and pushes: name -> (number, reply)."""
    text = re.sub(r"//.*", "", (PROTO / "cistern.proto").read_text())
    messages = {
        name: {f: (int(n), kind) for kind, f, n in re.findall(r"(\w+) (\w+) = (\d+);", body)}
        for name, body in re.findall(r"message (\w+) \{(.*?)\}", text, re.S)
    }
    text = (PROTO / "message.def").read_text()
    rows = re.findall(r"\b[RP]\(\w+, (\d+), (\w+)(?:, (\w+))?\)", text)
    numbers = {camel(name): (int(n), camel(reply or name)) for n, name, reply in rows}
    return messages, numbers


MESSAGES, NUMBERS = _schema()
NAMES = {number: name for name, (number, _) in NUMBERS.items()}
STATUS = {
    int(n): name for name, n in re.findall(r"^X\((\w+), (\d+),", (PROTO / "status.def").read_text(), re.M)
}

# ---- protobuf ----


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(message: str, fields: dict[str, Any]) -> bytes:
    out = bytearray()
    for name, value in fields.items():
        number, kind = MESSAGES[message][name]
        if kind in ("uint32", "uint64"):
            out += varint(number << 3) + varint(value)
            continue
        if kind in MESSAGES:
            value = encode(kind, value)
        data = value.encode() if isinstance(value, str) else bytes(value)
        out += varint(number << 3 | 2) + varint(len(data)) + data
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
        shift += 7


def decode(message: str, data: bytes) -> dict[str, Any]:
    """Every field of the message, absent ones with their default."""
    schema = MESSAGES[message]
    empty = {"bytes": b"", "string": ""}
    out: dict[str, Any] = {name: empty.get(kind, 0) for name, (_, kind) in schema.items()}
    by_number = {number: (name, kind) for name, (number, kind) in schema.items()}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        name, kind = by_number[tag >> 3]
        value, at = _read_varint(data, at)
        if tag & 7 == 2:
            raw, at = data[at : at + value], at + value
            out[name] = raw.decode() if kind == "string" else raw
        else:
            out[name] = value
    return out


# ---- descriptors and keys, by docs/protocol.md ----


def u32s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def descriptor(
    segments: list[tuple[int, int, int, int, int, int, int, int]],
    *,
    layers: list[tuple[int, int, int]],
    block_tokens: int,
    block_bytes: int,
    content: bytes,
    engine: bytes = b"test",
    n_layers: int | None = None,
    n_segments: int | None = None,
) -> bytes:
    """Canonical bytes. Segments: (layer, tensor, dtype, offset, length, three strides); layers:
    (kv_heads, head_dim_k, head_dim_v), without RoPE. The counts may lie."""
    out = b"cistern.descriptor.1" + content + bytes(32) + u32s(len(engine)) + engine + u32s(0)
    out += u32s(0, 0, block_tokens, 0, 1) + u64s(block_bytes)
    out += u32s(len(layers) if n_layers is None else n_layers)
    for layer in layers:
        out += u32s(*layer, 0) + bytes(3) + u32s(0) + struct.pack("<5f", 0, 0, 0, 0, 0) + u32s(0)
    out += u32s(len(segments) if n_segments is None else n_segments)
    for layer_index, tensor, dtype, *rest in segments:
        out += u32s(layer_index) + bytes((tensor, dtype)) + u64s(*rest)
    return out


_LAYER = struct.Struct("<4I3BIf4fI")
_SEGMENT = struct.Struct("<IBB5Q")
_HEAD = ("engine_abi", "state_version", "block_tokens", "tp_rank", "tp_size", "block_bytes")
_LAYER_FIELDS = ("kv_heads", "head_dim_k", "head_dim_v", "window", "rope", "k_rotated", "rope_scaling",
                 "rope_dims", "rope_theta")  # fmt: skip
_SEGMENT_FIELDS = ("layer", "tensor", "dtype", "offset", "length", "token_stride", "head_stride", "dim_stride")


def parse_descriptor(data: bytes) -> dict[str, Any]:
    """Canonical bytes as the fields that section 7 names; layers and segments are lists of dicts."""
    at = 20
    out: dict[str, Any] = {"content_id": data[at : at + 32], "adapter_id": data[at + 32 : at + 64]}
    at += 64
    for name in ("engine", "engine_options"):
        (n,) = struct.unpack_from("<I", data, at)
        out[name] = data[at + 4 : at + 4 + n].decode()
        at += 4 + n
    out |= zip(_HEAD, struct.unpack_from("<5IQ", data, at), strict=True)
    at += 28
    lists: list[list[Any]] = []
    for layout in (_LAYER, _SEGMENT):
        (n,) = struct.unpack_from("<I", data, at)
        at += 4
        lists.append([layout.unpack_from(data, at + i * layout.size) for i in range(n)])
        at += n * layout.size
    assert at == len(data)
    out["layers"] = [
        dict(zip(_LAYER_FIELDS, v[:9], strict=True), scaling=v[9:13], scaling_original_context=v[13])
        for v in lists[0]
    ]
    out["segments"] = [dict(zip(_SEGMENT_FIELDS, v, strict=True)) for v in lists[1]]
    return out


def key_root(fingerprint: bytes, salt: bytes = b"") -> bytes:
    return hashlib.sha256(b"cistern.root.1" + fingerprint + u32s(len(salt)) + salt).digest()


def key_block(parent: bytes, tokens: list[int], extra: bytes = b"") -> bytes:
    body = parent + u32s(len(tokens), *tokens, len(extra)) + extra
    return hashlib.sha256(b"cistern.key.1" + body).digest()


def chain(parent: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    keys = []
    for start in range(0, len(tokens), block_tokens):
        parent = key_block(parent, tokens[start : start + block_tokens])
        keys.append(parent)
    return keys


# ---- records ----

LEASE = struct.Struct("<HBBIQQQII")  # status, tier, preset, slab, lease, offset, length, tokens, crc
SLAB = struct.Struct("<IIQ")  # slab, status, size
SLOT = struct.Struct("<HHIQQQ")  # status, zero, busy_ms, slot, offset, length
SPACE = struct.Struct("<IBB2xIIQQQQQQ32s32s64s64s")
BLOCK = struct.Struct("<32s32sQIIBBHf")


def records(layout: struct.Struct, data: bytes) -> list[tuple[Any, ...]]:
    return list(layout.iter_unpack(data))


def statuses(data: bytes) -> list[str]:
    return [STATUS[n] for (n,) in struct.iter_unpack("<H", data)]


# ---- packets ----


class Packet:
    """A received packet. Fields of its message are attributes; `status` is "OK" or an error's name
    and `text` its sentence. The descriptors are the receiver's: take them, or close()."""

    def __init__(self, data: bytes, fds: list[int]) -> None:
        magic, self.version, self.flags, self.type, self.length, self.request = HEADER.unpack(
            data[: HEADER.size]
        )
        assert magic == MAGIC and len(data) == HEADER.size + self.length, "the daemon's own framing"
        body = data[HEADER.size :]
        self.raw = data
        self.fds = fds
        self.name = NAMES.get(self.type, str(self.type))
        self.status, self.text, self.fields = "OK", "", {}
        if self.flags & ERROR:
            self.status = STATUS[struct.unpack_from("<H", body)[0]]
            self.text = body[2:].decode()
        else:
            self.fields = decode(NUMBERS[self.name][1], body)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{self!r} has no {name}") from None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def __repr__(self) -> str:
        return f"<{self.name} {self.status} {self.text or sorted(self.fields)}>"


class Closed(Exception):
    """The daemon has ended the connection."""


class Wire:
    """One connection. Pushes that arrive while a reply is awaited gather in `pushes`."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        self.pushes: list[Packet] = []
        self._request = 0

    def send_raw(self, data: bytes, fds: list[int] | None = None, *, wait: bool = True) -> None:
        """Any bytes as one packet; BlockingIOError if the daemon doesn't read and wait is False."""
        control = []
        if fds:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self.socket.sendmsg([data], control, 0 if wait else socket.MSG_DONTWAIT)

    def send(
        self,
        message: str,
        body: bytes | None = None,
        fds: list[int] | None = None,
        *,
        wait: bool = True,
        **fields: Any,
    ) -> int:
        """A request by name, or with any payload instead of its fields. Returns its number."""
        self._request += 1
        data = encode(message, fields) if body is None else body
        self.send_raw(packet(NUMBERS[message][0], data, self._request), fds, wait=wait)
        return self._request

    def receive(self) -> Packet:
        """The next packet. Raises Closed at the end of the connection."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        if not poll.poll(HANG_GUARD_S * 1000):
            raise TimeoutError("the daemon does not answer")
        try:
            data, fds, flags, _ = socket.recv_fds(self.socket, PACKET_MAX + 1, FDS_MAX + 1)
        except ConnectionResetError:
            raise Closed from None
        if not data:
            raise Closed
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        return Packet(data, list(fds))

    def wait(self, request: int) -> Packet:
        """The reply to a request; pushes on the way are kept."""
        while True:
            p = self.receive()
            if p.flags & PUSH:
                self.pushes.append(p)
            elif p.request == request:
                return p

    def wait_push(self, name: str) -> Packet:
        """The next push of this name, kept or still to come."""
        for i, p in enumerate(self.pushes):
            if p.name == name:
                return self.pushes.pop(i)
        while True:
            p = self.receive()
            if p.flags & PUSH and p.name == name:
                return p
            if p.flags & PUSH:
                self.pushes.append(p)

    def call(
        self, message: str, body: bytes | None = None, fds: list[int] | None = None, **fields: Any
    ) -> Packet:
        return self.wait(self.send(message, body, fds, **fields))

    def hello(self, name: str = "wire") -> Packet:
        return self.call("Hello", version_min=VERSION, version_max=VERSION, client_name=name)

    def closed(self) -> bool:
        """Waits until the daemon ends the connection, reading what it still says."""
        try:
            while True:
                self.receive().close()
        except Closed:
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def packet(
    kind: int,
    body: bytes = b"",
    request: int = 1,
    *,
    magic: int = MAGIC,
    version: int = VERSION,
    flags: int = 0,
    length: int | None = None,
) -> bytes:
    """One packet; every header field may lie."""
    size = len(body) if length is None else length
    return HEADER.pack(magic, version, flags, kind, size, request) + body
