# SPDX-License-Identifier: Apache-2.0
"""The package's keys and fingerprints, and those of the tests' own client, are the golden ones."""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

import cistern
import pytest
import wire
from cdef_from_header import ROOT
from cistern import DType, Descriptor, Layer, Rope, Scaling, Segment, Tensor

VECTORS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / "keys.json").read_text())


def of(what: str) -> list[dict[str, Any]]:
    rows = [v for v in VECTORS if v["what"] == what]
    assert rows
    return rows


def ids(hexed: str) -> list[int]:
    return array("I", bytes.fromhex(hexed)).tolist()


def transposed(layer: int, dtype: DType, offset: int, heads: int = 3, dim: int = 8) -> Segment:
    length = 64 * heads * dim * 2
    return Segment(layer, Tensor.V, dtype, offset, length, 2, dim * 64 * 2, 64 * 2)


def rows(layer: int, tensor: Tensor, dtype: DType, offset: int, tokens: int, heads: int, dim: int) -> Segment:
    token = heads * dim * dtype.size
    return Segment(layer, tensor, dtype, offset, tokens * token, token, dim * dtype.size, dtype.size)


MODEL, ADAPTER = (hashlib.sha256(x).digest() for x in (b"model", b"adapter"))
DESCRIPTORS = {
    "one layer, f32": Descriptor.rows(1, 2, 4, DType.F32, content_id=MODEL, block_tokens=16, engine="example", engine_abi=1),
    "rotated K, transposed V, yarn, window": Descriptor(
        block_tokens=64,
        block_bytes=12288,
        content_id=MODEL,
        adapter_id=ADAPTER,
        engine="llama.cpp",
        engine_options="kv=f16;v_trans=1",
        engine_abi=7,
        state_version=3,
        tp_rank=1,
        tp_size=2,
        layers=[
            Layer(3, 8, 8, 4096, Rope.NEOX, True, 6, 10000.0, Scaling.YARN, (4.0, 32.0, 1.0, 1.25), 32768),
            Layer(3, 8, 8, 0, Rope.NORM, False, 8, 500000.0, Scaling.LINEAR, (0.5,)),
        ],
        segments=[
            rows(0, Tensor.K, DType.F16, 0, 64, 3, 8),
            transposed(0, DType.F16, 3072),
            rows(1, Tensor.K, DType.BF16, 6144, 64, 3, 8),
            transposed(1, DType.BF16, 9216),
        ],
    ),
    "opaque bytes": Descriptor(
        block_tokens=1024,
        block_bytes=10340,
        content_id=MODEL,
        engine="vllm",
        engine_options="fp8",
        layers=[Layer(4, 64, 64, 0, Rope.MROPE, True, 64, 1.0, Scaling.LLAMA3, (8.0, 1.0, 4.0), 8192)],
        segments=[
            Segment(0, Tensor.OPAQUE, DType.OPAQUE, 0, 10240, 10),
            Segment(0, Tensor.OPAQUE, DType.OPAQUE, 10240, 100, 0),
        ],
    ),
}


@pytest.mark.parametrize("vector", of("descriptor"), ids=lambda v: v["name"])
def test_fingerprints(vector: dict[str, Any]) -> None:
    assert DESCRIPTORS[vector["name"]].fingerprint().hex() == vector["fingerprint"]


def test_roots() -> None:
    for v in of("root"):
        assert wire.key_root(bytes.fromhex(v["fingerprint"]), bytes.fromhex(v["salt"])).hex() == v["root"]


def test_blocks() -> None:
    for v in of("block"):
        parent, extra, tokens = bytes.fromhex(v["parent"]), bytes.fromhex(v["extra"]), ids(v["tokens"])
        assert cistern.key_block(parent, tokens, extra).hex() == v["key"]
        assert wire.key_block(parent, tokens, extra).hex() == v["key"]


def test_chains() -> None:
    for v in of("chain"):
        keys = wire.chain(bytes.fromhex(v["root"]), ids(v["tokens"]), v["block_tokens"])
        assert b"".join(keys).hex() == v["keys"]


def test_flat_keys() -> None:
    for v in of("flat"):
        assert cistern.key_from_bytes(bytes.fromhex(v["data"])).hex() == v["key"]
