# SPDX-License-Identifier: Apache-2.0
"""Draws ratio against divergence as SVG: a line for each family of presets, a dot for each preset
without a parameter. Both axes are logarithmic."""
import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 540
LEFT, RIGHT, TOP, BOTTOM = 90, 190, 20, 60
X_RANGE, Y_RANGE = (1.4, 16), (5e-6, 0.2)
X_TICKS, Y_TICKS = (1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15), (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


def _x(ratio):
    low, high = map(math.log, X_RANGE)
    return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(kl):
    low, high = map(math.log, Y_RANGE)
    return HEIGHT - BOTTOM - (math.log(kl) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _text(x, y, text, anchor="start", size=13, color="#222", more=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{color}" {more}>{escape(text)}</text>')


def _line(x0, y0, x1, y1, color, more=""):
    return (f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{color}" '
            f"{more}/>")


def _axes():
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for tick in X_TICKS:
        yield _line(_x(tick), TOP, _x(tick), bottom, "#e4e4e4")
        yield _text(_x(tick), bottom + 20, f"{tick:g}x", "middle")
    for tick in Y_TICKS:
        yield _line(LEFT, _y(tick), right, _y(tick), "#e4e4e4")
        yield _text(LEFT - 8, _y(tick) + 4, f"{tick:g}", "end")
    yield _line(LEFT, bottom, right, bottom, "#222")
    yield _line(LEFT, TOP, LEFT, bottom, "#222")
    yield _text((LEFT + right) / 2, HEIGHT - 12, "ratio, net, against 16 bits", "middle", 14)
    yield _text(18, (TOP + bottom) / 2, "divergence of the predictions (nats)", "middle", 14,
                more=f'transform="rotate(-90 18 {(TOP + bottom) / 2:.1f})"')


def picture(families, dots, noise):
    """families: name -> [(ratio, kl)]; dots: the same of single presets; noise: KL of the floor."""
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *_axes()]
    if noise:
        out += [_line(LEFT, _y(noise), WIDTH - RIGHT, _y(noise), "#999", 'stroke-dasharray="5 4"'),
                _text(WIDTH - RIGHT + 8, _y(noise) + 4, "bf16 instead of fp32", color="#777")]
    legend = WIDTH - RIGHT + 16
    for i, (name, points) in enumerate(families.items()):
        color = COLORS[i % len(COLORS)]
        at = [(_x(r), _y(kl)) for r, kl in sorted(points) if kl >= Y_RANGE[0]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in at]
        y = TOP + 16 + 20 * i
        out += [_line(legend, y - 4, legend + 22, y - 4, color, 'stroke-width="3"'),
                _text(legend + 30, y, name)]
    for name, (ratio, kl) in dots.items():
        if kl >= Y_RANGE[0]:
            out.append(f'<circle cx="{_x(ratio):.1f}" cy="{_y(kl):.1f}" r="3.5" fill="#222"/>')
            out.append(_text(_x(ratio) - 7, _y(kl) + 4, name, "end", 12))
    return "\n".join([*out, "</svg>"]) + "\n"
