# SPDX-License-Identifier: Apache-2.0
"""Predictors that cistern-codec learns, against numpy's least squares on the same inputs: values of up
to two layers before, as a decoder has them, and for tensors of several groups their coordinates."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy

TOOL = Path(os.environ["CST_BUILD_ROOT"]) / "tools" / "cistern-codec"
TOKENS, SINKS, STEP, RIDGE = 3004, 4, 0.4, 1e-3
NARROW, WIDE = (3, 2, 8), (2, 2, 136)  # layers, heads, dimensions
Noise = tuple  # of K and of V: a number, or one for each layer


def write(folder: Path, shape: tuple[int, int, int], noise: Noise) -> dict[tuple[int, int], numpy.ndarray]:
    """A text of some factors that all tensors show, in noise of K and of V -> (layer, tensor): rows."""
    layers, heads, dims = shape
    rng = numpy.random.default_rng(5)
    n = heads * dims // 3
    factors = rng.normal(size=(TOKENS, n))
    x = numpy.stack([
        (factors @ rng.normal(size=(layers, n, heads * dims)) + rng.normal(size=(heads * dims))
         + noise[t] * rng.normal(size=(layers, TOKENS, heads * dims))).astype(numpy.float32)
        for t in range(2)
    ])  # fmt: skip
    for part, values in zip(("kpre", "v"), x):
        values.tofile(folder / f"a.{part}.raw")
    (folder / "a.json").write_text(json.dumps({
        "layers": layers, "tokens": TOKENS, "kv_heads": heads, "head_dim": dims,
        "dtype": "f32 little-endian",
        "rope": {"kind": "halves", "base": 1e4, "dims": dims, "first_position": 0},
        "files": {p: {"file": f"a.{p}.raw"} for p in ("kpre", "v")},
    }))  # fmt: skip
    return {(i, t): x[t, i, SINKS:].astype(float) for i in range(layers) for t in range(2)}


class Reader:
    def __init__(self, raw: bytes, at: int) -> None:
        self.raw, self.at = raw, at

    def get(self, form: str, shape: tuple[int, ...]) -> numpy.ndarray:
        n = int(numpy.prod(shape))
        x = numpy.frombuffer(self.raw, form, n, self.at).astype(float).reshape(shape)
        self.at += x.size * int(form[-1])
        return x


def basis(r: Reader, spans: list[tuple[int, int]], channels: int) -> tuple:
    """-> deviations, and all rows of all groups as rows of one matrix"""
    sigma, rows = r.get("<f4", (channels,)), numpy.zeros((channels, channels))
    for at, w in spans:
        rows[at : at + w, at : at + w] = r.get("<f2", (w, w))
    return sigma, rows


def sections(raw: bytes) -> dict[tuple[int, int], dict]:
    out: dict[tuple[int, int], dict] = {}
    for i in range(struct.unpack_from("<I", raw, 16)[0]):
        kind, tensor, layer, at, length = struct.unpack_from("<BBHII", raw, 32 + 16 * i)
        t = out.setdefault((layer, tensor), {"sources": 0, "rank": 0})
        if kind == 1:
            channels, width, t["rms"], _ = struct.unpack_from("<IIff", raw, at)
            t["spans"] = [(a, min(width, channels - a)) for a in range(0, channels, width)]
            r = Reader(raw, at + 16)
            t["mean"] = r.get("<f4", (channels,))
            t["sigma"], t["rows"] = basis(r, t["spans"], channels)
        else:
            assert kind == 4 or kind == 2
            t["sources"], _, t["rank"], scale = struct.unpack_from("<BBHf", raw, at)
            r = Reader(raw, at + 8)
            _, t["residual"] = basis(r, t["spans"], len(t["mean"]))
            t["matrix"] = r.get("<f2", ((at + length - r.at) // 2,)) * scale
    return out


def source(layer: int, tensor: int, bit: int) -> tuple[int, int]:
    own = tensor == 1 and bit % 2 == 0
    return layer - (0 if own else 1) - bit // 2, bit % 2


def first_coordinates(t: dict, rank: int) -> numpy.ndarray:
    """Rows of the basis: the next one of the group where its deviation is largest."""
    left = [list(range(at, at + w)) for at, w in t["spans"]]
    out = []
    while len(out) < min(rank, len(t["mean"])):
        heads = [t["sigma"][group[0]] if group else -1 for group in left]
        out.append(left[int(numpy.argmax(heads))].pop(0))
    return t["rows"][out]


def ridge(a: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    """Least squares with rows for the damping, as numpy solves them."""
    n, strength = a.shape[1], RIDGE
    if len(a) < 32 * n:
        strength *= 32 * n / len(a)
    damping = numpy.sqrt((a * a).sum() / n * strength)
    return numpy.linalg.lstsq(numpy.vstack([a, damping * numpy.eye(n)]),
                              numpy.vstack([x, numpy.zeros((n, x.shape[1]))]), rcond=None)[0]  # fmt: skip


def inputs(t: dict, key: tuple[int, int], g: int, all_: dict, decoded: dict) -> numpy.ndarray:
    """What group g of a tensor is predicted from."""
    columns = []
    for bit in range(4):
        if t["sources"] >> bit & 1:
            from_ = source(*key, bit)
            x, spans = decoded[from_], all_[from_]["spans"]
            if t["rank"]:
                columns.append(x @ first_coordinates(all_[from_], t["rank"]).T)
            else:
                at, w = spans[g * len(spans) // len(t["spans"])]
                columns.append(x[:, at : at + w])
    return numpy.hstack(columns)


def check(
    folder: Path, shape: tuple[int, int, int], noise: Noise = (1.5, 1.5)
) -> dict:
    """Follows the learner's decoder with its own tables; each matrix is what numpy fits."""
    tokens = write(folder, shape, noise)
    subprocess.run([TOOL, "learn", "--keys", "plain", "--out", folder / "side", folder],
                   check=True, capture_output=True)  # fmt: skip
    found, decoded = sections((folder / "side").read_bytes()), {}
    for key, t in found.items():
        x = tokens[key] - tokens[key].mean(axis=0)
        predicted, at = numpy.zeros_like(x), 0
        for g, (first, w) in enumerate(t["spans"] if t["sources"] else []):
            a = inputs(t, key, g, found, decoded)
            n = a.shape[1]
            if t["rank"]:  # an input's weights of all channels lie together
                matrix = t["matrix"].reshape(n, -1)[:, first : first + w]
            else:
                matrix, at = t["matrix"][at : at + n * w].reshape(n, w), at + n * w
            want = ridge(a, x[:, first : first + w])
            # fp32 sums, fp16 elements, integers that round to the other side
            assert numpy.abs(matrix - want).max() < 5e-3 * numpy.abs(want).max()
            predicted[:, first : first + w] = a @ matrix
        rows = t["residual" if t["sources"] else "rows"]
        step = STEP * t["rms"]
        z = (x - predicted) @ rows.T / step
        decoded[key] = predicted + numpy.trunc(z + numpy.copysign(0.5, z)) * step @ rows
    return found


def test_two_layers_back(tmp_path: Path) -> None:
    # Values of the first layer show the factors best, so they are worth what they cost the third.
    by_layer = (numpy.reshape(layers, (3, 1, 1)) for layers in ((2, 2, 0.7), (0.1, 2, 0.2)))
    found = check(tmp_path, NARROW, noise=tuple(by_layer))
    assert found[0, 0]["sources"] == 0 and found[0, 1]["sources"] == 1
    assert found[2, 0]["sources"] == found[2, 1]["sources"] == 15
    assert not any(t["rank"] for t in found.values())


def test_coordinates_of_all_groups(tmp_path: Path) -> None:
    found = check(tmp_path, WIDE, noise=(12, 0.3))
    assert all(len(t["spans"]) > 1 for t in found.values())
    assert any(t["rank"] for t in found.values())


def test_a_plain_predictor_where_there_is_one_layer(tmp_path: Path) -> None:
    found = check(tmp_path, (1, 2, 8))
    assert found[0, 1]["sources"] == 1 and found[0, 1]["rank"] == 0
