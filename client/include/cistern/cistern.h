/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcistern: share transformer KV caches between the processes of one host through cisternd.
 *
 * The life of a prompt
 *
 *     cistern_client_open(&client, NULL);
 *     cistern_space_open(client, &descriptor, NULL, &space);       the model, the block layout
 *     cistern_lookup(space, tokens, n, NULL, &match);              how much of it is stored?
 *     cistern_key_chain(space, NULL, tokens, n, keys, cap, &n_keys);
 *     cistern_acquire(space, keys, match.blocks, NULL, leases, statuses);
 *     cistern_lease_data(leases[i], &data, &length, NULL);         read-only memory, zero copy
 *     cistern_release(client, leases, match.blocks);
 *       ... compute the rest of the prompt ...
 *     cistern_reserve(space, parent, keys, tokens, n_tokens, n_keys, slots, statuses);
 *     cistern_slot_data(slots[i], &data, &length);                 write the block here
 *     cistern_commit(space, slots, n_keys, NULL, statuses);        others see it from now on
 *
 * Rules for every function
 *   - Returns CISTERN_OK (0) or a negative CISTERN_E_*; outputs are written on success only, except
 *     per-key `statuses`, which are written whenever the call returns 0.
 *     cistern_last_error() is one plain sentence about the calling thread's last failure.
 *   - Handles are opaque and may be used from any thread. A handle made before fork() answers
 *     CISTERN_E_FORKED in the child.
 *   - Inputs are copied before the call returns. Output arrays are the caller's.
 *   - A lost daemon is a miss, never an accident: lookups answer 0 blocks, stores answer
 *     CISTERN_E_DISCONNECTED, mapped leases stay readable, and the library reconnects with back-off
 *     at a later call (a new epoch: spaces reopen by themselves; leases and slots of the old epoch
 *     stay readable or writable memory but are no longer known to the daemon).
 *   - Option structs start with their own size: set it with sizeof(), zero the rest; NULL means
 *     defaults. Later versions append fields.
 *   - A key is 32 bytes; arrays of keys are n x 32 contiguous bytes.
 */
#ifndef CISTERN_H
#define CISTERN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CISTERN_KEY_SIZE 32

/* Status codes: 0 or negative. Per-key statuses use the same numbers. Pinned forever. */
#define CISTERN_OK 0
#define CISTERN_E_NOT_FOUND (-1)      /* no such block */
#define CISTERN_E_PENDING (-2)        /* stored, but an ancestor is not finished yet */
#define CISTERN_E_PARENT_MISSING (-3) /* an ancestor was aborted, lost or erased */
#define CISTERN_E_PRESENT (-4)        /* stored already; nothing to do */
#define CISTERN_E_KEY_BUSY (-5)       /* another writer is storing it */
#define CISTERN_E_KEY_MISMATCH (-6)   /* key and token ids disagree */
#define CISTERN_E_BAD_VERSION (-21)
#define CISTERN_E_BAD_ARGUMENT (-25)
#define CISTERN_E_BAD_DESCRIPTOR (-26)
#define CISTERN_E_BAD_HANDLE (-27)
#define CISTERN_E_BAD_STATE (-28)
#define CISTERN_E_DENIED (-30)
#define CISTERN_E_UNSUPPORTED (-31)
#define CISTERN_E_TOO_LARGE (-32)
#define CISTERN_E_BUSY (-40) /* the daemon is full; try again later */
#define CISTERN_E_QUOTA (-41)
#define CISTERN_E_NO_MEMORY (-42)
#define CISTERN_E_DRAINING (-60)
#define CISTERN_E_INTERNAL (-61)
#define CISTERN_E_DISCONNECTED (-80) /* no daemon: treat as a miss */
#define CISTERN_E_FORKED (-81)
#define CISTERN_E_TIMEOUT (-82)
#define CISTERN_E_UNTRUSTED_SERVER (-83)
#define CISTERN_E_CORRUPT (-84) /* data failed its check: treat as a miss */
#define CISTERN_E_SYSTEM (-85)
#define CISTERN_E_ENGINE (-86)

typedef struct cistern_client cistern_client;
typedef struct cistern_space cistern_space;
typedef struct cistern_lease cistern_lease;
typedef struct cistern_slot cistern_slot;

/* "0.1.0", and the number that grows when this ABI changes. */
const char *cistern_version(void);
uint32_t cistern_abi_version(void);

/* The sentence of a status code, and the last failure of the calling thread ("" if none). The text
 * lives until the thread's next call. */
const char *cistern_status_text(int32_t status);
const char *cistern_last_error(void);

/* ---- client ------------------------------------------------------------------------------- */

#define CISTERN_CLIENT_ASYNC 1u /* a library thread serves submissions; client_event_fd() works */
#define CISTERN_CLIENT_LAZY 2u  /* open succeeds without a daemon; it is tried at each call */

typedef struct cistern_client_options {
    uint32_t size;  /* sizeof(cistern_client_options) */
    uint32_t flags; /* CISTERN_CLIENT_* */
    const char
        *socket_path;    /* NULL: $CISTERN_SOCKET, /run/cistern/cistern.sock,
                            $XDG_RUNTIME_DIR/cistern/cistern.sock, /tmp/cistern-UID/cistern.sock */
    const char *name;    /* shown by cisternctl; NULL: the program's name */
    int64_t server_uid;  /* accept a server of this uid as well; -1: $CISTERN_SERVER_UID if set.
                            Always accepted: uid 0, the own uid, user cistern */
    uint32_t timeout_ms; /* longest wait for one answer; 0: 10,000 */
    uint32_t reserved;
} cistern_client_options;

#define CISTERN_CLIENT_OPTIONS_INIT                                                                \
    { sizeof(cistern_client_options), 0, 0, 0, -1, 0, 0 }

int32_t cistern_client_open(cistern_client **out, const cistern_client_options *options);

/* Ends the connection, all leases and all slots; unmaps. Spaces, leases and slots of this client
 * must not be used afterwards. NULL ok. */
void cistern_client_close(cistern_client *client);

/* CISTERN_OK if a daemon answers (connects if needed). */
int32_t cistern_client_ping(cistern_client *client);

/* The daemon's epoch and the namespace it put us in; *name lives as long as the client. */
int32_t cistern_client_info(cistern_client *client, uint64_t *epoch, const char **name);

/* ---- spaces ------------------------------------------------------------------------------- */

#define CISTERN_DTYPE_OPAQUE 0u
#define CISTERN_DTYPE_F32 1u
#define CISTERN_DTYPE_F16 2u
#define CISTERN_DTYPE_BF16 3u
#define CISTERN_TENSOR_K 0u
#define CISTERN_TENSOR_V 1u
#define CISTERN_TENSOR_OPAQUE 2u
#define CISTERN_ROPE_NONE 0u
#define CISTERN_ROPE_NORM 1u /* pairs (2i, 2i+1) */
#define CISTERN_ROPE_NEOX 2u /* halves (i, i + dims/2) */
#define CISTERN_ROPE_MROPE 3u
#define CISTERN_SCALING_NONE 0u
#define CISTERN_SCALING_LINEAR 1u
#define CISTERN_SCALING_YARN 2u
#define CISTERN_SCALING_LLAMA3 3u
#define CISTERN_KIND_TOKENS 0u
#define CISTERN_KIND_FLAT 1u
#define CISTERN_SCOPE_OWN 0u
#define CISTERN_SCOPE_PUBLIC 1u
#define CISTERN_CLASS_LOSSLESS 0u
#define CISTERN_CLASS_NEAR_LOSSLESS 1u
#define CISTERN_CLASS_SMALL_LOSS 2u
#define CISTERN_CLASS_COLD 3u
#define CISTERN_TIER_NONE 0u
#define CISTERN_TIER_HOT 1u
#define CISTERN_TIER_PACKED 2u
#define CISTERN_TIER_COLD 3u
#define CISTERN_TIER_REMOTE 4u
#define CISTERN_TIER_RECIPE 5u

/* One tensor of one layer inside a block. Element (token t, head h, dimension d) lies at
 * offset + t * token_stride + h * head_stride + d * dim_stride bytes from the block's start.
 * Opaque: token_stride is the bytes of one token, or 0 when tokens can't be separated. */
typedef struct cistern_segment {
    uint32_t layer;
    uint32_t tensor; /* CISTERN_TENSOR_* */
    uint32_t dtype;  /* CISTERN_DTYPE_*; OPAQUE exactly for opaque tensors */
    uint32_t reserved;
    uint64_t offset, length;                        /* bytes */
    uint64_t token_stride, head_stride, dim_stride; /* bytes */
} cistern_segment;

typedef struct cistern_layer {
    uint32_t kv_heads, head_dim_k, head_dim_v;
    uint32_t window;    /* attention window in tokens; 0 = full */
    uint32_t rope;      /* CISTERN_ROPE_* */
    uint32_t k_rotated; /* 1: K is stored after RoPE */
    uint32_t rope_dims;
    float rope_theta;
    uint32_t rope_scaling; /* CISTERN_SCALING_* */
    float scaling[4];      /* linear: factor; yarn: factor, beta_fast, beta_slow, attn_factor;
                              llama3: factor, low_freq_factor, high_freq_factor */
    uint32_t scaling_original_context;
} cistern_layer;

/* Everything that changes the bytes of a block or their meaning. Two descriptors that differ
 * anywhere are two spaces. */
typedef struct cistern_descriptor {
    uint32_t size;              /* sizeof(cistern_descriptor) */
    uint32_t block_tokens;      /* 16..1024; 64 is a good default */
    uint64_t block_bytes;       /* <= 256 MiB */
    uint8_t content_id[32];     /* SHA-256 of the model */
    uint8_t adapter_id[32];     /* SHA-256 over adapters and scales; zero: none */
    const char *engine;         /* "llama.cpp"; <= 64 printable ASCII characters */
    const char *engine_options; /* "key=value;..."; <= 512; NULL: "" */
    uint32_t engine_abi, state_version;
    uint32_t tp_rank, tp_size; /* tp_size 0 counts as 1 */
    uint32_t n_layers, n_segments;
    const cistern_layer *layers;
    const cistern_segment *segments; /* ascending offsets, no overlap */
} cistern_descriptor;

typedef struct cistern_space_options {
    uint32_t size;
    uint32_t kind;          /* CISTERN_KIND_*; default tokens */
    uint32_t scope;         /* CISTERN_SCOPE_* */
    uint32_t quality_class; /* CISTERN_CLASS_*; never laxer than the daemon's configuration */
    const void *salt;       /* part of the root key; <= 64 bytes */
    uint32_t salt_size;
    uint32_t reserved;
} cistern_space_options;

/* Same descriptor, kind, scope and class = same space, in every process of the namespace. */
int32_t cistern_space_open(cistern_client *client, const cistern_descriptor *descriptor,
                           const cistern_space_options *options, cistern_space **out);
void cistern_space_close(cistern_space *space); /* leases and slots stay valid; NULL ok */

/* SHA-256 of the canonical descriptor (docs/protocol.md). No daemon needed. */
int32_t cistern_descriptor_fingerprint(const cistern_descriptor *descriptor, uint8_t out[32]);

uint64_t cistern_space_block_bytes(const cistern_space *space);
uint32_t cistern_space_block_tokens(const cistern_space *space);

/* ---- keys --------------------------------------------------------------------------------- */

/* The parent of every first block of this space (fingerprint and salt). */
int32_t cistern_key_root(const cistern_space *space, uint8_t out[32]);

/* Keys of the blocks of tokens[0..n): one per full block and, if n is no multiple of block_tokens,
 * one for the tail. parent NULL: the root. *n_keys = ceil(n / block_tokens) <= cap. */
int32_t cistern_key_chain(const cistern_space *space, const uint8_t *parent, const uint32_t *tokens,
                          size_t n_tokens, uint8_t *keys, size_t cap, size_t *n_keys);

/* One link of a chain, without a space. `extra` enters the hash (multimodal ids and the like; such
 * blocks belong in flat spaces); may be NULL. */
int32_t cistern_key_block(const uint8_t parent[32], const uint32_t *tokens, uint32_t n_tokens,
                          const void *extra, uint32_t extra_size, uint8_t out[32]);

/* A key for flat spaces from any bytes (docs/protocol.md). */
int32_t cistern_key_from_bytes(const void *data, size_t size, uint8_t out[32]);

/* ---- reading ------------------------------------------------------------------------------ */

typedef struct cistern_match {
    uint32_t size;           /* set by the caller */
    uint32_t blocks;         /* leading full blocks of the prompt that are stored */
    uint32_t partial_tokens; /* further tokens inside one more block (full or tail), 0 = none */
    uint32_t partial_stored; /* tokens that block holds, >= partial_tokens */
    uint32_t partial_tier;   /* CISTERN_TIER_* */
    uint32_t worst_tier;     /* the leading blocks are no farther away */
    uint64_t tokens;         /* blocks * block_tokens + partial_tokens */
    uint64_t cost_ns;        /* expected time to fetch the leading blocks */
    uint8_t partial_key[32]; /* acquire this for the partial match */
} cistern_match;

/* How much of a prompt is stored. Free of side effects. keys: the chain if the caller has it (a
 * tail key is ignored), else NULL. */
int32_t cistern_lookup(cistern_space *space, const uint32_t *tokens, size_t n_tokens,
                       const uint8_t *keys, cistern_match *out);

/* One packet, one answer: the leading run of n keys. tiers NULL or n bytes (CISTERN_TIER_*). */
int32_t cistern_lookup_keys(cistern_space *space, const uint8_t *keys, size_t n, uint8_t *tiers,
                            size_t *n_present);

/* Membership of each key (flat spaces): tiers[i] = CISTERN_TIER_NONE for an absent key. */
int32_t cistern_lookup_each(cistern_space *space, const uint8_t *keys, size_t n, uint8_t *tiers);

typedef struct cistern_acquire_options {
    uint32_t size;
    uint32_t mode; /* 0: decoded by the daemon; 1: packed where there is a frame, for
                      cistern_lease_decode() */
    uint32_t layer_first;
    uint32_t layer_count; /* 0: all layers */
    uint32_t timeout_ms;  /* wait for decodes; 0: the client's timeout */
    uint32_t n_release;
    cistern_lease *const *release; /* given back in the same packet; invalid afterwards, whatever
                                      the call answers, wrong arguments aside */
} cistern_acquire_options;

/* The right to read blocks until released. Waits until every key is ready or failed: statuses[i] is
 * CISTERN_OK and leases[i] set, or statuses[i] negative and leases[i] NULL. */
int32_t cistern_acquire(cistern_space *space, const uint8_t *keys, size_t n,
                        const cistern_acquire_options *options, cistern_lease **leases,
                        int32_t *statuses);

typedef struct cistern_lease_info {
    uint32_t size;
    uint32_t tier;   /* where the bytes were found */
    uint32_t packed; /* 1: the bytes are a frame */
    uint32_t tokens; /* tokens the block holds */
    uint32_t slab;
    uint32_t crc32c; /* of the leased bytes */
    uint64_t offset; /* in the slab */
} cistern_lease_info;

/* Read-only memory, valid until the lease is released or the client closed. info may be NULL. */
int32_t cistern_lease_data(const cistern_lease *lease, const void **data, size_t *size,
                           cistern_lease_info *info);

/* The block's bytes into block (block_bytes of the space), whatever the lease holds: decodes a
 * frame, copies decoded bytes. With a layer range, other layers' bytes may stay untouched. */
int32_t cistern_lease_decode(const cistern_lease *lease, void *block, size_t size);

/* Never fails; NULL entries are skipped; the handles are invalid afterwards. */
void cistern_release(cistern_client *client, cistern_lease *const *leases, size_t n);

/* Copies block i into blocks[i] (sizes[i] bytes; shorter copies less). */
int32_t cistern_get_into(cistern_space *space, const uint8_t *keys, size_t n, void *const *blocks,
                         const size_t *sizes, int32_t *statuses);

/* ---- writing ------------------------------------------------------------------------------ */

/* Asks for room for a run of blocks. parent NULL: the root; ignored in flat spaces. tokens: the ids
 * of all n blocks, only the last may be short (flat: NULL, 0). statuses[i]: CISTERN_OK and slots[i]
 * set; CISTERN_E_PRESENT, _KEY_BUSY, _PARENT_MISSING, _KEY_MISMATCH or _BUSY and slots[i] NULL. */
int32_t cistern_reserve(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                        const uint32_t *tokens, size_t n_tokens, size_t n, cistern_slot **slots,
                        int32_t *statuses);

/* block_bytes of writable memory with unspecified contents. For a tail block the caller zeroes the
 * bytes of missing tokens. */
int32_t cistern_slot_data(cistern_slot *slot, void **data, size_t *size);

typedef struct cistern_commit_options {
    uint32_t size;
    uint32_t prediction;        /* id of the predictor behind the surprisals; 0: the engine */
    const uint16_t *surprisals; /* IEEE half floats, bits per token, for all tokens of the slots */
    size_t n_surprisals;
} cistern_commit_options;

/* Publishes slots, in order, parents first. statuses[i]: CISTERN_OK stored and visible;
 * CISTERN_E_PENDING (visible when its parent is); CISTERN_E_PARENT_MISSING; CISTERN_E_PRESENT
 * (another writer was first). NULL entries give CISTERN_E_BAD_HANDLE. The handles are invalid
 * afterwards, whatever the status. */
int32_t cistern_commit(cistern_space *space, cistern_slot *const *slots, size_t n,
                       const cistern_commit_options *options, int32_t *statuses);
void cistern_abort(cistern_space *space, cistern_slot *const *slots, size_t n);

/* reserve + copy + commit in as many rounds as the staging memory asks for. blocks[i] has
 * block_bytes bytes. */
int32_t cistern_put_from(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                         const uint32_t *tokens, size_t n_tokens, size_t n,
                         const void *const *blocks, int32_t *statuses);

/* ---- care --------------------------------------------------------------------------------- */

int32_t cistern_touch(cistern_space *space, const uint8_t *keys, size_t n);
int32_t cistern_pin(cistern_space *space, const uint8_t *keys, size_t n, uint64_t ttl_ms);
int32_t cistern_unpin(cistern_space *space, const uint8_t *keys, size_t n);

/* Removes blocks with everything below them; n = 0 removes the whole space. *n_erased may be NULL.
 */
int32_t cistern_erase(cistern_space *space, const uint8_t *keys, size_t n, uint64_t *n_erased);

/* Why did this prompt miss? One sentence, terminated, into text. */
int32_t cistern_explain(cistern_space *space, const uint32_t *tokens, size_t n_tokens, char *text,
                        size_t cap);

/* Counters of the namespace (space NULL) or of one space as one JSON object, terminated. */
int32_t cistern_stats(cistern_client *client, cistern_space *space, char *json, size_t cap);

/* ---- side data ---------------------------------------------------------------------------- */

/* Tables that the frames of a lossy space refer to by version (docs/codec-format.md). The daemon
 * learns them from what it stores; cistern_lease_decode() fetches them by itself. */
typedef struct cistern_sidedata_info {
    uint32_t size; /* set by the caller */
    uint32_t version;
    uint64_t bytes;
    uint8_t sha256[32];
} cistern_sidedata_info;

/* The bytes of a version (0: the newest) into data; NULL: only the numbers. info may be NULL.
 * CISTERN_E_NOT_FOUND: none yet; CISTERN_E_TOO_LARGE: cap is less than their bytes. */
int32_t cistern_sidedata_get(cistern_space *space, uint32_t version, void *data, size_t cap,
                             cistern_sidedata_info *info);

#define CISTERN_SIDEDATA_TABLES 0u
#define CISTERN_SIDEDATA_WEIGHTS 1u

/* Makes a new version, for frames that are made from now on. TABLES: whole ones, of a version above
 * the newest; WEIGHTS: the newest tables with other weights of the quantizer's steps, floats, one a
 * layer for K, then one a layer for V. CISTERN_E_DENIED: only users whom the
 * daemon's configuration names may, or the one whom the namespace is named after. version may be
 * NULL. */
int32_t cistern_sidedata_put(cistern_space *space, uint32_t kind, const void *data, size_t size,
                             uint32_t *version);

/* ---- submit and drain (CISTERN_CLIENT_ASYNC) ----------------------------------------------- */

/* One completion per submission. Buffers given to a submission stay the caller's and must live
 * until its completion is drained. */
typedef struct cistern_completion {
    uint64_t ticket;
    int32_t status; /* of the whole submission */
    uint32_t n;     /* keys */
} cistern_completion;

/* An eventfd (non-blocking, owned by the client) that is readable while completions wait; negative:
 * a status. */
int32_t cistern_client_event_fd(cistern_client *client);

/* Takes up to cap completions without blocking; returns how many, or a negative status. */
int32_t cistern_client_drain(cistern_client *client, cistern_completion *out, size_t cap);

/* As the blocking calls of the same name; statuses (tiers) are filled before the completion. */
int32_t cistern_submit_get_into(cistern_space *space, const uint8_t *keys, size_t n,
                                void *const *blocks, const size_t *sizes, int32_t *statuses,
                                uint64_t *ticket);
int32_t cistern_submit_put_from(cistern_space *space, const uint8_t *parent, const uint8_t *keys,
                                const uint32_t *tokens, size_t n_tokens, size_t n,
                                const void *const *blocks, int32_t *statuses, uint64_t *ticket);
int32_t cistern_submit_lookup_each(cistern_space *space, const uint8_t *keys, size_t n,
                                   uint8_t *tiers, uint64_t *ticket);

#ifdef __cplusplus
}
#endif
#endif
