/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linked to the shipped libcistern.so alone: every function of cistern.h is there, and what needs
 * no daemon works. test_symbols.py checks that nothing else is exported.
 */
#include <cistern/cistern.h>
#include <stdio.h>
#include <string.h>

typedef void (*function)(void);

#define F(name)                                                                                    \
    { #name, (function)name }
static const struct {
    const char *name;
    function address;
} functions[] = {
    F(cistern_version),
    F(cistern_abi_version),
    F(cistern_status_text),
    F(cistern_last_error),
    F(cistern_client_open),
    F(cistern_client_close),
    F(cistern_client_ping),
    F(cistern_client_info),
    F(cistern_space_open),
    F(cistern_space_close),
    F(cistern_descriptor_fingerprint),
    F(cistern_space_block_bytes),
    F(cistern_space_block_tokens),
    F(cistern_key_root),
    F(cistern_key_chain),
    F(cistern_key_block),
    F(cistern_key_from_bytes),
    F(cistern_lookup),
    F(cistern_lookup_keys),
    F(cistern_lookup_each),
    F(cistern_acquire),
    F(cistern_lease_data),
    F(cistern_lease_decode),
    F(cistern_release),
    F(cistern_get_into),
    F(cistern_reserve),
    F(cistern_slot_data),
    F(cistern_commit),
    F(cistern_abort),
    F(cistern_put_from),
    F(cistern_touch),
    F(cistern_pin),
    F(cistern_unpin),
    F(cistern_erase),
    F(cistern_explain),
    F(cistern_stats),
    F(cistern_sidedata_get),
    F(cistern_sidedata_put),
    F(cistern_client_event_fd),
    F(cistern_client_drain),
    F(cistern_submit_get_into),
    F(cistern_submit_put_from),
    F(cistern_submit_lookup_each),
};

static int failures;

static void check(int ok, const char *what) {
    if (ok)
        return;
    (void)fprintf(stderr, "failed: %s\n", what);
    failures++;
}

int main(int argc, char **argv) {
    cistern_client_options options = CISTERN_CLIENT_OPTIONS_INIT;
    uint8_t key[CISTERN_KEY_SIZE] = { 1 };
    cistern_client *client = NULL;

    if (argc > 1 && !strcmp(argv[1], "--names")) { /* for test_symbols.py */
        for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
            (void)puts(functions[i].name);
        return 0;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
        check(functions[i].address != NULL, functions[i].name);
    check(!strcmp(cistern_version(), CST_EXPECTED_VERSION), "cistern_version");
    check(cistern_abi_version() == 0, "cistern_abi_version is the soname's number");
    check(cistern_last_error()[0] == '\0', "no error yet");
    options.socket_path = "/nonexistent/cistern.sock";
    check(cistern_client_open(&client, &options) == CISTERN_E_DISCONNECTED, "no daemon");
    check(client == NULL, "no client");
    check(strstr(cistern_last_error(), "/nonexistent/cistern.sock") != NULL, "the sentence");
    check(cistern_client_ping(NULL) == CISTERN_E_BAD_HANDLE, "NULL client");
    check(cistern_key_from_bytes("a", 1, key) == CISTERN_OK && key[0] == 'a' && key[31] == 1,
          "a short foreign key");
    return failures != 0;
}
