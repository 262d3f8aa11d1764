/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The logger: one line an event on stderr, with the "<N>" level prefix when stderr is the journal.
 * Only daemon/ and the programs log; libraries return. Never a token, key, or block byte: ids that
 * stand for prompts go through cst_log_id(). Control characters are written as '?', so that a
 * peer's name can't forge a line. Rate limit: CST_LOG_BURST lines a second; what is dropped is
 * counted and reported in the next line. Any thread.
 */
#pragma once

#include "base/clock.h"
#include "base/macros.h"

#include <stdint.h>

enum { CST_LOG_BURST = 200 };

enum cst_log_level {
    CST_LOG_ERROR = 3,
    CST_LOG_WARNING = 4,
    CST_LOG_NOTICE = 5,
    CST_LOG_INFO = 6,
    CST_LOG_DEBUG = 7
};

void cst_log_set_level(enum cst_log_level max);
/* The clock of the rate limit; set before other threads log. Default: the monotonic clock. */
void cst_log_set_clock(const struct cst_clock *clock);
void cst_log(enum cst_log_level level, const char *fmt, ...) CST_PRINTF(2, 3);

/* 16 hex digits: a keyed hash (per process) of a 32-byte key, for correlating lines. */
struct cst_log_id {
    char text[17];
};
struct cst_log_id cst_log_id(const uint8_t key[32]);
