/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Identity of a GGUF file: the SHA-256 of its bytes. A model in parts (NAME-00001-of-00003.gguf,
 * any of them is named) is the SHA-256 over the digests of all parts in order.
 *
 * Hashing gigabytes at every start would cost more than it is worth, so digests are kept in
 * $XDG_CACHE_HOME/cistern/ids (else ~/.cache/cistern/ids; 0600), one line a file: device, inode,
 * size, times of last modification and last status change, digest. The status time catches a file
 * that was rewritten in place and had its modification time put back. Without a usable cache folder
 * every call hashes.
 *
 * Any thread, any process: the file is replaced in one rename; a lost race costs one hashing.
 */
#pragma once

#include <stdint.h>

/* 0, or -errno: what the file system said, -EBADMSG: no GGUF file, -EBUSY: it changes while it is
 * read. */
int cst_content_id(const char *path, uint8_t out[32]);
