# SPDX-License-Identifier: Apache-2.0
"""What scripts/bench quality measures with: exact states, kept between runs, and scores.

Each text is prefilled once, exactly; its keys and values are kept as bf16 in files that cistern-codec
reads, with the logits of its continuation beside them. To measure a preset, cistern-codec encodes and
decodes these files, and the model scores the same continuation on what comes back.
"""
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import quality_documents
from cistern._llama_engine import divergences, from_bf16, log_probabilities, to_bf16
from cistern.calibrate import calibrate
from quality_engine import Model, dequantise

PREFIX, SCORED, LEARNED, CALIBRATED, N_CTX = 2048, 256, 1024, 640, 2560
STATES = 1  # another number when the way in which states are computed or kept changes
HERE = Path(__file__).resolve().parent


def say(text):
    print(f"==> {text}", file=sys.stderr, flush=True)


class Difference:
    """Collects scored positions: how far one cache's predictions lie from the exact one's."""

    def __init__(self):
        self.kl, self.same, self.loss = [], [], []

    def add(self, exact, other, following):
        self.kl.append(divergences(exact, other))
        self.same.append(exact.argmax(axis=1) == other.argmax(axis=1))
        for i in range(0, len(following), 16):
            at = numpy.arange(len(following[i:i + 16])), following[i:i + 16]
            p, q = (log_probabilities(x[i:i + 16])[at] for x in (exact, other))
            self.loss.append(p - q)

    def figures(self):
        kl = numpy.concatenate(self.kl)
        return {"kl": float(kl.mean()), "kl_p99": float(numpy.quantile(kl, 0.99)),
                "top1": float(numpy.concatenate(self.same).mean()),
                "ppl": float(numpy.exp(numpy.concatenate(self.loss).mean()) - 1),
                "kl_each": [round(float(k.mean()), 6) for k in self.kl]}


class Folder:
    """Texts with their exact keys and values, in the layout of cistern-codec."""

    def __init__(self, path, dtype="bf16"):
        self.path, self.dtype = path, dtype

    def write(self, name, tokens, k, v, model, **more):
        self.path.mkdir(exist_ok=True)
        files = {}
        for part, x in (("kpost", k), ("v", v)):
            files[part] = {"file": f"{name}.{part}.{self.dtype}"}
            bits = to_bf16(x) if self.dtype == "bf16" else x.astype(numpy.float16)
            bits.tofile(self.path / files[part]["file"])
        shape = {"name": name, "layers": model.layers, "tokens": k.shape[1],
                 "kv_heads": model.heads, "head_dim": model.dims, "dtype": f"{self.dtype} little-endian",
                 "layout": "[layer][token][kv_head][dim], dim fastest",
                 "rope": {"kind": "interleaved pairs (2i,2i+1)", "base": model.rope_base,
                          "dims": model.dims, "first_position": 0},
                 "files": files, "ids": tokens, **more}
        (self.path / f"{name}.json").write_text(json.dumps(shape) + "\n")

    def shape(self, name):
        return json.loads((self.path / f"{name}.json").read_text())

    def names(self):
        return sorted(p.stem for p in self.path.glob("*.json"))


def load(folder, shape):
    """(K, V) of a text in fp32."""
    rows = (shape["layers"], shape["tokens"], -1)
    return [from_bf16(numpy.fromfile(folder / f"{shape['name']}.{part}.bf16", numpy.uint16))
            .reshape(rows) for part in ("kpost", "v")]


class Bench:
    """Documents, tasks, and the model that scores them."""

    def __init__(self, engine, cache, tool, learn_tokens):
        self.tool, self.learn_tokens = tool, str(learn_tokens)
        cache.mkdir(parents=True, exist_ok=True)
        model_path = cache / f"{engine.name}-f32.gguf"
        if not model_path.exists():
            say("dequantising the model, once")
            dequantise(engine / "model.gguf", model_path)
        self.model, self.model_path = Model(model_path, N_CTX), model_path
        self.cache = cache / self._identity(engine)
        self.documents = Folder(self.cache / "documents")
        self.documents_f16 = Folder(self.cache / "documents-f16", "f16")
        self.learned = Folder(self.cache / "learned")
        self.tasks = Folder(self.cache / "tasks")
        if not (self.cache / "complete").exists():
            self._prepare(cache)
        self.names = self.documents.names()

    @staticmethod
    def _identity(engine):
        """Changes with whatever changes the states."""
        digest = hashlib.sha256(f"{STATES} {engine.name} {PREFIX} {SCORED} {LEARNED}".encode())
        digest.update((HERE / "quality_documents.py").read_bytes())
        return f"states-{digest.hexdigest()[:16]}"

    # ---- exact states ----

    def _prepare(self, cache):
        for old in cache.glob("states-*"):
            shutil.rmtree(old)
        self.cache.mkdir()
        for text in quality_documents.measured():
            say(f"computing {text.name} exactly ({PREFIX} tokens)")
            tokens = self.model.tokenize(text.text)[:PREFIX + SCORED + 1]
            if len(tokens) < PREFIX + SCORED + 1:
                raise SystemExit(f"quality: {text.name} is too short")
            self._document(text, tokens[:PREFIX], tokens[PREFIX:])
        for text in quality_documents.learned():
            say(f"computing {text.name} ({LEARNED} tokens, to learn from)")
            tokens = self.model.tokenize(text.text[:12 * LEARNED])[:LEARNED]
            k, v = self.model.compute(tokens)
            self.learned.write(text.name, tokens, k, v, self.model, domain=text.domain)
        for task in quality_documents.tasks():
            self._task(task)
        (self.cache / "complete").touch()

    def _document(self, text, tokens, following):
        k, v = self.model.compute(tokens)
        self.documents.write(text.name, tokens, k, v, self.model, domain=text.domain,
                             following=following)
        self.documents_f16.write(text.name, tokens, k, v, self.model)
        shape = self.documents.shape(text.name)
        self.model.put(*load(self.documents.path, shape))
        numpy.save(self.cache / f"{text.name}.npy", self.model.score(following[:SCORED], PREFIX))
        self._noise(text.name, k, v, following)

    def _noise(self, name, k, v, following):
        """What changes nothing that anybody would call a loss: the floor under all figures."""
        exact, kept = numpy.load(self.cache / f"{name}.npy"), self.documents.shape(name)
        floors = {}
        for floor, (a, b), batch in (
                ("fp32_cache", (k, v), 512),
                ("f16_cache", (k.astype(numpy.float16).astype(numpy.float32),
                               v.astype(numpy.float16).astype(numpy.float32)), 512),
                ("batches_of_64", load(self.documents.path, kept), 64)):
            self.model.put(a, b)
            difference = Difference()
            difference.add(exact, self.model.score(following[:SCORED], PREFIX, batch),
                           following[1:])
            floors[floor] = difference.figures()
        (self.cache / f"{name}.noise").write_text(json.dumps(floors))

    def noise(self):
        """Floor -> mean figures over the documents."""
        each = [json.loads((self.cache / f"{name}.noise").read_text()) for name in self.names]
        return {floor: {figure: float(numpy.mean([e[floor][figure] for e in each]))
                        for figure in ("kl", "kl_p99", "top1", "ppl")} for floor in each[0]}

    def _task(self, task):
        say(f"computing {task.name}")
        tokens = self.model.tokenize(task.text)
        questions = [[self.model.tokenize(q.ask), self.model.tokenize(q.answer)]
                     for q in task.questions]
        if len(tokens) > N_CTX - 64:
            raise SystemExit(f"quality: {task.name} is too long")
        k, v = self.model.compute(tokens)
        self.tasks.write(task.name, tokens, k, v, self.model, domain=task.domain,
                         questions=questions)

    # ---- codec ----

    def encode(self, folder, out, names, arguments):
        """Runs texts through the codec into `out`; the sizes and errors."""
        done = subprocess.run([self.tool, "compare", *arguments, "--out", out, folder.path, *names],
                              stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ValueError(f"cistern-codec refused {' '.join(arguments)}")
        return json.loads(done.stdout)["texts"]

    def _digest(self, what):
        """Names a result of this build of cistern-codec."""
        return hashlib.sha256(self.tool.read_bytes() + what.encode()).hexdigest()[:16]

    def step_table(self):
        """A file of step weights by the sensitivity of the model's layers, on two texts."""
        path = self.cache / "steps.json"
        if not path.exists():
            say("measuring how sensitive the layers are")
            texts = [self.learned.shape(name)["ids"][:CALIBRATED]
                     for name in ("anarchism-prose", "policy")]
            table = calibrate(self.model, texts, prefix=CALIBRATED - 128)
            path.write_text(json.dumps(table.json()) + "\n")
        return path

    def side_data(self, arguments, domain):
        """A file of what was learned on texts of other domains; learned once per build."""
        arguments = ["--tokens", self.learn_tokens, *arguments]
        path = self.cache / f"side-{self._digest(' '.join(arguments))}-{domain}"
        if not path.exists():
            names = [n for n in self.learned.names() if self.learned.shape(n)["domain"] != domain]
            say(f"learning from {len(names)} texts for {domain}")
            made = path.with_suffix(".part")
            subprocess.run([self.tool, "learn", *arguments, "--out", made, self.learned.path,
                            *names], stdout=subprocess.DEVNULL, check=True)
            made.rename(path)
        return path

    def _through_codec(self, folder, out, arguments, learn):
        """Each text with the side data that it may know; results in the order of the names."""
        if learn is None:
            return self.encode(folder, out, folder.names(), arguments), 0
        results, side_bytes = [], 0
        for name in folder.names():
            side = self.side_data(learn, folder.shape(name)["domain"])
            side_bytes = max(side_bytes, side.stat().st_size)
            results += self.encode(folder, out, [name], [*arguments, "--side", str(side)])
        return results, side_bytes

    def ratio_f16(self, arguments):
        """Of a preset on the same documents in f16."""
        with tempfile.TemporaryDirectory(dir=self.cache) as out:
            results = self.encode(self.documents_f16, out, self.names, arguments)
        return sum(r["bytes_16bit"] for r in results) / sum(r["bytes"] for r in results)

    # ---- scores ----

    def measure(self, arguments, learn=None, tasks=True):
        """A preset's figures. arguments: of cistern-codec; learn: of its learn command, or None.
        The same program gives the same figures: those of its last run are kept."""
        what = json.dumps([arguments, learn and [self.learn_tokens, *learn], tasks])
        kept = self.cache / f"figures-{self._digest(what)}"
        if not kept.exists():
            kept.write_text(json.dumps(self._measure(arguments, learn, tasks)))
        return json.loads(kept.read_text())

    def _measure(self, arguments, learn, tasks):
        with tempfile.TemporaryDirectory(dir=self.cache) as out:
            out = Path(out)
            results, side_bytes = self._through_codec(self.documents, out, arguments, learn)
            figures = self.score(out)
            if tasks:
                self._through_codec(self.tasks, out, arguments, learn)
                figures |= self.score_tasks(out)
        sizes = [sum(r[key] for r in results) for key in ("bytes_16bit", "bytes")]
        figures |= {"ratio": sizes[0] / sizes[1], "side_bytes": side_bytes,
                    "documents": [self.documents.shape(name)["domain"] for name in self.names],
                    "ratio_each": [round(r["bytes_16bit"] / r["bytes"], 3) for r in results],
                    "error": max(r["error"] for r in results)}
        for part in "kv":
            nmse = [r[f"nmse_{part}"] for r in results]
            figures[f"e_{part}"] = float(numpy.sqrt(numpy.mean(nmse)))
        return figures

    def score(self, folder):
        """How the documents' continuations change with the keys and values in `folder`."""
        difference = Difference()
        for name in self.names:
            shape = self.documents.shape(name)
            self.model.put(*load(folder, shape))
            difference.add(numpy.load(self.cache / f"{name}.npy"),
                           self.model.score(shape["following"][:SCORED], PREFIX),
                           shape["following"][1:])
        return difference.figures()

    def score_tasks(self, folder):
        """Task kind -> share of right answers, and mean probability of the right one."""
        right, probability = {}, {}
        for name in self.tasks.names():
            shape = self.tasks.shape(name)
            self.model.put(*load(folder, shape))
            kind = name.split("-")[0]
            for ask, answer in shape["questions"]:
                logits = self.model.score(ask + answer[:-1], shape["tokens"])[len(ask) - 1:]
                at = numpy.arange(len(answer))
                right.setdefault(kind, []).append((logits.argmax(axis=1) == answer).all())
                probability.setdefault(kind, []).append(
                    numpy.exp(log_probabilities(logits)[at, answer].sum()))
        return {kind: float(numpy.mean(x)) for kind, x in right.items()} | {
            f"{kind}_p": float(numpy.mean(x)) for kind, x in probability.items()}
