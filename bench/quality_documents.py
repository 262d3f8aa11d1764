# SPDX-License-Identifier: Apache-2.0
"""The texts of scripts/bench quality: five documents that are measured, texts to learn from, tasks.

All come from Debian packages (scripts/install-deps --quality), so that anybody can repeat a figure.
A text's domain says from whom it must be kept apart: what is measured on a document was never
learned on a text of its domain.
"""
import gzip
import html
import random
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = Path("/usr/lib/python3.11")
PYTHON_DOC = Path("/usr/share/doc/python3.11/html/_sources")
DOC = Path("/usr/share/doc")
DEVREF = Path("/usr/share/developers-reference/_sources")
ANARCHISM = DOC / "anarchism/html"
DECIMAL = PYTHON / "test/decimaltestdata"


@dataclass
class Text:
    name: str
    domain: str
    text: str


@dataclass
class Question:
    """After the prefix comes `ask`, and `answer` is right."""
    ask: str
    answer: str


@dataclass
class Task:
    name: str
    domain: str
    text: str
    questions: list = field(default_factory=list)


def read(path, start=None):
    """A file as text, from the first occurrence of `start`."""
    try:
        data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError as error:
        raise SystemExit(f"quality: {error.filename} is missing; "
                         "scripts/install-deps --quality installs it") from error
    text = data.decode("utf-8", "replace")
    return text[text.index(start):] if start else text


def plain(path):
    """An HTML page as text."""
    text = re.sub(r"(?s)<(script|style|head).*?</\1>", "", read(path))
    text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def verses(passage):
    """A passage of the King James Version as running text."""
    out = subprocess.run(["bible", "-f", passage], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL, check=True).stdout
    return " ".join(re.sub(r"^\S+ ", "", line) for line in out.splitlines())


def chat(pairs):
    """Questions and answers in the model's chat template."""
    turns = ["<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
             "Face<|im_end|>\n"]
    for question, answer in pairs:
        turns.append(f"<|im_start|>user\n{question}<|im_end|>\n"
                     f"<|im_start|>assistant\n{answer}<|im_end|>\n")
    return "".join(turns)


def faq(path):
    """Pairs of a page of Python's FAQ: a heading that ends in a question mark, then its text."""
    pairs = re.findall(r"(?ms)^([^\n]+\?)\n-{4,}\n+(.*?)(?=^[^\n]+\n-{4,}\n|\Z)", read(path))
    return [(q, re.sub(r"(?m)^\.\. .*$", "", a).strip()) for q, a in pairs]


def anarchism_faq(section):
    """Pairs of a page of the Anarchist FAQ, whose headings are questions."""
    text = plain(ANARCHISM / f"sec{section}.html")
    parts = re.split(rf"\n\s*({section[0]}\.[\d.]* [^\n]+\?)\s*\n", text)
    return list(zip(parts[1::2], (part.strip() for part in parts[2::2])))


def measured():
    """The five documents, of five kinds."""
    return [
        Text("kjv", "prose", verses("gen1:1-gen12:1")),
        Text("argparse", "code", read(PYTHON / "argparse.py")),
        Text("developers-reference", "docs",
             read(DEVREF / "best-pkging-practices.rst.txt")),
        Text("chat", "chat", chat(faq(PYTHON_DOC / "faq/design.rst.txt"))),
        Text("decimal", "numbers", read(DECIMAL / "divide.decTest", "divx001")),
    ]


def learned():
    """Texts to learn from, some of each domain."""
    rst = PYTHON_DOC
    return [
        Text("anarchism-prose", "prose", plain(ANARCHISM / "secB1.html")[2000:]),
        Text("anarchism-history", "prose", plain(ANARCHISM / "append31.html")[1000:]),
        Text("jargon-stories", "prose", read(DOC / "jargon-text/jargon.txt.gz")[1300000:]),
        Text("jargon-lexicon", "prose", read(DOC / "jargon-text/jargon.txt.gz")[200000:]),
        Text("json-decoder", "code", read(PYTHON / "json/decoder.py")),
        Text("heapq", "code", read(PYTHON / "heapq.py", "def heappush")),
        Text("socketserver", "code", read(PYTHON / "socketserver.py", "class BaseServer")),
        Text("stdio-header", "code", read(Path("/usr/include/stdio.h"), "extern")),
        Text("policy", "docs", read(DOC / "debian-policy/policy.txt.gz")[30000:]),
        Text("debian-faq", "docs", read(DOC / "debian/FAQ/debian-faq.en.txt.gz")[20000:]),
        Text("tutorial", "docs", read(rst / "tutorial/classes.rst.txt")),
        Text("sqlite-manual", "docs", read(rst / "library/sqlite3.rst.txt")),
        Text("perl-policy", "docs", read(DOC / "debian-policy/perl-policy.txt.gz")[2000:]),
        Text("licence", "legal", read(Path("/usr/share/common-licenses/GPL-3"))),
        Text("licence-lgpl", "legal", read(Path("/usr/share/common-licenses/LGPL-2.1"))),
        Text("chat-anarchism", "chat", chat(anarchism_faq("A1"))),
        Text("chat-anarchism-2", "chat", chat(anarchism_faq("B2"))),
        Text("chat-programming", "chat", chat(faq(rst / "faq/programming.rst.txt"))),
        Text("complex-cases", "numbers", read(PYTHON / "test/cmath_testcases.txt")[8000:]),
        Text("decimal-shift", "numbers", read(DECIMAL / "shift.decTest", "shix001")),
        Text("package-names", "tables",
             read(DOC / "debian-policy/virtual-package-names-list.yaml.gz")[3000:]),
        Text("changelog", "tables", read(DOC / "debian-policy/changelog.gz")),
        Text("html", "markup", read(DOC / "debian-policy/menu-policy.html/ch2.html")),
        Text("html-anarchism", "markup", read(ANARCHISM / "secC1.html")),
        Text("unicode-howto", "docs", read(rst / "howto/unicode.rst.txt")),
    ]


WORDS = ("harbor velvet copper lantern meadow falcon marble saffron glacier timber orchid walnut "
         "compass anchor thistle cobalt").split()
NAMES = ("Alice Bruno Clara Daniel Edith Felix Greta Hugo Irene Jonas Karin Leo Marta Nils Olga "
         "Peter").split()


def needles(name, domain, text, words, names):
    """A text with remarks in it, evenly spread, and what to ask about each."""
    lines = text.split("\n")
    step = len(lines) // (len(words) + 1)
    for i in range(len(words), 0, -1):
        lines.insert(i * step, f"The secret word of {names[i - 1]} is {words[i - 1]}.")
    questions = [Question(f"\n\nThe secret word of {n} is", f" {w}") for n, w in zip(names, words)]
    return Task(name, domain, "\n".join(lines), questions)


def sums(n_examples, n_questions):
    rng = random.Random(1)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(n_examples + n_questions)]
    text = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:n_examples])
    return Task("sums", "numbers", text,
                [Question(f"{a} + {b} =", f" {a + b}") for a, b in pairs[n_examples:]])


def tasks():
    """Finding a word again, and small sums, from a prefix that went through the codec."""
    text = read(DOC / "debian-policy/policy.txt.gz")[60000:64000]
    story = plain(ANARCHISM / "secD1.html")[2000:6500]
    return [needles("needle-docs", "docs", text, WORDS[:8], NAMES[:8]),
            needles("needle-prose", "prose", story.replace(". ", ".\n"),
                    WORDS[8:], NAMES[8:]),
            sums(60, 40)]
