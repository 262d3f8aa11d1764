# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts; sourced, never run. Sets ROOT, goes there, and defines the helpers below.
ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/cistern

# say TEXT...: a step of progress, on stderr
say() {
    printf '==> %s\n' "$*" >&2
}

# die TEXT...: why we stop, then stop
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# setup_build DIR MESON-OPTION...: makes the build folder, or brings an old one to these options
setup_build() {
    local dir=$1
    shift
    if [ -f "$dir/build.ninja" ]; then
        meson configure "$dir" "$@" >/dev/null
    else
        meson setup "$dir" "$@" >/dev/null
    fi
}

# build DIR: quiet unless it fails
build() {
    local log=$1/build.log
    ninja -C "$1" >"$log" 2>&1 || {
        tail -40 "$log" >&2
        return 1
    }
}
