/* SPDX-License-Identifier: Apache-2.0 */
/* Owns the connection and the copy of the last answer; decides what a failure reads like. */
#include "base/mem.h"
#include "client/client.h"
#include "client/ctl/ctl.h"
#include "client/ctl/ctl_out.h"
#include "proto/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct ask {
    struct cst_call call; /* first */
    struct cst_ctl *ctl;
};

int cst_ctl_init(struct cst_ctl *ctl, const char *socket) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;

    ctl->packet = cst_malloc(CST_PACKET_MAX);
    ctl->room = cst_malloc(CST_UNPACK_BUDGET);
    if (!ctl->packet || !ctl->room)
        return -ENOMEM;
    options.flags = CISTERN_CLIENT_LAZY;
    options.socket_path = socket;
    options.name = "cisternctl";
    return cistern_client_open(&ctl->client, &options) ? cst_ctl_failed(ctl) : 0;
}

void cst_ctl_deinit(struct cst_ctl *ctl) {
    cistern_client_close(ctl->client);
    ctl->client = NULL;
    ctl->packet = cst_free(ctl->packet);
    ctl->room = cst_free(ctl->room);
}

int cst_ctl_say(const struct cst_ctl *ctl, const char *fmt, ...) {
    char text[512];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    fprintf(stderr, "cisternctl: %s\n", text);
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_text("error", text);
        cst_json_close('}');
    }
    return CST_CTL_FAILED;
}

static void say_where(const cistern_client *client) {
    for (size_t i = 0; client->dial.n_paths > 1 && i < client->dial.n_paths; i++)
        fprintf(stderr, "  tried %s\n", client->dial.paths[i]);
    fputs("Start one with `systemctl start cisternd.socket` or by running `cisternd`; "
          "--socket PATH or $CISTERN_SOCKET names another socket.\n",
          stderr);
}

int cst_ctl_failed(struct cst_ctl *ctl) {
    const struct cst_conn *conn = ctl->client ? &ctl->client->conn : NULL;
    bool missing = conn && conn->lost_status == CISTERN_E_DISCONNECTED && !conn->hello.epoch;

    (void)cst_ctl_say(ctl, "%s", cistern_last_error());
    if (missing)
        say_where(ctl->client);
    return CST_CTL_FAILED;
}

/* The answer lies in the reader's buffer: keep it. */
static int32_t keep(struct cst_call *call, const struct cst_packet *packet, struct cst_fds *fds) {
    struct cst_ctl *ctl = ((struct ask *)call)->ctl;

    ctl->packet_len = packet->length;
    memcpy(ctl->packet, packet->payload, packet->length);
    return CISTERN_OK;
}

const void *cst_ctl_ask(struct cst_ctl *ctl, uint16_t type, const ProtobufCMessage *message) {
    struct ask ask = { .call = CST_CALL_INIT(keep), .ctl = ctl };
    const void *answer;

    if (cst_client_request(ctl->client, type, message, &ask.call)) {
        (void)cst_ctl_failed(ctl);
        return NULL;
    }
    cst_arena_init(&ctl->arena, ctl->room, CST_UNPACK_BUDGET);
    answer = cst_message_unpack(cst_message_descriptor(type, true), ctl->packet, ctl->packet_len,
                                &ctl->arena);
    if (!answer)
        (void)cst_ctl_say(ctl,
                          "the daemon's answer to %s can't be decoded: is it of another "
                          "version?",
                          cst_message_name(type));
    return answer;
}
