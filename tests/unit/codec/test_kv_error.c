/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors of the lossy stages on whole documents of a real model against those that an independent
 * implementation measured on the same tensors: relative to the energy (the channel means included),
 * per layer, rms over layers and both documents, sinks left out. In fp32, so that the rounding of
 * decoded values plays no part. Keys are those before the rotation; the presets get the rotated
 * ones and must turn them back.
 */
#include "tests/lib/check.h"
#include "tests/unit/codec/codec_case.h"
#include "tests/unit/codec/kv_fixture.h"

#include "codec/dtype.h"
#include "codec/format.h"
#include "codec/stage.h"

#include "base/le.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = KV_LAYERS, TOKENS = KV_TOKENS };

/* The documents' tensors as blocks of one fp32 segment a layer and tensor; one for each document.
 */
static struct case_block *before[2], *after[2]; /* keys before and after the rotation */

static void check(const char *name, double sum_k, double sum_v, double k, double v) {
    double got_k = sqrt(sum_k / (2 * LAYERS)), got_v = sqrt(sum_v / (2 * LAYERS));

    print_message("%-28s K %.5f (%.4g)  V %.5f (%.4g)\n", name, got_k, k, got_v, v);
    assert_true(fabs(got_k / k - 1) < 0.01 && fabs(got_v / v - 1) < 0.01);
}

/* ---- stages -----------------------------------------------------------------------------------
 */

static const struct stage_row {
    const char *name;
    uint8_t stage, bits;
    enum { NONE, OWN, JOINT } means; /* of the document, of both documents */
    struct cst_groups_params k_groups, v_groups;
    double k, v;
} stages[] = {
    { "int8", CST_STAGE_INT8, .k = .0108, .v = .0072 },
    { "int4", CST_STAGE_GROUPS, 4, NONE, { 0, 4, 6 }, { 0, 4, 6 }, .195, .130 },
    { "lloyd 8", CST_STAGE_LLOYD, 8, .k = .00608, .v = .00616 },
    { "lloyd 4", CST_STAGE_LLOYD, 4, .k = .0920, .v = .0938 },
    { "lloyd 3", CST_STAGE_LLOYD, 3, .k = .175, .v = .180 },
    { "lloyd 4, joint means", CST_STAGE_LLOYD, 4, JOINT, .k = .0452, .v = .0870 },
    { "lloyd 4, means", CST_STAGE_LLOYD, 4, OWN, .k = .0433, .v = .0845 },
    { "kivi4",
      CST_STAGE_GROUPS,
      4,
      NONE,
      { CST_CODED_BY_CHANNEL | CST_CODED_ZEROS, 4, 5 },
      { CST_CODED_ZEROS, 4, 5 },
      .034,
      .084 },
};

static size_t encode(const struct stage_row *row, bool key, uint8_t *dst, const uint8_t *src,
                     const struct cst_stage_segment *s, const struct cst_codec_work *w) {
    float error;

    switch (row->stage) {
    case CST_STAGE_INT8:
        return cst_int8_encode(dst, src, s, w, &error);
    case CST_STAGE_GROUPS:
        return cst_groups_encode(dst, src, s, key ? &row->k_groups : &row->v_groups, w, &error);
    default:
        return cst_lloyd_encode(dst, src, s, row->bits, row->means == OWN ? CST_CODED_MEAN : 0, w,
                                &error, NULL);
    }
}

/* Takes the means of both documents off one of them, in `x`; returns the share of energy left. */
static double centre(uint8_t *bytes, size_t d, uint64_t offset) {
    const float *doc[2] = { (const void *)(before[0]->block + offset),
                            (const void *)(before[1]->block + offset) };
    double left = 0, energy = 0;
    float *x = (void *)bytes;

    for (size_t c = 0; c < KV_ROW; c++) {
        double mean = 0;

        for (size_t t = CST_SINK_TOKENS; t < TOKENS; t++)
            mean += (double)doc[0][t * KV_ROW + c] + (double)doc[1][t * KV_ROW + c];
        mean /= 2 * (TOKENS - CST_SINK_TOKENS);
        for (size_t t = CST_SINK_TOKENS; t < TOKENS; t++) {
            double was = (double)doc[d][t * KV_ROW + c], is = was - mean;

            x[t * KV_ROW + c] = (float)is;
            left += is * is;
            energy += was * was;
        }
    }
    return left / energy;
}

static void stage_errors(void **state) {
    const struct stage_row *row = *state;
    double sums[2] = { 0 };

    for (size_t d = 0; d < 2; d++) {
        struct case_block *c = before[d];

        for (uint32_t i = 0; i < 2 * LAYERS; i++) {
            const struct cst_segment *seg = &c->desc.segments[i];
            uint8_t *src = c->out + seg->offset;
            struct case_stage stage;
            double share = 1;

            memcpy(src, c->block + seg->offset, seg->length);
            if (row->means == JOINT)
                share = centre(src, d, seg->offset);
            case_stage_init(&stage, c, i, TOKENS, 0);
            assert_true(encode(row, i % 2 == 0, c->frame, src, &stage.s, &stage.w) > 0);
            sums[i % 2] += kv_nmse(src, stage.w.a) * share;
        }
    }
    check(row->name, sums[0], sums[1], row->k, row->v);
}

/* ---- presets -----------------------------------------------------------------------------------
 */

static const struct preset_row {
    const char *name;
    uint32_t preset;
    double k, v;
} presets[] = {
    { "turboquant of rotated keys", CST_PRESET_TURBOQUANT, .0433, .0845 },
    { "kivi4 of rotated keys", CST_PRESET_KIVI4, .034, .084 },
};

static void preset_errors(void **state) {
    const struct preset_row *row = *state;
    double sums[2] = { 0 };

    for (size_t d = 0; d < 2; d++) {
        struct cst_encode_params p = { row->preset, TOKENS, 0, 1 };
        struct case_block *c = after[d];

        assert_int_equal(case_encode(c, &p, NULL), 0);
        assert_int_equal(case_decode(c, 0, UINT32_MAX), 0);
        for (uint32_t i = 0; i < 2 * LAYERS; i++)
            sums[i % 2] +=
                kv_nmse(c->block + c->desc.segments[i].offset, c->out + c->desc.segments[i].offset);
    }
    check(row->name, sums[0], sums[1], row->k, row->v);
}

int main(void) {
    static const char *const texts[] = { "prose", "code" };
    char folder[PATH_MAX];
    int failed;

    if (!getenv("CISTERN_DATA"))
        return cst_skip("CISTERN_DATA is not set");
    (void)snprintf(folder, sizeof(folder), "%s/kv", getenv("CISTERN_DATA"));
    for (size_t d = 0; d < 2; d++) {
        before[d] = kv_document(folder, texts[d], "kpre", false);
        after[d] = kv_document(folder, texts[d], "kpost", true);
    }
    failed = cst_run_rows(stages, stage_errors) + cst_run_rows(presets, preset_errors);
    for (size_t d = 0; d < 2; d++) {
        case_free(before[d]);
        case_free(after[d]);
    }
    return failed;
}
