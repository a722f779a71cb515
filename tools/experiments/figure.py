"""Curves of runs as SVG: a panel for each figure, two in a row, a line for each kind of run, the mean over its seeds."""
from html import escape

from paired import mean

COLOURS = ["#222222", "#d1495b", "#00798c", "#edae49", "#66a182", "#8d6a9f", "#2e4057", "#b5651d"]
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 340, 230, 52, 26, 12, 36


def ticks(low, high):
    """Some five round numbers of [low, high]."""
    step = 10.0 ** -6
    factors = (2, 2.5, 2)
    i = 0
    while (high - low) / step > 5:
        step *= factors[i % 3]
        i += 1
    first = int(low / step)
    return [k * step for k in range(first, int(high / step) + 1) if low <= k * step <= high]


def points(runs, x, y):
    """Means over the seeds at each place at which all of them have a value."""
    curves = [run["curve"] for run in runs]
    found = []
    for i in range(min(len(c[x]) for c in curves)):
        values = [(c[x][i], c[y][i] if y in c else None) for c in curves]
        if all(v is not None for _, v in values):
            found.append((mean([a for a, _ in values]), mean([b for _, b in values])))
    return found


def panel(left, above, lines, x_title, y_title):
    xs, ys = [p[0] for _, line in lines for p in line], [p[1] for _, line in lines for p in line]
    low, high = min(0.0, min(ys)), max(ys) * 1.04
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x, y):
        return left + LEFT + width * x / max(xs), above + TOP + height * (1 - (y - low) / (high - low))

    out = [f'<text x="{left + LEFT}" y="{above + 16}" font-weight="bold">{escape(y_title)}</text>']
    for tick in ticks(low, high):
        x, y = at(0, tick)
        out.append(f'<path d="M{x:.1f} {y:.1f}h{width}" stroke="#dddddd"/><text x="{x - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(0, max(xs)):
        x, y = at(tick, low)
        out.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<text x="{left + LEFT + width / 2:.1f}" y="{above + HEIGHT - 5}" text-anchor="middle">{escape(x_title)}</text>')
    for colour, line in lines:
        path = " ".join("%.1f,%.1f" % at(*p) for p in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return out


def figure(curves, x, ys, title):
    """`curves`: (label, runs of its seeds); title(column) -> (text, scale)."""
    width, below = WIDTH * min(2, len(ys)), HEIGHT * ((len(ys) + 1) // 2)
    height = below + 18 * ((len(curves) + 2) // 3) + 8
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for i, y in enumerate(ys):
        (x_title, x_scale), (y_title, y_scale) = title(x), title(y)
        lines = [(COLOURS[k % len(COLOURS)], [(a * x_scale, b * y_scale) for a, b in points(runs, x, y)])
                 for k, (_, runs) in enumerate(curves)]
        out += panel(WIDTH * (i % 2), HEIGHT * (i // 2), [(colour, line) for colour, line in lines if line], x_title, y_title)
    for k, (label, _) in enumerate(curves):
        left, top = 20 + (k % 3) * (width - 20) / 3, below + 14 + 18 * (k // 3)
        out.append(f'<path d="M{left:.1f} {top - 4}h18" stroke="{COLOURS[k % len(COLOURS)]}" stroke-width="3"/>'
                   f'<text x="{left + 23:.1f}" y="{top}">{escape(label)}</text>')
    return "\n".join(out + ["</svg>", ""])
