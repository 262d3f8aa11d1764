/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Owns the reading and writing of tensors as files, and the layout of the blocks that are cut from
 * them.
 *
 * Invariants
 *   1. After a read, each part is exactly layers * tokens * row bytes: sizes that the JSON promises
 *      and those of the files agree.
 *   2. Everything in the JSON is bounded before it is multiplied.
 */
#include "tools/tensor_file.h"

#include "base/macros.h"
#include "base/mem.h"
#include "tools/json_read.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

enum {
    SHAPE_CAP = 1 << 20, /* bytes of a JSON file */
    ROW_CAP = 1 << 20,   /* bytes of one token of one layer */
    TOKENS_CAP = 1 << 24,
    FILE_NAME_CAP = 256,
};
#define PART_CAP (UINT64_C(16) << 30)

static const char *const part_suffix[2][2] = { { "kpost", "v" }, { "kpre", "v" } };

static int complain(int r, const char *path, const char *what) {
    (void)fprintf(stderr, "cistern-codec: %s: %s\n", path, what);
    return r;
}

static int fail(const char *path) {
    int r = -errno;

    (void)fprintf(stderr, "cistern-codec: %s: %m\n", path);
    return r;
}

/* ---- whole files ---- */

static int read_all(int fd, const char *path, uint8_t *out, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = read(fd, out + done, len - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(path);
        if (!n)
            return complain(-EIO, path, "ends early");
        done += (size_t)n;
    }
    return 0;
}

int cst_file_read(const char *path, size_t cap, uint8_t **out, size_t *len) {
    cst_auto(cst_closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    cst_auto(cst_freep) uint8_t *bytes = NULL;
    struct stat st;
    int r;

    if (fd < 0 || fstat(fd, &st))
        return fail(path);
    if (!S_ISREG(st.st_mode)) /* its size says nothing */
        return complain(-EINVAL, path, "is no regular file");
    if (st.st_size < 0 || (uint64_t)st.st_size > cap)
        return complain(-EFBIG, path, "is too large");
    bytes = cst_malloc((size_t)st.st_size + 1);
    if (!bytes)
        return complain(-ENOMEM, path, "no memory for it");
    r = read_all(fd, path, bytes, (size_t)st.st_size);
    if (r)
        return r;
    *len = (size_t)st.st_size;
    *out = cst_steal(&bytes);
    return 0;
}

int cst_file_write(const char *path, const void *data, size_t len) {
    cst_auto(cst_closep) int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    const uint8_t *p = data;

    if (fd < 0)
        return fail(path);
    while (len) {
        ssize_t n = write(fd, p, len);

        if (n < 0 && errno != EINTR)
            return fail(path);
        p += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

/* ---- shape ---- */

size_t cst_tensor_file_row(const struct cst_tensor_file *t) {
    return (size_t)t->heads * t->dims * (t->dtype == CST_DTYPE_F32 ? 4 : 2);
}

static size_t part_size(const struct cst_tensor_file *t) {
    return (size_t)t->layers * t->tokens * cst_tensor_file_row(t);
}

static bool get_dtype(struct cst_json_text json, uint8_t *out) {
    static const char *const names[CST_DTYPES] = { NULL, "f32", "f16", "bf16" };
    char text[64];

    if (!cst_json_get_string(json, "dtype", text, sizeof(text)))
        return false;
    for (uint8_t i = CST_DTYPE_F32; i < CST_DTYPES; i++) {
        size_t n = strlen(names[i]);

        if (!strncmp(text, names[i], n) && (!text[n] || text[n] == ' ')) {
            *out = i;
            return true;
        }
    }
    return false;
}

static bool get_rope(struct cst_json_text json, struct cst_tensor_file *t) {
    char kind[64];
    double base = 0;
    uint32_t dims = t->dims;

    t->layer =
        (struct cst_layer){ .kv_heads = t->heads, .head_dim_k = t->dims, .head_dim_v = t->dims };
    (void)cst_json_get_count(json, "rope.first_position", &t->first_position);
    if (!cst_json_get_string(json, "rope.kind", kind, sizeof(kind)) || !strncmp(kind, "none", 4))
        return true;
    if (!cst_json_get_real(json, "rope.base", &base) || !(base >= 1) || base > 1e12)
        return false;
    (void)cst_json_get_count(json, "rope.dims", &dims);
    if (dims > t->dims || dims % 2)
        return false;
    t->layer.rope = !strncmp(kind, "interleaved", 11) ? CST_ROPE_NORM : CST_ROPE_NEOX;
    t->layer.rope_dims = dims;
    t->layer.rope_theta = (float)base;
    return t->layer.rope == CST_ROPE_NORM || !strncmp(kind, "halves", 6);
}

static bool get_shape(struct cst_json_text json, struct cst_tensor_file *t) {
    if (!cst_json_get_count(json, "layers", &t->layers) || !t->layers ||
        t->layers > CST_LAYERS_MAX || !cst_json_get_count(json, "tokens", &t->tokens) ||
        !t->tokens || t->tokens > TOKENS_CAP || !cst_json_get_count(json, "kv_heads", &t->heads) ||
        !t->heads || t->heads > ROW_CAP || !cst_json_get_count(json, "head_dim", &t->dims) ||
        !t->dims || t->dims > ROW_CAP || !get_dtype(json, &t->dtype) || !get_rope(json, t))
        return false;
    return (uint64_t)t->heads * t->dims <= ROW_CAP / 4 && part_size(t) <= PART_CAP;
}

static int read_shape(struct cst_tensor_file *t, const char *folder, const char *name,
                      struct cst_json_text *json, uint8_t **ret_text) {
    char path[PATH_MAX];
    int r;

    *t = CST_TENSOR_FILE_NULL;
    if (strlen(name) >= sizeof(t->name) || strchr(name, '/'))
        return complain(-EINVAL, name, "is no name of a text");
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
    (void)snprintf(path, sizeof(path), "%s/%s.json", folder, name);
    r = cst_file_read(path, SHAPE_CAP, ret_text, &json->len);
    json->text = (const char *)*ret_text;
    if (r)
        return r;
    return get_shape(*json, t) ? 0 : complain(-EINVAL, path, "doesn't describe tensors");
}

/* ---- tensors ---- */

static int unpack(const char *path, uint8_t **bytes, size_t *len, size_t want) {
    cst_auto(cst_freep) uint8_t *plain = NULL;
    size_t n;

    if (ZSTD_getFrameContentSize(*bytes, *len) != want)
        return complain(-EINVAL, path, "doesn't hold as many bytes as the shape needs");
    plain = cst_malloc(want);
    if (!plain)
        return complain(-ENOMEM, path, "no memory for it");
    n = ZSTD_decompress(plain, want, *bytes, *len);
    if (ZSTD_isError(n) || n != want)
        return complain(-EINVAL, path, "is no zstd file");
    cst_free(*bytes);
    *bytes = cst_steal(&plain);
    *len = want;
    return 0;
}

static int read_part(struct cst_tensor_file *t, const char *folder, const char *file, int part) {
    char path[PATH_MAX];
    size_t len = 0, n = strlen(file);
    int r;

    if (strchr(file, '/'))
        return complain(-EINVAL, file, "lies in another folder");
    (void)snprintf(path, sizeof(path), "%s/%s", folder, file);
    r = cst_file_read(path, PART_CAP, &t->part[part], &len);
    if (!r && n > 4 && !strcmp(file + n - 4, ".zst"))
        r = unpack(path, &t->part[part], &len, part_size(t));
    if (!r && len != part_size(t))
        r = complain(-EINVAL, path, "doesn't hold as many bytes as the shape needs");
    return r;
}

int cst_tensor_file_read(struct cst_tensor_file *out, const char *folder, const char *name,
                         enum cst_keys keys) {
    cst_auto(cst_freep) uint8_t *text = NULL;
    char k[FILE_NAME_CAP], v[FILE_NAME_CAP];
    struct cst_json_text json = { 0 };
    int r = read_shape(out, folder, name, &json, &text);

    if (r)
        return r;
    if (keys != CST_KEYS_PLAIN && cst_json_get_string(json, "files.kpost.file", k, sizeof(k)))
        out->layer.k_rotated = out->layer.rope != CST_ROPE_NONE;
    else if (keys != CST_KEYS_PLAIN || !cst_json_get_string(json, "files.kpre.file", k, sizeof(k)))
        return complain(-ENOENT, name, "has no such keys");
    else
        out->plain_keys = true;
    if (keys == CST_KEYS_OPAQUE)
        out->layer.rope = CST_ROPE_NONE, out->layer.k_rotated = 0;
    if (!cst_json_get_string(json, "files.v.file", v, sizeof(v)))
        return complain(-ENOENT, name, "has no values");
    r = read_part(out, folder, k, 0);
    return r ? r : read_part(out, folder, v, 1);
}

int cst_tensor_file_read_frames(struct cst_tensor_file *out, const char *folder, const char *name,
                                uint32_t *block_tokens) {
    cst_auto(cst_freep) uint8_t *text = NULL;
    struct cst_json_text json = { 0 };
    uint32_t rotated = 0, plain = 0;
    int r = read_shape(out, folder, name, &json, &text);

    if (r)
        return r;
    if (!cst_json_get_count(json, "block_tokens", block_tokens) ||
        *block_tokens < CST_BLOCK_TOKENS_MIN || *block_tokens > CST_BLOCK_TOKENS_MAX)
        return complain(-EINVAL, name, "doesn't say how many tokens a block has");
    (void)cst_json_get_count(json, "keys_rotated", &rotated);
    (void)cst_json_get_count(json, "keys_plain", &plain);
    out->layer.k_rotated = rotated == 1;
    out->plain_keys = plain == 1;
    for (int part = 0; part < 2; part++) {
        out->part[part] = cst_calloc(1, part_size(out));
        if (!out->part[part])
            return complain(-ENOMEM, name, "no memory for its tensors");
    }
    return 0;
}

void cst_tensor_file_deinit(struct cst_tensor_file *t) {
    t->part[0] = cst_free(t->part[0]);
    t->part[1] = cst_free(t->part[1]);
}

/* ---- writing ---- */

static const char *suffix_of(const struct cst_tensor_file *t, int part) {
    return part_suffix[t->plain_keys][part];
}

static void put_files(FILE *f, const struct cst_tensor_file *t, const char *dtype) {
    (void)fprintf(f, ",\n \"files\": {");
    for (int part = 0; part < 2; part++)
        (void)fprintf(f, "%s\n  \"%s\": { \"file\": \"%s.%s.%s\", \"bytes\": %zu }",
                      part ? "," : "", suffix_of(t, part), t->name, suffix_of(t, part), dtype,
                      part_size(t));
    (void)fprintf(f, "\n }");
}

static const char *dtype_name(const struct cst_tensor_file *t) {
    return t->dtype == CST_DTYPE_F32 ? "f32" : t->dtype == CST_DTYPE_F16 ? "f16" : "bf16";
}

int cst_tensor_file_write_shape(const struct cst_tensor_file *t, const char *folder,
                                uint32_t block_tokens) {
    static const char *const kinds[] = { "none", "interleaved pairs (2i,2i+1)", "halves" };
    char path[PATH_MAX];
    FILE *f;

    (void)snprintf(path, sizeof(path), "%s/%s.json", folder, t->name);
    f = fopen(path, "we");
    if (!f)
        return fail(path);
    (void)fprintf(f,
                  "{\n \"name\": \"%s\",\n \"layers\": %u,\n \"tokens\": %u,\n \"kv_heads\": %u,\n"
                  " \"head_dim\": %u,\n \"dtype\": \"%s little-endian\",\n"
                  " \"layout\": \"[layer][token][kv_head][dim], dim fastest\",\n"
                  " \"keys_rotated\": %u,\n \"keys_plain\": %u,\n"
                  " \"rope\": { \"kind\": \"%s\", \"base\": %.9g, \"dims\": %u,"
                  " \"first_position\": %u }",
                  t->name, t->layers, t->tokens, t->heads, t->dims, dtype_name(t),
                  t->layer.k_rotated, t->plain_keys, kinds[t->layer.rope],
                  (double)t->layer.rope_theta, t->layer.rope_dims, t->first_position);
    if (block_tokens)
        (void)fprintf(f, ",\n \"block_tokens\": %u,\n \"frames\": \"%s.frames\"", block_tokens,
                      t->name);
    else
        put_files(f, t, dtype_name(t));
    (void)fprintf(f, "\n}\n");
    return fclose(f) ? fail(path) : 0;
}

int cst_tensor_file_write(const struct cst_tensor_file *t, const char *folder) {
    char path[PATH_MAX];
    int r = 0;

    for (int part = 0; part < 2 && !r; part++) {
        (void)snprintf(path, sizeof(path), "%s/%s.%s.%s", folder, t->name, suffix_of(t, part),
                       dtype_name(t));
        r = cst_file_write(path, t->part[part], part_size(t));
    }
    return r ? r : cst_tensor_file_write_shape(t, folder, 0);
}

/* ---- blocks ---- */

int cst_tensor_file_describe(const struct cst_tensor_file *t, uint32_t block_tokens,
                             struct cst_descriptor *desc) {
    uint64_t row = cst_tensor_file_row(t), part = row * block_tokens;
    uint32_t element = (uint32_t)(row / t->heads / t->dims);

    *desc = (struct cst_descriptor){
        .block_tokens = block_tokens,
        .block_bytes = 2 * t->layers * part,
        .tp_size = 1,
        .n_layers = t->layers,
        .n_segments = 2 * t->layers,
        .layers = cst_calloc(t->layers, sizeof(struct cst_layer)),
        .segments = cst_calloc((size_t)2 * t->layers, sizeof(struct cst_segment)),
    };
    if (!desc->layers || !desc->segments)
        return complain(-ENOMEM, t->name, "no memory for its descriptor");
    if (desc->block_bytes > CST_BLOCK_BYTES_MAX)
        return complain(-EFBIG, t->name, "its blocks are too large; take fewer tokens per block");
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        desc->layers[i / 2] = t->layer;
        desc->segments[i] = (struct cst_segment){
            .layer = i / 2,
            .tensor = i % 2 ? CST_TENSOR_V : CST_TENSOR_K,
            .dtype = t->dtype,
            .offset = i * part,
            .length = part,
            .token_stride = row,
            .head_stride = (uint64_t)t->dims * element,
            .dim_stride = element,
        };
    }
    return 0;
}

void cst_tensor_file_undescribe(struct cst_descriptor *desc) {
    desc->layers = cst_free(desc->layers);
    desc->segments = cst_free(desc->segments);
}

static uint8_t *rows_of(const struct cst_tensor_file *t, uint32_t segment, uint32_t first) {
    return t->part[segment % 2] +
           ((size_t)(segment / 2) * t->tokens + first) * cst_tensor_file_row(t);
}

void cst_tensor_file_cut(const struct cst_tensor_file *t, const struct cst_descriptor *desc,
                         uint32_t first, uint32_t n, uint8_t *block) {
    size_t row = cst_tensor_file_row(t);

    assert(first <= t->tokens && n <= t->tokens - first && n <= desc->block_tokens);
    for (uint32_t i = 0; i < desc->n_segments; i++) {
        uint8_t *to = block + desc->segments[i].offset;

        memcpy(to, rows_of(t, i, first), n * row);
        memset(to + n * row, 0, (desc->block_tokens - n) * row);
    }
}

void cst_tensor_file_join(struct cst_tensor_file *t, const struct cst_descriptor *desc,
                          uint32_t first, uint32_t n, const uint8_t *block) {
    size_t row = cst_tensor_file_row(t);

    assert(first <= t->tokens && n <= t->tokens - first && n <= desc->block_tokens);
    for (uint32_t i = 0; i < desc->n_segments; i++)
        memcpy(rows_of(t, i, first), block + desc->segments[i].offset, n * row);
}

/* ---- folders ---- */

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int append(char ***list, size_t *n, const char *name, size_t len) {
    char **grown = cst_realloc(*list, (*n + 1) * sizeof(**list));

    if (!grown)
        return -ENOMEM;
    *list = grown;
    grown[*n] = cst_memdup(name, len + 1);
    if (!grown[*n])
        return -ENOMEM;
    grown[(*n)++][len] = '\0';
    return 0;
}

static bool has_shape(const char *folder, const char *file) {
    cst_auto(cst_freep) uint8_t *text = NULL;
    struct cst_json_text json = { 0 };
    char path[PATH_MAX];
    uint32_t tokens;

    (void)snprintf(path, sizeof(path), "%s/%s", folder, file);
    if (cst_file_read(path, SHAPE_CAP, &text, &json.len))
        return false;
    json.text = (const char *)text;
    return cst_json_get_count(json, "tokens", &tokens);
}

int cst_tensor_file_list(const char *folder, char ***out, size_t *n) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    int r = 0;

    *out = NULL;
    *n = 0;
    if (!dir)
        return fail(folder);
    while (!r && (entry = readdir(dir))) {
        size_t len = strlen(entry->d_name);

        if (len > 5 && !strcmp(entry->d_name + len - 5, ".json") &&
            has_shape(folder, entry->d_name))
            r = append(out, n, entry->d_name, len - 5);
    }
    (void)closedir(dir);
    if (!r && !*n)
        return complain(-ENOENT, folder, "holds no NAME.json that describes tensors");
    if (*n)
        qsort(*out, *n, sizeof(**out), by_text);
    return r;
}
