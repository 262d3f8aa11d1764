/* SPDX-License-Identifier: Apache-2.0 */
/* The integer coder: any bytes as a stream of any matrix, by every instruction set alike; and any
 * matrix there and back. */
#include "tests/fuzz/fuzz.h"

#include "codec/dispatch.h"
#include "codec/rans.h"

#include "base/macros.h"

#include <stdio.h>
#include <string.h>

enum { TOKENS = 70, CHANNELS = 12, STRIDE = 80, PAYLOAD = 9, HEAD = 4 + CHANNELS };

struct place {
    int32_t q[CHANNELS * STRIDE];
    uint8_t payload[PAYLOAD];
};

static bool same(const struct place *a, const struct place *b, const struct cst_rans_matrix *m) {
    for (uint32_t c = 0; c < m->channels; c++) {
        if (memcmp(a->q + c * m->stride, b->q + c * m->stride, m->tokens * sizeof(*m->q)))
            return false;
    }
    return memcmp(a->payload, b->payload, m->payload_len) == 0;
}

static void decode(const struct cst_rans_matrix *shape, const uint8_t *src, size_t len,
                   struct cst_rans_work *work, const struct place *expected) {
    const struct cst_codec_ops *sets[] = { cst_codec_ops_portable(), cst_codec_ops_avx2(),
                                           cst_codec_ops_avx512() };
    struct place place[2] = { { { 0 }, { 0 } }, { { 0 }, { 0 } } };
    struct cst_rans_matrix m = *shape;
    bool ok[2];

    for (size_t k = 0; k < CST_COUNT(sets) && sets[k]; k++) {
        size_t at = k > 0;

        m.q = place[at].q;
        m.payload = place[at].payload;
        ok[at] = cst_rans_decode_coefficients(&m, src, len, work, sets[k]);
        check(ok[at] == ok[0] && (!ok[0] || same(&place[at], &place[0], &m)));
    }
    check(!expected || (ok[0] && same(&place[0], expected, &m)));
}

/* Tokens, channels, payload bytes, whether to encode, a class for each channel; then a stream, or
 * integers of four bytes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct cst_rans_work *work;
    struct cst_rans_matrix m;
    struct place place = { { 0 }, { 0 } };
    uint8_t bytes[8192];
    size_t len;

    if (size < HEAD)
        return 0;
    work = cst_rans_work_init(room(cst_rans_work_size()));
    m = (struct cst_rans_matrix){
        place.q,  STRIDE,        1 + data[0] % TOKENS,   1 + data[1] % CHANNELS,
        data + 4, place.payload, data[2] % (PAYLOAD + 1)
    };
    if (data[3] % 2 == 0) {
        decode(&m, data + HEAD, size - HEAD, work, NULL);
    } else {
        for (size_t i = 0; i < CHANNELS * STRIDE && HEAD + 4 * i + 4 <= size; i++)
            memcpy(&place.q[i], data + HEAD + 4 * i, 4);
        memcpy(place.payload, data, PAYLOAD);
        len = cst_rans_encode_coefficients(bytes, sizeof(bytes), &m, work, cst_codec_ops());
        if (len)
            decode(&m, bytes, len, work, &place);
    }
    free(work);
    return 0;
}
