/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cisternctl: looks into a running cisternd and takes care of what it stores. Owns the command
 * table, from which parsing and help come. One thread.
 *
 * Exit status: 0 done, 1 failed, 2 called wrongly.
 */
#include "base/macros.h"
#include "client/ctl/ctl.h"

#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TAKES_ALL = 1, TAKES_YES = 2, TAKES_SALT = 4, TAKES_NAMESPACE = 8 };

static const struct command {
    const char *name, *args, *help;
    int (*run)(struct cst_ctl *ctl);
    size_t min, max; /* arguments */
    unsigned takes;
} commands[] = {
    { "ping", "", "say whether a daemon answers, and how fast", cst_ctl_ping, 0, 0, 0 },
    { "status", "", "show the daemon's memory, clients and limits (administrators)", cst_ctl_status,
      0, 0, 0 },
    { "spaces", "", "list the spaces: one per model, kind and class", cst_ctl_spaces, 0, 0,
      TAKES_NAMESPACE },
    { "ls", "[SPACE]", "list the blocks of one space or of all", cst_ctl_ls, 0, 1,
      TAKES_NAMESPACE },
    { "stats", "[SPACE]", "show the counters of the namespace or of one space", cst_ctl_stats, 0, 1,
      TAKES_NAMESPACE },
    { "erase", "SPACE KEY...", "erase blocks with all that builds on them; --all: the whole space",
      cst_ctl_erase, 1, SIZE_MAX, TAKES_ALL | TAKES_YES | TAKES_NAMESPACE },
    { "purge", "[NAMESPACE]", "forget everything that a namespace has stored", cst_ctl_purge, 0, 1,
      TAKES_YES },
    { "explain", "SPACE [FILE]",
      "say why a prompt misses; FILE (default: standard input) holds its "
      "token ids",
      cst_ctl_explain, 1, 2, TAKES_SALT | TAKES_NAMESPACE },
};

static const char usage_head[] = "usage: cisternctl [OPTION...] COMMAND [ARGUMENT...]\n"
                                 "\n"
                                 "Looks into a running cisternd and takes care of what it stores.\n"
                                 "\n"
                                 "Commands\n";

static const char usage_tail[] =
    "\n"
    "SPACE is the beginning of a space's fingerprint (at least 4 digits), where needed with\n"
    "/CLASS or /CLASS/KIND; KEY the beginning of a block's key (at least 8 digits).\n"
    "\n"
    "Options\n"
    "  --socket PATH      the daemon's socket; default: $CISTERN_SOCKET, else the usual places\n"
    "  --json             print one JSON object\n"
    "  --namespace NAME   only spaces of this namespace (administrators see all)\n"
    "  --all              erase: every block of the space\n"
    "  --yes              erase --all, purge: don't ask\n"
    "  --salt TEXT        explain: the salt of the prompt's root key\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 called wrongly.\n";

static const struct option options[] = {
    { "socket", required_argument, NULL, 's' },
    { "json", no_argument, NULL, 'j' },
    { "namespace", required_argument, NULL, 'n' },
    { "all", no_argument, NULL, 'a' },
    { "yes", no_argument, NULL, 'y' },
    { "salt", required_argument, NULL, 't' },
    { "help", no_argument, NULL, 'h' },
    { "version", no_argument, NULL, 'v' },
    { NULL, 0, NULL, 0 },
};

static int print_help(void) {
    fputs(usage_head, stdout);
    for (size_t i = 0; i < CST_COUNT(commands); i++)
        printf("  %-7s %-13s %s\n", commands[i].name, commands[i].args, commands[i].help);
    fputs(usage_tail, stdout);
    return CST_CTL_OK;
}

CST_PRINTF(1, 2) static int wrong(const char *fmt, ...) {
    va_list ap;

    va_start(ap, fmt);
    fputs("cisternctl: ", stderr);
    (void)vfprintf(stderr, fmt, ap);
    fputs("\nTry `cisternctl --help`.\n", stderr);
    va_end(ap);
    return CST_CTL_USAGE;
}

static const struct command *find_command(const char *name) {
    for (size_t i = 0; i < CST_COUNT(commands); i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

/* An option that a command would ignore is a mistake worth naming. */
static const char *useless_option(const struct cst_ctl *ctl, unsigned takes) {
    if (ctl->all && !(takes & TAKES_ALL))
        return "--all";
    if (ctl->yes && !(takes & TAKES_YES))
        return "--yes";
    if (ctl->salt && !(takes & TAKES_SALT))
        return "--salt";
    if (ctl->only_ns && !(takes & TAKES_NAMESPACE))
        return "--namespace";
    return NULL;
}

static int run(struct cst_ctl *ctl, const struct command *command, const char *socket) {
    const char *useless = useless_option(ctl, command->takes);
    int status;

    if (useless)
        return wrong("%s does not take %s", command->name, useless);
    if (ctl->n_args < command->min)
        return wrong("%s needs %s", command->name, command->args);
    if (ctl->n_args > command->max)
        return wrong("%s takes %s", command->name,
                     command->args[0] ? command->args : "no argument");
    status = cst_ctl_init(ctl, socket);
    if (status < 0)
        status = cst_ctl_say(ctl, "out of memory");
    if (!status)
        status = command->run(ctl);
    cst_ctl_deinit(ctl);
    if (fflush(stdout) || ferror(stdout)) {
        perror("cisternctl: standard output");
        status = CST_CTL_FAILED;
    }
    return status;
}

int main(int argc, char **argv) {
    struct cst_ctl ctl = { .color = isatty(STDOUT_FILENO) && !getenv("NO_COLOR") };
    const struct command *command;
    const char *socket = NULL;
    int c;

    opterr = 0;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 's':
            socket = optarg;
            break;
        case 'j':
            ctl.json = true;
            break;
        case 'n':
            ctl.only_ns = optarg;
            break;
        case 'a':
            ctl.all = true;
            break;
        case 'y':
            ctl.yes = true;
            break;
        case 't':
            ctl.salt = optarg;
            break;
        case 'h':
            return print_help();
        case 'v':
            return puts(cistern_version()) < 0;
        default:
            return wrong("%s is no option, or its argument is missing", argv[optind - 1]);
        }
    }
    if (optind == argc)
        return wrong("name a command");
    command = find_command(argv[optind]);
    if (!command)
        return wrong("there is no command \"%s\"", argv[optind]);
    ctl.args = argv + optind + 1;
    ctl.n_args = (size_t)(argc - optind - 1);
    return run(&ctl, command, socket);
}
