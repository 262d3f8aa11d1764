/* SPDX-License-Identifier: Apache-2.0 */
/* ping, status, stats: one request, its fields shown. No state. */
#include "base/clock.h"
#include "base/macros.h"
#include "client/client.h"
#include "client/ctl/ctl.h"
#include "client/ctl/ctl_out.h"

#include <inttypes.h>
#include <stdio.h>

static const struct cst_field status_fields[] = {
    { "version", "version", CST_FORMAT_TEXT },
    { "process", "pid", CST_FORMAT_COUNT },
    { "running for", "uptime_ms", CST_FORMAT_MS },
    { "backend", "backend", CST_FORMAT_TEXT },
    { "eviction policy", "policy", CST_FORMAT_TEXT },
    { "worker threads", "workers", CST_FORMAT_COUNT },
    { NULL, NULL, 0 },
    { "memory in use", "memory_used", CST_FORMAT_BYTES },
    { "of at most", "memory_limit", CST_FORMAT_BYTES },
    { "index in use", "index_used", CST_FORMAT_BYTES },
    { "of at most", "index_limit", CST_FORMAT_BYTES },
    { "staging", "staging_bytes", CST_FORMAT_BYTES },
    { "held by clients", "held_bytes", CST_FORMAT_BYTES },
    { "slabs", "slabs", CST_FORMAT_COUNT },
    { NULL, NULL, 0 },
    { "disk in use", "disk_used", CST_FORMAT_BYTES },
    { "of at most", "disk_limit", CST_FORMAT_BYTES },
    { "reached by", "disk_io", CST_FORMAT_TEXT },
    { "encrypted", "disk_encrypted", CST_FORMAT_COUNT },
    { "turned off", "disk_off", CST_FORMAT_COUNT },
    { "records", "disk_records", CST_FORMAT_COUNT },
    { "found at the start", "disk_recovered", CST_FORMAT_COUNT },
    { "not to be used", "disk_rejected", CST_FORMAT_COUNT },
    { "read", "disk_read_bytes", CST_FORMAT_BYTES },
    { "written", "disk_written_bytes", CST_FORMAT_BYTES },
    { "written again", "disk_moved_bytes", CST_FORMAT_BYTES },
    { "evicted records", "disk_evicted", CST_FORMAT_COUNT },
    { "corrupt records", "disk_corrupt", CST_FORMAT_COUNT },
    { "unreadable records", "disk_lost", CST_FORMAT_COUNT },
    { "segments left alone", "disk_unused", CST_FORMAT_BYTES },
    { "disk errors", "disk_errors", CST_FORMAT_COUNT },
    { "tried again", "disk_retries", CST_FORMAT_COUNT },
    { NULL, NULL, 0 },
    { "clients", "clients", CST_FORMAT_COUNT },
    { "spaces", "spaces", CST_FORMAT_COUNT },
    { "leases", "leases", CST_FORMAT_COUNT },
    { "open slots", "reserved", CST_FORMAT_COUNT },
    { "requests", "requests", CST_FORMAT_COUNT },
    { "errors", "errors", CST_FORMAT_COUNT },
    { "dropped clients", "dropped_clients", CST_FORMAT_COUNT },
};

static const struct cst_field stats_fields[] = {
    { "blocks", "blocks", CST_FORMAT_COUNT },
    { "tail blocks", "tail_blocks", CST_FORMAT_COUNT },
    { "pinned blocks", "pinned_blocks", CST_FORMAT_COUNT },
    { "hot bytes", "hot_bytes", CST_FORMAT_BYTES },
    { "in slabs of", "hot_slab_bytes", CST_FORMAT_BYTES },
    { "packed bytes", "packed_bytes", CST_FORMAT_BYTES },
    { "in slabs of", "packed_slab_bytes", CST_FORMAT_BYTES },
    { "side data", "side_bytes", CST_FORMAT_BYTES },
    { "too much for the disk", "sides_off_disk", CST_FORMAT_COUNT },
    { "that decode to", "packed_decoded_bytes", CST_FORMAT_BYTES },
    { "blocks on disk", "cold_blocks", CST_FORMAT_COUNT },
    { "bytes on disk", "cold_bytes", CST_FORMAT_BYTES },
    { "index", "index_bytes", CST_FORMAT_BYTES },
    { "held by clients", "held_bytes", CST_FORMAT_BYTES },
    { "leases", "leases", CST_FORMAT_COUNT },
    { "open slots", "reserved", CST_FORMAT_COUNT },
    { NULL, NULL, 0 },
    { "lookups", "lookups", CST_FORMAT_COUNT },
    { "keys looked up", "lookup_keys", CST_FORMAT_COUNT },
    { "keys found", "hit_keys", CST_FORMAT_COUNT },
    { "blocks asked for", "acquires", CST_FORMAT_COUNT },
    { "blocks served", "served_blocks", CST_FORMAT_COUNT },
    { "tokens served", "served_tokens", CST_FORMAT_COUNT },
    { "bytes served", "served_bytes", CST_FORMAT_BYTES },
    { "blocks stored", "stored_blocks", CST_FORMAT_COUNT },
    { "bytes stored", "stored_bytes", CST_FORMAT_BYTES },
    { NULL, NULL, 0 },
    { "evicted blocks", "evicted_blocks", CST_FORMAT_COUNT },
    { "expired blocks", "expired_blocks", CST_FORMAT_COUNT },
    { "detached blocks", "detached_blocks", CST_FORMAT_COUNT },
    { "corrupt blocks", "corrupt_blocks", CST_FORMAT_COUNT },
    { "decodes", "decodes", CST_FORMAT_COUNT },
    { "encodes", "encodes", CST_FORMAT_COUNT },
    { "with a safer preset", "fallbacks", CST_FORMAT_COUNT },
    { "made smaller", "recodes", CST_FORMAT_COUNT },
    { "side data learned", "sides_learned", CST_FORMAT_COUNT },
    { "written to disk", "spilled_blocks", CST_FORMAT_COUNT },
    { "bytes written", "spilled_bytes", CST_FORMAT_BYTES },
    { "read from disk", "cold_reads", CST_FORMAT_COUNT },
    { "read for lookups", "prefetched_blocks", CST_FORMAT_COUNT },
    { "and asked for", "prefetch_used", CST_FORMAT_COUNT },
    { "found on disk", "recovered_blocks", CST_FORMAT_COUNT },
    { "merged fetches", "merged_fetches", CST_FORMAT_COUNT },
    { "refused as busy", "busy", CST_FORMAT_COUNT },
};

int cst_ctl_ping(struct cst_ctl *ctl) {
    uint64_t epoch, start;
    const char *name;
    double us;

    if (cistern_client_info(ctl->client, &epoch, &name)) /* connects, so that ping only pings */
        return cst_ctl_failed(ctl);
    start = cst_now_ns(&cst_clock_monotonic);
    if (cistern_client_ping(ctl->client))
        return cst_ctl_failed(ctl);
    us = (double)(cst_now_ns(&cst_clock_monotonic) - start) / 1000;
    if (ctl->json) {
        char text[17];

        (void)snprintf(text, sizeof(text), "%016" PRIx64, epoch);
        cst_json_open(NULL, '{');
        cst_json_text("version", ctl->client->conn.hello.daemon_version);
        cst_json_text("namespace", name);
        cst_json_text("epoch", text);
        cst_json_real("round_trip_us", us);
        cst_json_close('}');
    } else {
        char version[64], ns[128];

        cst_text_field(ctl->client->conn.hello.daemon_version, sizeof(version), version,
                       sizeof(version));
        cst_text_field(name, sizeof(ns), ns, sizeof(ns));
        printf("cisternd %s answers in %.0f us; we are in namespace %s\n", version, us, ns);
    }
    return CST_CTL_OK;
}

static void show(const struct cst_ctl *ctl, const ProtobufCMessage *m, const char *heading,
                 const struct cst_field *fields, size_t n) {
    if (ctl->json) {
        cst_json_open(NULL, '{');
        cst_json_message(m);
        cst_json_close('}');
    } else {
        cst_text_heading(ctl->color, heading);
        cst_text_message(m, fields, n);
    }
}

int cst_ctl_status(struct cst_ctl *ctl) {
    Cistern__V1__Status request = CISTERN__V1__STATUS__INIT;
    const ProtobufCMessage *m = cst_ctl_ask(ctl, CST_MSG_STATUS, &request.base);

    if (!m)
        return CST_CTL_FAILED;
    show(ctl, m, "cisternd", status_fields, CST_COUNT(status_fields));
    return CST_CTL_OK;
}

int cst_ctl_stats(struct cst_ctl *ctl) {
    Cistern__V1__Stats request = CISTERN__V1__STATS__INIT;
    struct cst_space_record space;
    char heading[160] = "this namespace", id[65];
    const ProtobufCMessage *m;

    if (ctl->n_args) {
        if (!cst_ctl_find_space(ctl, ctl->args[0], &space))
            return CST_CTL_FAILED;
        request.space = cst_load32(&space.space);
        cst_text_hex(space.fingerprint, sizeof(space.fingerprint), id);
        (void)snprintf(heading, sizeof(heading), "space %.16s", id);
    }
    m = cst_ctl_ask(ctl, CST_MSG_STATS, &request.base);
    if (!m)
        return CST_CTL_FAILED;
    show(ctl, m, heading, stats_fields, CST_COUNT(stats_fields));
    return CST_CTL_OK;
}
