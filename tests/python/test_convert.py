# SPDX-License-Identifier: Apache-2.0
"""What callers may pass: tokens, keys, surprisals, blocks."""

import array
import struct

import numpy
import pytest
from cistern import DType, Descriptor, Keys, Tensor
from cistern._convert import Buffers, surprisals_to_c, tokens_view
from cistern._ffi import ffi

IDS = [0, 1, 70000, 2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        iter(IDS),
        array.array("I", IDS),
        array.array("q", IDS),
        numpy.array(IDS, numpy.uint32),
        numpy.array(IDS, numpy.int64),
        numpy.repeat(numpy.array(IDS, numpy.uint32), 2)[::2],
        numpy.array(IDS, ">i8"),
    ],
    ids=["list", "tuple", "iterator", "array-I", "array-q", "uint32", "int64", "strided", "big"],
)
def test_tokens_of_every_shape_are_the_same_ids(tokens: object) -> None:
    assert tokens_view(tokens).tolist() == IDS


def test_uint32_tokens_are_not_copied() -> None:
    ids = numpy.arange(8, dtype=numpy.uint32)
    view = tokens_view(ids)
    ids[3] = 99
    assert view[3] == 99


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], numpy.array([0.5])])
def test_what_is_no_token_id_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        tokens_view(bad)


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.5, 12.25], numpy.array([0, 1.5, 12.25], numpy.float16), numpy.array([0, 1.5, 12.25])],
    ids=["list", "float16", "float64"],
)
def test_surprisals_become_half_floats(values: object) -> None:
    out, n = surprisals_to_c(values)
    assert n == 3
    assert bytes(ffi.buffer(out)) == struct.pack("<3e", 0.0, 1.5, 12.25)


def test_keys_are_a_sequence_of_32_bytes() -> None:
    raw = bytes(range(96))
    keys = Keys(raw)
    assert list(keys) == [raw[:32], raw[32:64], raw[64:]]
    assert keys[1:] == Keys(raw[32:]) and keys[-1] == raw[64:]
    assert keys[::2] == Keys(raw[:32] + raw[64:])
    assert Keys.of(list(keys)) == keys and Keys.of(memoryview(raw)) == keys
    assert len(keys[2:1]) == 0
    with pytest.raises(IndexError):
        keys[3]
    for bad in (raw[:33], [raw[:31]]):
        with pytest.raises(ValueError):
            Keys.of(bad)


def test_buffers_of_one_or_many() -> None:
    whole = numpy.arange(12, dtype=numpy.uint8)
    cut = Buffers(whole, 3)
    many = Buffers([whole[:4], bytearray(range(4, 8)), bytes(range(8, 12))], 3)
    for buffers in (cut, many):
        buffers.require(4)
        parts = [bytes(ffi.buffer(p, s)) for p, s in zip(buffers.pointers, buffers.sizes)]
        assert b"".join(parts) == bytes(range(12))
    with pytest.raises(ValueError, match="instead of 5"):
        cut.require(5)
    with pytest.raises(ValueError):
        Buffers(whole, 5)
    with pytest.raises(ValueError):
        Buffers([whole], 2)
    with pytest.raises((BufferError, TypeError, ValueError)):
        Buffers([b"readonly"], 1, writable=True)
    with pytest.raises(ValueError, match="contiguous"):
        Buffers([whole[::2]], 1)


def test_rows_lays_blocks_out_in_c_order() -> None:
    """A numpy array [layer][2][token][head][dim] is the oracle for every offset and stride."""
    shape = (3, 2, 16, 2, 8)
    layout = Descriptor.rows(3, 2, 8, DType.F16, content_id=bytes(32), block_tokens=16)
    block = numpy.arange(numpy.prod(shape), dtype=numpy.float16).reshape(shape)
    assert layout.block_bytes == block.nbytes
    for segment in layout.segments:
        want = block[segment.layer, int(segment.tensor == Tensor.V)]
        assert numpy.array_equal(layout.array(block, segment), want)
    layout.array(block, layout.segments[-1])[15, 1, 7] = -1
    assert block[2, 1, 15, 1, 7] == -1
