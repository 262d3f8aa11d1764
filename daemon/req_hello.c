/* SPDX-License-Identifier: Apache-2.0 */
/* Hello and Ping: the beginning of a connection. */
#include "daemon/call.h"

#include "proto/record.h"

#include <stdio.h>
#include <string.h>

static bool is_name(const char *name) {
    for (const char *c = name; *c; c++)
        if (*c < ' ' || *c > '~')
            return false;
    return strlen(name) <= CST_RECORD_NAME_MAX;
}

void cst_req_hello(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Hello *hello = (const void *)message;
    Cistern__V1__HelloReply reply = CISTERN__V1__HELLO_REPLY__INIT;
    struct cst_session *s = call->session;
    const struct cst_config *config = &call->server->config;

    if (s->greeted)
        return cst_fail(call, CST_STATUS_BAD_STATE, "Hello was said already");
    if (hello->version_min > CST_PROTOCOL_VERSION || hello->version_max < CST_PROTOCOL_VERSION)
        return cst_fail(call, CST_STATUS_BAD_VERSION, "this daemon speaks version %d, not %u to %u",
                        CST_PROTOCOL_VERSION, hello->version_min, hello->version_max);
    if (!is_name(hello->client_name))
        return cst_fail(call, CST_STATUS_BAD_ARGUMENT,
                        "a client's name has at most 64 printable characters");
    s->greeted = true;
    (void)snprintf(s->name, sizeof(s->name), "%s", hello->client_name);
    cst_timer_stop(&s->timer);
    reply.version = CST_PROTOCOL_VERSION;
    reply.epoch = call->server->epoch;
    reply.packet_max = CST_PACKET_MAX;
    reply.keys_max = CST_KEYS_MAX;
    reply.requests_max = (uint32_t)config->requests;
    reply.staging_bytes = config->staging;
    reply.features = s->admin;
    reply.namespace_ = s->namespace_name;
    reply.daemon_version = (char *)(uintptr_t)CST_DAEMON_VERSION;
    cst_reply(call, &reply.base);
}

void cst_req_ping(struct cst_call *call, const ProtobufCMessage *message) {
    const Cistern__V1__Ping *ping = (const void *)message;
    Cistern__V1__PingReply reply = CISTERN__V1__PING_REPLY__INIT;

    reply.payload = ping->payload;
    cst_reply(call, &reply.base);
}
