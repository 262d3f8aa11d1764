# SPDX-License-Identifier: Apache-2.0
"""The model of scripts/bench quality: llama.cpp with everything in fp32.

The weights of the engine's model are dequantised once: then the noise that the engine itself makes
is a thousand times smaller than the losses that are measured. The cache is fp32, too, so that each
16-bit value that a codec gives back is used as it is.
"""
import llama_cpp.llama_cpp as llama
import numpy
from cistern._llama_engine import Predictor, empty_state


def dequantise(source, target):
    """A model file whose weights are all fp32. Appears complete or not at all."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = llama.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    params.nthread = 2
    made = target.with_suffix(".part")
    if llama.llama_model_quantize(str(source).encode(), str(made).encode(), params):
        raise SystemExit("quality: the engine can't dequantise its model")
    made.rename(target)


class Model(Predictor):
    """A predictor whose keys and values are arrays [layer][token][head * dimension]."""

    def __init__(self, path, n_ctx):
        # Flash attention would round keys and values to f16, and add them up in it.
        super().__init__(path, n_ctx, type_k=llama.GGML_TYPE_F32, type_v=llama.GGML_TYPE_F32,
                         flash_attn_type=llama.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        self.layers = llama.llama_model_n_layer(self.model)
        self.heads = llama.llama_model_n_head_kv(self.model)
        self.dims = llama.llama_model_n_embd(self.model) // llama.llama_model_n_head(self.model)
        self.rope_base = float(self.metadata("llama.rope.freq_base"))

    def compute(self, tokens):
        """(K, V) of tokens."""
        state = self.prefill(tokens)
        return [numpy.stack([state.get(i, value) for i in range(self.layers)])
                for value in (False, True)]

    def put(self, k, v):
        """The sequence is these keys and values afterwards."""
        state = empty_state(k.shape[1], self.layers, self.heads * self.dims)
        for layer in range(self.layers):
            state.set(layer, False, k[layer])
            state.set(layer, True, v[layer])
        self.load(state)
