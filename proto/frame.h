/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packets: a 16-byte header and one protobuf message, at most CST_PACKET_MAX bytes in all, over a
 * SEQPACKET socket. docs/protocol.md draws it.
 */
#pragma once

#include "base/le.h"
#include "proto/cistern.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    CST_PACKET_MAX = 128 * 1024,
    CST_PACKET_FDS_MAX = 16,
    CST_PROTOCOL_VERSION = 1,
    CST_UNPACK_BUDGET = 16 * 1024, /* arena bytes one message may become: its struct and strings */
};
#define CST_PACKET_MAGIC UINT32_C(0x4e545343) /* "CSTN" */

/* Header flags */
enum { CST_PACKET_REPLY = 1, CST_PACKET_ERROR = 2, CST_PACKET_PUSH = 4 };

/* An error reply carries no protobuf message but u16le status, then a UTF-8 sentence. */

struct cst_packet_header {
    struct cst_le32 magic;
    uint8_t version;
    uint8_t flags;
    struct cst_le16 type;
    struct cst_le32 length;  /* payload bytes after the header */
    struct cst_le32 request; /* chosen by the client, echoed; 0 in pushes */
};
_Static_assert(sizeof(struct cst_packet_header) == 16, "docs/protocol.md, header");

struct cst_packet {
    uint16_t type;
    uint8_t version, flags;
    uint32_t request;
    const uint8_t *payload;
    size_t length;
};

/* Parses and checks one received packet. Returns a number of status.def: 0, BAD_LENGTH, BAD_MAGIC,
 * BAD_VERSION (CST_PROTOCOL_VERSION, or 0 for HELLO only), BAD_MESSAGE (unknown flag). out is
 * filled whenever 16 <= n <= CST_PACKET_MAX, else zero. */
int cst_packet_parse(struct cst_packet *out, const void *data, size_t n);
void cst_packet_header_fill(struct cst_packet_header *h, uint16_t type, uint8_t flags,
                            uint32_t request, size_t length);

enum cst_message {
#define R(NAME, number, request, reply) CST_MSG_##NAME = number,
#define P(NAME, number, push) CST_MSG_##NAME = number,
#include "proto/message.def"
};
const char *cst_message_name(uint16_t type); /* NULL if unknown */
const ProtobufCMessageDescriptor *cst_message_descriptor(uint16_t type,
                                                         bool reply); /* NULL if unknown */

/*
 * Bump allocator with a hard budget for unpacking: a message that wants more does not decode. One
 * block of memory, never zeroed, reused for every message: unpacking costs no heap call. reset()
 * takes back all. One thread at a time.
 */
struct cst_arena {
    uint8_t *data; /* the caller's */
    size_t used, size;
};
void cst_arena_init(struct cst_arena *a, void *memory, size_t size);
void cst_arena_reset(struct cst_arena *a);

/*
 * Unpacks into the arena. `bytes` fields BORROW from data: they live as long as the packet's
 * buffer; strings and nested messages live in the arena until its reset. Never free the result.
 * NULL when the bytes don't decode, carry an unknown field or one field twice, or want too much.
 */
ProtobufCMessage *cst_message_unpack(const ProtobufCMessageDescriptor *desc, const uint8_t *data,
                                     size_t n, struct cst_arena *arena);

/* Packs header + message into out; returns the packet's size, 0 if it does not fit. */
size_t cst_packet_pack(void *out, size_t cap, uint16_t type, uint8_t flags, uint32_t request,
                       const ProtobufCMessage *message);

/* As cst_packet_pack(), and the bytes field number `field` (empty in message) gets bulk_len bytes
 * that stay where they are: returns the size of all that comes before them. Send both parts with
 * cst_packet_send_bulk(): 64 KiB of keys are then copied once, by the kernel. */
size_t cst_packet_pack_bulk(void *out, size_t cap, uint16_t type, uint8_t flags, uint32_t request,
                            const ProtobufCMessage *message, unsigned field, size_t bulk_len);

/* An error reply; a text that does not fit is cut. 0 if not even the status fits. */
size_t cst_packet_pack_error(void *out, size_t cap, uint16_t type, uint32_t request, int status,
                             const char *text);

/* The status of an error reply, its sentence in text[cap] without control characters; OK if the
 * packet is no error reply, BAD_MESSAGE if it is a broken one. */
int cst_packet_error(const struct cst_packet *packet, char *text, size_t cap);

/* ---- sockets with descriptors ---- */

/* Sends one packet. `borrowed` descriptors stay the caller's. 0, -EAGAIN, -EPIPE, other errno. */
int cst_packet_send_borrowed_fds(int sock, const void *data, size_t n, const int *borrowed,
                                 size_t n_fds, int flags);

/* Sends head and bulk as one packet, without descriptors. */
int cst_packet_send_bulk(int sock, const void *head, size_t n, const void *bulk, size_t bulk_len,
                         int flags);

/* Makes a listening or connected socket refuse descriptors: who attaches some gets EPERM. Sockets
 * accepted later inherit it. false: this kernel (before Linux 6.16) can't. */
bool cst_packet_refuse_fds(int sock);
bool cst_packet_refuses_fds(int sock);

/* Receives one packet from a socket that refuses descriptors (on another one they would vanish
 * without a word). Returns as cst_packet_recv_owned_fds(). */
ssize_t cst_packet_recv(int sock, void *data, size_t cap, int flags);

/* Receives one packet. Received descriptors are the caller's (`owned`, CLOEXEC); more than cap_fds
 * or a truncated control message: all are closed and *n_fds = SIZE_MAX. With cap_fds = 0 the kernel
 * drops them before they are ours. Returns bytes, 0 at the end of the connection or for an empty
 * packet, -EMSGSIZE for a packet over `cap`, -EAGAIN, other -errno. */
ssize_t cst_packet_recv_owned_fds(int sock, void *data, size_t cap, int *owned, size_t cap_fds,
                                  size_t *n_fds, int flags);
