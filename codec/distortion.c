/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far a decoded segment is from the original. Relative to the deviation from the channel mean,
 * not to the energy: most of a key's energy is its mean, which cancels in the softmax. Sums are
 * doubles in one fixed order, so the number is the same everywhere. No state; any thread.
 */
#include "codec/dtype.h"
#include "codec/stage.h"

#include <math.h>

static void channel_means(double *mean, const uint8_t *seg, const struct cst_view *v,
                          uint32_t first, uint32_t end) {
    for (uint32_t h = 0, c = 0; h < v->heads; h++) {
        for (uint32_t d = 0; d < v->dims; d++, c++) {
            double sum = 0;

            for (uint32_t t = first; t < end; t++)
                sum += (double)cst_dtype_load(v->dtype, seg + cst_view_at(v, t, h, d));
            mean[c] = sum / (end - first);
        }
    }
}

double cst_distortion(const uint8_t *seg, const uint8_t *decoded, const struct cst_view *v,
                      uint32_t first, uint32_t end, double *sum) {
    double error = 0, deviation = 0;

    if (first >= end)
        return 0;
    channel_means(sum, seg, v, first, end);
    for (uint32_t t = first; t < end; t++) {
        for (uint32_t h = 0, c = 0; h < v->heads; h++) {
            for (uint32_t d = 0; d < v->dims; d++, c++) {
                uint64_t at = cst_view_at(v, t, h, d);
                double x = (double)cst_dtype_load(v->dtype, seg + at);
                double e = (double)cst_dtype_load(v->dtype, decoded + at) - x;

                error += e * e;
                deviation += (x - sum[c]) * (x - sum[c]);
            }
        }
    }
    if (error == 0)
        return 0;
    if (!isfinite(error) || !isfinite(deviation) || deviation == 0)
        return INFINITY;
    return sqrt(error / deviation);
}
