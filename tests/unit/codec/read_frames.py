#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A second, slow decoder of frames, written from docs/codec-format.md, against the golden frames.

usage: read_frames.py FOLDER    (the folder of manifest.json)

Streams of stage ZSTD are piped through the zstd program; without it their frames are left out.
"""
import hashlib
import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path

OPAQUE, F32, F16, BF16 = range(4)
RAW, ZERO, ZSTD, PLANES, INT8 = range(5)
SIZE = {OPAQUE: 1, F32: 4, F16: 2, BF16: 2}


class Refused(Exception):
    pass


def need(condition, result="corrupt"):
    if not condition:
        raise Refused(result)


def crc_table():
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        yield n


CRC = list(crc_table())


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def head_dim(layout, seg):
    layer = layout["layers"][seg["layer"]]
    return layer["head_dim_v" if seg["tensor"] == 1 else "head_dim_k"]


def layout_crc(layout):
    data = struct.pack("<QII", layout["block_bytes"], layout["block_tokens"],
                       len(layout["segments"]))
    for s in layout["segments"]:
        data += struct.pack("<5Q3IBBxx", s["offset"], s["length"], s["token_stride"],
                            s["head_stride"], s["dim_stride"], s["layer"],
                            layout["layers"][s["layer"]]["kv_heads"], head_dim(layout, s),
                            s["tensor"], s["dtype"])
    return crc32c(data)


def offsets(layout, seg, tokens):
    """Element offsets of the present tokens in channel order: [token][channel]."""
    heads, dims = layout["layers"][seg["layer"]]["kv_heads"], head_dim(layout, seg)
    return [[t * seg["token_stride"] + h * seg["head_stride"] + d * seg["dim_stride"]
             for h in range(heads) for d in range(dims)] for t in range(tokens)]


def code_lengths(data):
    """-> {symbol: length}, bytes used"""
    lengths, symbol, filled, at = {}, 0, 0, 0

    def nibble():
        nonlocal at
        need(at // 2 < len(data))
        at += 1
        return data[(at - 1) // 2] >> 4 * ((at - 1) % 2) & 15
    while filled < 2048:
        v = nibble()
        if v == 0:
            symbol += 1 + nibble()
            continue
        need(v <= 11 and symbol <= 255)
        lengths[symbol] = v
        symbol += 1
        filled += 1 << 11 - v
    need(filled == 2048 and (at % 2 == 0 or data[at // 2] >> 4 == 0))
    return lengths, (at + 1) // 2


def huffman(data, n):
    lengths, at = code_lengths(data)
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((v, k) for k, v in lengths.items()):
        code <<= length - last
        codes[length, code] = symbol
        code, last = code + 1, length
    streams = 4 * math.ceil(n / 16384)
    need(len(data) >= at + 2 * streams)
    sizes = struct.unpack_from(f"<{streams}H", data, at)
    at += 2 * streams
    out, share = bytearray(), math.ceil(n / streams)
    for size in sizes:
        need(at + size <= len(data))
        bits = "".join(f"{b:08b}" for b in data[at:at + size])
        at += size
        used = 0
        for _ in range(min(share, n - len(out))):
            length = next((l for l in range(1, 12) if used + l <= len(bits)
                           and (l, int(bits[used:used + l], 2)) in codes), None)
            need(length)
            out.append(codes[length, int(bits[used:used + length], 2)])
            used += length
        need(len(bits) - used < 8 and "1" not in bits[used:])
    need(at == len(data) and len(out) == n)
    return bytes(out)


def plane(coding, data, n):
    need(coding <= 2)
    if coding == 0:
        need(len(data) == n)
        return data
    if coding == 1:
        need(len(data) == 1)
        return data * n
    return huffman(data, n)


def planes(layout, seg, tokens, data):
    need(seg["dtype"] in (F16, BF16) and len(data) >= 8)
    flags, hi_coding, lo_coding, reserved, hi_length = struct.unpack_from("<BBBBI", data)
    need(flags <= 1 and reserved == 0 and hi_length <= len(data) - 8)
    if flags:
        need(seg["length"] % 2 == 0)
        places = list(range(0, seg["length"], 2))
    else:
        places = sorted(sum(offsets(layout, seg, tokens), []))
    hi = plane(hi_coding, data[8:8 + hi_length], len(places))
    lo = plane(lo_coding, data[8 + hi_length:], len(places))
    out = bytearray(seg["length"])
    for at, h, l in zip(places, hi, lo):
        r = h << 8 | l
        struct.pack_into("<H", out, at, r >> 1 | (r & 1) << 15)
    return bytes(out)


def rounded(x, dtype):
    """Bytes of x in the type, to nearest even."""
    if dtype == F32:
        return struct.pack("<f", x)
    if dtype == F16:
        return struct.pack("<e", x)
    u, = struct.unpack("<I", struct.pack("<f", x))
    return struct.pack("<H", u + 0x7FFF + (u >> 16 & 1) >> 16)


def int8(layout, seg, tokens, first_position, data):
    need(seg["dtype"] != OPAQUE)
    places, size = offsets(layout, seg, tokens), SIZE[seg["dtype"]]
    channels, sinks = len(places[0]), min(tokens, max(0, 4 - first_position))
    groups, coded = math.ceil(channels / 64), tokens - sinks
    scales_at = sinks * channels * size
    q_at = scales_at + 2 * coded * groups
    need(len(data) == q_at + coded * channels)
    out = bytearray(seg["length"])
    for t, row in enumerate(places):
        for c, at in enumerate(row):
            if t < sinks:
                from_ = (t * channels + c) * size
                out[at:at + size] = data[from_:from_ + size]
                continue
            scale, = struct.unpack_from("<e", data, scales_at + 2 * ((t - sinks) * groups + c // 64))
            need(math.isfinite(scale))
            q, = struct.unpack_from("<b", data, q_at + (t - sinks) * channels + c)
            out[at:at + size] = rounded(q * scale, seg["dtype"])
    return bytes(out)


def unzstd(data, n):
    done = subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=False)
    need(done.returncode == 0 and len(done.stdout) == n)
    return done.stdout


def stream(layout, seg, tokens, first_position, stage, data, n):
    if stage == RAW:
        need(len(data) == n)
        return data
    if stage == ZERO:
        need(not data)
        return bytes(n)
    if stage == ZSTD:
        return unzstd(data, n)
    need(seg)
    if stage == PLANES:
        return planes(layout, seg, tokens, data)
    return int8(layout, seg, tokens, first_position, data)


def gaps(layout):
    at = 0
    for s in layout["segments"] + [{"offset": layout["block_bytes"], "length": 0}]:
        yield at, s["offset"]
        at = s["offset"] + s["length"]


def decode(frame, layout):
    need(len(frame) >= 64 and frame[:4] == b"CFRM")
    (version, preset, flags, tokens, first_position, block_bytes, frame_bytes, _error, block_crc,
     layout_sum, n, table_crc, reserved, header_crc) = struct.unpack_from("<HBBIIQQfIIII8sI", frame, 4)
    need(version == 1, "version")
    need(crc32c(frame[:60]) == header_crc)
    need(preset <= 2 and flags == 0 and reserved == bytes(8), "version")
    need(frame_bytes <= len(frame))
    need(layout_sum == layout_crc(layout) and block_bytes == layout["block_bytes"], "mismatch")
    need(1 <= tokens <= layout["block_tokens"])
    gap_bytes = sum(b - a for a, b in gaps(layout))
    need(n == len(layout["segments"]) + (gap_bytes > 0))
    need(crc32c(frame[64:64 + 16 * n]) == table_crc)
    block, at = bytearray(block_bytes), 64 + 16 * n
    for i in range(n):
        stage, stage_version, zero, length, _, _ = struct.unpack_from("<BBHIIf", frame, 64 + 16 * i)
        start = -(-at // 16) * 16
        need(start + length <= frame_bytes and not any(frame[at:start]))
        need(stage <= INT8 and stage_version == 1 and zero == 0, "version")
        at = start + length
        data = frame[start:at]
        if i < len(layout["segments"]):
            seg = layout["segments"][i]
            block[seg["offset"]:seg["offset"] + seg["length"]] = \
                stream(layout, seg, tokens, first_position, stage, data, seg["length"])
        else:
            rest = stream(layout, None, tokens, first_position, stage, data, gap_bytes)
            for a, b in gaps(layout):
                block[a:b], rest = rest[:b - a], rest[b - a:]
    need(at == frame_bytes)
    need(crc32c(block) == block_crc)
    return bytes(block)


def main():
    folder = Path(sys.argv[1])
    entries = json.loads((folder / "manifest.json").read_text())
    failed = 0
    for e in entries:
        frame = (folder / e["file"]).read_bytes()
        if "opaque" in e["file"] and not shutil.which("zstd"):
            print(f"{e['file']}: left out, there is no zstd program")
            continue
        try:
            got, result = hashlib.sha256(decode(frame, e)).hexdigest(), "ok"
        except Refused as r:
            got, result = None, str(r)
        if result != e["result"] or got != e.get("decoded_sha256"):
            print(f"{e['file']}: {result} {got}, not {e['result']} {e.get('decoded_sha256')}")
            failed += 1
    print(f"{len(entries)} frames, {failed} wrong")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
