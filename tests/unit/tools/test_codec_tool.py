# SPDX-License-Identifier: Apache-2.0
"""cistern-codec on tensors in files: round trips, its figures against numpy's, refusals."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy
import pytest

TOOL = Path(os.environ["CST_BUILD_ROOT"]) / "tools" / "cistern-codec"
SINKS = 4


def run(*args: object, code: int = 0) -> str:
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr and not done.stdout
    return done.stdout


def to_bits(x: numpy.ndarray, dtype: str) -> numpy.ndarray:
    if dtype == "bf16":
        return (x.astype(numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)
    return x.astype(numpy.float16 if dtype == "f16" else numpy.float32)


def values(path: Path, dtype: str) -> numpy.ndarray:
    if dtype == "bf16":
        bits = numpy.fromfile(path, numpy.uint16).astype(numpy.uint32) << 16
        return bits.view(numpy.float32).astype(float)
    return numpy.fromfile(path, numpy.float16 if dtype == "f16" else numpy.float32).astype(float)


def write(
    folder: Path, name: str, shape: tuple[int, int, int, int], dtype: str, more: dict | None = None
) -> None:
    """Random tensors [layer][token][head][dimension] and their description."""
    rng = numpy.random.default_rng(sum(shape))
    layers, tokens, heads, dims = shape
    for part in ("kpost", "v"):
        to_bits(rng.normal(size=shape) * 3, dtype).tofile(folder / f"{name}.{part}.raw")
    description = {
        "layers": layers, "tokens": tokens, "kv_heads": heads, "head_dim": dims,
        "dtype": f"{dtype} little-endian",
        "rope": {"kind": "halves", "base": 1e4, "dims": dims, "first_position": 0},
        "files": {p: {"file": f"{name}.{p}.raw"} for p in ("kpost", "v")},
    } | (more or {})  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(description))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("tokens", [1, 16, 61, 100])
def test_what_is_encoded_without_loss_comes_back(tmp_path: Path, tokens: int, dtype: str) -> None:
    write(tmp_path, "text", (2, tokens, 3, 80), dtype)
    (tmp_path / "frames").mkdir()
    (tmp_path / "back").mkdir()
    out = json.loads(run("encode", "--block", 32, tmp_path, tmp_path / "frames"))
    run("decode", tmp_path / "frames", tmp_path / "back")
    for part in ("kpost", "v"):
        before = (tmp_path / f"text.{part}.raw").read_bytes()
        assert (tmp_path / "back" / f"text.{part}.{dtype}").read_bytes() == before
    frames = tmp_path / "frames" / "text.frames"
    assert out["all"]["bytes"] == frames.stat().st_size
    assert out["all"]["bytes_16bit"] == 2 * 2 * 2 * tokens * 3 * 80
    heads = json.loads(run("inspect", frames))
    assert [h["first_position"] for h in heads] == list(range(0, tokens, 32))
    assert sum(h["tokens"] for h in heads) == tokens
    assert sum(h["bytes"] for h in heads) == frames.stat().st_size


@pytest.mark.parametrize("preset", ["int8", "kivi4", "turboquant:5,3"])
def test_errors_are_those_of_the_decoded_tensors(tmp_path: Path, preset: str) -> None:
    shape = (3, 75, 2, 64)
    write(tmp_path, "text", shape, "f16")
    (tmp_path / "back").mkdir()
    out = json.loads(run("compare", "--preset", preset, "--out", tmp_path / "back", tmp_path))
    (result,) = out["texts"]
    for part, letter in (("kpost", "k"), ("v", "v")):
        a = values(tmp_path / f"text.{part}.raw", "f16").reshape(shape)[:, SINKS:]
        b = values(tmp_path / "back" / f"text.{part}.f16", "f16").reshape(shape)[:, SINKS:]
        nmse = ((a - b) ** 2).sum(axis=(1, 2, 3)) / (a**2).sum(axis=(1, 2, 3))
        assert 0 < nmse.max() < 0.1
        assert result[f"layers_{letter}"] == pytest.approx(nmse.tolist(), rel=1e-6)
        assert result[f"nmse_{letter}"] == pytest.approx(nmse.mean(), rel=1e-6)


@pytest.mark.parametrize("preset", ["turboquant:3,3", "jolt"])
def test_rounds_code_what_the_round_before_gave(tmp_path: Path, preset: str) -> None:
    shape, rounds = (2, 75, 2, 64), 3
    write(tmp_path, "text", shape, "bf16")
    args, before = ["compare", "--preset", preset], tmp_path
    for i in range(rounds + 1):
        (tmp_path / str(i)).mkdir()
        out = json.loads(run(*args, "--out", tmp_path / str(i), before))
        assert "drift" not in out["texts"][0]
        before = tmp_path / str(i)
    (tmp_path / "at-once").mkdir()
    out = json.loads(run(*args, "--rounds", rounds, "--out", tmp_path / "at-once", tmp_path))

    nmse = numpy.zeros((2, 2, shape[0]))
    for part, name in enumerate(("kpost", "v")):
        a = values(tmp_path / f"text.{name}.raw", "bf16").reshape(shape)[:, SINKS:]
        for when, folder in enumerate(("0", str(rounds))):
            b = values(tmp_path / folder / f"text.{name}.bf16", "bf16").reshape(shape)[:, SINKS:]
            nmse[when, part] = ((a - b) ** 2).sum(axis=(1, 2, 3)) / (a**2).sum(axis=(1, 2, 3))
        last = (tmp_path / str(rounds) / f"text.{name}.bf16").read_bytes()
        assert (tmp_path / "at-once" / f"text.{name}.bf16").read_bytes() == last
    (result,) = out["texts"]
    assert result["nmse_k"] == pytest.approx(nmse[0, 0].mean(), rel=1e-6)
    assert result["drift"] == pytest.approx((nmse[1].sum() / nmse[0].sum()) ** 0.5, rel=1e-6)
    assert result["drift_worst"] == pytest.approx((nmse[1] / nmse[0]).max() ** 0.5, rel=1e-6)


def test_what_loses_nothing_does_not_drift(tmp_path: Path) -> None:
    write(tmp_path, "text", (2, 20, 2, 64), "bf16")
    (result,) = json.loads(run("compare", "--rounds", 2, tmp_path))["texts"]
    assert (result["drift"], result["drift_worst"]) == (1, 1)


def test_side_data_are_learned_and_needed(tmp_path: Path) -> None:
    shape = (2, 400, 2, 64)
    write(tmp_path, "text", shape, "bf16")
    side, frames, back = (tmp_path / name for name in ("side", "frames", "back"))
    frames.mkdir()
    back.mkdir()
    weights = {"step_weight": {"K": [0.5, 1.0], "V": [2.0, 1.0]}}
    (tmp_path / "steps").write_text(json.dumps(weights))
    learned = json.loads(run("learn", "--out", side, "--steps", tmp_path / "steps", tmp_path))
    assert (learned["bytes"], learned["tensors"]) == (side.stat().st_size, 4)
    assert json.loads(run("inspect", side))["tokens"] == learned["tokens"] == 400 - SINKS

    run("encode", "--preset", "klt", "--step", 0.2, "--side", side, tmp_path, frames)
    run("decode", frames, back, code=1)
    run("decode", "--side", side, frames, back)
    for part, w in (("kpost", weights["step_weight"]["K"]), ("v", weights["step_weight"]["V"])):
        a = values(tmp_path / f"text.{part}.raw", "bf16").reshape(shape)[:, SINKS:]
        b = values(back / f"text.{part}.bf16", "bf16").reshape(shape)[:, SINKS:]
        deviation = a.std(axis=1).mean(axis=(1, 2))
        error = numpy.sqrt(((a - b) ** 2).mean(axis=(1, 2, 3))) / deviation
        assert error == pytest.approx(numpy.array(w) * 0.2 / 12**0.5, rel=0.05)


def test_frames_of_one_text_decode_into_that_text_only(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    write(tmp_path, "a", (1, 40, 2, 64), "bf16")
    run("encode", tmp_path, tmp_path / "frames")
    good = (tmp_path / "frames" / "a.frames").read_bytes()
    for bad in (good[:-1], good + b"x", good[:200] + bytes([good[200] ^ 1]) + good[201:], good * 2):
        (tmp_path / "frames" / "a.frames").write_bytes(bad)
        run("decode", tmp_path / "frames", tmp_path, code=1)


@pytest.mark.parametrize(
    "more",
    [{"tokens": 0}, {"layers": 10**9}, {"tokens": 17}, {"dtype": "int4"}, {"files": {}},
     {"rope": {"kind": "spiral", "base": 2}}, {"rope": {"kind": "halves"}},
     {"files": {"kpost": {"file": "../a.v.raw"}, "v": {"file": "a.v.raw"}}}],
)  # fmt: skip
def test_wrong_descriptions_are_refused(tmp_path: Path, more: dict[str, object]) -> None:
    write(tmp_path, "a", (1, 16, 2, 64), "bf16", more)
    run("compare", tmp_path, "a", code=1)


@pytest.mark.parametrize(
    "args",
    [[], ["compare"], ["guess", "."], ["encode", "."], ["compare", "--preset", "zip", "."],
     ["compare", "--block", "8", "."], ["compare", "--ratio", "x", "."], ["compare", "--rounds", "0", "."], ["inspect"]],
)  # fmt: skip
def test_wrong_calls_are_refused(args: list[str]) -> None:
    run(*args, code=2)


def test_what_has_no_size_is_refused(tmp_path: Path) -> None:
    """Neither an empty answer for a pipe full of frames, nor a wait for who writes into it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        run("inspect", path, code=1)
