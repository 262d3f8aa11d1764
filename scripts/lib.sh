# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts; sourced, never run. Sets SELF, ROOT and CACHE, goes to ROOT, and defines the
# helpers below.
SELF=$(realpath -- "$0")
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

# show_help: the comment that the script opens with
show_help() {
    sed -n '3,/^[^#]/s/^# \?//p' "$SELF"
    exit
}

# setup_build DIR MESON-OPTION...: makes the build folder, or brings an old one to these options
setup_build() {
    local dir=$1 what=setup log
    shift
    [ ! -f "$dir/build.ninja" ] || what=configure
    log=$(meson "$what" "$dir" "$@" 2>&1) || {
        tail -20 <<<"$log" >&2
        return 1
    }
}

# percent: reads what ninja prints, tells each further tenth
percent() {
    local line tenths last=0
    while IFS= read -r line; do
        [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
        tenths=$((10 * BASH_REMATCH[1] / BASH_REMATCH[2]))
        [ "$tenths" -gt "$last" ] || continue
        last=$tenths
        printf '    %d %%\n' "$((10 * tenths))" >&2
    done
}

# build DIR [TARGET...]: tells how far it is; quiet otherwise, unless it fails
build() {
    local log=$1/build.log
    ninja -C "$@" 2>&1 | tee "$log" | percent || {
        tail -40 "$log" >&2
        return 1
    }
}
