#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The house rules that a machine can check, over the whole source tree.

usage: lint.py [--root DIR] [--only RULE[,RULE...]] [--skip RULE[,RULE...]]

Each rule is a function that yields (path, line, text); its docstring says what it enforces. Exit
0: clean, 1: findings, 77: a tool that a rule needs is missing. test_lint.py shows each rule a tree
that breaks it.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARIES = ["base", "codec", "proto", "gpu", "store", "client"]
FOLDERS = LIBRARIES + ["daemon", "tools", "bench", "tests"]
# folder -> folders whose headers it may include; the longest matching folder counts
ALLOWED = {
    "base": ["base"],
    "codec": ["base", "codec"],
    "proto": ["base", "proto"],
    "gpu": ["base", "gpu"],
    "gpu/cuda": ["base", "codec", "gpu"],
    "store": ["base", "codec", "proto", "gpu", "store"],
    "daemon": ["base", "codec", "proto", "gpu", "store", "daemon"],
    "client": ["base", "codec", "proto", "client"],
    "client/examples": [],
    "tools": LIBRARIES + ["tools"],
    "bench": LIBRARIES + ["bench", "tests/lib"],
    "tests": FOLDERS,
}
PUBLIC_HEADER = "cistern/"  # client/include/cistern/*.h, by <> or ""
PUBLIC_USERS = ["client", "tools", "bench", "tests"]
# header pattern -> the only files (by pattern) that may include it
FENCED = {
    r"cuda.*|cublas.*|cusolver.*|nvrtc.*|nvml.*": r"gpu/cuda/.*|tests/.*",
    r"liburing.*": r"base/ring\.c|store/io_uring\.c|tests/.*|bench/.*",
    r"cblas.*|lapacke.*": r"codec/linalg\.[ch]|tests/.*|bench/.*",
}
NOT_PRODUCT = ("tests/", "bench/", "client/examples/")
PROGRAMS = ("daemon/", "tools/", "client/ctl/")
GENERATED_HEADER = re.compile(r"\.pb-c\.h$|/version\.h$")
DATA = re.compile(r"^tests/(golden|data|fuzz/corpus)/")
TEXT = {".c", ".h", ".cu", ".py", ".sh", ".md", ".proto", ".def", ".build", ".txt", ".sym", ".in",
        ".service", ".socket", ".conf", ".toml", ".cfg", ".yml", ".json", ""}


class Tree:
    """The files of a source tree, without build output; texts are read once."""

    def __init__(self, root):
        self.root = Path(root)
        self.paths = sorted(self._list())
        self._texts = {}

    def _list(self):
        if (self.root / ".git").exists() and shutil.which("git"):
            out = subprocess.run(["git", "-C", self.root, "ls-files", "-coz", "--exclude-standard"],
                                 check=True, capture_output=True, text=True).stdout
            return {p for p in out.split("\0") if p and (self.root / p).is_file()}
        found = set()
        for folder, dirs, files in os.walk(self.root):
            dirs[:] = [d for d in dirs if not d.startswith((".", "build")) and d != "__pycache__"]
            found |= {str((Path(folder) / f).relative_to(self.root)) for f in files}
        return found

    def text(self, path):
        if path not in self._texts:
            self._texts[path] = (self.root / path).read_bytes().decode("utf-8", "replace")
        return self._texts[path]

    def with_suffix(self, *suffixes):
        return [p for p in self.paths if p.endswith(suffixes) and not DATA.match(p)]

    def c_files(self):
        return self.with_suffix(".c", ".h", ".cu")

    def product(self):
        return [p for p in self.c_files() if not p.startswith(NOT_PRODUCT)]


def code_only(text):
    """C text with comments and literals blanked, line numbers kept."""
    def blank(m):
        s = m.group(0)
        kept = s[0] + s[-1] if s[0] in "\"'" else " "
        return kept + "\n" * s.count("\n")
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text,
                  flags=re.S)


def find(tree, paths, pattern, say, code=True):
    for path in paths:
        text = code_only(tree.text(path)) if code else tree.text(path)
        for m in re.finditer(pattern, text):
            yield path, text.count("\n", 0, m.start()) + 1, say.format(m.group(m.lastindex or 0))


def call_of(*names):
    return r"(?<![\w.>])(" + "|".join(names) + r")\s*\("


def folder_of(path, table):
    return max((f for f in table if path.startswith(f + "/")), key=len, default=None)


# ---- rules -----------------------------------------------------------------------------------

def rule_includes(tree):
    """Includes are root-relative and follow the layers; fenced headers stay behind their fence."""
    for path in tree.c_files():
        own = folder_of(path, ALLOWED)
        for n, line in enumerate(tree.text(path).split("\n"), 1):
            m = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
            if not m:
                continue
            quoted, name = m.group(1) == '"', m.group(2)
            for fenced, users in FENCED.items():
                if re.fullmatch(fenced, name) and not re.fullmatch(users, path):
                    yield path, n, f"{name} is only for {users}"
            if name.startswith(PUBLIC_HEADER):
                if own and own.split("/")[0] not in PUBLIC_USERS:
                    yield path, n, f"{own}/ may not include the client's {name}"
                continue
            target = folder_of(name, FOLDERS)
            if not quoted and not target:
                continue
            if not target or not ((tree.root / name).is_file() or GENERATED_HEADER.search(name)
                                  or name.endswith(".def")):
                yield path, n, f"\"{name}\" is not a path from the root of the tree"
            elif not name.startswith(tuple(f + "/" for f in ALLOWED.get(own, []))):
                yield path, n, f"{own or 'this folder'} may not include {target}/"


def rule_unique_names(tree):
    """No two files share a name, so that a name in a log, a trace or a talk is a place."""
    common = re.compile(r"(meson\.build|README.*|__init__\.py|__main__\.py|\.gitignore|py\.typed)$")
    seen = {}
    for path in tree.paths:
        name = path.rsplit("/", 1)[-1]
        if common.fullmatch(name) or DATA.match(path):
            continue
        if name in seen:
            yield path, 1, f"has the same name as {seen[name]}"
        seen.setdefault(name, path)


def rule_opening(tree):
    """Each C file opens with the licence and a comment that says what it owns and why."""
    for path in tree.c_files():
        lines = tree.text(path).split("\n")
        if lines[0] != "/* SPDX-License-Identifier: Apache-2.0 */":
            yield path, 1, "does not open with the SPDX line"
        elif not lines[1].startswith("/*"):
            yield path, 2, "has no opening comment after the SPDX line"


def rule_length(tree):
    """Files stay under 1,000 lines."""
    for path in tree.with_suffix(".c", ".h", ".cu", ".py", ".sh"):
        n = tree.text(path).count("\n")
        if n >= 1000:
            yield path, n, "1,000 lines or more"


def rule_functions(tree):
    """Functions of the product stay under 60 lines, unless the line before says /* long: why */."""
    for path in tree.with_suffix(".c", ".cu"):
        if path.startswith(NOT_PRODUCT):
            continue
        lines, head, start = tree.text(path).split("\n"), 0, None
        for n, line in enumerate(lines):
            if start is None:
                head = n if re.match("[A-Za-z_]", line) else head
                start = n if line.endswith(") {") else None
            elif line.startswith("}"):
                if n - start - 1 > 60 and not re.search(r"\blong: .*\*/$", lines[head - 1]):
                    yield path, start + 1, f"a function of {n - start - 1} lines"
                start = None


def rule_heap(tree):
    """Heap memory comes from base/mem.c only, so that allocation faults reach all of it."""
    names = ["malloc", "calloc", "realloc", "reallocarray", "free", "strdup", "strndup", "asprintf",
             "vasprintf", "posix_memalign", "aligned_alloc", "getline", "open_memstream"]
    paths = [p for p in tree.product() if p != "base/mem.c"]
    yield from find(tree, paths, call_of(*names), "{}() bypasses base/mem.h")


def rule_pure_codec(tree):
    """codec/ has no heap, no I/O and no log; codec/linalg.c may ask for workspace."""
    names = ["cst_malloc", "cst_calloc", "cst_realloc", "cst_memdup", "cst_strdup", "cst_free",
             "cst_log", "open", "read", "write", "fopen", "getenv"]
    paths = [p for p in tree.c_files() if p.startswith("codec/") and "/linalg." not in p]
    yield from find(tree, paths, call_of(*names), "{}() in a pure folder")


def rule_quiet_libraries(tree):
    """Libraries return what happened; they don't print, log or end the process."""
    names = ["printf", "fprintf", "vfprintf", "puts", "perror", "cst_log", "exit", "_exit", "abort",
             "syslog"]
    paths = [p for p in tree.product() if folder_of(p, LIBRARIES) and not p.startswith(PROGRAMS)
             and not p.startswith("base/log.")]
    yield from find(tree, paths, call_of(*names), "{}() in a library")


def rule_banned(tree):
    """Functions that overflow, hide errors or keep hidden state are not called."""
    everywhere = ["strcpy", "stpcpy", "strcat", "strncat", "strncpy", "sprintf", "vsprintf", "gets",
                  "alloca", "strtok", "atoi", "atol", "atoll", "atof", "rand", "srand", "tmpnam",
                  "mktemp", "tempnam"]
    product = ["sscanf", "fscanf", "scanf", "system", "popen", "signal", "setjmp", "longjmp",
               "gmtime", "localtime", "strerror", "usleep"]
    yield from find(tree, tree.c_files(), call_of(*everywhere), "{}() is banned")
    yield from find(tree, tree.product(), call_of(*product), "{}() is banned in the product")


def rule_cloexec(tree):
    """Descriptors of the product are close-on-exec from birth."""
    yield from find(tree, tree.product(), call_of("accept", "pipe", "dup", "dup2", "epoll_create"),
                    "{}() makes a descriptor that survives exec")
    made = call_of("open", "openat", "socket", "socketpair", "accept4", "memfd_create", "eventfd",
                   "pipe2", "epoll_create1", "timerfd_create", "signalfd", "inotify_init1")
    yield from find(tree, tree.product(), made + r"(?![^;]*CLOEXEC)", "{}() without CLOEXEC")


def rule_schema(tree):
    """The protocol's schema has no repeated fields and no recursion: its decoder has no limits."""
    for path in tree.with_suffix(".proto"):
        text = re.sub(r"//[^\n]*", "", tree.text(path))
        uses = {m.group(1): set(re.findall(r"(\w+)\s+\w+\s*=\s*\d+", m.group(2)))
                for m in re.finditer(r"message\s+(\w+)\s*\{([^}]*)\}", text)}
        for m in re.finditer(r"\b(repeated|map\s*<|oneof|import|extend)\b", text):
            yield path, text.count("\n", 0, m.start()) + 1, f"'{m.group(1)}' is not allowed"
        for message in uses:
            reached, todo = set(), [message]
            while todo:
                for used in uses.get(todo.pop(), ()):
                    if used not in reached:
                        reached.add(used)
                        todo.append(used)
            if message in reached:
                yield path, 1, f"message {message} contains itself"


def rule_blanks(tree):
    """No tabs, trailing blanks or foreign line ends; text files end with one newline."""
    for path in tree.paths:
        if Path(path).suffix not in TEXT or DATA.match(path) or path == "LICENSE":
            continue
        text = tree.text(path)
        if text and not text.endswith("\n") or text.endswith("\n\n"):
            yield path, text.count("\n") + 1, "does not end with exactly one newline"
        for n, line in enumerate(text.split("\n"), 1):
            if "\t" in line:
                yield path, n, "tab"
            if line != line.rstrip():
                yield path, n, "trailing blank"


def rule_machine_paths(tree):
    """No path of one machine, no address of a package registry."""
    parts = ["/wor" + "k/", "/tmp/w" + "t", "/tmp/pr" + "ep", "/home/[a-z]", r"pyp" + r"i\.org",
             "pythonh" + "osted", r"deb\.deb" + r"ian\.org"]
    paths = [p for p in tree.paths if not DATA.match(p) and Path(p).suffix in TEXT]
    yield from find(tree, paths, "|".join(parts), "'{}' means nothing elsewhere", code=False)


def rule_listed(tree):
    """Each C source is named in a meson.build: no file is forgotten by the build."""
    listed = "\n".join(tree.text(p) for p in tree.paths if p.endswith("meson.build"))
    for path in tree.with_suffix(".c"):
        name = path.rsplit("/", 1)[-1]
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", listed):
            yield path, 1, "is in no meson.build"


def rule_links(tree):
    """Relative links of the documents lead somewhere."""
    for path in tree.with_suffix(".md"):
        for n, line in enumerate(tree.text(path).split("\n"), 1):
            for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
                if "://" not in link and not link.startswith("mailto:") \
                        and not (tree.root / path).parent.joinpath(link).exists():
                    yield path, n, f"broken link {link}"


def rule_names(tree):
    """Functions and files that the documents name exist, so that no arrow leads nowhere."""
    code = "\n".join(tree.text(p) for p in tree.with_suffix(".c", ".h", ".cu", ".def", ".py"))
    known = set(re.findall(r"\w+", code))
    for path in tree.with_suffix(".md"):
        for n, line in enumerate(tree.text(path).split("\n"), 1):
            for name in re.findall(r"`(\w+)\(\)`", line):
                if name not in known and name not in ("poll",):
                    yield path, n, f"no function {name}()"
            for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:c|h|def|proto|py|md))`", line):
                if not any((tree.root / at / name).exists() for at in ("", "client/include")):
                    yield path, n, f"no file {name}"


def rule_format(tree):
    """C files are formatted by clang-format 14 with the tree's .clang-format."""
    tool = shutil.which("clang-format-14")
    if not tool:
        raise LookupError("clang-format-14 is not installed (scripts/install-deps)")
    files = tree.c_files()
    if not files:
        return
    out = subprocess.run([tool, "--dry-run", "--style=file", *files], cwd=tree.root,
                         capture_output=True, text=True).stderr
    for m in re.finditer(r"^(\S+?):(\d+):\d+: .*clang-format-violations", out, re.M):
        yield m.group(1), int(m.group(2)), "is not formatted (clang-format-14 -i)"


RULES = {n[5:].replace("_", "-"): f for n, f in list(globals().items()) if n.startswith("rule_")}


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    args.add_argument("--root", default=Path(__file__).resolve().parents[2])
    args.add_argument("--only", default="")
    args.add_argument("--skip", default="")
    args = args.parse_args()
    only, skip = set(filter(None, args.only.split(","))), set(filter(None, args.skip.split(",")))
    if (only | skip) - set(RULES):
        sys.exit(f"no such rule; there are: {', '.join(RULES)}")
    tree, findings, missing = Tree(args.root), 0, None
    for name, rule in RULES.items():
        if name in skip or only and name not in only:
            continue
        try:
            for path, line, text in rule(tree):
                findings += 1
                print(f"{path}:{line}: {text} [{name}]")
        except LookupError as e:
            missing = e
    if missing and not findings:
        print(f"skipped: {missing}")
        return 77
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
