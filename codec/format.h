/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a frame, version 1: header, stream table, streams. docs/codec-format.md explains
 * them; its numbers and these change together, with a version number.
 */
#pragma once

#include "base/le.h"

#define CST_FRAME_MAGIC "CFRM"

enum {
    CST_FRAME_VERSION = 1,
    CST_STREAM_ALIGN = 16, /* streams start at multiples of this, counted from the frame's start */
};

/* The first 6 bytes stay what they are in every version. */
struct cst_frame_header {
    uint8_t magic[4];
    struct cst_le16 version;
    uint8_t preset; /* enum cst_preset */
    uint8_t flags;  /* enum cst_frame_flag */
    struct cst_le32 tokens, first_position;
    struct cst_le64 block_bytes, frame_bytes;
    struct cst_le32 error; /* float */
    struct cst_le32 block_crc, layout_crc;
    struct cst_le32 n_streams;
    struct cst_le32 table_crc;    /* CRC32C of the stream table */
    uint8_t bits_k, bits_v;       /* parameters of the preset; 0 where it has none */
    struct cst_le16 side_version; /* of the side data that it needs; 0: none */
    struct cst_le32 side_check;   /* the first bytes of their SHA-256 */
    struct cst_le32 header_crc;   /* CRC32C of all bytes before it */
};
_Static_assert(sizeof(struct cst_frame_header) == 64, "docs/codec-format.md section 2");

enum cst_frame_flag {
    /* Streams lie by layer, K before V before opaque ones, and may depend on earlier ones; decoded
     * bits may differ between machines, so block_crc is 0 and the streams' checksums count. */
    CST_FRAME_LAYERED = 1
};

/* One a segment, in the descriptor's order or by layer, then one for the bytes in no segment if
 * there are any.
 */
struct cst_stream_entry {
    uint8_t stage;            /* enum cst_stage */
    uint8_t version;          /* of the stage */
    struct cst_le16 outliers; /* tokens that lossy stages keep; they end the stream */
    struct cst_le32 length;   /* bytes, without the padding to the next stream */
    struct cst_le32 crc;      /* CRC32C of these bytes */
    struct cst_le32 error;    /* float: of this stream, as in the header */
};
_Static_assert(sizeof(struct cst_stream_entry) == 16, "docs/codec-format.md section 3");

/* Numbers stand in frames: append only. Every stage is at version 1. */
enum cst_stage {
    CST_STAGE_RAW = 0,    /* the bytes */
    CST_STAGE_ZERO = 1,   /* all bytes are zero; empty stream */
    CST_STAGE_ZSTD = 2,   /* one zstd frame of the bytes */
    CST_STAGE_PLANES = 3, /* 16-bit floats: exponent plane and sign/mantissa plane */
    CST_STAGE_INT8 = 4,   /* sinks raw, then fp16 scales, then int8 values */
    CST_STAGE_GROUPS = 5, /* sinks raw, then scales and zeros of groups, then codes */
    CST_STAGE_LLOYD = 6,  /* sinks raw, then means and norms, then codes of rotated heads */
    CST_STAGE_POLAR = 7,  /* sinks raw, then lengths, then angles of rotated heads */
    CST_STAGE_TUCKER = 8, /* layered frames only */
    CST_STAGE_KLT = 9,    /* layered frames only */
    CST_STAGE_EXPONENTS = 10,
    CST_STAGE_SPUN = 11, /* LLOYD of heads behind another rotation */
    CST_STAGES
};
enum { CST_STAGE_VERSION = 1 };

/* Head of a PLANES stream; the exponent plane's bytes follow, then the sign/mantissa plane's. */
struct cst_planes_header {
    uint8_t flags;                /* enum cst_planes_flag */
    uint8_t hi_coding, lo_coding; /* enum cst_plane_coding */
    uint8_t reserved;
    struct cst_le32 hi_length; /* bytes of the exponent plane */
};
_Static_assert(sizeof(struct cst_planes_header) == 8, "docs/codec-format.md section 4");

enum cst_planes_flag { CST_PLANES_FLAT = 1 /* all elements of the segment, in memory order */ };

enum cst_plane_coding {
    CST_PLANE_RAW = 0,     /* one byte an element */
    CST_PLANE_FILL = 1,    /* one byte, repeated */
    CST_PLANE_HUFFMAN = 2, /* codec/huffman.h */
    CST_PLANE_CODINGS
};

/* Head of an EXPONENTS stream; levels of the channels above the lowest one, then the rANS stream
 * follow. */
struct cst_exponents_header {
    uint8_t flags;         /* enum cst_exponents_flag */
    uint8_t bits;          /* of a level, 0..6 */
    struct cst_le16 level; /* the lowest */
};
_Static_assert(sizeof(struct cst_exponents_header) == 4, "docs/codec-format.md section 4.9");

enum cst_exponents_flag { CST_EXPONENTS_ZEROS = 1 /* the highest code is level 0 */ };

/* Head of a GROUPS, LLOYD, POLAR or TUCKER stream; sinks, then fp16 parameters, then codes follow.
 */
struct cst_coded_header {
    uint8_t flags;        /* enum cst_coded_flag */
    uint8_t bits;         /* of a code, 1..8; TUCKER: 0 is no codes */
    int8_t exponent;      /* fp16 parameters are multiplied by 2^exponent */
    uint8_t group;        /* GROUPS: log2 of the values that share a scale; else 0 */
    struct cst_le32 rope; /* UNROTATED: cst_rope_id() of the layer; else 0 */
};
_Static_assert(sizeof(struct cst_coded_header) == 8, "docs/codec-format.md section 4.4");

/* TUCKER: behind the sinks. Factors, core, means, norms and codes follow. */
struct cst_tucker_header {
    struct cst_le16 rank_t, rank_d;
    struct cst_le32 scale; /* float: of the core's halves */
};
_Static_assert(sizeof(struct cst_tucker_header) == 8, "docs/codec-format.md section 4.7");

enum cst_coded_flag {
    CST_CODED_UNROTATED = 1,  /* K turned back to position 0 */
    CST_CODED_MEAN = 2,       /* LLOYD: less the mean of each channel */
    CST_CODED_ZEROS = 4,      /* GROUPS: each group has a zero, else codes are symmetric */
    CST_CODED_BY_CHANNEL = 8, /* GROUPS: groups run over the tokens of a channel, else over the
                                 channels of a token */
    CST_CODED_FACTORS = 16,   /* TUCKER: the first stream of a cell, with its factors */
    CST_CODED_LLOYD = 32,     /* TUCKER: Lloyd-Max levels, else uniform ones */
    CST_CODED_SIDE_MEAN = 64, /* LLOYD: less the means of the frame's side data */
    CST_CODED_SKETCH = 128,   /* LLOYD: the highest bit of a code is a sign sketch's */
};

/* Head of a KLT stream; sinks follow, then what codec/rans.h makes of coefficients and gains. */
struct cst_klt_header {
    uint8_t flags; /* enum cst_klt_flag */
    int8_t spread; /* quarter octaves by which deviations exceed those of the side data */
    uint8_t reserved[2];
    struct cst_le32 step; /* float */
    struct cst_le32 rope; /* UNROTATED: cst_rope_id() of the layer; else 0 */
};
_Static_assert(sizeof(struct cst_klt_header) == 12, "docs/codec-format.md section 4.8");

enum { CST_KLT_SPREAD_MAX = 32 };

enum cst_klt_flag {
    CST_KLT_UNROTATED = 1, /* K turned back to position 0 */
    CST_KLT_GAINS = 2,     /* each token has a factor of the step */
    CST_KLT_PREDICTED = 4  /* residuals, in the basis of residuals */
};

enum {
    CST_CODED_EXPONENT_MIN = -126,
    CST_CODED_EXPONENT_MAX = 80, /* nothing decoded reaches infinity before it is rounded */
    CST_GROUP_LOG2_MIN = 4,
    CST_GROUP_LOG2_MAX = 10
};
