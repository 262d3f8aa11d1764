#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Makes packets/*.bin and packets/expected.txt by docs/protocol.md: every message once, then bad ones.

usage: make_packets.py [--check]

The encoder below is written from the document and shares nothing with the C code. A line of
expected.txt is `file status`: the status that a connection which has said Hello gets for it (OK:
it decodes; a reply or push decodes at the client). --check compares instead of writing.
"""
import json
import struct
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("packets")
REPLY, ERROR, PUSH = 1, 2, 4
KEY, PARENT = bytes(range(32)), bytes(range(100, 132))
VECTORS = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="ascii"))
DESCRIPTOR = bytes.fromhex(next(v["bytes"] for v in VECTORS if v["what"] == "descriptor"))


def varint(v):
    out = b""
    while v > 127:
        out += bytes([v & 127 | 128])
        v >>= 7
    return out + bytes([v])


def field(number, value):
    """An int is a varint, a str a string, bytes bytes, a tuple a ListRef (offset, length)."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, tuple):
        value = message(*value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(*values):
    """The fields 1, 2, 3 ... in order; None, 0 and empty values are left out, as proto3 does."""
    return b"".join(field(i + 1, v) for i, v in enumerate(values) if v)


def packet(number, payload, flags=0, request=7, version=1, magic=b"CSTN", length=None):
    return magic + struct.pack("<BBHII", version, flags, number,
                               len(payload) if length is None else length, request) + payload


def record(layout, *values):
    return struct.pack("<" + layout, *values)


LEASE = record("HBBIQQQII", 0, 1, 0, 3, 1000, 4096, 65536, 64, 0x12345678)
SLOT = record("HHIQQQ", 0, 0, 0, 5, 131072, 65536)
SPACE = record("IBBHIIQQQQQQ32s32s64s64s", 1, 0, 0, 0, 64, 7, 65536, 3, 1, 196608, 80000, 900, KEY,
               PARENT, b"uid-1000", b"llama.cpp")
BLOCK = record("32s32sQIIBBHI", KEY, PARENT, 40000, 64, 2, 1, 3, 1, 0x3d4ccccd)
SIDE = record("IIQ32s", 3, 0, 1 << 22, PARENT)
ERROR_TEXT = "the daemon is full; try again later"

# name, number, request fields, reply fields
REQUESTS = [
    ("hello", 1, (1, 1, "worker"),
     (1, 0x1122334455667788, 131072, 131072, 64, 1 << 26, 1, "uid-1000", "0.1.0")),
    ("ping", 2, (b"payload",), (b"payload",)),
    ("space_open", 3, (DESCRIPTOR, 1, 1, 2, b"salt"), (1, 1024, 16, KEY, 7, SIDE)),
    ("space_close", 4, (1,), ()),
    ("lookup", 5, (1, KEY + PARENT, (4096, 64), PARENT, record("3I", 5, 6, 7), 1),
     (2, record("BIBI", 1, 1, 2, 1), 3, KEY, 40, 2, 123456, 2)),
    ("lookup_each", 6, (1, KEY + PARENT, (0, 64)), (b"\x02", b"\x00\x01")),
    ("acquire", 7, (1, KEY, (64, 32), 1, 1000, record("Q", 999), 2, 8), (LEASE,)),
    ("release", 8, (record("2Q", 1000, 1001),), ()),
    ("slab_get", 9, (record("2I", 3, 4),), (record("IIQIIQ", 3, 0, 1 << 26, 4, 1, 0),)),
    ("slab_dropped", 10, (record("I", 3),), ()),
    ("staging_get", 11, (1 << 20,), (1 << 20, 1 << 19)),
    ("reserve", 12, (1, PARENT, KEY, (0, 32), record("2I", 8, 9), (32, 8)), (SLOT,)),
    ("commit", 13, (record("2Q", 5, 6), record("2H", 0x3c00, 0x4000), 3), (record("2H", 0, 2),)),
    ("abort", 14, (record("Q", 5),), ()),
    ("touch", 15, (1, KEY), (record("H", 0), 1)),
    ("pin", 16, (1, KEY, 60000), (record("H", 0), 1)),
    ("unpin", 17, (1, KEY), (record("H", 1), 0)),
    ("erase", 18, (1, KEY, 1), (record("H", 0), 12)),
    ("explain", 19, (1, KEY, (0, 32), record("I", 4)),
     (1, "one sentence", "layers", PARENT, 9)),
    ("subscribe", 20, (1,), ()),
    ("stats", 21, (1,), tuple(range(1, 34))),
    ("spaces", 22, (1,), (SPACE, 1)),
    ("blocks", 23, (1, 17, 100), (BLOCK, 18)),
    ("sidedata_get", 24, (1, 3, 1 << 21, (4096, 65536)), (3, 1 << 22, PARENT, 65536)),
    ("sidedata_put", 25, (1, 1, 1 << 22, 1 << 21, (4096, 65536)), (4,)),
    ("status", 40, (),
     ("0.1.0", 1 << 60, 5, 1 << 30, 1 << 20, 1 << 28, 4096, 2, 3, 2, 1 << 26, 0, 100, 1, 0, "arc",
      "host", 4242, 2, 1, 0)),
    ("purge", 41, ("uid-1000",), (12, "erased")),
]
PUSHES = [
    ("ready", 100, (LEASE,)),
    ("slab_retire", 101, (3,)),
    ("event", 102, (1, 1, KEY, 1, 5)),
    ("goodbye", 103, (60, "the daemon is stopping")),
]


def good():
    for name, number, request, reply in REQUESTS:
        yield name, packet(number, message(*request))
        yield name + "-reply", packet(number, message(*reply), REPLY)
    for name, number, fields in PUSHES:
        yield name, packet(number, message(*fields), PUSH, 0)
    yield "hello-version-0", packet(1, message(1, 3, "newer"), version=0)
    yield "error", packet(7, struct.pack("<H", 40) + ERROR_TEXT.encode(), REPLY | ERROR)


def bad():
    lookup = message(1, KEY)
    yield "empty", b"", "BAD_LENGTH"
    yield "half-header", packet(5, lookup)[:8], "BAD_LENGTH"
    yield "magic", packet(5, lookup, magic=b"CSTM"), "BAD_MAGIC"
    yield "http", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "BAD_MAGIC"
    yield "version-0", packet(5, lookup, version=0), "BAD_VERSION"
    yield "version-2", packet(5, lookup, version=2), "BAD_VERSION"
    yield "length-short", packet(5, lookup, length=len(lookup) - 1), "BAD_LENGTH"
    yield "length-long", packet(5, lookup, length=len(lookup) + 1), "BAD_LENGTH"
    yield "length-huge", packet(5, lookup, length=0xffffffff), "BAD_LENGTH"
    yield "flag", packet(5, lookup, flags=0x80), "BAD_MESSAGE"
    yield "type-0", packet(0, b""), "BAD_TYPE"
    yield "type-reserved", packet(26, b""), "BAD_TYPE"
    yield "type-65535", packet(0xffff, b""), "BAD_TYPE"
    yield "unknown-field", packet(5, lookup + field(15, 1)), "BAD_MESSAGE"
    yield "unknown-flood", packet(5, b"\x78\x01" * 2000), "BAD_MESSAGE"
    yield "unknown-in-list", packet(5, field(3, field(1, 4) + field(3, 4))), "BAD_MESSAGE"
    yield "twice", packet(5, lookup + field(1, 2)), "BAD_MESSAGE"
    yield "wire-type", packet(5, field(1, b"1")), "BAD_MESSAGE"
    yield "cut", packet(5, lookup[:-1]), "BAD_MESSAGE"
    yield "space-over-32-bits", packet(5, field(1, 1 << 32)), "BAD_MESSAGE"
    yield "varint-endless", packet(5, b"\x08" + b"\xff" * 20), "BAD_MESSAGE"
    yield "name-with-zero", packet(1, field(3, "a\0b")), "BAD_MESSAGE"
    yield "name-endless", packet(1, field(3, "n" * 20000)), "BAD_MESSAGE"
    yield "nested-deep", packet(5, field(3, field(1, b"\x0a\x00"))), "BAD_MESSAGE"
    yield "descriptor-cut", packet(3, message(DESCRIPTOR[:-1])), "BAD_DESCRIPTOR"
    yield "descriptor-empty", packet(3, b""), "BAD_DESCRIPTOR"
    yield "descriptor-more", packet(3, message(DESCRIPTOR + b"\0")), "BAD_DESCRIPTOR"
    overlap = bytearray(DESCRIPTOR)
    overlap[-40:-32] = struct.pack("<Q", 508)  # offset of the last segment
    yield "descriptor-overlap", packet(3, message(bytes(overlap))), "BAD_DESCRIPTOR"
    overrun = bytearray(DESCRIPTOR)
    overrun[-32:-24] = struct.pack("<Q", 513)  # its length
    yield "descriptor-overrun", packet(3, message(bytes(overrun))), "BAD_DESCRIPTOR"


def files():
    out, expected = {}, "# file status; written by make_packets.py\n"
    for kind, rows in (("good", ((n, p, "OK") for n, p in good())), ("bad", bad())):
        for name, data, status in rows:
            out[f"{kind}-{name}.bin"] = data
            expected += f"{kind}-{name}.bin {status}\n"
    out["expected.txt"] = expected.encode()
    return out


def main():
    made = files()
    if sys.argv[1:] == ["--check"]:
        found = {p.name: p.read_bytes() for p in FOLDER.iterdir()}
        wrong = sorted(n for n in made.keys() | found.keys() if made.get(n) != found.get(n))
        if wrong:
            sys.exit(f"not what this script makes: {' '.join(wrong)}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        FOLDER.mkdir(exist_ok=True)
        for old in FOLDER.iterdir():
            old.unlink()
        for name, data in made.items():
            (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
