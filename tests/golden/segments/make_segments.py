#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Directories of the disk tier, good and bad, written from docs/disk-format.md alone.

usage: make_segments.py DIRECTORY

Makes DIRECTORY/good and DIRECTORY/bad-NAME. No encryption, 256 KiB segments: 1 is closed (a space,
two blocks in a chain, a void, side data), 2 is open with one block behind it, 3 was never used. The
same bytes each time.
"""
import hashlib
import struct
import sys
from pathlib import Path

CHUNK = 4096
SEGMENT = 256 * 1024
UUID = bytes(range(16))
SALT = bytes(range(100, 132))
START = SALT[:8]
NAME = b"public"

TABLE = []
for i in range(256):
    for _ in range(8):
        i = i >> 1 ^ (0x82F63B78 if i & 1 else 0)
    TABLE.append(i)


def crc32c(*parts):
    crc = 0xFFFFFFFF
    for part in parts:
        for byte in part:
            crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def sealed(data):
    """The structure with its checksum at the end."""
    return data + struct.pack("<I", crc32c(data))


def tag(*parts):
    return struct.pack("<I12x", crc32c(*parts))


def pad(data, size):
    return data + bytes(-len(data) % size)


def superblock():
    return sealed(b"CSTSTORE" + struct.pack("<4I", 1, 0, 0, 0) + UUID +
                  struct.pack("<QQ68x", SEGMENT, 1700000000))


def segment_head(number, fill):
    return sealed(b"CSTSEGMT" + struct.pack("<4I", 1, 0, 0, 0) + UUID +
                  struct.pack("<IBB2xQQQQ", number, 0, len(NAME), fill, 10 + number, SEGMENT,
                              1700000001) + SALT + NAME.ljust(64, b"\0") + bytes(332))


def space_meta():
    canonical = b"not a descriptor, but of some length"
    identity = hashlib.sha256(b"cistern.space.1").digest()
    return identity, identity + identity + struct.pack("<BB2xI", 1, 0, len(canonical)) + canonical


def block_meta(key, parent, position, payload):
    space, _ = space_meta()
    tokens = struct.pack("<16I", *range(16)) + struct.pack("<16e", *[1.5] * 16)
    return (key + space + parent +
            struct.pack("<IIfIIBBBxQ", position, 16, 0.25, crc32c(payload), 7, 3,
                        1 | 2 * (position > 0), 1, 1700000002) + tokens + struct.pack("<Q", 9))


def side_meta(payload, part=0):
    space, _ = space_meta()
    return (hashlib.sha256(payload).digest() + space +
            struct.pack("<QQIIII", 9, len(payload), 2, part, 1, crc32c(payload)))


class Segment:
    def __init__(self, number, fill):
        self.number, self.fill = number, fill
        self.data = pad(segment_head(number, fill), CHUNK)
        self.entries = []

    def add(self, kind, meta, payload=b""):
        chunk = len(self.data) // CHUNK
        slot = len(self.entries)
        offset = (128 + len(meta) + 63) // 64 * 64 if kind != 4 else 0
        n = (max(offset + len(payload), 128) + CHUNK - 1) // CHUNK
        head = struct.pack("<IBBBxII", 0x43455243, 1, kind, 0, self.number, chunk)
        head += struct.pack("<Q", self.fill) + START
        head += struct.pack("<IIQIIQQQ", slot, n, 100 + slot, len(meta), offset, len(payload),
                            2 * slot + 1, 2 * slot + 2)
        assert len(head) == 80
        head += tag(head, meta[:32], payload) if payload else bytes(16)
        head += tag(head, meta) if meta else bytes(16)
        head = sealed(head + bytes(12))
        body = head + meta
        if payload:
            body = body.ljust(offset, b"\0") + payload
        self.data += pad(body, CHUNK)
        entry = struct.pack("<IIQII", chunk, n, 100 + slot, len(payload),
                            len(meta) | kind << 24) + meta
        self.entries.append(pad(entry, 8))

    def close(self):
        end = len(self.data) // CHUNK
        body = b"".join(self.entries)
        at = SEGMENT // CHUNK - 1 - (80 + len(body) + CHUNK - 1) // CHUNK
        head = struct.pack("<IBBxxII", 0x58444943, 1, 0, self.number, at)
        head += struct.pack("<Q", self.fill) + START
        head += struct.pack("<IIQ", 0, len(self.entries), 50)
        assert len(head) == 48
        head = sealed(head + tag(head, body) + struct.pack("<I8x", len(body)))
        self.data = self.data.ljust(at * CHUNK, b"\0") + pad(head + body, CHUNK)
        self.data += pad(sealed(b"CSTFOOTR" + struct.pack("<IIQ", self.number, at, self.fill) +
                                START + struct.pack("<III16x", 1, len(self.entries), end)), CHUNK)

    def bytes(self):
        return self.data.ljust(SEGMENT, b"\0")


def checkpoint():
    body = struct.pack("<IIQ", 1, 5, 4) + START + struct.pack("<II", 1, 0)
    body += struct.pack("<Q", 1 << 3) + struct.pack("<IIQ", 1, 0, 2 ** 64 - 1)
    return sealed(b"CSTCHECK" + struct.pack("<4I", 1, 0, 0, 0) + UUID +
                  struct.pack("<QQQQQIII32x", 105, 12, 1700000003, 4, len(body), 1, 1,
                              crc32c(body))) + body


def keys():
    head = sealed(b"CSTKEYS1" + struct.pack("<4I", 1, 0, 0, 0) + UUID + bytes(16) + SALT +
                  bytes(16) + struct.pack("<II12x", 2, 1))
    return sealed(head + struct.pack("<B3x", len(NAME)) + NAME.ljust(64, b"\0") + bytes(32) +
                  bytes(16))


def good():
    one, two = Segment(1, 4), Segment(2, 1)
    frame, root = b"frame " * 1000, hashlib.sha256(b"root").digest()
    a, b = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()
    one.add(2, space_meta()[1])
    one.add(1, block_meta(a, root, 0, frame), frame)
    one.add(1, block_meta(b, a, 1, frame[:100]), frame[:100])
    one.add(4, b"")
    one.add(3, side_meta(frame), frame)
    one.close()
    two.add(2, space_meta()[1])
    two.add(1, block_meta(a, root, 0, frame), frame)
    return {"cistern-store": superblock(), "keys": keys(), "checkpoint": checkpoint(),
            "seg-00000001": one.bytes(), "seg-00000002": two.bytes(),
            "seg-00000003": bytes(SEGMENT)}


def part_two_of_one():
    segment = Segment(1, 4)
    segment.add(2, space_meta()[1])
    segment.add(3, side_meta(b"side", 1), b"side")
    segment.close()
    return segment.bytes()


def flipped(name, at):
    files = good()
    data = bytearray(files[name])
    data[at] ^= 0x10
    files[name] = bytes(data)
    return files


def changed(**files):
    return {**good(), **{name.replace("_", "-"): data for name, data in files.items()}}


# name: files, and what cistern-segdump says
def bad():
    one = good()["seg-00000001"]
    return {
        "superblock": (flipped("cistern-store", 50), "wrong checksum"),
        "keys": (flipped("keys", 200), "wrong length, or wrong checksum of all"),
        "keys-short": (changed(keys=keys()[:-1]), "wrong length, or wrong checksum of all"),
        "checkpoint": (flipped("checkpoint", 130), "wrong checksum of its body"),
        "segment": (flipped("seg-00000001", 60), "wrong checksum"),
        "record": (flipped("seg-00000001", CHUNK + 40), "wrong checksum of a record's header"),
        "meta": (flipped("seg-00000001", 2 * CHUNK + 140), "wrong checksum of a record's meta"),
        "payload": (flipped("seg-00000001", 2 * CHUNK + 5000),
                    "wrong checksum of a record's payload"),
        "side-data": (changed(seg_00000001=part_two_of_one()),
                      "a part of side data that can't be"),
        "index": (flipped("seg-00000001", SEGMENT - 2 * CHUNK + 100),
                  "wrong checksum of its entries"),
        "swapped": (changed(seg_00000002=one), "another segment's header"),
        "foreign": (changed(cistern_store=sealed(superblock()[:24] + bytes(16) +
                                                 superblock()[40:124])),
                    "belongs to another store"),
        "cut-off": (changed(seg_00000001=one[:-CHUNK]), "impossible size"),
    }


def write(folder, files):
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]) / "good", good())
    for name, (files, _) in bad().items():
        write(Path(sys.argv[1]) / f"bad-{name}", files)


if __name__ == "__main__":
    main()
