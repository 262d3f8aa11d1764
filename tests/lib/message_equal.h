/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing protobuf-c messages by their descriptors: for the tests and fuzz targets of proto/. */
#pragma once

#include <protobuf-c/protobuf-c.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Same values in every field, nested messages included; unknown fields on neither side. */
static inline bool cst_message_equal(const ProtobufCMessage *a, const ProtobufCMessage *b) {
    if (a->descriptor != b->descriptor || a->n_unknown_fields || b->n_unknown_fields)
        return false;
    for (unsigned i = 0; i < a->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &a->descriptor->fields[i];
        const uint8_t *x = (const uint8_t *)a + f->offset, *y = (const uint8_t *)b + f->offset;
        const ProtobufCMessage *sub_x, *sub_y;
        ProtobufCBinaryData bytes_x, bytes_y;
        const char *text_x, *text_y;

        switch (f->type) {
        case PROTOBUF_C_TYPE_UINT32:
            if (memcmp(x, y, sizeof(uint32_t)) != 0)
                return false;
            break;
        case PROTOBUF_C_TYPE_UINT64:
            if (memcmp(x, y, sizeof(uint64_t)) != 0)
                return false;
            break;
        case PROTOBUF_C_TYPE_BYTES:
            memcpy(&bytes_x, x, sizeof(bytes_x));
            memcpy(&bytes_y, y, sizeof(bytes_y));
            if (bytes_x.len != bytes_y.len ||
                (bytes_x.len && memcmp(bytes_x.data, bytes_y.data, bytes_x.len) != 0))
                return false;
            break;
        case PROTOBUF_C_TYPE_STRING:
            memcpy(&text_x, x, sizeof(text_x));
            memcpy(&text_y, y, sizeof(text_y));
            if (strcmp(text_x, text_y) != 0)
                return false;
            break;
        case PROTOBUF_C_TYPE_MESSAGE:
            memcpy(&sub_x, x, sizeof(sub_x));
            memcpy(&sub_y, y, sizeof(sub_y));
            if (!sub_x != !sub_y || (sub_x && !cst_message_equal(sub_x, sub_y)))
                return false;
            break;
        default:
            return false;
        }
    }
    return true;
}
