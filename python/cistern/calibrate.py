# SPDX-License-Identifier: Apache-2.0
"""Measures how sensitive a model is to noise in the keys and values of each layer, and makes a table of
quantizer steps of it: layers that don't mind get larger steps. Needs llama-cpp-python and numpy.

A text's cache is computed exactly; then, one layer's keys or values after the other, white noise is
added that is `--noise` times as strong as the tensor's deviation from its channels' means, and the
divergence of the following tokens' predictions is measured. Sensitivity is that divergence (nats) per
noise variance; a step is sensitivity^-1/4, the geometric mean of all being 1. That exponent, and the
method, were found by measurement: at equal bytes it halves the divergence of the preset `deep`.

With --class, the table goes to the daemon, for the space of that class that workers with this model file
and the engine's default context parameters use. The daemon must have learned tables for it already.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._llama_engine import Predictor

SINKS = 4  # tokens that lossy presets keep as they are
FLOOR = 0.02  # of the mean sensitivity: steps don't grow beyond what was measurable
SMALL = 1e-3  # noise that only shows how far the engine's own rounding spreads


@dataclass
class Table:
    """Per layer: sensitivities and steps of keys and values."""

    model: str
    sensitivity: dict[str, list[float]]

    def steps(self) -> dict[str, list[float]]:
        """Step weights; their geometric mean is 1."""
        import numpy

        s = numpy.array([self.sensitivity["K"], self.sensitivity["V"]])
        if not (s >= 0).all() or not s.any():
            raise ValueError("nothing was measurable; take stronger noise")
        w = numpy.maximum(s, FLOOR * s.mean()) ** -0.25
        w /= numpy.exp(numpy.log(w).mean())
        return {"K": w[0].round(4).tolist(), "V": w[1].round(4).tolist()}

    def json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "unit": "KL in nats per unit of relative noise variance in one layer, sensitivities "
            f"floored at {FLOOR:.0%} of their mean for the weights",
            "sensitivity": {k: [float(f"{x:.4g}") for x in v] for k, v in self.sensitivity.items()},
            "step_weight": self.steps(),
        }


def _measure_text(
    predictor: Predictor, tokens: Sequence[int], prefix: int, noise: float, say: Any
) -> Any:
    """Sensitivities [K, V][layer] on one text."""
    import numpy

    from ._llama_engine import divergences

    state = predictor.prefill(tokens[:prefix])
    following = tokens[prefix:]
    exact = predictor.score(following, prefix)
    out = numpy.zeros((2, state.layers))
    rng = numpy.random.default_rng(1)

    def disturbed(layer: int, value: bool, strength: float) -> float:
        x = state.get(layer, value)
        deviation = numpy.sqrt(x[SINKS:].var(axis=0).mean())
        y = x.copy()
        y[SINKS:] += rng.normal(scale=strength * deviation, size=y[SINKS:].shape)
        state.set(layer, value, y)
        predictor.load(state)
        state.set(layer, value, x)
        return float(divergences(exact, predictor.score(following, prefix)).mean())

    floor = disturbed(state.layers // 2, False, SMALL)
    for layer in range(state.layers):
        for value in (False, True):
            kl = disturbed(layer, value, noise)
            out[int(value), layer] = max(0.0, kl - floor) / noise**2
        say(f"layer {layer + 1} of {state.layers}")
    return out


def calibrate(
    predictor: Predictor,
    texts: Sequence[Sequence[int]],
    *,
    model: str = "",
    prefix: int = 512,
    noise: float = 0.3,
    say: Any = lambda text: None,
) -> Table:
    """Measures on texts of more than `prefix` tokens; what follows the prefix is scored."""
    mean = sum(_measure_text(predictor, tokens, prefix, noise, say) for tokens in texts)
    mean /= len(texts)
    return Table(model, {"K": mean[0].tolist(), "V": mean[1].tolist()})


def _default_texts() -> list[str]:
    """English prose about a language, and a program: both come with Python."""
    import inspect
    import tokenize

    from pydoc_data import topics

    return ["\n\n".join(topics.topics.values()), inspect.getsource(tokenize)]


def _arguments() -> argparse.Namespace:
    args = argparse.ArgumentParser(prog="python -m cistern.calibrate", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    args.add_argument("model", type=Path, help="a GGUF file")
    args.add_argument("--text", type=Path, action="append", default=[],
                      help="a text to measure on (may be given more than once)")  # fmt: skip
    args.add_argument("--out", type=Path, help="write the table here (default: standard output)")
    args.add_argument("--prefix", type=int, default=512, help="tokens whose cache is disturbed")
    args.add_argument("--scored", type=int, default=128, help="tokens that are scored after them")
    args.add_argument("--class", dest="quality", action="append", default=[],
                      choices=["near-lossless", "small-loss", "cold"],
                      help="give the table to the daemon (may be given more than once)")  # fmt: skip
    args.add_argument("--socket", help="the daemon's")
    args.add_argument("--noise", type=float, default=0.3, help="its deviation over the tensor's")
    return args.parse_args()


def upload(predictor: Predictor, args: argparse.Namespace, table: Table) -> None:
    """Gives the table to the spaces of the classes asked for."""
    from . import Client, Quality
    from .llama import Session

    steps = table.steps()
    with Client(args.socket, name="calibrate") as client:
        for name in args.quality:
            quality = Quality[name.upper().replace("-", "_")]
            with Session(
                client, predictor.ctx, args.model, library=predictor.library, quality=quality
            ) as session:
                version = session.put_step_weights(steps["K"], steps["V"])
            print(f"{name}: version {version}", file=sys.stderr)


def main() -> int:
    args = _arguments()
    from . import CisternError
    from ._llama_engine import Predictor

    predictor = Predictor(args.model, args.prefix + args.scored)
    length = args.prefix + args.scored
    texts = [path.read_text(errors="replace") for path in args.text] or _default_texts()
    tokens = [predictor.tokenize(text[: 16 * length])[:length] for text in texts]
    if min(map(len, tokens)) <= args.prefix:
        print("calibrate: a text is too short", file=sys.stderr)
        return 1
    table = calibrate(
        predictor,
        tokens,
        model=args.model.name,
        prefix=args.prefix,
        noise=args.noise,
        say=lambda text: print(f"==> {text}", file=sys.stderr, flush=True),
    )
    out = json.dumps(table.json(), indent=1) + "\n"
    if args.out:
        args.out.write_text(out)
    else:
        sys.stdout.write(out)
    try:
        upload(predictor, args, table)
    except CisternError as error:
        print(f"calibrate: the daemon didn't take the table: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
