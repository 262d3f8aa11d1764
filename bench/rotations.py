#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Lloyd-Max codes of heads lose behind several rotations, next to dense random ones.

usage: rotations.py [--bits 2,4] [--dims 64,80,...] DIR     (DIR/prose.kpre.bf16.zst and so on)

Squared error behind a rotation over that behind a dense one (QR of Gaussian numbers, mean of four):
  T      Walsh-Hadamard transform of blocks of powers of two (stage LLOYD)
  S      the same behind fixed signs, overlapping where there is more than one block (stage SPUN)
  T, r   T behind random signs, mean of four
of keys before their rotation and of values, cut into heads of `dims` channels, with and less their
channels' means in 64-token blocks; the same as a model holds them that has transformed them itself
(by T); normal numbers with channels 25 times larger; and normal numbers around one value.
"""
from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import numpy as np

LAYERS, TOKENS, CHANNELS = 30, 512, 192
HEADS, DRAWS = 4000, 4


def load(folder: Path, name: str) -> np.ndarray:
    texts = []
    for text in ("prose", "code"):
        command = ["zstd", "-dc", str(folder / f"{text}.{name}.bf16.zst")]
        raw = subprocess.run(command, capture_output=True, check=True).stdout
        bits = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        texts.append(bits.view(np.float32).reshape(LAYERS, TOKENS, CHANNELS)[:, 4:])
    return np.concatenate(texts, 1).astype(np.float64)


def lloyd_max(bits: int) -> np.ndarray:
    x = np.linspace(-9, 9, 400001)
    mass = np.cumsum(np.exp(-x * x / 2))
    moment = np.cumsum(x * np.exp(-x * x / 2))
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass / mass[-1], x)
    for _ in range(3000):
        edges = np.concatenate(([0], np.searchsorted(x, (levels[1:] + levels[:-1]) / 2), [len(x) - 1]))
        levels = np.diff(moment[edges]) / np.diff(mass[edges])
    return levels


def loss(heads: np.ndarray, rotation: np.ndarray, levels: np.ndarray) -> float:
    """Relative squared error of codes with a norm that keeps each head's length."""
    y = heads @ rotation.T
    rms = np.sqrt((y**2).mean(1, keepdims=True))
    q = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, y / np.where(rms > 0, rms, 1))]
    q *= np.linalg.norm(y, axis=1, keepdims=True) / np.linalg.norm(q, axis=1, keepdims=True)
    return float(((q - y) ** 2).sum() / (heads**2).sum())


def hadamard(n: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def blocks(n: int) -> np.ndarray:
    out, at = np.zeros((n, n)), 0
    while at < n:
        k = 1 << (n - at).bit_length() - 1
        out[at : at + k, at : at + k] = hadamard(k)
        at += k
    return out


def signs(n: int, first: int = 0) -> np.ndarray:
    """The format's fixed signs (docs/codec-format.md section 4.6)."""
    out = []
    for h in range(first + 1, first + n + 1):
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        out.append(-1.0 if (h ^ h >> 16) & 1 else 1.0)
    return np.diag(out)


def spun(n: int) -> np.ndarray:
    k = 1 << n.bit_length() - 1
    if k == n:
        return hadamard(n) @ signs(n)
    first, last = np.eye(n), np.eye(n)
    first[:k, :k] = last[n - k :, n - k :] = hadamard(k)
    return last @ signs(n, n) @ first @ signs(n)


def inputs(keys: np.ndarray, values: np.ndarray, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def centred(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        for t in range(0, x.shape[1], 64):
            x[:, t : t + 64] -= x[:, t : t + 64].mean(1, keepdims=True)
        return x

    def cut(x: np.ndarray) -> np.ndarray:
        heads = x[..., : x.shape[-1] // n * n].reshape(-1, n)
        return heads[rng.choice(len(heads), min(len(heads), HEADS), replace=False)]

    if n > CHANNELS:  # there is no such head: both together
        keys = values = np.concatenate((keys, values), 2)
    out = {"K": cut(keys), "K - mean": cut(centred(keys)), "V": cut(values), "V - mean": cut(centred(values))}
    out |= {f"{name}, by T": x @ blocks(n) for name, x in out.items()}
    out["normal"] = rng.standard_normal((HEADS, n))
    for large in (1, 2, 8):
        x = rng.standard_normal((HEADS, n))
        at = rng.permuted(np.tile(np.arange(n), (HEADS, 1)), axis=1)[:, :large]
        np.put_along_axis(x, at, 25 * np.take_along_axis(x, at, 1), 1)
        out[f"{large} channels x 25"] = x
    x = rng.standard_normal((HEADS, n))
    x[:, -2:] *= 25
    out["last 2 x 25"] = x
    out["around 3"] = rng.standard_normal((HEADS, n)) + 3
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", default="2,4")
    parser.add_argument("--dims", default="64,80,96,112,128,256")
    parser.add_argument("folder", type=Path, metavar="DIR")
    args = parser.parse_args()
    rng = np.random.default_rng(7)
    keys, values = load(args.folder, "kpre"), load(args.folder, "v")
    print("| dims | bits | heads | dense | T | S | T, r |\n|---|---|---|---|---|---|---|")
    for n in map(int, args.dims.split(",")):
        heads = inputs(keys, values, n, rng)
        dense = [np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(DRAWS)]
        drawn = [blocks(n) * rng.choice([-1.0, 1.0], n) for _ in range(DRAWS)]
        for bits in map(int, args.bits.split(",")):
            levels = lloyd_max(bits)
            for name, x in heads.items():
                base = np.mean([loss(x, r, levels) for r in dense])
                ratio = [np.mean([loss(x, r, levels) for r in rs]) / base for rs in ([blocks(n)], [spun(n)], drawn)]
                print(f"| {n} | {bits} | {name} | {base:.5f} | " + " | ".join(f"{r:.3f}" for r in ratio) + " |", flush=True)


if __name__ == "__main__":
    main()
