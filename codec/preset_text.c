/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Presets as people write them: a name, then what its parameters are after a colon. No state; any
 * thread.
 */
#include "codec/codec.h"
#include "codec/preset.h"

#include <string.h>

/* "B" or "B,B": bits of keys and of values, 1..8 each; then "+qjl" or nothing. */
static bool take_bits(struct cst_encode_params *out, const char *text) {
    size_t n = strcspn(text, "+");

    if (text[n] && strcmp(text + n, "+qjl") != 0)
        return false;
    out->qjl = text[n];
    if ((n != 1 && !(n == 3 && text[1] == ',')) || text[0] < '1' || text[0] > '8' ||
        text[n - 1] < '1' || text[n - 1] > '8')
        return false;
    out->bits_k = (uint8_t)(text[0] - '0');
    out->bits_v = (uint8_t)(text[n - 1] - '0');
    return cst_preset_takes(out);
}

/* A number without sign, exponent or blanks, within min .. max. */
static bool take_real(float *out, const char *text, float min, float max) {
    size_t whole = strspn(text, "0123456789"), point = text[whole] == '.';
    size_t n = whole + point + strspn(text + whole + point, "0123456789");
    double v = 0, unit = 1;

    if (text[n] || n > 9 || n == point)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (i == whole)
            continue;
        v = 10 * v + (text[i] - '0');
        unit *= i > whole ? 10 : 1;
    }
    *out = (float)(v / unit);
    return *out >= min && *out <= max;
}

static bool take_parameter(struct cst_encode_params *p, const char *text) {
    switch (p->preset) {
    case CST_PRESET_TURBOQUANT:
        return take_bits(p, text);
    case CST_PRESET_KLT:
    case CST_PRESET_DEEP:
        return take_real(&p->step, text, .01F, 4);
    case CST_PRESET_JOLT:
    case CST_PRESET_FLASHJOLT:
    case CST_PRESET_JOLT_PLUS:
        return take_real(&p->ratio, text, 1, 64);
    default:
        return false;
    }
}

int cst_preset_parse(struct cst_encode_params *out, const char *text) {
    const char *colon = strchrnul(text, ':');
    struct cst_encode_params p = { .tokens = 0 };
    char name[16];
    int preset;

    if ((size_t)(colon - text) >= sizeof(name))
        return CST_CODEC_E_PRESET;
    memcpy(name, text, (size_t)(colon - text));
    name[colon - text] = '\0';
    preset = cst_preset_from_name(name);
    if (preset < 0)
        return CST_CODEC_E_PRESET;
    p.preset = (uint32_t)preset;
    if (*colon && !take_parameter(&p, colon + 1))
        return CST_CODEC_E_PRESET;
    *out = p;
    return 0;
}
