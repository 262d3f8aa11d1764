/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of the disk tier, format 1: docs/disk-format.md says the same in words. Nothing but
 * layouts, constants and the arithmetic that follows from them: the engine and tools that look at
 * a directory share this header and nothing else.
 *
 * All numbers are little-endian. A structure with a `crc` ends with it: CRC32C (base/crc32c.h) of
 * the bytes before it. Reserved bytes are written as 0 and ignored.
 */
#pragma once

#include "base/le.h"
#include "base/macros.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CST_DISK_SUPER_NAME "cistern-store"
#define CST_DISK_KEYS_NAME "keys"
#define CST_DISK_CHECKPOINT_NAME "checkpoint"
#define CST_DISK_NEW_SUFFIX ".new"       /* of a keys or checkpoint file being written */
#define CST_DISK_SEGMENT_NAME "seg-%08x" /* segment id */
#define CST_DISK_SUPER_MAGIC "CSTSTORE"  /* 8 bytes each, without a terminator */
#define CST_DISK_SEGMENT_MAGIC "CSTSEGMT"
#define CST_DISK_FOOTER_MAGIC "CSTFOOTR"
#define CST_DISK_CHECKPOINT_MAGIC "CSTCHECK"
#define CST_DISK_KEYS_MAGIC "CSTKEYS1"
#define CST_DISK_RECORD_MAGIC UINT32_C(0x43455243) /* "CREC" */
#define CST_DISK_INDEX_MAGIC UINT32_C(0x58444943)  /* "CIDX" */

enum {
    CST_DISK_VERSION = 1,
    CST_DISK_CHUNK = 4096, /* records, index blocks and footers begin at multiples of it */
    CST_DISK_NAMESPACE_MAX = 64,
    CST_DISK_INDEX_CHUNKS = 64, /* of an index block; the last one of a segment may be shorter */
    CST_DISK_PAYLOAD_ALIGN = 64,
    CST_DISK_TOKENS_MAX = 1024,
    CST_DISK_SIDE_MAX = 8,
    CST_DISK_CANONICAL_MAX = 120 * 1024,
    CST_DISK_TAG = 16,
    CST_DISK_SALT = 32,
    CST_DISK_KEY = 32,
};
#define CST_DISK_SEGMENT_BYTES_MIN (UINT64_C(256) << 10)
#define CST_DISK_SEGMENT_BYTES_MAX (UINT64_C(4) << 30)

/*
 * Feature flags, the same three words in the superblock, keys and checkpoint files and segment
 * headers. A reader that doesn't know a set bit of
 *   compat     goes on,
 *   ro_compat  may read, but must not write,
 *   incompat   must not read at all and leaves the files as they are.
 */
struct cst_disk_version {
    struct cst_le32 version, compat, ro_compat, incompat;
};
enum { CST_DISK_COMPAT = 0, CST_DISK_RO_COMPAT = 0, CST_DISK_INCOMPAT = 0 }; /* bits known */

enum cst_disk_cipher {
    CST_DISK_CRC32C = 0,  /* plain text; the first 4 bytes of a tag are a CRC32C, the rest is 0 */
    CST_DISK_AES_GCM = 1, /* AES-256-GCM */
};

/* ---- superblock: the file cistern-store, locked by the daemon that uses the directory ---- */

struct cst_disk_super {
    uint8_t magic[8];
    struct cst_disk_version version;
    uint8_t uuid[16]; /* random; segments, keys and checkpoints of the store repeat it */
    struct cst_le64 segment_bytes; /* of every segment */
    struct cst_le64 created;       /* seconds since 1970 */
    uint8_t reserved[68];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_super) == 128, "docs/disk-format.md section 2");

/* ---- segment: header chunk, records, (closed:) index blocks, footer chunk ---- */

/* At the start of the file; the rest of the chunk is 0. A file whose first 8 bytes are 0 is a
 * segment without content. */
struct cst_disk_segment {
    uint8_t magic[8];
    struct cst_disk_version version;
    uint8_t uuid[16];         /* the store's */
    struct cst_le32 id;       /* as in the file's name */
    uint8_t cipher;           /* enum cst_disk_cipher */
    uint8_t namespace_length; /* 1 .. 64 */
    uint8_t reserved[2];
    struct cst_le64 fill;     /* grows at every reuse of the segment */
    struct cst_le64 sequence; /* grows at every segment that is begun in the store */
    struct cst_le64 segment_bytes;
    struct cst_le64 created;     /* seconds since 1970 */
    uint8_t salt[CST_DISK_SALT]; /* random, drawn at the start of the daemon that wrote it */
    uint8_t namespace_name[CST_DISK_NAMESPACE_MAX]; /* then zeros */
    uint8_t reserved2[332];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_segment) == 512, "docs/disk-format.md section 3");

enum cst_disk_type {
    CST_DISK_BLOCK = 1, /* a block of a space: meta = cst_disk_block + lists, payload = a frame */
    CST_DISK_SPACE = 2, /* what a space is: meta = cst_disk_space + canonical bytes, no payload */
    CST_DISK_SIDE = 3,  /* a part of side data: meta = cst_disk_side, payload = its bytes */
    CST_DISK_VOID = 4,  /* keeps a place: no meta, no payload, payload_offset 0 */
};

/*
 * A record: this header, the sealed meta, zeros up to payload_offset, the sealed payload, zeros up
 * to a chunk. Both messages are sealed with the segment's key and nonces of their own:
 *   payload  additional data = bytes 0 .. 79 of the header, then the key of the meta (32 bytes)
 *   meta     additional data = bytes 0 .. 95 of the header (so the payload's tag, too)
 * With CST_DISK_CRC32C a tag is the CRC32C of the additional data followed by the plain text.
 */
struct cst_disk_record {
    struct cst_le32 magic;
    uint8_t version; /* CST_DISK_VERSION */
    uint8_t type;    /* enum cst_disk_type */
    uint8_t cipher;
    uint8_t reserved;
    struct cst_le32 segment;    /* id */
    struct cst_le32 chunk;      /* where it begins, in chunks from the start of the segment */
    struct cst_le64 fill;       /* the segment's */
    struct cst_le64 start;      /* the first 8 bytes of the segment's salt */
    struct cst_le32 slot;       /* 0, 1, 2 ... within the segment, without gaps */
    struct cst_le32 n_chunks;   /* of the whole record */
    struct cst_le64 generation; /* grows with every record of the store */
    struct cst_le32 meta_bytes;
    struct cst_le32 payload_offset; /* from the start of the record */
    struct cst_le64 payload_bytes;
    struct cst_le64 meta_nonce, payload_nonce;
    uint8_t payload_tag[CST_DISK_TAG]; /* at 80 */
    uint8_t meta_tag[CST_DISK_TAG];    /* at 96 */
    uint8_t reserved2[12];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_record) == 128, "docs/disk-format.md section 4");
_Static_assert(offsetof(struct cst_disk_record, payload_tag) == 80, "additional data of payloads");
_Static_assert(offsetof(struct cst_disk_record, meta_tag) == 96, "additional data of metas");

/* What every meta begins with. */
struct cst_disk_meta {
    uint8_t key[32];   /* block: its key. Space: its identity. Side data: SHA-256 of the whole */
    uint8_t space[32]; /* identity: SHA-256("cistern.space.1", fingerprint[32], u8 kind, u8 class,
                          u32le length, namespace name) */
};
_Static_assert(sizeof(struct cst_disk_meta) == 64, "docs/disk-format.md section 4");

enum {
    CST_DISK_HAS_SURPRISALS = 1, /* flags of a block */
    CST_DISK_HAS_PARENT = 2,     /* its parent is a block, not a root */
};

/* Followed by n_tokens u32 ids, n_tokens f16 surprisals (if the flag is set), zeros up to a
 * multiple of 8, n_side u64 versions of side data that the frame refers to. */
struct cst_disk_block {
    struct cst_disk_meta meta;
    uint8_t parent[32];          /* parent's key, or the root key; 0 in flat spaces */
    struct cst_le32 position;    /* in the chain; 0: child of a root, or flat */
    struct cst_le32 n_tokens;    /* 0 in flat spaces */
    struct cst_le32 error;       /* f32 bits: the frame's */
    struct cst_le32 payload_crc; /* CRC32C of the frame */
    struct cst_le32 block_crc;   /* CRC32C of the bytes that were committed */
    uint8_t preset;              /* the frame's */
    uint8_t flags;
    uint8_t n_side;
    uint8_t reserved;
    struct cst_le64 born; /* seconds since 1970 */
};
_Static_assert(sizeof(struct cst_disk_block) == 128, "docs/disk-format.md section 4");

/* Followed by the canonical bytes of the descriptor. */
struct cst_disk_space {
    struct cst_disk_meta meta; /* key == space */
    uint8_t kind, klass;
    uint8_t reserved[2];
    struct cst_le32 canonical_bytes;
};
_Static_assert(sizeof(struct cst_disk_space) == 72, "docs/disk-format.md section 4");

struct cst_disk_side {
    struct cst_disk_meta meta;
    struct cst_le64 version;
    struct cst_le64 total_bytes; /* of all parts */
    struct cst_le32 kind;        /* the codec's name for the table */
    struct cst_le32 part, parts; /* 0 .. parts - 1 */
    struct cst_le32 payload_crc; /* CRC32C of this part */
};
_Static_assert(sizeof(struct cst_disk_side) == 96, "docs/disk-format.md section 4");

/* An index block: this header, then the sealed body: n_entries entries, zeros up to a chunk.
 * Additional data = bytes 0 .. 47. Blocks lie one after the other, each CST_DISK_INDEX_CHUNKS long
 * but for the last one, which ends before the footer. */
struct cst_disk_index {
    struct cst_le32 magic;
    uint8_t version;
    uint8_t cipher;
    uint8_t reserved[2];
    struct cst_le32 segment, chunk; /* as in records */
    struct cst_le64 fill, start;
    struct cst_le32 number; /* 0, 1, 2 ... */
    struct cst_le32 n_entries;
    struct cst_le64 nonce;
    uint8_t tag[CST_DISK_TAG];  /* at 48 */
    struct cst_le32 body_bytes; /* sealed; the same for reader and writer: it ends the message */
    uint8_t reserved2[8];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_index) == 80, "docs/disk-format.md section 5");
_Static_assert(offsetof(struct cst_disk_index, tag) == 48, "additional data of index blocks");

/* Followed by the record's meta (plain inside the sealed body) and zeros up to a multiple of 8.
 * Entries are in the order of slots. */
struct cst_disk_entry {
    struct cst_le32 chunk, n_chunks;
    struct cst_le64 generation;
    struct cst_le32 payload_bytes;
    struct cst_le32 meta_bytes; /* bits 0 .. 23; bits 24 .. 31: type */
};
_Static_assert(sizeof(struct cst_disk_entry) == 24, "docs/disk-format.md section 5");

/* The last chunk of a closed segment; the rest of it is 0. */
struct cst_disk_footer {
    uint8_t magic[8];
    struct cst_le32 segment;
    struct cst_le32 index_chunk; /* of the first index block */
    struct cst_le64 fill, start;
    struct cst_le32 n_index; /* blocks */
    struct cst_le32 n_records;
    struct cst_le32 end_chunk; /* of the last record: the first chunk after it */
    uint8_t reserved[16];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_footer) == 64, "docs/disk-format.md section 5");

/* ---- checkpoint ---- */

enum { CST_DISK_CLEAN = 1 }; /* flags: written by a clean stop, after everything else */

/* Followed by the body: n_segments of cst_disk_mark, each with its bitmap and pins. Written to
 * checkpoint.new, which then replaces checkpoint. */
struct cst_disk_checkpoint {
    uint8_t magic[8];
    struct cst_disk_version version;
    uint8_t uuid[16];
    struct cst_le64 generation; /* the last one given to a record */
    struct cst_le64 sequence;   /* the last one given to a segment */
    struct cst_le64 written;    /* seconds since 1970 */
    struct cst_le64 n_records;  /* live ones */
    struct cst_le64 body_bytes;
    struct cst_le32 flags;
    struct cst_le32 n_segments;
    struct cst_le32 body_crc;
    uint8_t reserved[32];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_checkpoint) == 128, "docs/disk-format.md section 6");

/* n_slots 0: the segment had been given up, nothing in it counts. Followed by (n_slots + 63) / 64
 * u64 words, bit (slot % 64) of word (slot / 64) set: this record was dropped; then n_pins of
 * cst_disk_pin. Counts for a segment with the same fill and start. */
struct cst_disk_mark {
    struct cst_le32 segment;
    struct cst_le32 n_slots;
    struct cst_le64 fill, start;
    struct cst_le32 n_pins;
    struct cst_le32 reserved;
};
_Static_assert(sizeof(struct cst_disk_mark) == 32, "docs/disk-format.md section 6");

struct cst_disk_pin {
    struct cst_le32 slot;
    struct cst_le32 reserved;
    struct cst_le64 until; /* seconds since 1970; all bits set: no end */
};
_Static_assert(sizeof(struct cst_disk_pin) == 16, "docs/disk-format.md section 6");

/* ---- keys ---- */

enum cst_disk_root {
    CST_DISK_ROOT_EPHEMERAL = 1, /* made by the daemon, in memory of this boot */
    CST_DISK_ROOT_EXTERNAL = 2,  /* a key file or a credential */
};

/* Followed by n_entries of cst_disk_wrapped, then a CRC32C over everything before it. Rewritten as
 * a whole: keys.new replaces keys. */
struct cst_disk_keys {
    uint8_t magic[8];
    struct cst_disk_version version;
    uint8_t uuid[16];
    uint8_t boot[16];            /* boot id of the daemon that wrote the file */
    uint8_t salt[CST_DISK_SALT]; /* random at each writing. Wrapping key = HKDF-SHA256(root key,
                                    salt, "cistern.wrap.1") */
    uint8_t check[CST_DISK_TAG]; /* HKDF-SHA256(root key, salt, "cistern.check.1"): tells a wrong
                                    root key from damage */
    struct cst_le32 root;        /* enum cst_disk_root */
    struct cst_le32 n_entries;
    uint8_t reserved[12];
    struct cst_le32 crc;
};
_Static_assert(sizeof(struct cst_disk_keys) == 128, "docs/disk-format.md section 7");

/* AES-256-GCM with the wrapping key, nonce = u32le 0, u64le entry number, additional data = bytes
 * 0 .. 67, plain text = the namespace's key. */
struct cst_disk_wrapped {
    uint8_t namespace_length;
    uint8_t reserved[3];
    uint8_t namespace_name[CST_DISK_NAMESPACE_MAX]; /* then zeros */
    uint8_t key[CST_DISK_KEY];
    uint8_t tag[CST_DISK_TAG];
};
_Static_assert(sizeof(struct cst_disk_wrapped) == 116, "docs/disk-format.md section 7");

/* ---- keys and nonces of a segment ----
 * segment key = HKDF-SHA256(namespace key, salt of the segment header, info); nonce = u32le 0,
 * u64le counter: every message of a fill has its own. */
#define CST_DISK_SEGMENT_INFO "cistern.segment.1" /* info: these 17 bytes, u32le id, u64le fill */
#define CST_DISK_WRAP_INFO "cistern.wrap.1"
#define CST_DISK_CHECK_INFO "cistern.check.1"

/* ---- arithmetic ---- */

static inline uint64_t cst_disk_chunks(uint64_t bytes) {
    return (bytes + CST_DISK_CHUNK - 1) / CST_DISK_CHUNK;
}

static inline uint32_t cst_disk_payload_offset(uint32_t meta_bytes) {
    return (uint32_t)cst_align_up(sizeof(struct cst_disk_record) + meta_bytes,
                                  CST_DISK_PAYLOAD_ALIGN);
}

static inline uint32_t cst_disk_record_chunks(uint32_t meta_bytes, uint64_t payload_bytes) {
    return (uint32_t)cst_disk_chunks(cst_disk_payload_offset(meta_bytes) + payload_bytes);
}

static inline uint32_t cst_disk_block_meta_bytes(uint32_t n_tokens, bool surprisals,
                                                 uint32_t n_side) {
    uint32_t lists = n_tokens * (surprisals ? 6 : 4);

    return (uint32_t)sizeof(struct cst_disk_block) + ((lists + 7) & ~UINT32_C(7)) + 8 * n_side;
}

static inline uint32_t cst_disk_entry_bytes(uint32_t meta_bytes) {
    return (uint32_t)sizeof(struct cst_disk_entry) + ((meta_bytes + 7) & ~UINT32_C(7));
}

/* meta_bytes and type share a word of an entry. */
static inline uint32_t cst_disk_entry_meta_bytes(const struct cst_disk_entry *e) {
    return cst_load32(&e->meta_bytes) & 0xffffff;
}

static inline enum cst_disk_type cst_disk_entry_type(const struct cst_disk_entry *e) {
    return (enum cst_disk_type)(cst_load32(&e->meta_bytes) >> 24);
}

static inline void cst_disk_entry_set(struct cst_disk_entry *e, enum cst_disk_type type,
                                      uint32_t meta_bytes) {
    cst_store32(&e->meta_bytes, meta_bytes | (uint32_t)type << 24);
}
