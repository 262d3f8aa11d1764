/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cisternctl's commands and what they share. One thread, one connection, one request at a time.
 *
 * A command returns the program's exit status. When it fails it has said why on standard error, in
 * plain sentences; with --json also as {"error": ...}. What is printed as JSON is always complete.
 */
#pragma once

#include "proto/frame.h"
#include "proto/record.h"

#include <cistern/cistern.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CST_CTL_OK = 0, CST_CTL_FAILED = 1, CST_CTL_USAGE = 2 };

struct cst_ctl {
    bool json, color;
    bool yes, all;              /* --yes, --all */
    const char *salt, *only_ns; /* --salt, --namespace; NULL: not given */
    size_t n_args;
    char **args; /* of the command */

    cistern_client *client;
    uint8_t *packet; /* CST_PACKET_MAX bytes: the last answer */
    size_t packet_len;
    uint8_t *room; /* the arena's */
    struct cst_arena arena;
};

int cst_ctl_ping(struct cst_ctl *ctl);
int cst_ctl_status(struct cst_ctl *ctl);
int cst_ctl_spaces(struct cst_ctl *ctl);
int cst_ctl_ls(struct cst_ctl *ctl);
int cst_ctl_stats(struct cst_ctl *ctl);
int cst_ctl_erase(struct cst_ctl *ctl);
int cst_ctl_purge(struct cst_ctl *ctl);
int cst_ctl_explain(struct cst_ctl *ctl);

/* ---- requests (ctl_ask.c) ---- */

/* 0 or -ENOMEM. Opens nothing yet: the first request connects. */
int cst_ctl_init(struct cst_ctl *ctl, const char *socket);
void cst_ctl_deinit(struct cst_ctl *ctl);

/* Sends, waits, and returns the unpacked answer: valid until the next request. NULL: it failed and
 * that has been said. */
const void *cst_ctl_ask(struct cst_ctl *ctl, uint16_t type, const ProtobufCMessage *message);

/* Says why the last call of libcistern failed; returns CST_CTL_FAILED. */
int cst_ctl_failed(struct cst_ctl *ctl);

/* "cisternctl: " and a sentence, with --json also as an object; returns CST_CTL_FAILED. */
int cst_ctl_say(const struct cst_ctl *ctl, const char *fmt, ...) CST_PRINTF(2, 3);

/* ---- spaces (ctl_space.c) ---- */

struct cst_ctl_spaces {
    struct cst_space_record *record; /* owned: cst_free() */
    size_t n;
};

/* Those that the user may see, narrowed by --namespace and by spec, which may be NULL:
 * FINGERPRINT[/CLASS[/KIND]], the fingerprint's first digits. false: failed and said. */
bool cst_ctl_list_spaces(struct cst_ctl *ctl, const char *spec, struct cst_ctl_spaces *out);

/* The only space that spec names. */
bool cst_ctl_find_space(struct cst_ctl *ctl, const char *spec, struct cst_space_record *out);

/* fn sees each block of a space in order; it returns false to end early. false: failed and said. */
bool cst_ctl_each_block(struct cst_ctl *ctl, uint32_t space,
                        bool (*fn)(const struct cst_block_record *block, void *arg), void *arg);
