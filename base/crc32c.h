/* SPDX-License-Identifier: Apache-2.0 */
/* CRC32C (Castagnoli), RFC 3720 B.4: crc32c of "123456789" is 0xe3069283. Through ISA-L. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* crc = 0 starts; feed the result back to continue. Any n. Any thread. */
uint32_t cst_crc32c(uint32_t crc, const void *data, size_t n);

/* The CRC of A followed by B from their own ones and the length of B: no byte is read. About 2 us.
 * (zlib's crc32_combine() for this polynomial.) */
uint32_t cst_crc32c_combine(uint32_t a, uint32_t b, uint64_t b_length);
