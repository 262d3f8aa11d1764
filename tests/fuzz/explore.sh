#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: explore.sh TARGET CORPUS - runs a libFuzzer target for $FUZZ_SECONDS (15); what it finds
# interesting goes to a scratch folder, a crashing input stays in the current one. libFuzzer's own
# exit code for a crash is 77, which would read as "skipped".
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" -max_total_time="${FUZZ_SECONDS:-15}" -max_len=131072 -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -error_exitcode=1 -artifact_prefix="./crash-$(basename "$1")-" "$scratch" "$2"
