# SPDX-License-Identifier: Apache-2.0
"""What cistern-codec learns, against numpy: means, bases and their cross-validated deviations."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import numpy
import pytest

TOOL = Path(os.environ["CST_BUILD_ROOT"]) / "tools" / "cistern-codec"
LAYERS, TOKENS, HEADS, DIMS, SINKS, FOLDS = 2, 500, 2, 16, 4, 4
WIDTH = HEADS * DIMS


def run(*args: object) -> dict:
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write(folder: Path, name: str, seed: int) -> dict[str, numpy.ndarray]:
    """A text whose channels are correlated, each layer in its own way."""
    mixing = numpy.random.default_rng(1).normal(size=(2, LAYERS, WIDTH, WIDTH))
    scale = 2.0 ** -numpy.arange(WIDTH)[:, None] * 2 + 0.05
    rng, tensors = numpy.random.default_rng(seed), {}
    for i, part in enumerate(("kpre", "v")):
        x = rng.normal(size=(LAYERS, TOKENS, WIDTH)) @ (scale * mixing[i]) + mixing[i, :, :1] * 3
        tensors[part] = x.astype(numpy.float32)
        tensors[part].tofile(folder / f"{name}.{part}.raw")
    description = {
        "layers": LAYERS, "tokens": TOKENS, "kv_heads": HEADS, "head_dim": DIMS,
        "dtype": "f32 little-endian",
        "rope": {"kind": "halves", "base": 1e4, "dims": DIMS, "first_position": 0},
        "files": {p: {"file": f"{name}.{p}.raw"} for p in tensors},
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(description))
    return tensors


def sections(raw: bytes) -> dict[tuple[int, int], tuple]:
    """(layer, tensor) -> rms, mean, deviations, basis, from the KLT sections."""
    out = {}
    for i in range(struct.unpack_from("<I", raw, 16)[0]):
        kind, tensor, layer, at, _length = struct.unpack_from("<BBHII", raw, 32 + 16 * i)
        if kind == 1:
            channels, width, rms, weight = struct.unpack_from("<IIff", raw, at)
            assert (channels, width, weight) == (WIDTH, WIDTH, 1)
            mean, sigma = numpy.frombuffer(raw, "<f4", 2 * WIDTH, at + 16).reshape(2, WIDTH)
            rows = numpy.frombuffer(raw, "<f2", WIDTH * WIDTH, at + 16 + 8 * WIDTH)
            out[layer, tensor] = rms, mean, sigma, rows.reshape(WIDTH, WIDTH).astype(float)
    return out


def basis(x: numpy.ndarray) -> numpy.ndarray:
    """Eigenvectors as rows, the largest eigenvalue first; x is less its mean."""
    return numpy.linalg.eigh(x.T @ x)[1].T[::-1]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("learn")
    texts = [write(folder, name, seed) for seed, name in enumerate(("a", "b"))]
    said = run("learn", "--keys", "plain", "--no-predictors", "--out", folder / "side", folder)
    tokens = {
        (layer, i): numpy.concatenate([t[part][layer, SINKS:] for t in texts]).astype(float)
        for layer in range(LAYERS)
        for i, part in enumerate(("kpre", "v"))
    }
    return said, sections((folder / "side").read_bytes()), tokens


def test_the_report(learned: tuple) -> None:
    said, found, tokens = learned
    assert said["tokens"] == 2 * (TOKENS - SINKS)
    assert said["tensors"] == len(found) == len(tokens) and said["predicted"] == 0


def test_means_and_bases_are_numpys(learned: tuple) -> None:
    _, found, tokens = learned
    for key, x in tokens.items():
        rms, mean, _, rows = found[key]
        centred = x - x.mean(axis=0)
        assert numpy.abs(mean - x.mean(axis=0)).max() < 1e-4
        assert abs(rms / numpy.sqrt((centred**2).mean()) - 1) < 1e-5
        want = basis(centred)
        # eigenvalues of the first ones lie far apart; the others span the same space
        along = numpy.abs((rows[:5] * want[:5]).sum(axis=1))
        assert along.min() > 0.999
        assert numpy.abs(rows @ rows.T - numpy.eye(WIDTH)).max() < 2e-3
        covariance = rows @ (centred.T @ centred / len(x)) @ rows.T
        off = covariance - numpy.diag(numpy.diag(covariance))
        assert numpy.abs(off).max() < 2e-3 * covariance.max()


def test_deviations_are_those_of_tokens_left_out(learned: tuple) -> None:
    _, found, tokens = learned
    for key, x in tokens.items():
        centred, n = x - x.mean(axis=0), len(x)
        variance = numpy.zeros(WIDTH)
        for fold in range(FOLDS):
            at = slice(n * fold // FOLDS, n * (fold + 1) // FOLDS)
            rest = numpy.delete(centred, at, axis=0)
            variance += ((centred[at] @ basis(rest).T) ** 2).sum(axis=0) / n
        off = numpy.abs(found[key][2] / numpy.sqrt(variance) - 1)
        assert off[:10].max() < 1e-4
        # the least one is a thousandth of the largest: its square is at the end of fp32's digits
        assert numpy.abs(found[key][2] ** 2 - variance).max() < 1e-5 * variance.max()
