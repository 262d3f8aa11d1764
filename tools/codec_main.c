/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cistern-codec: the codec for people who study caches, on tensors in files. Owns the options and
 * the table of commands. One thread.
 *
 * Exit status: 0 done, 1 failed, 2 called wrongly.
 */
#include "base/macros.h"
#include "base/mem.h"
#include "base/restart.h"
#include "codec/linalg.h"
#include "tools/codec_tool.h"

#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILED = 1, WRONG = 2 };
enum { ROUNDS_MAX = 1000 };

static const struct command {
    const char *name, *args, *help;
    int (*run)(const struct cst_tool_options *options);
    bool folder, out; /* takes DIR, takes OUT */
} commands[] = {
    { "compare", "DIR [NAME...]", "encode, decode, say what was lost", cst_tool_compare, true,
      false },
    { "encode", "DIR OUT [NAME...]", "write OUT/NAME.frames", cst_tool_encode, true, true },
    { "decode", "DIR OUT [NAME...]", "frames in DIR to tensors in OUT", cst_tool_decode, true,
      true },
    { "learn", "DIR [NAME...]", "write side data of a model to --out FILE", cst_tool_learn, true,
      false },
    { "inspect", "FILE...", "say what frames or side data hold", cst_tool_inspect, false, false },
};

static const char usage_tail[] =
    "\n"
    "DIR holds texts: NAME.json, which says the shape, and the tensors it names (raw or .zst).\n"
    "Without NAME, all of them. Results are JSON on standard output.\n"
    "\n"
    "Options\n"
    "  --preset NAME      how to encode (see docs/codecs.md); turboquant:K,V sets its bits,\n"
    "                     +qjl behind them adds a sign sketch\n"
    "  --block N          tokens of a block, 16 to 1024 (default 64)\n"
    "  --ratio R          jolt, flashjolt, jolt_plus: what frames should reach (default 3)\n"
    "  --layers N         the same: layers that share a decomposition (default 6,\n"
    "                     below 256 tokens 1)\n"
    "  --step C           klt, deep: quantizer step over the deviation (default .4)\n"
    "  --keys KIND        rotated: as an engine stores them (default); plain: before the "
    "rotation;\n"
    "                     opaque: rotated ones that presets are not to turn back\n"
    "  --side FILE        side data that presets may use\n"
    "  --out PATH         compare: write the decoded tensors there; learn: the side data\n"
    "  --rounds N         compare: encode what was decoded again, N times (to 1000), and say how "
    "much\n"
    "                     larger that makes errors\n"
    "  --tokens N         learn: take at most N tokens of each text\n"
    "  --steps FILE       learn: with the step weights of this table\n"
    "  --no-predictors    learn: bases only\n"
    "  --help\n";

static void usage(FILE *to) {
    (void)fprintf(to, "usage: cistern-codec COMMAND [OPTION...] ARGUMENT...\n\nCommands\n");
    for (size_t i = 0; i < CST_COUNT(commands); i++)
        (void)fprintf(to, "  %-8s %-18s %s\n", commands[i].name, commands[i].args,
                      commands[i].help);
    (void)fputs(usage_tail, to);
}

static int wrong(const char *what, const char *value) {
    (void)fprintf(stderr, "cistern-codec: %s '%s'; see cistern-codec --help\n", what, value);
    return WRONG;
}

static bool parse_count(const char *text, unsigned long min, unsigned long max, uint32_t *out) {
    char *end;
    unsigned long v = strtoul(text, &end, 10);

    if (!*text || *end || *text == '-' || v < min || v > max)
        return false;
    *out = (uint32_t)v;
    return true;
}

static bool parse_real(const char *text, float min, float max, float *out) {
    char *end;
    float v = strtof(text, &end);

    if (!*text || *end || !(v >= min && v <= max))
        return false;
    *out = v;
    return true;
}

static bool parse_keys(const char *text, enum cst_keys *out) {
    static const char *const names[] = { "rotated", "plain", "opaque" };

    for (unsigned i = 0; i < CST_COUNT(names); i++) {
        if (!strcmp(text, names[i])) {
            *out = (enum cst_keys)i;
            return true;
        }
    }
    return false;
}

/* Other options may stand before this one: what they set stays. */
static bool parse_preset(const char *text, struct cst_encode_params *p) {
    struct cst_encode_params parsed;

    if (cst_preset_parse(&parsed, text))
        return false;
    p->preset = parsed.preset;
    p->bits_k = parsed.bits_k;
    p->bits_v = parsed.bits_v;
    p->qjl = parsed.qjl;
    if (parsed.step > 0)
        p->step = parsed.step;
    if (parsed.ratio > 0)
        p->ratio = parsed.ratio;
    return true;
}

static bool parse_groups(const char *text, uint8_t *out) {
    uint32_t v;

    if (!parse_count(text, 0, UINT8_MAX, &v))
        return false;
    *out = (uint8_t)v;
    return true;
}

/* 0 or an exit status. */
static int parse_option(struct cst_tool_options *o, int option, const char *value) {
    bool good = true;

    switch (option) {
    case 'p':
        good = parse_preset(value, &o->params);
        break;
    case 'b':
        good = parse_count(value, CST_BLOCK_TOKENS_MIN, CST_BLOCK_TOKENS_MAX, &o->block_tokens);
        break;
    case 'r':
        good = parse_real(value, 1, 1000, &o->params.ratio);
        break;
    case 'g':
        good = parse_groups(value, &o->params.group_layers);
        break;
    case 'c':
        good = parse_real(value, 1e-4f, 100, &o->params.step);
        break;
    case 'k':
        good = parse_keys(value, &o->keys);
        break;
    case 'o':
        o->out = value;
        break;
    case 's':
        o->side = value;
        break;
    case 'w':
        o->steps = value;
        break;
    case 't':
        good = parse_count(value, 1, UINT32_MAX, &o->text_tokens);
        break;
    case 'i':
        good = parse_count(value, 1, ROUNDS_MAX, &o->rounds);
        break;
    case 'n':
        o->no_predictors = true;
        break;
    default:
        return WRONG; /* getopt has said why */
    }
    return good ? 0 : wrong("a value that an option doesn't take:", value);
}

static int parse_options(struct cst_tool_options *o, int argc, char **argv, bool *help) {
    static const struct option options[] = {
        { "preset", required_argument, NULL, 'p' }, { "block", required_argument, NULL, 'b' },
        { "ratio", required_argument, NULL, 'r' },  { "layers", required_argument, NULL, 'g' },
        { "step", required_argument, NULL, 'c' },   { "keys", required_argument, NULL, 'k' },
        { "out", required_argument, NULL, 'o' },    { "side", required_argument, NULL, 's' },
        { "steps", required_argument, NULL, 'w' },  { "tokens", required_argument, NULL, 't' },
        { "rounds", required_argument, NULL, 'i' }, { "no-predictors", no_argument, NULL, 'n' },
        { "help", no_argument, NULL, 'h' },         { 0 },
    };
    int option, r;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 'h') {
            *help = true;
            return 0;
        }
        r = parse_option(o, option, optarg);
        if (r)
            return r;
    }
    return 0;
}

static const struct command *find_command(const char *name) {
    for (size_t i = 0; i < CST_COUNT(commands); i++) {
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    }
    return NULL;
}

static int run_command(const struct command *command, struct cst_tool_options *o, char **args,
                       size_t n) {
    char **listed = NULL;
    int r = 0;

    if (n < (size_t)command->folder + command->out + !command->folder)
        return wrong("too few arguments for", command->name);
    if (command->run == cst_tool_learn && !o->out)
        return wrong("--out is missing for", command->name);
    if (command->folder)
        o->folder = *args++, n--;
    if (command->out)
        o->out = *args++, n--;
    o->names = args;
    o->n_names = n;
    if (command->folder && !n) {
        r = cst_tensor_file_list(o->folder, &listed, &o->n_names);
        o->names = listed;
    }
    if (!r)
        r = command->run(o);
    for (size_t i = 0; listed && i < o->n_names; i++)
        cst_free(listed[i]);
    cst_free(listed);
    return r ? FAILED : 0;
}

int main(int argc, char **argv) {
    struct cst_tool_options options = {
        .params = { .preset = CST_PRESET_LOSSLESS, .bound = FLT_MAX },
        .block_tokens = 64,
    };
    const struct command *command;
    bool help = false;
    int r;

    cst_restart_with(argv, CST_LINALG_VARIABLE, cst_linalg_core_type());
    r = parse_options(&options, argc, argv, &help);
    if (r)
        return r;
    if (help || optind == argc) {
        usage(help ? stdout : stderr);
        return help ? 0 : WRONG;
    }
    command = find_command(argv[optind]);
    if (!command)
        return wrong("no command", argv[optind]);
    return run_command(command, &options, argv + optind + 1, (size_t)(argc - optind - 1));
}
