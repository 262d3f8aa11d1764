/* SPDX-License-Identifier: Apache-2.0 */
/* The records inside `bytes` fields, as docs/protocol.md draws them. Read them from a copy or in
 * place: all members are bytes, so any address will do. */
#pragma once

#include "base/le.h"

#include <stdint.h>

enum { CST_RECORD_NAME_MAX = 64 };

/* AcquireReply.leases, Ready.leases */
struct cst_lease_record {
    struct cst_le16 status;
    uint8_t tier, preset;
    struct cst_le32 slab;
    struct cst_le64 lease, offset, length;
    struct cst_le32 tokens, crc32c;
};
_Static_assert(sizeof(struct cst_lease_record) == 40, "docs/protocol.md, Acquire");

/* SlabGetReply.slabs */
struct cst_slab_record {
    struct cst_le32 slab, status;
    struct cst_le64 size;
};
_Static_assert(sizeof(struct cst_slab_record) == 16, "docs/protocol.md, SlabGet");

/* ReserveReply.slots */
struct cst_slot_record {
    struct cst_le16 status, zero;
    struct cst_le32 busy_ms;
    struct cst_le64 slot, offset, length;
};
_Static_assert(sizeof(struct cst_slot_record) == 32, "docs/protocol.md, Reserve");

/* LookupReply.tiers: run-length */
struct cst_tier_run {
    uint8_t tier;
    struct cst_le32 count;
};
_Static_assert(sizeof(struct cst_tier_run) == 5, "docs/protocol.md, Lookup");

/* SpacesReply.spaces */
struct cst_space_record {
    struct cst_le32 space; /* as Blocks, Stats, Erase and Explain take it */
    uint8_t kind, quality_class;
    uint8_t zero[2];
    struct cst_le32 block_tokens, presets;
    struct cst_le64 block_bytes, blocks, tail_blocks, hot_bytes, packed_bytes, index_bytes;
    uint8_t fingerprint[32], content_id[32];
    char namespace_name[CST_RECORD_NAME_MAX], engine[CST_RECORD_NAME_MAX]; /* zero-padded */
};
_Static_assert(sizeof(struct cst_space_record) == 256, "docs/protocol.md, Spaces");

/* SpaceOpenReply.sides */
struct cst_side_record {
    struct cst_le32 version, zero;
    struct cst_le64 size;
    uint8_t sha256[32];
};
_Static_assert(sizeof(struct cst_side_record) == 48, "docs/protocol.md, SpaceOpen");

/* BlocksReply.blocks */
struct cst_block_record {
    uint8_t key[32], parent[32];
    struct cst_le64 packed_bytes; /* 0: not packed */
    struct cst_le32 tokens, depth;
    uint8_t tier, preset;
    struct cst_le16 leases;
    struct cst_le32 error; /* IEEE float: rms error over rms deviation; 0 for exact bytes */
};
_Static_assert(sizeof(struct cst_block_record) == 88, "docs/protocol.md, Blocks");
