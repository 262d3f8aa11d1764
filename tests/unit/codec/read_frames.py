#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A second, slow decoder of frames, written from docs/codec-format.md, against the golden frames.

usage: read_frames.py FOLDER    (the folder of manifest.json)

Presets that the format defines in floating point are held to its section 8, against decoded blocks
that lie beside their frames; the others to the bit.

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
RAW, ZERO, ZSTD, PLANES, INT8, GROUPS, LLOYD, POLAR = range(8)
TUCKER, KLT, EXPONENTS, SPUN = 8, 9, 10, 11
TURBOQUANT, JOLT, DEEP = 6, 8, 12
UNROTATED, MEAN, ZEROS, BY_CHANNEL, FACTORS, LLOYD_MAX, SKETCH = 1, 2, 4, 8, 16, 32, 128
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


def rope_id(layer):
    return crc32c(struct.pack("<BBxxI5fI", layer["rope"], layer["rope_scaling"], layer["rope_dims"],
                              layer["rope_theta"], *layer["scaling"],
                              layer["scaling_original_context"]))


def frequency(layer, i):
    base, dims = layer["rope_theta"], layer["rope_dims"]
    scaling, original = layer["scaling"], layer["scaling_original_context"]
    f, share = base ** (-2 * i / dims), 1
    if layer["rope_scaling"] == 1:
        share = 0
    elif layer["rope_scaling"] == 2:
        def pair(turns):
            return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        low = max(0, math.floor(pair(scaling[1])))
        high = min(dims - 1, math.ceil(pair(scaling[2])))
        share = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
    elif layer["rope_scaling"] == 3:
        turns = original * f / (2 * math.pi)
        share = min(1, max(0, (turns - scaling[1]) / (scaling[2] - scaling[1])))
    return f if share == 1 else f * share + f / scaling[0] * (1 - share)


def turn(layer, row, dims, position):
    """Keys of one token out to their position."""
    half = layer["rope_dims"] // 2
    for head in range(0, len(row), dims):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if layer["rope"] == 1 else (i, i + half)
            x, y, angle = row[head + a], row[head + b], frequency(layer, i) * position
            row[head + a] = x * math.cos(angle) - y * math.sin(angle)
            row[head + b] = x * math.sin(angle) + y * math.cos(angle)


LEVELS = {}


def levels(bits):
    """The Lloyd-Max quantizer of a normal variable by Lloyd's iteration."""
    def below(x):
        return math.erf(x / math.sqrt(2)) / 2

    def density(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if bits not in LEVELS:
        half = [4 * (i + 0.5) / 2 ** bits for i in range(2 ** (bits - 1))]
        change = 1
        while change > 1e-9:
            edges = [0] + [(a + b) / 2 for a, b in zip(half, half[1:])] + [30]
            better = [(density(a) - density(b)) / (below(b) - below(a))
                      for a, b in zip(edges, edges[1:])]
            change = max(abs(a - b) for a, b in zip(half, better))
            half = better
        LEVELS[bits] = [-x for x in reversed(half)] + half
    return LEVELS[bits]


class Coded:
    """The head of a GROUPS or LLOYD stream, and what both have in common."""
    head = 8

    def __init__(self, layout, seg, tokens, first_position, data):
        need(seg["dtype"] != OPAQUE)
        self.layout, self.seg, self.data = layout, seg, data
        self.layer, self.dims = layout["layers"][seg["layer"]], head_dim(layout, seg)
        self.places, self.size = offsets(layout, seg, tokens), SIZE[seg["dtype"]]
        self.channels, self.first_position = len(self.places[0]), first_position
        self.sinks = min(tokens, max(0, 4 - first_position))
        self.coded = tokens - self.sinks
        self.at = 8 + self.sinks * self.channels * self.size
        need(len(data) >= self.at)
        self.flags, self.bits, self.exponent, self.group, rope = struct.unpack_from("<BBbBI", data)
        need(self.bits <= 8 and -126 <= self.exponent <= 80)
        if self.flags & UNROTATED:
            need(seg["tensor"] == 0 and self.layer.get("k_rotated") and self.layer["rope"] in (1, 2)
                 and rope == rope_id(self.layer))
        else:
            need(rope == 0)

    def halves(self, n, unit=None):
        need(len(self.data) >= self.at + 2 * n)
        values = struct.unpack_from(f"<{n}e", self.data, self.at)
        need(all(map(math.isfinite, values)))
        self.at += 2 * n
        unit = math.ldexp(1, self.exponent) if unit is None else unit
        return [v * unit for v in values]

    def codes(self):
        """-> [token][channel], and nothing may follow"""
        row = -(-self.channels // 8) * self.bits
        need(len(self.data) == self.at + self.coded * row)
        for t in range(self.coded):
            packed = int.from_bytes(self.data[self.at + t * row:self.at + (t + 1) * row], "little")
            yield [packed >> self.bits * c & (1 << self.bits) - 1 for c in range(self.channels)]

    def block(self, rows):
        out = bytearray(self.seg["length"])
        for t, row in enumerate(self.places):
            if t < self.sinks:
                for c, at in enumerate(row):
                    from_ = self.head + (t * self.channels + c) * self.size
                    out[at:at + self.size] = self.data[from_:from_ + self.size]
                continue
            values = rows[t - self.sinks]
            if self.flags & UNROTATED:
                turn(self.layer, values, self.dims, self.first_position + t)
            for at, x in zip(row, values):
                out[at:at + self.size] = rounded(x, self.seg["dtype"])
        return bytes(out)


def groups(*args):
    s = Coded(*args)
    need(not s.flags & ~(UNROTATED | ZEROS | BY_CHANNEL) and s.bits >= 2 and 4 <= s.group <= 10)
    length = 1 << s.group
    if s.flags & BY_CHANNEL:
        per_row, rows = s.channels, -(-s.coded // length)
    else:
        per_row, rows = -(-s.channels // length), s.coded
    scales = s.halves(per_row * rows)
    zeros = s.halves(per_row * rows) if s.flags & ZEROS else [-2 ** (s.bits - 1) * x for x in scales]
    values = []
    for t, codes in enumerate(s.codes()):
        at = [t // length * per_row + c if s.flags & BY_CHANNEL else t * per_row + c // length
              for c in range(s.channels)]
        values.append([q * scales[i] + zeros[i] for q, i in zip(codes, at)])
    return s.block(values)


def transformed(values):
    out, at, left = [], 0, len(values)
    while left:
        n = 1 << left.bit_length() - 1
        block = values[at:at + n]
        out += [sum(-x if (i & j).bit_count() % 2 else x for j, x in enumerate(block)) /
                math.sqrt(n) for i in range(n)]
        at, left = at + n, left - n
    return out


def head(codes, level, norm):
    """A head of rotated codes."""
    return transformed([norm * level[q] for q in codes])


def random_sign(j):
    h = j + 1
    h = (h ^ h >> 16) * 0x85ebca6b & 0xffffffff
    h = (h ^ h >> 13) * 0xc2b2ae35 & 0xffffffff
    return -1 if (h ^ h >> 16) & 1 else 1


def sketched_head(codes, bits, norm, size):
    level, low = levels(bits - 1), (1 << bits - 1) - 1
    z = transformed([-size if q > low else size for q in codes])
    return transformed([norm * level[q & low] + random_sign(j) * x
                        for j, (q, x) in enumerate(zip(codes, z))])


def spun_head(codes, level, norm):
    x, dims = [norm * level[q] for q in codes], len(codes)
    n = 1 << dims.bit_length() - 1
    if n < dims:
        x = x[:dims - n] + transformed(x[dims - n:])
        x = [random_sign(dims + j) * v for j, v in enumerate(x)]
    x = transformed(x[:n]) + x[n:]
    return [random_sign(j) * v for j, v in enumerate(x)]


def spun(*args):
    return lloyd(*args, coded_head=spun_head)


def lloyd(*args, coded_head=head):
    s = Coded(*args)
    sketch = s.flags & SKETCH
    need(not s.flags & ~(UNROTATED | MEAN | SKETCH) and s.group == 0)
    need(not sketch or coded_head is head)
    need(s.bits >= (2 if sketch else 1))
    means = s.halves(s.channels) if s.flags & MEAN else [0] * s.channels
    heads = s.channels // s.dims
    norms, values = s.halves(heads * s.coded), []
    sizes = s.halves(heads * s.coded) if sketch else []
    for t, codes in enumerate(s.codes()):
        row = []
        for h in range(heads):
            mine, i = codes[h * s.dims:(h + 1) * s.dims], t * heads + h
            row += sketched_head(mine, s.bits, norms[i], sizes[i]) if sketch else \
                coded_head(mine, levels(s.bits), norms[i])
        values.append([x + m for x, m in zip(row, means)])
    return s.block(values)


STEP = [0, 1.595769, .995687, .586019, .335201, .188139, .104063, .056868, .030762]


def product(a, b, rows, inner, columns):
    return [sum(a[i * inner + k] * b[k * columns + j] for k in range(inner))
            for i in range(rows) for j in range(columns)]


def tucker(layout, seg, tokens, first_position, data, cells):
    """cells: tensor -> shape and factors of the last stream that had some"""
    s = Coded(layout, seg, tokens, first_position, data)
    need(not s.flags & ~(UNROTATED | MEAN | FACTORS | LLOYD_MAX) and s.group == 0)
    heads = s.channels // s.dims
    need(len(data) >= s.at + 8)
    rank_t, rank_d, scale = struct.unpack_from("<HHf", data, s.at)
    s.at += 8
    need(rank_t <= s.coded and rank_d <= s.dims and 0 < scale <= 2 ** 80)
    shape = s.coded, s.dims, rank_t, rank_d
    if s.flags & FACTORS:
        cells[seg["tensor"]] = (shape, s.halves(s.coded * rank_t, 1), s.halves(rank_d * s.dims, 1))
    need(seg["tensor"] in cells and cells[seg["tensor"]][0] == shape)
    _, token, dim = cells[seg["tensor"]]
    core = [product(s.halves(rank_t * rank_d, scale), dim, rank_t, rank_d, s.dims)
            for _ in range(heads)]
    backbone = [product(token, c, s.coded, rank_t, s.dims) for c in core]
    means = s.halves(s.channels) if s.flags & MEAN else [0] * s.channels
    values = [[backbone[h][t * s.dims + d] + means[h * s.dims + d]
               for h in range(heads) for d in range(s.dims)] for t in range(s.coded)]
    if not s.bits:
        need(s.at == len(data))
        return s.block(values)
    level = levels(s.bits) if s.flags & LLOYD_MAX else \
        [(k - 2 ** (s.bits - 1) + 0.5) * STEP[s.bits] for k in range(2 ** s.bits)]
    norms = s.halves(heads * s.coded)
    for t, codes in enumerate(s.codes()):
        for h in range(heads):
            residual = head(codes[h * s.dims:(h + 1) * s.dims], level, norms[t * heads + h])
            for d, x in enumerate(residual):
                values[t][h * s.dims + d] += x
    return s.block(values)


QUARTER = [[.9523438, .805634, .5924136, .3050268], [.9104246, .7810479, .6244711, .413675],
           [.8656486, .7609979, .6487543, .5006521]]


def polar(layout, seg, tokens, first_position, data):
    s = Coded(layout, seg, tokens, first_position, data)
    need(s.flags in (0, UNROTATED) and s.bits == 0 and s.group == 0 and s.dims % 16 == 0)
    blocks = s.channels // 16
    lengths = s.halves(s.coded * blocks)
    row = -(-blocks * 46 // 8)
    need(len(data) == s.at + s.coded * row)
    values = []
    for t in range(s.coded):
        codes, x = Bits(data[s.at + t * row:s.at + (t + 1) * row]), []
        for length in lengths[t * blocks:(t + 1) * blocks]:
            levels_ = [[codes.get(2 if l else 4) for _ in range(8 >> l)] for l in range(4)]
            r = [length]
            for l in (3, 2, 1, 0):
                if l:
                    r = [x for y, c in zip(r, levels_[l])
                         for x in (y * QUARTER[l - 1][c], y * QUARTER[l - 1][3 - c])]
                else:
                    r = [x for y, c in zip(r, levels_[0])
                         for x in (y * math.cos(math.pi * (c + .5) / 8),
                                   y * math.sin(math.pi * (c + .5) / 8))]
            x += r
        for h in range(0, s.channels, s.dims):
            at, left = h, s.dims
            while left:
                n = 1 << left.bit_length() - 1
                block = x[at:at + n]
                x[at:at + n] = [sum(-v if (i & j).bit_count() % 2 else v
                                    for j, v in enumerate(block)) / math.sqrt(n) for i in range(n)]
                at, left = at + n, left - n
        values.append(x)
    return s.block(values)


class Bits:
    """Numbers from the lowest bit of the first byte up."""

    def __init__(self, data):
        self.data, self.at, self.all = data, 0, int.from_bytes(data, "little")

    def get(self, n):
        need(self.at + n <= 8 * len(self.data))
        self.at += n
        return self.all >> self.at - n & (1 << n) - 1

    def state(self):
        b = 16 + self.get(4)
        return 1 << b | self.get(b)


def integers(data, channels, tokens, table_of, payload_len):
    """A rANS stream -> rows of integers, payload. table_of(tag, channel) -> frequencies, shift"""
    need(data)
    lanes, tag = 1 << (data[0] & 7), data[0] >> 3
    need(lanes <= min(32, tokens))
    head = Bits(data[1:])
    states = [head.state() for _ in range(lanes)]
    at = 1 + (head.at + 7) // 8
    need(head.get(-head.at % 8) == 0)
    tables, rows = [table_of(tag, c) for c in range(channels)], []
    for frequencies, _ in tables:
        slots = [(s - len(frequencies) // 2, f, i) for s, f in enumerate(frequencies)
                 for i in range(f)]
        need(len(slots) == 4096)
        row = []
        for t in range(tokens):
            x = states[t % lanes]
            symbol, f, i = slots[x % 4096]
            x = f * (x // 4096) + i
            if x < 1 << 16:
                need(at + 2 <= len(data))
                x = x << 16 | struct.unpack_from("<H", data, at)[0]
                at += 2
            states[t % lanes] = x
            row.append(symbol)
        rows.append(row)
    bits = "".join(f"{x.bit_length() - 17:04b}"[::-1] + f"{x:b}"[:0:-1] for x in states)
    whole = len(bits) // 8
    need("1" not in bits[8 * whole:])
    raw = Bits(bytes(int(bits[i:i + 8][::-1], 2) for i in range(0, 8 * whole, 8)) + data[at:])
    payload = bytes(raw.get(8) for _ in range(payload_len))
    for row, (frequencies, shift) in zip(rows, tables):
        reach = len(frequencies) // 2
        for t, s in enumerate(row):
            if abs(s) == reach:
                u = 0
                while raw.get(1):
                    u += 1
                row[t] += ((1 << u) - 1 + raw.get(u)) * (1 if s > 0 else -1)
        row[:] = [s * (1 << shift) - ((1 << shift) >> 1) + raw.get(shift) for s in row]
        need(all(abs(q) < 1 << 28 for q in row))
    left = 8 * len(raw.data) - raw.at
    need((left < 8 or at == len(data)) and raw.get(left) == 0)
    return rows, payload


def coefficient_table(q):
    """Frequencies of class q."""
    def above(y):
        return 1 / (1 + math.exp(math.pi * y / (math.sqrt(3) * 2 ** ((q - 24) / 4))))

    r = 1
    while 4096 * above(r - 0.5) >= 1.5:
        r += 1
    half = [max(1, math.floor(4096 * (above(s - 0.5) - (above(s + 0.5) if s < r else 0)) + 0.5))
            for s in range(1, r + 1)]
    return half[::-1] + [4096 - 2 * sum(half)] + half


def coefficients(data, classes, tokens, payload_len):
    def table_of(tag, c):
        shift = max(0, -(-(classes[c] - 34) // 4)) + (c < tag)
        return coefficient_table(max(0, classes[c] - 4 * shift)), shift

    return integers(data, len(classes), tokens, table_of, payload_len)


assert coefficients(bytes.fromhex("18dcdebd2c"), [24] * 3, 1, 0) == ([[1], [0], [-2]], b"")


def exponent_table(k):
    def below(x):
        return 2 / (1 + math.exp(-math.pi * x / (math.sqrt(3) * 2 ** (k / 4)))) - 1

    bounds = [0] + [below(2.0 ** (s - 3)) for s in range(-7, 7)] + [1]
    f = [max(1, math.floor(4096 * (b - a) + 0.5)) for a, b in zip(bounds, bounds[1:])]
    f[4 + 7] += 4096 - sum(f)
    return f


def exponents(layout, seg, tokens, data):
    need(seg["dtype"] == BF16 and len(data) >= 4)
    flags, bits, lowest = struct.unpack_from("<BBH", data)
    places = offsets(layout, seg, tokens)
    channels = len(places[0])
    size = -(-channels // 8) * bits
    need(flags <= 1 and bits <= 6 and lowest < 1024 and len(data) >= 4 + size)
    codes = Bits(data[4:4 + size])
    codes = [codes.get(bits) for _ in range(channels)]
    levels = [0 if flags and c == (1 << bits) - 1 else lowest + c for c in codes]
    tables = [exponent_table(k) for k in range(4)]

    def table_of(tag, c):
        need(tag == 0)
        return tables[levels[c] % 4], 0

    rows, low = integers(data[4 + size:], channels, tokens, table_of, tokens * channels)
    order = sorted((at, t, c) for t, row in enumerate(places) for c, at in enumerate(row))
    out = bytearray(seg["length"])
    for (at, t, c), l in zip(order, low):
        r = (rows[c][t] + levels[c] // 4 - 4) % 256 << 8 | l
        struct.pack_into("<H", out, at, r >> 1 | (r & 1) << 15)
    return bytes(out)


class Side:
    """Side data: (layer, tensor) -> what is known of it."""

    def __init__(self, raw, layout):
        (magic, form, self.version, size, model, n, _tokens, step) = \
            struct.unpack_from("<4sHHIIIIf4x", raw)
        need(magic == b"CSID" and form == 1 and size == len(raw) and self.version and step > 0)
        need(model == self.model(layout))
        self.check = struct.unpack("<I", hashlib.sha256(raw).digest()[:4])[0]
        self.layout, self.tensors, at, last = layout, {}, 32 + 16 * n, -1
        for i in range(n):
            kind, tensor, layer, offset, length = struct.unpack_from("<BBHII4x", raw, 32 + 16 * i)
            rank, at = (layer << 16 | tensor << 8 | kind), -(-at // 16) * 16
            need(rank > last and offset == at and tensor < 2 and kind in (1, 2, 3, 4))
            last, at = rank, at + length
            if kind == 1:
                self.klt(layer, tensor, raw[offset:at])
            elif kind != 3:
                self.predictor(layer, tensor, raw[offset:at], kind)
        need(at == len(raw))

    @staticmethod
    def model(layout):
        out = struct.pack("<I", len(layout["layers"]))
        for x in layout["layers"]:
            turned = x.get("k_rotated") and x["rope"]
            out += struct.pack("<IIII", x["kv_heads"], x["head_dim_k"], x["head_dim_v"],
                               rope_id(x) if turned else 0)
        return crc32c(out)

    def groups(self, key):
        t = self.tensors[key]
        return [(at, min(t["width"], t["channels"] - at))
                for at in range(0, t["channels"], t["width"])]

    @staticmethod
    def sources(layer, tensor, which):
        """Keys of the tensors that are predicted from, in the order of bits."""
        first = (layer if tensor else layer - 1), layer - 1
        return [(first[i % 2] - i // 2, i % 2) for i in range(4) if which >> i & 1]

    def picked(self, key, rank):
        """The first coordinates of a tensor by falling deviation -> (group, row) each."""
        t, out = self.tensors[key], []
        taken = [0] * len(self.groups(key))
        while len(out) < min(rank, t["channels"]):
            left = [(-t["klt"][0][first + n], g) for g, ((first, w), n) in
                    enumerate(zip(self.groups(key), taken)) if n < w]
            g = min(left)[1]
            out.append((g, taken[g]))
            taken[g] += 1
        return out

    def klt(self, layer, tensor, raw):
        channels, width, rms, weight = struct.unpack_from("<IIff", raw)
        need(0 < width <= min(channels, 256) and rms > 0 and weight > 0)
        self.tensors[layer, tensor] = t = {"channels": channels, "width": width, "sources": 0}
        t["mean"] = struct.unpack_from(f"<{channels}f", raw, 16)
        t["klt"], end = self.basis(layer, tensor, raw, 16 + 4 * channels)
        need(end == len(raw))

    def basis(self, layer, tensor, raw, at):
        """-> deviations, and a matrix a group"""
        channels, rows = self.tensors[layer, tensor]["channels"], []
        sigma = struct.unpack_from(f"<{channels}f", raw, at)
        at += 4 * channels
        for _, w in self.groups((layer, tensor)):
            rows.append(struct.unpack_from(f"<{w * w}e", raw, at))
            at += 2 * w * w
        return (sigma, rows), at

    def predictor(self, layer, tensor, raw, kind):
        t = self.tensors[layer, tensor]
        sources, zero, rank, scale = struct.unpack_from("<BBHf", raw)
        need(not t["sources"] and not zero and sources < 16 and rank <= 512)
        need((kind == 4) == (sources > 3 or rank > 0))
        t["sources"], t["inputs"] = sources, []
        t["residual"], at = self.basis(layer, tensor, raw, 8)
        keys = self.sources(layer, tensor, sources)
        need(keys and all(key in self.tensors for key in keys))
        if rank:
            at = self.from_coordinates(t, keys, rank, scale, raw, at)
        else:
            at = self.from_channels((layer, tensor), keys, scale, raw, at)
        need(at == len(raw))

    def from_channels(self, key, keys, scale, raw, at):
        """Inputs: (source, its channels and factors, first channel predicted, their weights)."""
        own = self.groups(key)
        for g, (to, w) in enumerate(own):
            for source in keys:
                from_ = self.groups(source)
                first, n = from_[g * len(from_) // len(own)]
                for i in range(n):
                    weights = struct.unpack_from(f"<{w}e", raw, at)
                    at += 2 * w
                    self.tensors[key]["inputs"].append(
                        (source, [(first + i, 1)], to, [x * scale for x in weights]))
        return at

    def from_coordinates(self, t, keys, rank, scale, raw, at):
        for source in keys:
            groups, matrices = self.groups(source), self.tensors[source]["klt"][1]
            need(len(groups) <= 1024)
            for g, i in self.picked(source, rank):
                first, w = groups[g]
                row = [(first + j, matrices[g][i * w + j]) for j in range(w)]
                weights = struct.unpack_from(f"<{t['channels']}e", raw, at)
                at += 2 * t["channels"]
                t["inputs"].append((source, row, 0, [x * scale for x in weights]))
        return at


class Klt(Coded):
    """A KLT stream. last: (layer, tensor) -> rows, as decoded last, of what it may lean on."""
    head = 12

    def __init__(self, layout, seg, tokens, first_position, data, side, last):
        need(seg["dtype"] != OPAQUE and len(data) >= 12 and side)
        self.layout, self.seg, self.data = layout, seg, data
        self.layer, self.dims = layout["layers"][seg["layer"]], head_dim(layout, seg)
        self.places, self.size = offsets(layout, seg, tokens), SIZE[seg["dtype"]]
        self.channels, self.first_position = len(self.places[0]), first_position
        self.sinks = min(tokens, max(0, 4 - first_position))
        self.coded = tokens - self.sinks
        self.flags, self.spread, zero, self.step, rope = struct.unpack_from("<BbHfI", data)
        turned = seg["tensor"] == 0 and self.layer.get("k_rotated") and self.layer["rope"]
        need(self.flags < 8 and not zero and abs(self.spread) <= 32 and 0 < self.step <= 2 ** 60)
        need(bool(self.flags & UNROTATED) == bool(turned))
        need(rope == (rope_id(self.layer) if turned else 0))
        self.side, self.last, self.key = side, last, (seg["layer"], seg["tensor"])
        self.t = side.tensors.get(self.key)
        need(self.t and self.t["channels"] == self.channels and self.coded)

    def classes(self, sigma):
        edges = [self.step * 2 ** ((k - 24.5 - self.spread) / 4) for k in range(1, 45)]
        return [sum(s >= e for e in edges) for s in sigma]

    def rows(self):
        gains, predicted = self.flags & 2, self.flags & 4
        need(not predicted or self.t["sources"])
        sigma, matrices = self.t["residual" if predicted else "klt"]
        at = 12 + self.sinks * self.channels * self.size
        q, codes = coefficients(self.data[at:], self.classes(sigma), self.coded,
                                self.coded if gains else 0)
        need(all(c < 128 for c in codes))
        steps = [self.step * 2 ** (c / 8 - 8) for c in codes] or [self.step] * self.coded
        out = [list(self.t["mean"]) for _ in range(self.coded)]
        for (first, w), m in zip(self.side.groups(self.key), matrices):
            for i in range(w):
                for t in range(self.coded):
                    z = q[first + i][t] * steps[t]
                    if z:
                        row = out[t]
                        for j in range(w):
                            row[first + j] += z * m[i * w + j]
        for source, factors, to, weights in self.t["inputs"] if predicted else []:
            need(self.last.get(source))
            mean = self.side.tensors[source]["mean"]
            for row, a in zip(out, self.last[source]):
                x = sum((a[i] - mean[i]) * f for i, f in factors)
                for j, weight in enumerate(weights):
                    row[to + j] += x * weight
        return out


def plain_rows(layout, seg, tokens, first_position, data):
    """Rows of a decoded segment behind the sinks, keys turned back; None: out of limits."""
    layer, unit, out = layout["layers"][seg["layer"]], "e" if seg["dtype"] == F16 else "f", []
    for t, row in enumerate(offsets(layout, seg, tokens)):
        if t < max(0, 4 - first_position):
            continue
        if seg["dtype"] == BF16:
            x = [struct.unpack("<f", b"\0\0" + data[at:at + 2])[0] for at in row]
        else:
            x = [struct.unpack_from("<" + unit, data, at)[0] for at in row]
        if not all(abs(v) <= 2 ** 60 for v in x):
            return None
        if seg["tensor"] == 0 and layer.get("k_rotated") and layer["rope"]:
            turn(layer, x, head_dim(layout, seg), -(first_position + t))
        out.append(x)
    return out


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
    if stage == EXPONENTS:
        return exponents(layout, seg, tokens, data)
    coding = {INT8: int8, GROUPS: groups, LLOYD: lloyd, POLAR: polar, SPUN: spun}[stage]
    return coding(layout, seg, tokens, first_position, data)


def take_outliers(layout, seg, tokens, first_position, data, n):
    """Splits a stream with n tokens behind it: what the stage made, {offset: bytes}"""
    if not n:
        return data, {}
    need(seg["dtype"] != OPAQUE)
    places, size = offsets(layout, seg, tokens), SIZE[seg["dtype"]]
    sinks, row = min(tokens, max(0, 4 - first_position)), len(places[0]) * SIZE[seg["dtype"]]
    need(n <= (tokens - sinks) // 16 and len(data) >= n * (2 + row))
    data, rest = data[:-n * (2 + row)], data[-n * (2 + row):]
    numbers = struct.unpack_from(f"<{n}H", rest)
    need(sinks <= numbers[0] and numbers[-1] < tokens)
    need(all(a < b for a, b in zip(numbers, numbers[1:])))
    kept = {}
    for k, t in enumerate(numbers):
        for c, at in enumerate(places[t]):
            from_ = 2 * n + k * row + c * size
            kept[at] = rest[from_:from_ + size]
    return data, kept


def gaps(layout):
    at = 0
    for s in layout["segments"] + [{"offset": layout["block_bytes"], "length": 0}]:
        yield at, s["offset"]
        at = s["offset"] + s["length"]


def decode(frame, layout, side=None):
    need(len(frame) >= 64 and frame[:4] == b"CFRM")
    (version, preset, flags, tokens, first_position, block_bytes, frame_bytes, _error, block_crc,
     layout_sum, n, table_crc, bits_k, bits_v, side_version, side_check, header_crc) = \
        struct.unpack_from("<HBBIIQQfIIIIBBHII", frame, 4)
    need(version == 1, "version")
    need(crc32c(frame[:60]) == header_crc)
    layered = JOLT <= preset <= DEEP
    need(preset <= DEEP and flags == layered, "version")
    least, most = (1, 8) if preset == TURBOQUANT else (0, 0)
    need(least <= bits_k <= most and least <= bits_v <= most, "version")
    need(frame_bytes <= len(frame))
    need(layout_sum == layout_crc(layout) and block_bytes == layout["block_bytes"], "mismatch")
    need(1 <= tokens <= layout["block_tokens"])
    side = Side(side, layout) if side else None
    need(not side_version or side and (side.version, side.check) == (side_version, side_check),
         "side")
    gap_bytes = sum(b - a for a, b in gaps(layout))
    need(n == len(layout["segments"]) + (gap_bytes > 0))
    need(crc32c(frame[64:64 + 16 * n]) == table_crc)
    block, at, cells, last = bytearray(block_bytes), 64 + 16 * n, {}, {}
    order = list(range(len(layout["segments"])))
    if layered:
        order.sort(key=lambda i: (layout["segments"][i]["layer"], layout["segments"][i]["tensor"]))
    for i in range(n):
        stage, stage_version, kept, length, crc, _ = struct.unpack_from("<BBHIIf", frame, 64 + 16 * i)
        start = -(-at // 16) * 16
        need(start + length <= frame_bytes and not any(frame[at:start]))
        need(stage <= POLAR or stage in (EXPONENTS, SPUN) or layered and stage in (TUCKER, KLT),
             "version")
        need(stage_version == 1 and (not kept or INT8 <= stage <= KLT or stage == SPUN), "version")
        at = start + length
        data = frame[start:at]
        need(crc32c(data) == crc)
        if i < len(layout["segments"]):
            seg = layout["segments"][order[i]]
            where = slice(seg["offset"], seg["offset"] + seg["length"])
            data, kept = take_outliers(layout, seg, tokens, first_position, data, kept)
            if stage == TUCKER:
                block[where] = tucker(layout, seg, tokens, first_position, data, cells)
            elif stage == KLT:
                coded = Klt(layout, seg, tokens, first_position, data, side, last)
                rows = coded.rows()
                last[coded.key] = [list(row) for row in rows]
                block[where] = coded.block(rows)
            else:
                block[where] = stream(layout, seg, tokens, first_position, stage, data,
                                      seg["length"])
            for place, value in kept.items():
                block[seg["offset"] + place:seg["offset"] + place + len(value)] = value
            if preset == DEEP and stage != KLT and seg["tensor"] < 2:
                last[seg["layer"], seg["tensor"]] = plain_rows(
                    layout, seg, tokens, first_position, block[where])
        else:
            rest = stream(layout, None, tokens, first_position, stage, data, gap_bytes)
            for a, b in gaps(layout):
                block[a:b], rest = rest[:b - a], rest[b - a:]
    need(at == frame_bytes)
    if preset <= 2:
        need(crc32c(block) == block_crc)
    return bytes(block)


def values(layout, seg, block):
    """The tensor's values, holes left out."""
    at = [seg["offset"] + i for row in offsets(layout, seg, layout["block_tokens"]) for i in row]
    if seg["dtype"] == BF16:
        return [struct.unpack("<f", b"\0\0" + block[i:i + 2])[0] for i in at]
    return [struct.unpack_from("<f" if seg["dtype"] == F32 else "<e", block, i)[0] for i in at]


def close(layout, got, want):
    """Section 8: within 2^-8 of the larger of value and rms of its tensor."""
    for seg in layout["segments"]:
        a, b = values(layout, seg, got), values(layout, seg, want)
        rms = math.sqrt(sum(x * x for x in b) / len(b))
        if any(abs(x - y) > 2 ** -8 * max(abs(y), rms) for x, y in zip(a, b)):
            return False
    return True


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
            side = (folder / e["side"]).read_bytes() if "side" in e else None
            got, result = decode(frame, e, side), "ok"
            block = folder / e["file"].replace(".frame", ".block")
            if block.exists() and close(e, got, block.read_bytes()):
                got = block.read_bytes()
            got = hashlib.sha256(got).hexdigest()
        except Refused as r:
            got, result = None, str(r)
        if result != e["result"] or got != e.get("decoded_sha256"):
            print(f"{e['file']}: {result} {got}, not {e['result']} {e.get('decoded_sha256')}")
            failed += 1
    print(f"{len(entries)} frames, {failed} wrong")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
