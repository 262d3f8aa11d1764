# SPDX-License-Identifier: Apache-2.0
"""What presets cost a real model: scripts/bench quality.

usage: scripts/bench quality [--json] [--only NAME[,NAME...]] [--no-tasks] [--learn N]
                             [--daemon] [--claims]

Five documents of five kinds, 2,048 tokens each, are computed exactly, go through a preset and come
back; the next 256 tokens are then scored against the exact cache. quality.NAME.X, NAME being a
preset, with its parameter where that isn't the default one:

  ratio         bytes at 16 bits over bytes of the frames, all counted but the side data of the model
  kl, kl_p99    divergence of the predictions in nats, mean and 99 % quantile over 1,280 positions
  top1          share of positions with the same likeliest token
  ppl           relative change of perplexity
  needle, sums  share of right answers: words found again, small sums
  FAMILY.ratio_at_kl_LIMIT   the ratio where KL crosses a limit, interpolated between points

With --daemon the documents go through a daemon of our own instead, in each lossy class:
quality.daemon.CLASS.X. With --claims, figures behind what docs/codecs.md says of two papers.

The first run computes the exact states (2 minutes) and keeps them in the cache folder (2 GB).
"""
import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from quality_measure import Bench, say

LIMITS = {"001": 0.001, "003": 0.003, "01": 0.01, "015": 0.015, "02": 0.02}


@dataclass
class Point:
    """One way to encode. targets: figure -> (sense, value), sense being "<=" or ">="."""
    name: str
    arguments: list
    learn: list | None = None
    targets: dict = field(default_factory=dict)


def turboquant(bits, name):
    return Point(name, ["--preset", f"turboquant:{bits}"])


def stepped(preset, name, step, learn):
    return Point(f"{name}-{step}", ["--preset", preset, "--step", step], learn)


def tucker(preset, name, ratio, block=1024):
    suffix = f"-b{block}" if block != 1024 else ""
    return Point(f"{name}-{ratio}{suffix}",
                 ["--preset", preset, "--ratio", ratio, "--layers", str(JOLT_LAYERS),
                  "--block", str(block)])


SINGLE = [
    Point("lossless", ["--preset", "lossless"], targets={"ratio": (">=", 1.5)}),
    Point("int8", ["--preset", "int8"]),
    Point("int4", ["--preset", "int4"]),
    Point("kivi4", ["--preset", "kivi4"]),
    Point("kivi2", ["--preset", "kivi2"]),
    Point("polar", ["--preset", "polar"]),
    Point("turboquant-4-qjl", ["--preset", "turboquant:4+qjl"]),
    Point("turboquant-4-means", ["--preset", "turboquant"], ["--no-predictors"],
          targets={"ratio": (">=", 3.6), "kl": ("<=", 0.0035)}),
]
JOLT_LAYERS = 0  # that share a decomposition: as the preset has it
FAMILY_TARGETS = {("klt", "003"): 4.4, ("deep", "003"): 6.5, ("deep", "01"): 9,
                  ("deep_steps", "003"): 7.8, ("deep_steps", "01"): 11,
                  ("deep_steps", "015"): 12.5}


def families(steps):
    """Family -> points, from the smallest loss on. steps: a file of step weights."""
    out = {
        "turboquant": [turboquant(b, f"turboquant-{b}" if b != "4" else "turboquant")
                       for b in ("8", "6", "5", "4", "3", "2")],
        "jolt": [tucker("jolt", "jolt", r) for r in ("2", "2.5", "3", "4")],
        "flashjolt": [tucker("flashjolt", "flashjolt", r) for r in ("2", "3", "4")],
        "jolt_plus": [tucker("jolt+", "jolt_plus", r) for r in ("2.5", "3", "4", "5", "6")],
        "jolt_b64": [tucker("jolt", "jolt", r, 64) for r in ("2", "3", "4")],
        "jolt_plus_b64": [tucker("jolt+", "jolt_plus", r, 64) for r in ("2.5", "3", "4")],
        "klt": [stepped("klt", "klt", c, ["--no-predictors"])
                for c in (".1", ".2", ".3", ".4", ".6")],
        "deep": [stepped("deep", "deep", c, []) for c in (".12", ".2", ".4", ".7", "1.0")],
        "deep_steps": [stepped("deep", "deep_steps", c, ["--steps", str(steps)])
                       for c in (".12", ".2", ".4", ".7", "1.0", "1.3")],
    }
    points = {point.name: point for family in out.values() for point in family}
    points["turboquant"].targets = {"ratio": (">=", 3.45), "kl": ("<=", 0.0035)}
    points["jolt-2"].targets = {"kl": ("<=", 0.0001)}
    points["jolt-3"].targets = {"kl": ("<=", 0.0025)}
    points["jolt_plus-3"].targets = {"kl": ("<=", 0.001)}
    return out


def crossing(points, limit):
    """The ratio at which a family's KL reaches the limit, between two measured points."""
    points = sorted((p["ratio"], p["kl"]) for p in points)
    for (r0, k0), (r1, k1) in zip(points, points[1:]):
        if k0 <= limit < k1:
            at = (math.log(limit) - math.log(k0)) / (math.log(k1) - math.log(k0))
            return math.exp(math.log(r0) + at * (math.log(r1) - math.log(r0)))
    return None


class Report:
    def __init__(self, as_json):
        self.as_json = as_json

    def figure(self, name, value, unit, target=None, **detail):
        sense, limit = target or (None, None)
        ok = None
        if value is not None:
            ok = target is None or (value <= limit if sense == "<=" else value >= limit)
        if self.as_json:
            value = None if value is None else float(f"{value:.6g}")
            print(json.dumps({"name": name, "value": value, "unit": unit, "target": limit,
                              "ok": ok, "detail": detail}), flush=True)
            return
        shown = "-" if value is None else f"{value:.4g}"
        verdict = "" if target is None else "ok" if ok else "MISSED"
        goal = "" if target is None else f"{sense} {limit:g}"
        more = ", ".join(f"{k}: {v}" for k, v in detail.items())
        print(f"{name:<34} {shown:>10} {unit:<6} {goal:<9} {verdict:<6} {more}", flush=True)


UNITS = {"ratio": "ratio", "kl": "nats", "kl_p99": "nats", "top1": "share", "ppl": "share",
         "needle": "share", "sums": "share"}


def report_point(report, point, figures):
    for figure, unit in UNITS.items():
        if figure not in figures:
            continue
        detail = {}
        if figure == "ratio":
            detail = {k: round(figures[k], 4) for k in ("e_k", "e_v", "error", "side_bytes")}
            detail["documents"] = dict(zip(figures["documents"], figures["ratio_each"]))
        elif figure == "kl":
            detail = {"documents": dict(zip(figures["documents"], figures["kl_each"]))}
        elif f"{figure}_p" in figures:
            detail = {"probability": round(figures[f"{figure}_p"], 3)}
        report.figure(f"quality.{point.name}.{figure}", figures[figure], unit,
                      point.targets.get(figure), **detail)


def report_family(report, family, measured):
    points = sorted([round(p["ratio"], 2), round(p["kl"], 5)] for p in measured)
    for limit, kl in LIMITS.items():
        target = FAMILY_TARGETS.get((family, limit))
        if limit == "015" and not target:
            continue
        report.figure(f"quality.{family}.ratio_at_kl_{limit}", crossing(measured, kl), "ratio",
                      target and (">=", target), points=points)


def run(bench, report, only, tasks):
    for floor, figures in bench.noise().items():
        report.figure(f"quality.noise.{floor}.kl", figures["kl"], "nats", top1=figures["top1"])
    exact = bench.score_tasks(bench.tasks.path) if tasks else {}
    for kind in ("needle", "sums"):
        if kind in exact:
            report.figure(f"quality.exact.{kind}", exact[kind], "share",
                          probability=round(exact[f"{kind}_p"], 3))
    singles = {point.name: [point] for point in SINGLE}
    for family, points in (singles | families(bench.step_table())).items():
        measured = []
        for point in points:
            if only and family not in only and point.name not in only:
                continue
            say(f"measuring {point.name}")
            try:
                measured.append(bench.measure(point.arguments, point.learn, tasks))
            except ValueError as error:
                say(str(error))
                continue
            report_point(report, point, measured[-1])
            if point.name == "lossless":
                report.figure("quality.lossless_f16.ratio", bench.ratio_f16(point.arguments),
                              "ratio", (">=", 1.12))
        if len(measured) > 1:
            report_family(report, family, measured)


def main():
    args = argparse.ArgumentParser(prog="scripts/bench quality", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--json", action="store_true")
    args.add_argument("--only", default="", help="presets or families")
    args.add_argument("--no-tasks", action="store_true", help="leave out needle and sums")
    args.add_argument("--learn", type=int, default=1024, metavar="N",
                      help="learn from the first N tokens of each text (at most 1024)")
    args.add_argument("--daemon", action="store_true", help="measure classes through the daemon")
    args.add_argument("--claims", action="store_true", help="what papers claim")
    args.add_argument("--engine", type=Path, required=True, help=argparse.SUPPRESS)
    args.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    args.add_argument("--tool", type=Path, required=True, help=argparse.SUPPRESS)
    args = args.parse_args()
    bench = Bench(args.engine, args.cache, args.tool, args.learn)
    if args.daemon:
        import quality_daemon
        quality_daemon.measure(bench, Report(args.json), args.tool.parent.parent)
        return
    if args.claims:
        import quality_claims
        quality_claims.measure(bench, Report(args.json))
        return
    run(bench, Report(args.json), set(filter(None, args.only.split(","))), not args.no_tasks)


if __name__ == "__main__":
    sys.exit(main())
