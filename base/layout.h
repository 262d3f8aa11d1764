/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model descriptor: everything that changes the bytes of a block or their meaning. Shared by
 * codec (how to read a block), proto (canonical bytes), store (identity) and client.
 *
 * A block is one contiguous object of block_bytes bytes, the KV of block_tokens consecutive tokens
 * over all layers. A segment is one tensor of one layer inside it. Element (token t, head h,
 * dimension d) of a K or V segment lies at
 *     offset + t * token_stride + h * head_stride + d * dim_stride       (bytes from block start)
 * which describes both row-major [token][head][dim] and transposed [head][dim][token] layouts. An
 * opaque segment is bytes that are not interpreted; token_stride says how many of them one token
 * takes when they are token-separable (an engine's quantised rows), 0 when they are not.
 *
 * A tail block (fewer tokens than block_tokens) has the same size and layout; the bytes of the
 * missing tokens are zero and never read.
 */
#pragma once

#include <stdint.h>

enum {
    CST_BLOCK_TOKENS_MIN = 16,
    CST_BLOCK_TOKENS_MAX = 1024,
    CST_LAYERS_MAX = 512,
    CST_SEGMENTS_MAX = 1024,
    CST_ENGINE_MAX = 64,   /* bytes, without terminator */
    CST_OPTIONS_MAX = 512, /* bytes, without terminator */
    CST_SALT_MAX = 64,
    CST_KEY_SIZE = 32,
};
#define CST_BLOCK_BYTES_MAX (UINT64_C(256) << 20)

/* Values are on the wire and on disk: append only. */
enum cst_dtype {
    CST_DTYPE_OPAQUE = 0,
    CST_DTYPE_F32 = 1,
    CST_DTYPE_F16 = 2,
    CST_DTYPE_BF16 = 3,
    CST_DTYPES
};
enum cst_tensor { CST_TENSOR_K = 0, CST_TENSOR_V = 1, CST_TENSOR_OPAQUE = 2, CST_TENSORS };
enum cst_rope {
    CST_ROPE_NONE = 0,
    CST_ROPE_NORM = 1 /* pairs (2i, 2i+1) */,
    CST_ROPE_NEOX = 2 /* halves */,
    CST_ROPE_MROPE = 3,
    CST_ROPES
};
enum cst_rope_scaling {
    CST_SCALING_NONE = 0,
    CST_SCALING_LINEAR = 1,
    CST_SCALING_YARN = 2,
    CST_SCALING_LLAMA3 = 3,
    CST_SCALINGS
};
enum cst_kind { CST_KIND_TOKENS = 0, CST_KIND_FLAT = 1, CST_KINDS };
enum cst_class {
    CST_CLASS_LOSSLESS = 0,
    CST_CLASS_NEAR_LOSSLESS = 1,
    CST_CLASS_SMALL_LOSS = 2,
    CST_CLASS_COLD = 3,
    CST_CLASSES
};
enum cst_tier {
    CST_TIER_NONE = 0,
    CST_TIER_HOT = 1,
    CST_TIER_PACKED = 2,
    CST_TIER_COLD = 3,
    CST_TIER_REMOTE = 4,
    CST_TIER_RECIPE = 5
};

struct cst_segment {
    uint32_t layer;  /* < n_layers */
    uint8_t tensor;  /* enum cst_tensor */
    uint8_t dtype;   /* enum cst_dtype; OPAQUE exactly for opaque segments */
    uint64_t offset; /* bytes from the start of the block */
    uint64_t length; /* bytes; segments don't overlap and end within block_bytes */
    uint64_t token_stride, head_stride, dim_stride; /* bytes */
};

struct cst_layer {
    uint32_t kv_heads;
    uint32_t head_dim_k, head_dim_v;
    uint32_t window;      /* attention window in tokens; 0 = full */
    uint8_t rope;         /* enum cst_rope */
    uint8_t k_rotated;    /* 1: K is stored after RoPE */
    uint8_t rope_scaling; /* enum cst_rope_scaling */
    uint32_t rope_dims;   /* rotated dimensions of a head */
    float rope_theta;
    float scaling[4]; /* linear: factor; yarn: factor, beta_fast, beta_slow, attn_factor;
                         llama3: factor, low_freq_factor, high_freq_factor */
    uint32_t scaling_original_context;
};

struct cst_descriptor {
    uint8_t content_id[32];            /* SHA-256 of the model file(s) */
    uint8_t adapter_id[32];            /* SHA-256 over adapters and their scales; zero = none */
    char engine[CST_ENGINE_MAX + 1];   /* "llama.cpp", printable ASCII */
    char options[CST_OPTIONS_MAX + 1]; /* engine facts as "key=value;...", printable ASCII */
    uint32_t engine_abi, state_version;
    uint32_t block_tokens;
    uint32_t tp_rank, tp_size; /* tp_size >= 1 */
    uint64_t block_bytes;
    uint32_t n_layers, n_segments;
    struct cst_layer *layers;     /* owned */
    struct cst_segment *segments; /* owned; sorted by offset */
};
