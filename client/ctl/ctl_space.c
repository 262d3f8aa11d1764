/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spaces and ls, and how a person names a space or a block: by the first digits. No state.
 * Invariant: records are copied out of the answer before the next request overwrites it.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "client/ctl/ctl.h"
#include "client/ctl/ctl_out.h"
#include "codec/codec.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SPEC_DIGITS_MIN = 4, SHORT = 16 };

static const char *name_of(const char *const *names, size_t n, unsigned i) {
    return i < n ? names[i] : "?";
}

static const char *class_name(unsigned i) {
    static const char *const names[] = { "lossless", "near-lossless", "small-loss", "cold" };

    return name_of(names, CST_COUNT(names), i);
}

static const char *kind_name(unsigned i) {
    static const char *const names[] = { "tokens", "flat" };

    return name_of(names, CST_COUNT(names), i);
}

static const char *tier_name(unsigned i) {
    static const char *const names[] = { "none", "hot", "packed", "cold", "remote", "recipe" };

    return name_of(names, CST_COUNT(names), i);
}

static const char *preset_name(unsigned i) {
    const char *name = cst_preset_name(i);

    return name ? name : "?";
}

/* ---- choosing spaces ---- */

/* FINGERPRINT[/CLASS[/KIND]] against one record. */
static bool fits(const struct cst_space_record *r, const char *spec) {
    char id[65], full[128];
    size_t digits = spec ? strcspn(spec, "/") : 0;

    if (!spec)
        return true;
    cst_text_hex(r->fingerprint, sizeof(r->fingerprint), id);
    if (digits > 64 || strncmp(id, spec, digits) != 0)
        return false;
    (void)snprintf(full, sizeof(full), "/%s/%s", class_name(r->quality_class), kind_name(r->kind));
    return !spec[digits] || !strcmp(spec + digits, full) ||
           (!strncmp(spec + digits, full, strlen(spec + digits)) &&
            full[strlen(spec + digits)] == '/');
}

static bool in_namespace(const struct cst_space_record *r, const char *only) {
    return !only || (strlen(only) <= sizeof(r->namespace_name) &&
                     !strncmp(r->namespace_name, only, sizeof(r->namespace_name)));
}

static bool keep_page(struct cst_ctl *ctl, const ProtobufCBinaryData *page, const char *spec,
                      struct cst_ctl_spaces *out) {
    size_t n = page->len / sizeof(*out->record);
    struct cst_space_record *grown;

    grown = cst_realloc(out->record, (out->n + n) * sizeof(*out->record));
    if (!grown) {
        (void)cst_ctl_say(ctl, "out of memory");
        return false;
    }
    out->record = grown;
    for (size_t i = 0; i < n; i++) {
        memcpy(&grown[out->n], page->data + i * sizeof(*grown), sizeof(*grown));
        if (fits(&grown[out->n], spec) && in_namespace(&grown[out->n], ctl->only_ns))
            out->n++;
    }
    return true;
}

bool cst_ctl_list_spaces(struct cst_ctl *ctl, const char *spec, struct cst_ctl_spaces *out) {
    Cistern__V1__Spaces request = CISTERN__V1__SPACES__INIT;

    *out = (struct cst_ctl_spaces){ 0 };
    do {
        const Cistern__V1__SpacesReply *reply = cst_ctl_ask(ctl, CST_MSG_SPACES, &request.base);
        uint32_t before = request.start;

        if (!reply || !keep_page(ctl, &reply->spaces, spec, out)) {
            out->record = cst_free(out->record);
            return false;
        }
        request.start = reply->next > before ? reply->next : 0; /* never the same page twice */
    } while (request.start);
    return true;
}

bool cst_ctl_find_space(struct cst_ctl *ctl, const char *spec, struct cst_space_record *out) {
    struct cst_ctl_spaces all;
    bool found;

    if (strcspn(spec, "/") < SPEC_DIGITS_MIN) {
        (void)cst_ctl_say(ctl,
                          "\"%.80s\" is too short: give at least %d digits of the space's "
                          "fingerprint",
                          spec, SPEC_DIGITS_MIN);
        return false;
    }
    if (!cst_ctl_list_spaces(ctl, spec, &all))
        return false;
    found = all.n == 1;
    if (found)
        *out = all.record[0];
    else if (!all.n)
        (void)cst_ctl_say(ctl, "no space begins with \"%.80s\"; `cisternctl spaces` lists them",
                          spec);
    else
        (void)cst_ctl_say(ctl,
                          "%zu spaces fit \"%.80s\": give more digits, /CLASS, /CLASS/KIND or "
                          "--namespace",
                          all.n, spec);
    (void)cst_free(all.record);
    return found;
}

/* ---- spaces ---- */

static void json_space(const struct cst_space_record *r) {
    char text[CST_RECORD_NAME_MAX + 1];

    cst_text_field(r->namespace_name, sizeof(r->namespace_name), text, sizeof(text));
    cst_json_text("namespace", text);
    cst_text_field(r->engine, sizeof(r->engine), text, sizeof(text));
    cst_json_text("engine", text);
    cst_json_hex("fingerprint", r->fingerprint, sizeof(r->fingerprint));
    cst_json_hex("content_id", r->content_id, sizeof(r->content_id));
    cst_json_text("class", class_name(r->quality_class));
    cst_json_text("kind", kind_name(r->kind));
    cst_json_open("presets", '[');
    for (unsigned i = 0; i < 32; i++)
        if (cst_load32(&r->presets) >> i & 1)
            cst_json_text(NULL, preset_name(i));
    cst_json_close(']');
    cst_json_number("block_tokens", cst_load32(&r->block_tokens));
    cst_json_number("block_bytes", cst_load64(&r->block_bytes));
    cst_json_number("blocks", cst_load64(&r->blocks));
    cst_json_number("tail_blocks", cst_load64(&r->tail_blocks));
    cst_json_number("hot_bytes", cst_load64(&r->hot_bytes));
    cst_json_number("packed_bytes", cst_load64(&r->packed_bytes));
    cst_json_number("index_bytes", cst_load64(&r->index_bytes));
}

static void text_space(const struct cst_space_record *r) {
    char id[65], ns[CST_RECORD_NAME_MAX + 1], engine[CST_RECORD_NAME_MAX + 1];
    char block[CST_AMOUNT_MAX], hot[CST_AMOUNT_MAX], packed[CST_AMOUNT_MAX];

    cst_text_hex(r->fingerprint, sizeof(r->fingerprint), id);
    cst_text_field(r->namespace_name, sizeof(r->namespace_name), ns, sizeof(ns));
    cst_text_field(r->engine, sizeof(r->engine), engine, sizeof(engine));
    printf("%.*s  %-13s  %-6s  %-12s  %-12s  %6" PRIu32 " x %9s  %8" PRIu64 "  %10s  %10s\n", SHORT,
           id, class_name(r->quality_class), kind_name(r->kind), ns, engine,
           cst_load32(&r->block_tokens), cst_text_bytes(cst_load64(&r->block_bytes), block),
           cst_load64(&r->blocks), cst_text_bytes(cst_load64(&r->hot_bytes), hot),
           cst_text_bytes(cst_load64(&r->packed_bytes), packed));
}

int cst_ctl_spaces(struct cst_ctl *ctl) {
    struct cst_ctl_spaces all;
    char heading[160];

    if (!cst_ctl_list_spaces(ctl, NULL, &all))
        return CST_CTL_FAILED;
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_open("spaces", '[');
        for (size_t i = 0; i < all.n; i++) {
            cst_json_open(NULL, '{');
            json_space(&all.record[i]);
            cst_json_close('}');
        }
        cst_json_close(']');
        cst_json_close('}');
    } else if (all.n) {
        (void)snprintf(heading, sizeof(heading),
                       "%-*s  %-13s  %-6s  %-12s  %-12s  %6s x %9s  %8s  %10s  %10s", SHORT,
                       "fingerprint", "class", "kind", "namespace", "engine", "tokens", "block",
                       "blocks", "hot", "packed");
        cst_text_heading(ctl->color, heading);
        for (size_t i = 0; i < all.n; i++)
            text_space(&all.record[i]);
    } else {
        puts("no spaces");
    }
    (void)cst_free(all.record);
    return CST_CTL_OK;
}

/* ---- ls ---- */

bool cst_ctl_each_block(struct cst_ctl *ctl, uint32_t space,
                        bool (*fn)(const struct cst_block_record *block, void *arg), void *arg) {
    Cistern__V1__Blocks request = CISTERN__V1__BLOCKS__INIT;

    request.space = space;
    do {
        const Cistern__V1__BlocksReply *reply = cst_ctl_ask(ctl, CST_MSG_BLOCKS, &request.base);
        uint64_t before = request.cursor;

        if (!reply)
            return false;
        for (size_t at = 0; at + sizeof(struct cst_block_record) <= reply->blocks.len;
             at += sizeof(struct cst_block_record)) {
            struct cst_block_record block;

            memcpy(&block, reply->blocks.data + at, sizeof(block));
            if (!fn(&block, arg))
                return true;
        }
        request.cursor = reply->next > before ? reply->next : 0;
    } while (request.cursor);
    return true;
}

static double error_of(const struct cst_block_record *b) {
    uint32_t bits = cst_load32(&b->error);
    float v;

    memcpy(&v, &bits, sizeof(v));
    return (double)v;
}

static bool json_block(const struct cst_block_record *b, void *arg) {
    cst_json_open(NULL, '{');
    cst_json_hex("key", b->key, sizeof(b->key));
    cst_json_hex("parent", b->parent, sizeof(b->parent));
    cst_json_number("tokens", cst_load32(&b->tokens));
    cst_json_number("depth", cst_load32(&b->depth));
    cst_json_text("tier", tier_name(b->tier));
    cst_json_text("preset", preset_name(b->preset));
    cst_json_number("packed_bytes", cst_load64(&b->packed_bytes));
    cst_json_number("leases", cst_load16(&b->leases));
    cst_json_real("error", error_of(b));
    cst_json_close('}');
    return true;
}

static bool text_block(const struct cst_block_record *b, void *arg) {
    char key[65], parent[65], packed[CST_AMOUNT_MAX];

    cst_text_hex(b->key, sizeof(b->key), key);
    cst_text_hex(b->parent, sizeof(b->parent), parent);
    printf("%.*s  %.*s  %6" PRIu32 "  %6" PRIu32 "  %-6s  %-9s  %10s  %6u  %7.4f\n", SHORT, key,
           SHORT, parent, cst_load32(&b->depth), cst_load32(&b->tokens), tier_name(b->tier),
           preset_name(b->preset), cst_text_bytes(cst_load64(&b->packed_bytes), packed),
           cst_load16(&b->leases), error_of(b));
    return true;
}

static bool json_listing(struct cst_ctl *ctl, const struct cst_ctl_spaces *all) {
    bool ok = true;

    cst_json_open(NULL, '{');
    cst_json_open("spaces", '[');
    for (size_t i = 0; ok && i < all->n; i++) {
        cst_json_open(NULL, '{');
        json_space(&all->record[i]);
        cst_json_open("listing", '[');
        ok = cst_ctl_each_block(ctl, cst_load32(&all->record[i].space), json_block, NULL);
        cst_json_close(']');
        cst_json_close('}');
    }
    cst_json_close(']');
    cst_json_close('}');
    return ok;
}

static bool text_listing(struct cst_ctl *ctl, const struct cst_ctl_spaces *all) {
    bool ok = true;

    for (size_t i = 0; ok && i < all->n; i++) {
        char id[65], heading[256];

        cst_text_hex(all->record[i].fingerprint, 32, id);
        (void)snprintf(heading, sizeof(heading), "%sspace %s/%s/%s", i ? "\n" : "", id,
                       class_name(all->record[i].quality_class), kind_name(all->record[i].kind));
        cst_text_heading(ctl->color, heading);
        (void)snprintf(heading, sizeof(heading), "%-*s  %-*s  %6s  %6s  %-6s  %-9s  %10s  %6s  %7s",
                       SHORT, "key", SHORT, "parent", "depth", "tokens", "tier", "preset", "packed",
                       "leases", "error");
        cst_text_heading(ctl->color, heading);
        ok = cst_ctl_each_block(ctl, cst_load32(&all->record[i].space), text_block, NULL);
    }
    if (!all->n)
        puts("no spaces");
    return ok;
}

int cst_ctl_ls(struct cst_ctl *ctl) {
    struct cst_ctl_spaces all = { 0 };
    struct cst_space_record one;
    bool ok;

    if (ctl->n_args) {
        if (!cst_ctl_find_space(ctl, ctl->args[0], &one))
            return CST_CTL_FAILED;
        ok = (ctl->json ? json_listing
                        : text_listing)(ctl, &(struct cst_ctl_spaces){ .record = &one, .n = 1 });
    } else {
        if (!cst_ctl_list_spaces(ctl, NULL, &all))
            return CST_CTL_FAILED;
        ok = (ctl->json ? json_listing : text_listing)(ctl, &all);
        (void)cst_free(all.record);
    }
    return ok ? CST_CTL_OK : CST_CTL_FAILED;
}
