# SPDX-License-Identifier: Apache-2.0
"""What a block of a space looks like: dataclasses over cistern_descriptor.

Everything here changes the bytes of a block or their meaning, so two descriptors that differ
anywhere are two spaces. Units: offsets, lengths and strides are bytes; windows and contexts are
tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._ffi import ffi, lib
from .errors import check

if TYPE_CHECKING:
    import numpy


class DType(enum.IntEnum):
    """Element type of a segment; OPAQUE exactly for opaque tensors."""

    OPAQUE = 0
    F32 = 1
    F16 = 2
    BF16 = 3

    @property
    def size(self) -> int:
        """Bytes of one element (1 for OPAQUE)."""
        return (1, 4, 2, 2)[self]


class Tensor(enum.IntEnum):
    """Which tensor of a layer a segment holds."""

    K = 0
    V = 1
    OPAQUE = 2


class Rope(enum.IntEnum):
    """Pairing of rotated dimensions: NORM (2i, 2i+1), NEOX (i, i + dims/2)."""

    NONE = 0
    NORM = 1
    NEOX = 2
    MROPE = 3


class Scaling(enum.IntEnum):
    """RoPE scaling method."""

    NONE = 0
    LINEAR = 1
    YARN = 2
    LLAMA3 = 3


class Kind(enum.IntEnum):
    """TOKENS: chained keys in a prefix trie. FLAT: foreign keys without parents or tokens."""

    TOKENS = 0
    FLAT = 1


class Scope(enum.IntEnum):
    """OWN: the caller's namespace. PUBLIC: the shared one, readable by all."""

    OWN = 0
    PUBLIC = 1


class Quality(enum.IntEnum):
    """Quality class of a space. LOSSLESS never receives bytes that a lossy space has touched."""

    LOSSLESS = 0
    NEAR_LOSSLESS = 1
    SMALL_LOSS = 2
    COLD = 3


class Tier(enum.IntEnum):
    """Where a block is. NONE: nowhere."""

    NONE = 0
    HOT = 1
    PACKED = 2
    COLD = 3
    REMOTE = 4
    RECIPE = 5


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of one layer: element (token t, head h, dim d) lies at
    ``offset + t * token_stride + h * head_stride + d * dim_stride`` from the block's start."""

    layer: int
    tensor: Tensor
    dtype: DType
    offset: int
    length: int
    token_stride: int
    head_stride: int = 0
    dim_stride: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """Shape and position encoding of one attention layer. `scaling` holds up to four numbers:
    linear: factor; yarn: factor, beta_fast, beta_slow, attn_factor; llama3: factor,
    low_freq_factor, high_freq_factor."""

    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int = 0
    rope: Rope = Rope.NONE
    k_rotated: bool = False
    rope_dims: int = 0
    rope_theta: float = 0.0
    rope_scaling: Scaling = Scaling.NONE
    scaling: Sequence[float] = ()
    scaling_original_context: int = 0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The identity of a space: model, engine, layers and the layout of a block."""

    block_tokens: int
    block_bytes: int
    content_id: bytes
    """SHA-256 of the model, 32 bytes."""
    layers: Sequence[Layer]
    segments: Sequence[Segment]
    """Ascending offsets, no overlap."""
    adapter_id: bytes = field(default=bytes(32))
    """SHA-256 over adapters and their scales; zero: none."""
    engine: str = "python"
    engine_options: str = ""
    """What else changes the bytes, as ``key=value;...``."""
    engine_abi: int = 0
    state_version: int = 0
    tp_rank: int = 0
    tp_size: int = 1

    @classmethod
    def rows(
        cls,
        layers: int | Iterable[Layer],
        kv_heads: int = 0,
        head_dim: int = 0,
        dtype: DType = DType.F16,
        *,
        content_id: bytes,
        block_tokens: int = 64,
        **facts: Any,
    ) -> Descriptor:
        """Plain C-order blocks ``[layer][K, V][token][head][dim]``.

        `layers` is a number of equal layers (with `kv_heads` and `head_dim`) or the layers
        themselves. `facts` are the remaining fields of Descriptor.
        """
        if isinstance(layers, int):
            layers = [Layer(kv_heads, head_dim, head_dim)] * layers
        layers = tuple(layers)
        segments: list[Segment] = []
        offset = 0
        for index, layer in enumerate(layers):
            for tensor, dim in ((Tensor.K, layer.head_dim_k), (Tensor.V, layer.head_dim_v)):
                head = dim * dtype.size
                token = layer.kv_heads * head
                length = token * block_tokens
                segments.append(
                    Segment(index, tensor, dtype, offset, length, token, head, dtype.size)
                )
                offset += length
        return cls(block_tokens, offset, content_id, layers, tuple(segments), **facts)

    @classmethod
    def opaque(
        cls, block_bytes: int, *, content_id: bytes, block_tokens: int = 64, **facts: Any
    ) -> Descriptor:
        """Blocks that are one run of bytes which nobody interprets."""
        layers = (Layer(1, 1, 1),)
        segments = (Segment(0, Tensor.OPAQUE, DType.OPAQUE, 0, block_bytes, 0),)
        return cls(block_tokens, block_bytes, content_id, layers, segments, **facts)

    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical descriptor, 32 bytes. No daemon needed; raises Misuse for a
        descriptor that is not valid, with a sentence that names the field."""
        out = ffi.new("uint8_t[32]")
        descriptor, _keep = self.to_c()
        check(lib().cistern_descriptor_fingerprint(descriptor, out))
        return bytes(out)

    def array(self, block: Any, segment: Segment) -> numpy.ndarray[Any, Any]:
        """A segment of a block (any buffer of block_bytes) as a numpy array [token, head, dim]
        without a copy, writable if the buffer is. BF16 comes as uint16."""
        import numpy

        if segment.dtype == DType.OPAQUE:
            whole = numpy.frombuffer(block, numpy.uint8)
            return whole[segment.offset : segment.offset + segment.length]
        layer = self.layers[segment.layer]
        dim = layer.head_dim_k if segment.tensor == Tensor.K else layer.head_dim_v
        kind = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}[segment.dtype]
        return numpy.ndarray(
            (self.block_tokens, layer.kv_heads, dim),
            kind,
            block,
            segment.offset,
            (segment.token_stride, segment.head_stride, segment.dim_stride),
        )

    def to_c(self) -> tuple[Any, list[Any]]:
        """cistern_descriptor * and what must stay alive as long as it is used."""
        for name in ("content_id", "adapter_id"):
            if len(getattr(self, name)) != 32:
                raise ValueError(f"{name} has {len(getattr(self, name))} bytes instead of 32")
        layers = ffi.new("cistern_layer[]", [_layer_fields(layer) for layer in self.layers])
        segments = ffi.new("cistern_segment[]", [_segment_fields(s) for s in self.segments])
        engine = ffi.new("char[]", self.engine.encode())
        options = ffi.new("char[]", self.engine_options.encode())
        out = ffi.new(
            "cistern_descriptor *",
            {
                "size": ffi.sizeof("cistern_descriptor"),
                "block_tokens": self.block_tokens,
                "block_bytes": self.block_bytes,
                "content_id": bytes(self.content_id),
                "adapter_id": bytes(self.adapter_id),
                "engine": engine,
                "engine_options": options,
                "engine_abi": self.engine_abi,
                "state_version": self.state_version,
                "tp_rank": self.tp_rank,
                "tp_size": self.tp_size,
                "n_layers": len(self.layers),
                "n_segments": len(self.segments),
                "layers": layers,
                "segments": segments,
            },
        )
        return out, [layers, segments, engine, options]


def _layer_fields(layer: Layer) -> dict[str, Any]:
    return {
        "kv_heads": layer.kv_heads,
        "head_dim_k": layer.head_dim_k,
        "head_dim_v": layer.head_dim_v,
        "window": layer.window,
        "rope": int(layer.rope),
        "k_rotated": int(layer.k_rotated),
        "rope_dims": layer.rope_dims,
        "rope_theta": layer.rope_theta,
        "rope_scaling": int(layer.rope_scaling),
        "scaling": list(layer.scaling),
        "scaling_original_context": layer.scaling_original_context,
    }


def _segment_fields(segment: Segment) -> dict[str, Any]:
    return {
        "layer": segment.layer,
        "tensor": int(segment.tensor),
        "dtype": int(segment.dtype),
        "offset": segment.offset,
        "length": segment.length,
        "token_stride": segment.token_stride,
        "head_stride": segment.head_stride,
        "dim_stride": segment.dim_stride,
    }
