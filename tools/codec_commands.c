/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands encode, decode, compare and inspect. Each prints one JSON value; what goes wrong
 * goes to standard error, and no JSON is printed then, so a reader never takes half a
 * result.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "client/ctl/ctl_out.h"
#include "codec/side_format.h"
#include "tools/codec_side.h"
#include "tools/codec_text.h"
#include "tools/codec_tool.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const size_t FRAMES_CAP = (size_t)16 << 30;

/* ---- results ---- */

struct result {
    const char *name;
    uint32_t layers, tokens;
    size_t bytes, frame_bytes, n_frames; /* bytes: of the values at 16 bits */
    float error;
    double encode_s, decode_s;
    double *nmse[2];           /* per layer; NULL: not decoded */
    double drift, drift_worst; /* 0: coded once */
};

static void put_sizes(size_t bytes, size_t frame_bytes, size_t n_frames, float error) {
    cst_json_number("frames", n_frames);
    cst_json_number("bytes_16bit", bytes);
    cst_json_number("bytes", frame_bytes);
    cst_json_real("ratio", (double)bytes / (double)frame_bytes);
    cst_json_real("error", (double)error);
}

static void put_nmse(const struct result *r) {
    for (int part = 0; part < 2; part++) {
        double sum = 0;

        for (uint32_t i = 0; i < r->layers; i++)
            sum += r->nmse[part][i];
        cst_json_real(part ? "nmse_v" : "nmse_k", sum / r->layers);
        cst_json_open(part ? "layers_v" : "layers_k", '[');
        for (uint32_t i = 0; i < r->layers; i++)
            cst_json_real(NULL, r->nmse[part][i]);
        cst_json_close(']');
    }
}

static void put_result(const struct result *r) {
    cst_json_open(NULL, '{');
    cst_json_text("name", r->name);
    cst_json_number("tokens", r->tokens);
    put_sizes(r->bytes, r->frame_bytes, r->n_frames, r->error);
    cst_json_real("encode_s", r->encode_s);
    if (r->nmse[0]) {
        cst_json_real("decode_s", r->decode_s);
        put_nmse(r);
    }
    if (r->drift > 0) {
        cst_json_real("drift", r->drift);
        cst_json_real("drift_worst", r->drift_worst);
    }
    cst_json_close('}');
}

static void put_results(const struct cst_tool_options *o, const struct result *results) {
    struct result all = { 0 };

    cst_json_open(NULL, '{');
    cst_json_text("preset", cst_preset_name(o->params.preset));
    cst_json_number("block_tokens", o->block_tokens);
    cst_json_open("texts", '[');
    for (size_t i = 0; i < o->n_names; i++) {
        put_result(&results[i]);
        all.bytes += results[i].bytes;
        all.frame_bytes += results[i].frame_bytes;
        all.n_frames += results[i].n_frames;
        all.error = CST_MAX(all.error, results[i].error);
    }
    cst_json_close(']');
    cst_json_open("all", '{');
    put_sizes(all.bytes, all.frame_bytes, all.n_frames, all.error);
    cst_json_close('}');
    cst_json_close('}');
}

/* ---- encode and compare ---- */

static int no_memory(void) {
    (void)fprintf(stderr, "cistern-codec: no memory\n");
    return -ENOMEM;
}

static int write_frames(const struct cst_codec_text *c, const char *folder) {
    char path[PATH_MAX];
    int r;

    (void)snprintf(path, sizeof(path), "%s/%s.frames", folder, c->tensors->name);
    r = cst_file_write(path, c->frames, c->len);
    return r ? r : cst_tensor_file_write_shape(c->tensors, folder, c->desc.block_tokens);
}

static void decoded_deinit(struct cst_tensor_file *t) {
    cst_tensor_file_deinit(t);
}

static void measure(const struct cst_tensor_file *t, const struct cst_tensor_file *copy,
                    double *nmse[2]) {
    for (int part = 0; part < 2; part++)
        cst_codec_text_nmse(t, copy, part, nmse[part]);
}

/* What errors are after the rounds over what they were before: of the sum over all tensors, and of
 * the tensor for which it is most. */
static void put_drift(struct result *res, double *const last[2]) {
    double before = 0, after = 0;

    res->drift_worst = 0;
    for (uint32_t i = 0; i < 2 * res->layers; i++) {
        double was = res->nmse[i % 2][i / 2], is = last[i % 2][i / 2];

        if (!(was > 0)) /* nothing was lost, or there are values that aren't finite */
            continue;
        before += was;
        after += is;
        res->drift_worst = fmax(res->drift_worst, sqrt(is / was));
    }
    res->drift = before > 0 ? sqrt(after / before) : 1;
    if (!(before > 0))
        res->drift_worst = 1;
}

/* Codes the copy again and again, each time from what the time before gave. */
static int code_again(const struct cst_tool_options *o, struct cst_codec_text *c,
                      const struct cst_encode_params *params, struct cst_tensor_file *copy,
                      struct result *res) {
    const struct cst_tensor_file *original = c->tensors;
    cst_auto(cst_freep) double *nmse = cst_calloc((size_t)2 * original->layers, sizeof(double));
    int r = nmse ? 0 : no_memory();

    for (uint32_t i = 0; i < o->rounds && !r; i++) {
        c->tensors = copy;
        cst_codec_text_restart(c);
        r = cst_codec_text_encode(c, params);
        if (!r)
            r = cst_codec_text_decode(c, params->side, copy);
    }
    c->tensors = original;
    if (!r) {
        double *last[2] = { nmse, nmse + original->layers };

        measure(original, copy, last);
        put_drift(res, last);
    }
    return r;
}

/* Decodes into a copy, measures, and writes the copy (of the last round) if asked for. */
static int decode_and_measure(const struct cst_tool_options *o, struct cst_codec_text *c,
                              const struct cst_encode_params *params, struct result *res) {
    const struct cst_tensor_file *t = c->tensors;
    cst_auto(decoded_deinit) struct cst_tensor_file copy = *t;
    size_t size = (size_t)t->layers * t->tokens * cst_tensor_file_row(t);
    int r;

    for (int part = 0; part < 2; part++) {
        copy.part[part] = cst_malloc(size);
        res->nmse[part] = cst_calloc(t->layers, sizeof(double));
    }
    if (!copy.part[0] || !copy.part[1] || !res->nmse[0] || !res->nmse[1])
        return no_memory();
    r = cst_codec_text_decode(c, params->side, &copy);
    res->decode_s = c->decode_s;
    if (!r)
        measure(t, &copy, res->nmse);
    if (!r && o->rounds)
        r = code_again(o, c, params, &copy, res);
    return r || !o->out ? r : cst_tensor_file_write(&copy, o->out);
}

/* params->side: the file's, if one was given. */
static int read_side(const struct cst_tool_options *o, const struct cst_codec_text *c,
                     struct cst_codec_side *side, const struct cst_side **ret_side) {
    int r = o->side ? cst_codec_side_read(side, o->side, &c->desc) : 0;

    *ret_side = o->side ? &side->side : NULL;
    return r;
}

static int run_text(const struct cst_tool_options *o, const char *name, bool compare,
                    struct result *res) {
    cst_auto(cst_tensor_file_deinit) struct cst_tensor_file tensors = CST_TENSOR_FILE_NULL;
    cst_auto(cst_codec_text_deinit) struct cst_codec_text c = CST_CODEC_TEXT_NULL;
    cst_auto(cst_codec_side_deinit) struct cst_codec_side side = CST_CODEC_SIDE_NULL;
    struct cst_encode_params params = o->params;
    int r = cst_tensor_file_read(&tensors, o->folder, name, o->keys);

    if (!r)
        r = cst_codec_text_init(&c, &tensors, o->block_tokens);
    if (!r)
        r = read_side(o, &c, &side, &params.side);
    if (!r)
        r = cst_codec_text_encode(&c, &params);
    if (r)
        return r;
    *res = (struct result){
        .name = name,
        .layers = tensors.layers,
        .tokens = tensors.tokens,
        .bytes = (size_t)4 * tensors.layers * tensors.tokens * tensors.heads * tensors.dims,
        .frame_bytes = c.len,
        .n_frames = c.n_frames,
        .error = c.error,
        .encode_s = c.encode_s,
    };
    return compare ? decode_and_measure(o, &c, &params, res) : write_frames(&c, o->out);
}

static int run_texts(const struct cst_tool_options *o, bool compare) {
    struct result *results = cst_calloc(o->n_names, sizeof(*results));
    int r = results ? 0 : no_memory();

    for (size_t i = 0; i < o->n_names && !r; i++)
        r = run_text(o, o->names[i], compare, &results[i]);
    if (!r)
        put_results(o, results);
    for (size_t i = 0; i < o->n_names && results; i++) {
        cst_free(results[i].nmse[0]);
        cst_free(results[i].nmse[1]);
    }
    cst_free(results);
    return r;
}

int cst_tool_encode(const struct cst_tool_options *o) {
    return run_texts(o, false);
}

int cst_tool_compare(const struct cst_tool_options *o) {
    return run_texts(o, true);
}

/* ---- decode ---- */

static int decode_text(const struct cst_tool_options *o, const char *name) {
    cst_auto(cst_tensor_file_deinit) struct cst_tensor_file tensors = CST_TENSOR_FILE_NULL;
    cst_auto(cst_codec_text_deinit) struct cst_codec_text c = CST_CODEC_TEXT_NULL;
    cst_auto(cst_codec_side_deinit) struct cst_codec_side side = CST_CODEC_SIDE_NULL;
    const struct cst_side *parsed = NULL;
    uint32_t block_tokens = o->block_tokens;
    char path[PATH_MAX];
    int r = cst_tensor_file_read_frames(&tensors, o->folder, name, &block_tokens);

    if (!r)
        r = cst_codec_text_init(&c, &tensors, block_tokens);
    (void)snprintf(path, sizeof(path), "%s/%s.frames", o->folder, name);
    if (!r)
        r = cst_file_read(path, FRAMES_CAP, &c.frames, &c.len);
    if (!r)
        r = read_side(o, &c, &side, &parsed);
    if (!r)
        r = cst_codec_text_decode(&c, parsed, &tensors);
    if (!r)
        r = cst_tensor_file_write(&tensors, o->out);
    return r;
}

int cst_tool_decode(const struct cst_tool_options *o) {
    int r = 0;

    for (size_t i = 0; i < o->n_names && !r; i++)
        r = decode_text(o, o->names[i]);
    if (r)
        return r;
    cst_json_open(NULL, '{');
    cst_json_open("decoded", '[');
    for (size_t i = 0; i < o->n_names; i++)
        cst_json_text(NULL, o->names[i]);
    cst_json_close(']');
    cst_json_close('}');
    return 0;
}

/* ---- inspect ---- */

static void put_frame(const struct cst_frame_info *info) {
    cst_json_open(NULL, '{');
    cst_json_text("preset", cst_preset_name(info->preset));
    cst_json_number("tokens", info->tokens);
    cst_json_number("first_position", info->first_position);
    cst_json_number("block_bytes", info->block_bytes);
    cst_json_number("bytes", info->frame_bytes);
    cst_json_real("error", (double)info->error);
    if (info->bits_k) {
        cst_json_number("bits_k", info->bits_k);
        cst_json_number("bits_v", info->bits_v);
    }
    if (info->side_version) {
        cst_json_number("side_version", info->side_version);
        cst_json_number("side_check", info->side_check);
    }
    cst_json_close('}');
}

static bool is_side_data(const uint8_t *bytes, size_t len) {
    return len >= sizeof(struct cst_side_header) && !memcmp(bytes, CST_SIDE_MAGIC, 4);
}

static void put_side_data(const uint8_t *bytes, size_t len) {
    struct cst_side_header head;
    uint32_t step = 0;
    float value;

    memcpy(&head, bytes, sizeof(head));
    step = cst_load32(&head.step);
    memcpy(&value, &step, sizeof(value));
    cst_json_open(NULL, '{');
    cst_json_number("format", cst_load16(&head.format));
    cst_json_number("version", cst_load16(&head.version));
    cst_json_number("tokens", cst_load32(&head.tokens));
    cst_json_real("step", (double)value);
    cst_json_number("sections", cst_load32(&head.n_sections));
    cst_json_number("bytes", len);
    cst_json_close('}');
}

static int inspect_file(const char *path) {
    cst_auto(cst_freep) uint8_t *bytes = NULL;
    struct cst_frame_info info;
    size_t len = 0, at = 0;
    int r = cst_file_read(path, FRAMES_CAP, &bytes, &len);

    if (r)
        return r;
    if (is_side_data(bytes, len)) {
        put_side_data(bytes, len);
        return 0;
    }
    while (at < len) { /* all of them first: half a result is none */
        if (cst_frame_inspect(bytes + at, len - at, &info) || info.frame_bytes > len - at) {
            (void)fprintf(stderr, "cistern-codec: %s: no frame at byte %zu\n", path, at);
            return -EINVAL;
        }
        at += info.frame_bytes;
    }
    cst_json_open(NULL, '[');
    for (at = 0; at < len; at += info.frame_bytes) {
        (void)cst_frame_inspect(bytes + at, len - at, &info);
        put_frame(&info);
    }
    cst_json_close(']');
    return 0;
}

int cst_tool_inspect(const struct cst_tool_options *o) {
    int r = 0;

    for (size_t i = 0; i < o->n_names && !r; i++)
        r = inspect_file(o->names[i]);
    return r;
}
