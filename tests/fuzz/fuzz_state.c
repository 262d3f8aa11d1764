/* SPDX-License-Identifier: Apache-2.0 */
/* Sequence states of llama.cpp: whatever parses is cut into blocks, joined and cut again; the
 * second blocks equal the first and the joined state parses with the same layout. */
#include "tests/fuzz/fuzz.h"

#include "client/llama/state.h"

#include <string.h>

enum { BLOCK = 16 };

static void round_trip(const struct cst_state *s) {
    const struct cst_state_layout *l = &s->layout;
    size_t block_size = cst_state_block_size(l, BLOCK), size = cst_state_size(l, s->n_cells);
    uint8_t *block = room(block_size), *again = room(block_size), *blob = room(size);
    struct cst_state joined;

    cst_state_join_begin(l, s->n_cells, 0, blob);
    for (uint32_t at = 0; at < s->n_cells; at += BLOCK) {
        uint32_t n = s->n_cells - at < BLOCK ? s->n_cells - at : BLOCK;

        cst_state_cut(s, at, n, BLOCK, block);
        cst_state_join_block(l, s->n_cells, at, n, BLOCK, block, blob);
    }
    check(cst_state_parse(&joined, blob, size) == 0);
    check(joined.n_cells == s->n_cells && !joined.order);
    check(cst_state_layout_equal(&joined.layout, l));
    for (uint32_t at = 0; at < s->n_cells; at += BLOCK) {
        uint32_t n = s->n_cells - at < BLOCK ? s->n_cells - at : BLOCK;

        cst_state_cut(s, at, n, BLOCK, block);
        cst_state_cut(&joined, at, n, BLOCK, again);
        check(memcmp(block, again, block_size) == 0);
    }
    cst_state_deinit(&joined);
    free(blob);
    free(again);
    free(block);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct cst_state s;
    int r = cst_state_parse(&s, data, size);

    check(r >= 0 && r < CST_STATE_CONDITIONS);
    if (r)
        check(cst_state_text(r)[0]);
    else if (s.n_cells)
        round_trip(&s);
    cst_state_deinit(&s);
    return 0;
}
