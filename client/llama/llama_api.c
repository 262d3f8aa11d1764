/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds llama.cpp's functions. All or nothing: a libllama that lacks one of them is older or newer
 * than what the state format of state.h was read from, and is refused by that name.
 */
#include "client/llama/llama_api.h"

#include <dlfcn.h>
#include <string.h>

const char *cst_llama_api_resolve(struct cst_llama_api *out, void *library) {
    void *handle = library ? library : RTLD_DEFAULT;
    struct cst_llama_api api;

#define X(result, name, arguments)                                                                 \
    {                                                                                              \
        void *symbol = dlsym(handle, "llama_" #name);                                              \
                                                                                                   \
        if (!symbol)                                                                               \
            return "llama_" #name;                                                                 \
        memcpy(&api.name, &symbol, sizeof(symbol));                                                \
    }
    CST_LLAMA_FUNCTIONS(X)
#undef X
    *out = api;
    return NULL;
}
