/* SPDX-License-Identifier: Apache-2.0 */
/* Packs a message: the bytes are those of protobuf_c_message_pack(), a third of its instructions.
 */
#pragma once

#include "proto/cistern.pb-c.h"

#include <stddef.h>
#include <stdint.h>

/* Bytes written, or SIZE_MAX if they are more than cap. Any thread. */
size_t cst_message_pack(uint8_t *out, size_t cap, const ProtobufCMessage *message);
