/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns nothing: functions over a socket that the caller owns. Any thread.
 *
 * Invariants: 1. no byte is sent to a server before its uid is accepted; 2. in /tmp only a folder
 * that belongs to us alone counts, so nobody can put a socket there for us; 3. every answer is
 * checked and capped before it is kept.
 */
#include "client/client_dial.h"

#include "base/mem.h"
#include "client/client_error.h"
#include "proto/frame.h"

#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    PATH_MAX_BYTES = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1,
    NAME_MAX_BYTES = 64,
    PACKET_MIN = 4096, /* a daemon that takes less is none */
    REPLY_MAX = 4096,
};

/* ---- where ---- */

static int32_t add_path(struct cst_dial *d, const char *path) {
    d->paths[d->n_paths] = cst_strdup(path);
    if (!d->paths[d->n_paths])
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    d->n_paths++;
    return CISTERN_OK;
}

static int32_t add_only_path(struct cst_dial *d, const char *path) {
    if (strlen(path) > PATH_MAX_BYTES)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT,
                               "the socket path has %zu bytes; at most %d are possible",
                               strlen(path), (int)PATH_MAX_BYTES);
    return add_path(d, path);
}

static int32_t add_usual_paths(struct cst_dial *d) {
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    char path[PATH_MAX_BYTES + 1];
    int32_t status = add_path(d, "/run/cistern/cistern.sock");

    if (!status && runtime && runtime[0] == '/' &&
        snprintf(path, sizeof(path), "%s/cistern/cistern.sock", runtime) < (int)sizeof(path))
        status = add_path(d, path);
    if (status)
        return status;
    (void)snprintf(path, sizeof(path), "/tmp/cistern-%u/cistern.sock", (unsigned)geteuid());
    d->private_dir = true;
    return add_path(d, path);
}

static int64_t server_uid_from_env(void) {
    const char *text = secure_getenv("CISTERN_SERVER_UID");
    char *end;
    unsigned long uid;

    if (!text || text[0] < '0' || text[0] > '9')
        return -1;
    errno = 0;
    uid = strtoul(text, &end, 10);
    return errno || *end || uid > UINT32_MAX ? -1 : (int64_t)uid;
}

int32_t cst_dial_init(struct cst_dial *d, const cistern_client_options *options) {
    const char *path =
        options->socket_path ? options->socket_path : secure_getenv("CISTERN_SOCKET");
    const char *name = options->name ? options->name : program_invocation_short_name;
    char cut[NAME_MAX_BYTES + 1];

    *d = (struct cst_dial){ .server_uid = options->server_uid, .timeout_ms = options->timeout_ms };
    if (d->server_uid < 0)
        d->server_uid = server_uid_from_env();
    (void)snprintf(cut, sizeof(cut), "%s", name);
    d->name = cst_strdup(cut);
    if (!d->name)
        return cst_client_fail_status(CISTERN_E_NO_MEMORY);
    if (path && path[0])
        return add_only_path(d, path);
    if (options->socket_path)
        return cst_client_fail(CISTERN_E_BAD_ARGUMENT, "the socket path is empty");
    return add_usual_paths(d);
}

void cst_dial_deinit(struct cst_dial *d) {
    for (size_t i = 0; i < CST_DIAL_PATHS; i++)
        d->paths[i] = cst_free(d->paths[i]);
    d->n_paths = 0;
    d->name = cst_free(d->name);
}

bool cst_dial_is_private_dir(const char *path, uid_t uid) {
    struct stat st;

    return !lstat(path, &st) && S_ISDIR(st.st_mode) && st.st_uid == uid && !(st.st_mode & 022);
}

static bool is_usable(const struct cst_dial *d, size_t i) {
    char dir[PATH_MAX_BYTES + 1];
    char *slash;

    if (!d->private_dir || i + 1 < d->n_paths)
        return true;
    (void)snprintf(dir, sizeof(dir), "%s", d->paths[i]);
    slash = strrchr(dir, '/');
    if (slash)
        *slash = '\0';
    return cst_dial_is_private_dir(dir, geteuid());
}

/* ---- who ---- */

static bool is_user_cistern(uid_t uid) {
    struct passwd entry, *found = NULL;
    char room[4096];

    return !getpwnam_r("cistern", &entry, room, sizeof(room), &found) && found &&
           found->pw_uid == uid;
}

bool cst_dial_is_trusted(uid_t uid, int64_t extra) {
    return uid == 0 || uid == geteuid() || (extra >= 0 && uid == (uid_t)extra) ||
           is_user_cistern(uid);
}

static int32_t check_peer(const struct cst_dial *d, int fd) {
    struct ucred peer;
    socklen_t n = sizeof(peer);

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) < 0)
        return cst_client_fail(CISTERN_E_SYSTEM, "SO_PEERCRED: %s", strerrordesc_np(errno));
    if (cst_dial_is_trusted(peer.uid, d->server_uid))
        return CISTERN_OK;
    return cst_client_fail(
        CISTERN_E_UNTRUSTED_SERVER,
        "the socket is served by uid %u, which is neither root, uid %u, user cistern "
        "nor $CISTERN_SERVER_UID",
        (unsigned)peer.uid, (unsigned)geteuid());
}

/* ---- hello ---- */

static int32_t connect_any(const struct cst_dial *d, int fd) {
    union {
        struct sockaddr any;
        struct sockaddr_un un;
    } address = { .un = { .sun_family = AF_UNIX } };
    const char *where = d->paths[0];
    int error = ENOENT;

    for (size_t i = 0; i < d->n_paths; i++) {
        if (!is_usable(d, i))
            continue;
        (void)snprintf(address.un.sun_path, sizeof(address.un.sun_path), "%s", d->paths[i]);
        if (!connect(fd, &address.any, sizeof(address.un)))
            return CISTERN_OK;
        if (errno != ENOENT) {
            error = errno;
            where = d->paths[i];
        }
    }
    if (error == EACCES)
        return cst_client_fail(CISTERN_E_DISCONNECTED,
                               "this user may not connect to %s; is it in the socket's group?",
                               where);
    if (d->n_paths == 1)
        return cst_client_fail(CISTERN_E_DISCONNECTED, "no daemon at %s: %s", d->paths[0],
                               strerrordesc_np(error));
    return cst_client_fail(CISTERN_E_DISCONNECTED,
                           "no daemon at any of the usual sockets (%s, ...): %s", d->paths[0],
                           strerrordesc_np(error));
}

static int32_t keep_hello(struct cst_hello *out, const Cistern__V1__HelloReply *reply) {
    if (reply->version != CST_PROTOCOL_VERSION)
        return cst_client_fail(CISTERN_E_BAD_VERSION,
                               "the daemon speaks protocol version %u, not %d",
                               (unsigned)reply->version, CST_PROTOCOL_VERSION);
    if (reply->packet_max < PACKET_MIN || !reply->keys_max ||
        strlen(reply->namespace_) >= CST_NAMESPACE_MAX)
        return cst_client_fail(CISTERN_E_CORRUPT, "the daemon's Hello names impossible limits");
    *out = (struct cst_hello){
        .epoch = reply->epoch,
        .staging_bytes = reply->staging_bytes,
        .features = reply->features,
        .packet_max = CST_MIN(reply->packet_max, (uint32_t)CST_PACKET_MAX),
        .keys_max = reply->keys_max,
        .requests_max = reply->requests_max,
    };
    (void)snprintf(out->namespace_name, sizeof(out->namespace_name), "%s", reply->namespace_);
    (void)snprintf(out->daemon_version, sizeof(out->daemon_version), "%s", reply->daemon_version);
    return CISTERN_OK;
}

static int32_t read_hello(struct cst_hello *out, const uint8_t *data, size_t n) {
    uint8_t room[REPLY_MAX];
    char text[CST_ERROR_TEXT];
    struct cst_packet packet;
    struct cst_arena arena;
    const ProtobufCMessage *reply;
    int wire;

    if (cst_packet_parse(&packet, data, n) || packet.type != CST_MSG_HELLO ||
        !(packet.flags & CST_PACKET_REPLY))
        return cst_client_fail(CISTERN_E_CORRUPT,
                               "the server did not answer the Hello with a Hello");
    wire = cst_packet_error(&packet, text, sizeof(text));
    if (wire)
        return cst_client_fail(cst_status_to_api((uint32_t)wire), "%s", text);
    cst_arena_init(&arena, room, sizeof(room));
    reply = cst_message_unpack(cst_message_descriptor(CST_MSG_HELLO, true), packet.payload,
                               packet.length, &arena);
    if (!reply)
        return cst_client_fail(CISTERN_E_CORRUPT, "the daemon's Hello cannot be decoded");
    return keep_hello(out, (const Cistern__V1__HelloReply *)reply);
}

static int32_t hello_error(ssize_t r) {
    if (r == -EAGAIN)
        return cst_client_fail(CISTERN_E_TIMEOUT, "the daemon did not answer the Hello in time");
    return cst_client_fail(CISTERN_E_DISCONNECTED, "the daemon closed the connection at the Hello");
}

static int32_t say_hello(const struct cst_dial *d, int fd, struct cst_hello *out) {
    Cistern__V1__Hello hello = CISTERN__V1__HELLO__INIT;
    uint8_t data[REPLY_MAX];
    size_t n, n_fds;
    ssize_t r;

    hello.version_min = hello.version_max = CST_PROTOCOL_VERSION;
    hello.client_name = d->name;
    n = cst_packet_pack(data, sizeof(data), CST_MSG_HELLO, 0, 1, &hello.base);
    r = cst_packet_send_borrowed_fds(fd, data, n, NULL, 0, 0);
    if (r)
        return hello_error(r);
    do
        r = cst_packet_recv_owned_fds(fd, data, sizeof(data), NULL, 0, &n_fds, 0);
    while (r == -EINTR);
    return r > 0 ? read_hello(out, data, (size_t)r) : hello_error(r);
}

int32_t cst_dial(const struct cst_dial *d, int fd, struct cst_hello *out) {
    struct timeval timeout = { .tv_sec = d->timeout_ms / 1000,
                               .tv_usec = d->timeout_ms % 1000 * 1000L };
    int32_t status;

    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0)
        return cst_client_fail(CISTERN_E_SYSTEM, "setsockopt: %s", strerrordesc_np(errno));
    status = connect_any(d, fd);
    if (!status)
        status = check_peer(d, fd);
    return status ? status : say_hello(d, fd, out);
}
