#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Makes keys.json: descriptors, fingerprints, roots, chains and flat keys by docs/protocol.md.

usage: make_keys.py [--check]

Written from the document with hashlib and struct alone, so that it shares nothing with the C code
that the vectors test. One vector a line; all bytes in hex. --check compares instead of writing.
"""
import hashlib
import json
import struct
import sys
from pathlib import Path

OUT = Path(__file__).with_name("keys.json")
F32, F16, BF16, OPAQUE = 1, 2, 3, 0
K, V, OTHER = 0, 1, 2


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def u8(*v):
    return bytes(v)


def u32(*v):
    return struct.pack(f"<{len(v)}I", *v)


def u64(*v):
    return struct.pack(f"<{len(v)}Q", *v)


def f32(*v):
    return struct.pack(f"<{len(v)}f", *v)


def text(s):
    return u32(len(s)) + s.encode("ascii")


def layer(kv_heads, dim_k, dim_v, window=0, rope=0, rotated=0, scaling=0, dims=0, theta=0.0,
          factors=(0.0, 0.0, 0.0, 0.0), context=0):
    return (u32(kv_heads, dim_k, dim_v, window) + u8(rope, rotated, scaling) + u32(dims)
            + f32(theta, *factors) + u32(context))


def segment(index, tensor, dtype, offset, length, strides):
    return u32(index) + u8(tensor, dtype) + u64(offset, length, *strides)


def descriptor(content, adapter, engine, options, abi, state, block_tokens, tp, block_bytes, layers,
               segments):
    return (b"cistern.descriptor.1" + content + adapter + text(engine) + text(options)
            + u32(abi, state, block_tokens, *tp) + u64(block_bytes)
            + u32(len(layers)) + b"".join(layers) + u32(len(segments)) + b"".join(segments))


def row_major(index, tensor, size, dtype, offset, tokens, heads, dim):
    return segment(index, tensor, dtype, offset, tokens * heads * dim * size,
                   (heads * dim * size, dim * size, size))


def transposed(index, tensor, size, dtype, offset, tokens, heads, dim):
    return segment(index, tensor, dtype, offset, tokens * heads * dim * size,
                   (size, dim * tokens * size, tokens * size))


def descriptors():
    content, adapter, none = sha(b"model"), sha(b"adapter"), bytes(32)
    yield "one layer, f32", descriptor(
        content, none, "example", "", 1, 0, 16, (0, 1), 2 * 16 * 2 * 4 * 4,
        [layer(2, 4, 4)],
        [row_major(0, K, 4, F32, 0, 16, 2, 4), row_major(0, V, 4, F32, 512, 16, 2, 4)])
    yield "rotated K, transposed V, yarn, window", descriptor(
        content, adapter, "llama.cpp", "kv=f16;v_trans=1", 7, 3, 64, (1, 2), 2 * 2 * 64 * 3 * 8 * 2,
        [layer(3, 8, 8, 4096, 2, 1, 2, 6, 10000.0, (4.0, 32.0, 1.0, 1.25), 32768),
         layer(3, 8, 8, 0, 1, 0, 1, 8, 500000.0, (0.5, 0.0, 0.0, 0.0), 0)],
        [row_major(0, K, 2, F16, 0, 64, 3, 8), transposed(0, V, 2, F16, 3072, 64, 3, 8),
         row_major(1, K, 2, BF16, 6144, 64, 3, 8), transposed(1, V, 2, BF16, 9216, 64, 3, 8)])
    yield "opaque bytes", descriptor(
        content, none, "vllm", "fp8", 0, 0, 1024, (0, 1), 1024 * 10 + 100,
        [layer(4, 64, 64, 0, 3, 1, 3, 64, 1.0, (8.0, 1.0, 4.0, 0.0), 8192)],
        [segment(0, OTHER, OPAQUE, 0, 1024 * 10, (10, 0, 0)),
         segment(0, OTHER, OPAQUE, 1024 * 10, 100, (0, 0, 0))])


def block_key(parent, tokens, extra=b""):
    return sha(b"cistern.key.1", parent, u32(len(tokens)), u32(*tokens), u32(len(extra)), extra)


def chain(parent, tokens, block_tokens):
    keys = []
    for at in range(0, len(tokens), block_tokens):
        parent = block_key(parent, tokens[at:at + block_tokens])
        keys.append(parent)
    return b"".join(keys)


def flat_key(data):
    if len(data) <= 31:
        return data + bytes(31 - len(data)) + bytes([len(data)])
    return sha(b"cistern.flat.1", u32(len(data)), data)[:31] + b"\xff"


def vectors():
    for name, data in descriptors():
        yield {"what": "descriptor", "name": name, "bytes": data.hex(),
               "fingerprint": sha(data).hex()}
    fingerprint = sha(dict(descriptors())["one layer, f32"])
    for salt in (b"", b"s", bytes(range(64))):
        yield {"what": "root", "fingerprint": fingerprint.hex(), "salt": salt.hex(),
               "root": sha(b"cistern.root.1", fingerprint, u32(len(salt)), salt).hex()}
    root = sha(b"cistern.root.1", fingerprint, u32(0))
    for tokens, extra in (([], b""), ([0], b""), ([1, 2, 3], b"image 7"),
                          ([0xffffffff, 0x01020304], bytes(100))):
        yield {"what": "block", "parent": root.hex(), "tokens": u32(*tokens).hex(),
               "extra": extra.hex(), "key": block_key(root, tokens, extra).hex()}
    for n, size in ((0, 64), (1, 64), (63, 64), (64, 64), (65, 64), (200, 64), (48, 16),
                    (1025, 1024)):
        tokens = [i * i * 7919 % 151936 for i in range(n)]
        yield {"what": "chain", "root": root.hex(), "block_tokens": size,
               "tokens": u32(*tokens).hex(), "keys": chain(root, tokens, size).hex()}
    for data in (b"", b"a", bytes(31), bytes(32), bytes(range(31)), bytes(range(32)), b"k" * 200):
        yield {"what": "flat", "data": data.hex(), "key": flat_key(data).hex()}


def main():
    made = "[\n" + ",\n".join(json.dumps(v) for v in vectors()) + "\n]\n"
    if sys.argv[1:] == ["--check"]:
        if made != OUT.read_text(encoding="ascii"):
            sys.exit(f"{OUT.name} is not what this script makes")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        OUT.write_text(made, encoding="ascii")


if __name__ == "__main__":
    main()
