/* SPDX-License-Identifier: Apache-2.0 */
/*
 * erase, purge, explain. No state.
 *
 * Invariants: 1. nothing is erased before every key named was found to be exactly one block; 2. a
 * command that takes more than named blocks asks first, or wants --yes where nobody can answer.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "client/ctl/ctl.h"
#include "client/ctl/ctl_out.h"
#include "proto/key.h"
#include "proto/status.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEY = CST_KEY_SIZE,
    KEY_DIGITS_MIN = 8,
    ERASE_MAX = 1000,
    EXPLAIN_KEYS_MAX = (CST_PACKET_MAX - 8192) / KEY,
    TOKENS_MAX = EXPLAIN_KEYS_MAX * CST_BLOCK_TOKENS_MAX,
};

/* Asks on the terminal, unless --yes. */
static bool agreed(const struct cst_ctl *ctl, const char *what) {
    char line[16];

    if (ctl->yes)
        return true;
    if (!isatty(STDIN_FILENO)) {
        (void)cst_ctl_say(ctl, "this would %s; say --yes to do it", what);
        return false;
    }
    fprintf(stderr, "This will %s. Go on? [y/N] ", what);
    if (fgets(line, sizeof(line), stdin) && (line[0] == 'y' || line[0] == 'Y'))
        return true;
    (void)cst_ctl_say(ctl, "nothing was done");
    return false;
}

/* ---- erase ---- */

struct search {
    char *const *args;
    size_t n;
    uint8_t (*keys)[KEY];
    unsigned *found; /* blocks that fit argument i */
};

static bool match(const struct cst_block_record *b, void *arg) {
    struct search *s = arg;
    char key[2 * KEY + 1];

    cst_text_hex(b->key, sizeof(b->key), key);
    for (size_t i = 0; i < s->n; i++)
        if (!strncmp(key, s->args[i], strlen(s->args[i])) && s->found[i]++ == 0)
            memcpy(s->keys[i], b->key, KEY);
    return true;
}

/* The whole key of each argument; false and said unless exactly one block fits it. */
static bool resolve(struct cst_ctl *ctl, uint32_t space, struct search *s) {
    for (size_t i = 0; i < s->n; i++)
        if (strlen(s->args[i]) < KEY_DIGITS_MIN || strlen(s->args[i]) > 2 * KEY ||
            strspn(s->args[i], "0123456789abcdef") != strlen(s->args[i])) {
            (void)cst_ctl_say(ctl, "\"%.80s\" is no key: give %d to %d hexadecimal digits",
                              s->args[i], KEY_DIGITS_MIN, 2 * KEY);
            return false;
        }
    if (!cst_ctl_each_block(ctl, space, match, s))
        return false;
    for (size_t i = 0; i < s->n; i++)
        if (s->found[i] != 1) {
            (void)cst_ctl_say(ctl,
                              s->found[i] ? "%u blocks begin with %s: give more digits"
                                          : "%u blocks of this space begin with %s",
                              s->found[i], s->args[i]);
            return false;
        }
    return true;
}

static int say_erased(const struct cst_ctl *ctl, uint64_t blocks) {
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_number("erased_blocks", blocks);
        cst_json_close('}');
    } else {
        printf("erased %" PRIu64 " blocks\n", blocks);
    }
    return CST_CTL_OK;
}

static int erase(struct cst_ctl *ctl, const Cistern__V1__Erase *request) {
    const Cistern__V1__KeysReply *reply = cst_ctl_ask(ctl, CST_MSG_ERASE, &request->base);

    return reply ? say_erased(ctl, reply->blocks) : CST_CTL_FAILED;
}

static int erase_keys(struct cst_ctl *ctl, Cistern__V1__Erase *request) {
    static uint8_t keys[ERASE_MAX][KEY];
    static unsigned found[ERASE_MAX];
    struct search s = { ctl->args + 1, ctl->n_args - 1, keys, found };

    if (s.n > ERASE_MAX)
        return cst_ctl_say(ctl, "at most %d blocks at a time", ERASE_MAX);
    if (!resolve(ctl, request->space, &s))
        return CST_CTL_FAILED;
    request->keys = (ProtobufCBinaryData){ .len = s.n * KEY, .data = keys[0] };
    return erase(ctl, request);
}

int cst_ctl_erase(struct cst_ctl *ctl) {
    Cistern__V1__Erase request = CISTERN__V1__ERASE__INIT;
    struct cst_space_record space;
    char what[128];

    if (ctl->all == (ctl->n_args > 1)) {
        (void)cst_ctl_say(ctl, "name the blocks to erase, or say --all");
        return CST_CTL_USAGE;
    }
    if (!cst_ctl_find_space(ctl, ctl->args[0], &space))
        return CST_CTL_FAILED;
    request.space = cst_load32(&space.space);
    if (!ctl->all)
        return erase_keys(ctl, &request);
    (void)snprintf(what, sizeof(what), "erase all %" PRIu64 " blocks of the space",
                   cst_load64(&space.blocks));
    if (!agreed(ctl, what))
        return CST_CTL_FAILED;
    request.all = 1;
    return erase(ctl, &request);
}

/* ---- purge ---- */

int cst_ctl_purge(struct cst_ctl *ctl) {
    Cistern__V1__Purge request = CISTERN__V1__PURGE__INIT;
    const Cistern__V1__PurgeReply *reply;
    char what[160];

    if (ctl->n_args)
        request.namespace_ = ctl->args[0];
    (void)snprintf(what, sizeof(what), "forget everything that %s%.80s has stored",
                   ctl->n_args ? "namespace " : "this namespace", ctl->n_args ? ctl->args[0] : "");
    if (!agreed(ctl, what))
        return CST_CTL_FAILED;
    reply = cst_ctl_ask(ctl, CST_MSG_PURGE, &request.base);
    if (!reply)
        return CST_CTL_FAILED;
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_number("erased_blocks", reply->blocks);
        cst_json_text("result", reply->result);
        cst_json_close('}');
    } else {
        char result[64];

        cst_text_field(reply->result, strlen(reply->result), result, sizeof(result));
        printf("%s %" PRIu64 " blocks\n", result, reply->blocks);
    }
    return CST_CTL_OK;
}

/* ---- explain ---- */

struct tokens {
    uint32_t *id; /* owned */
    size_t n;
};

static bool add_token(struct cst_ctl *ctl, struct tokens *t, uint64_t id) {
    if (t->n % 4096 == 0) {
        uint32_t *grown = cst_realloc(t->id, (t->n + 4096) * sizeof(*grown));

        if (!grown) {
            (void)cst_ctl_say(ctl, "out of memory");
            return false;
        }
        t->id = grown;
    }
    if (t->n >= TOKENS_MAX || id > UINT32_MAX) {
        (void)cst_ctl_say(ctl, "token %zu: %s", t->n + 1,
                          id > UINT32_MAX ? "an id has at most 32 bits" : "too many tokens");
        return false;
    }
    t->id[t->n++] = (uint32_t)id;
    return true;
}

/* Decimal ids with anything but digits, signs and letters between them: "[1, 2, 3]" is fine. */
static bool read_tokens(struct cst_ctl *ctl, FILE *f, struct tokens *t) {
    int c = getc(f);

    while (c != EOF) {
        uint64_t id = 0;

        if (!isdigit(c) && (isalpha(c) || c == '-' || c == '+' || c == '.')) {
            (void)cst_ctl_say(ctl, "after %zu tokens: '%c' is no token id", t->n, c);
            return false;
        }
        if (!isdigit(c)) {
            c = getc(f);
            continue;
        }
        for (; isdigit(c); c = getc(f))
            id = CST_MIN(id * 10 + (uint64_t)(c - '0'), UINT64_C(1) << 40);
        if (!add_token(ctl, t, id))
            return false;
    }
    if (!t->n)
        (void)cst_ctl_say(ctl, "there are no token ids");
    return t->n > 0;
}

static bool open_tokens(struct cst_ctl *ctl, struct tokens *t) {
    const char *path = ctl->n_args > 1 ? ctl->args[1] : "-";
    FILE *f = strcmp(path, "-") != 0 ? fopen(path, "re") : stdin;
    bool ok;

    if (!f) {
        (void)cst_ctl_say(ctl, "%s: %s", path, strerrordesc_np(errno));
        return false;
    }
    ok = read_tokens(ctl, f, t);
    if (f != stdin)
        (void)fclose(f);
    return ok;
}

static int say_explanation(const struct cst_ctl *ctl, const Cistern__V1__ExplainReply *reply,
                           size_t blocks) {
    char line[160], nearest[2 * KEY + 1] = "";

    if (reply->nearest.len == KEY)
        cst_text_hex(reply->nearest.data, KEY, nearest);
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_text("reason", reply->reason);
        cst_json_number("blocks", blocks);
        cst_json_number("present_blocks", reply->present);
        cst_json_text("field", reply->field);
        cst_json_text("nearest", nearest);
        cst_json_number("nearest_present_blocks", reply->nearest_present);
        cst_json_close('}');
        return CST_CTL_OK;
    }
    cst_text_line("why", reply->reason);
    (void)snprintf(line, sizeof(line), "%" PRIu32 " of %zu full blocks", reply->present, blocks);
    cst_text_line("stored here", line);
    if (nearest[0]) {
        (void)snprintf(line, sizeof(line), "%.16s, has %" PRIu32 "; differs in %.64s", nearest,
                       reply->nearest_present, reply->field);
        cst_text_line("nearest space", line);
    }
    return CST_CTL_OK;
}

static int ask_why(struct cst_ctl *ctl, const struct cst_space_record *space,
                   const struct tokens *t) {
    Cistern__V1__Explain request = CISTERN__V1__EXPLAIN__INIT;
    uint32_t size = cst_load32(&space->block_tokens);
    cst_auto(cst_freep) uint8_t *keys = NULL;
    const char *salt = ctl->salt ? ctl->salt : "";
    const Cistern__V1__ExplainReply *reply;
    uint8_t root[KEY];
    size_t full;

    if (size < CST_BLOCK_TOKENS_MIN || strlen(salt) > CST_SALT_MAX)
        return cst_ctl_say(ctl, "a salt has at most %d bytes", CST_SALT_MAX);
    full = t->n / size;
    if (full > EXPLAIN_KEYS_MAX)
        return cst_ctl_say(ctl, "at most %u tokens of this space at a time",
                           EXPLAIN_KEYS_MAX * size);
    keys = cst_malloc(full * KEY);
    if (!keys)
        return cst_ctl_say(ctl, "out of memory");
    cst_key_root(space->fingerprint, salt, (uint32_t)strlen(salt), root);
    cst_key_chain(root, t->id, full * size, size, keys);
    request.space = cst_load32(&space->space);
    request.keys = (ProtobufCBinaryData){ .len = full * KEY, .data = keys };
    request.tail = (ProtobufCBinaryData){ .len = t->n % size * sizeof(*t->id),
                                          .data = (uint8_t *)(t->id + full * size) };
    reply = cst_ctl_ask(ctl, CST_MSG_EXPLAIN, &request.base);
    return reply ? say_explanation(ctl, reply, full) : CST_CTL_FAILED;
}

int cst_ctl_explain(struct cst_ctl *ctl) {
    struct cst_space_record space;
    struct tokens t = { 0 };
    int status = CST_CTL_FAILED;

    if (cst_ctl_find_space(ctl, ctl->args[0], &space)) {
        if (space.kind != CST_KIND_TOKENS)
            status = cst_ctl_say(ctl, "a flat space has no token ids to explain");
        else if (open_tokens(ctl, &t))
            status = ask_why(ctl, &space, &t);
    }
    (void)cst_free(t.id);
    return status;
}
