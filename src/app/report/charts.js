R"js(
"use strict";
// Charts of a report, drawn from the JSON in the page (src/app/report/data.h); page.js says which.  What comes
// from runs reaches the page as text nodes only.
window.onerror = (message) => document.documentElement.setAttribute("data-error", message);

// ---- elements ----------------------------------------------------------------------------------------------------
const svgTags = new Set(["svg", "path", "line", "text", "circle"]);
function make(tag, attributes, ...children) {
  const e =
    svgTags.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (name.startsWith("on"))
      e.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean" && !name.startsWith("aria-"))
      e.toggleAttribute(name, value);
    else if (value != null)
      e.setAttribute(name, value);
  e.append(...children.filter((c) => c != null));
  return e;
}
const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const groupColor = (g) => `--c: var(--g${g % 8})`;
const stackColor = (i) => `--c: var(--s${Math.min(i, 5)})`;

// ---- numbers -----------------------------------------------------------------------------------------------------
const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const finite = (v) => typeof v === "number" && isFinite(v);
function scaled(v, unit) {
  const names = ["", "k", "M", "G", "T", "P", "E"];
  let i = 0;
  while (Math.abs(v) >= 999.5 && i < 6) v /= 1000, i++;
  const digits = i === 0 && Number.isInteger(v) ? 0 : Math.abs(v) < 10 ? 2 : Math.abs(v) < 100 ? 1 : 0;
  const space = unit || names[i] ? "\u00a0" : "";
  return v.toFixed(digits) + space + names[i] + unit;
}
function seconds(v) {
  if (Math.abs(v) < 0.9995) return v === 0 ? "0\u00a0s" : `${(v * 1000).toPrecision(3)}\u00a0ms`;
  if (v < 60) return `${v.toFixed(v < 10 ? 2 : 1)}\u00a0s`;
  const s = Math.round(v);
  if (s < 3600) return `${Math.floor(s / 60)}\u00a0min ${String(s % 60).padStart(2, "0")}\u00a0s`;
  return `${Math.floor(s / 3600)}\u00a0h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}\u00a0min`;
}
function plain(v) {
  const a = Math.abs(v);
  if (Number.isInteger(v) && a < 1e5) return String(v).replace("-", "\u2212");
  if (a >= 1e5 || a < 1e-4) return v.toExponential(2).replace("-", "\u2212").replace("e+", "e");
  return (a < 0.01 ? String(+v.toPrecision(3))
                   : v.toFixed(
                       a >= 1000    ? 0
                         : a >= 100 ? 1
                         : a >= 10  ? 2
                                    : 3))
    .replace("-", "\u2212");
}
const units = {
  plain,
  seconds,
  count: (v) => scaled(v, ""),
  bytes: (v) => scaled(v, "B"),
  flop: (v) => scaled(v, "FLOP"),
};
// At most `count` round numbers in [low, high].
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) list.push(i * step);
  return {list, step};
}
// Ticks have the same number of decimals: as many as their distance needs.
function tickText(v, step, unit) {
  if (Math.abs(v) < step * 1e-9) return "0";
  if (unit === "seconds" && step < 0.9995) return `${+ (v * 1000).toPrecision(6)}\u00a0ms`;
  if (unit === "seconds") return step >= 60 ? `${+ (v / 60).toPrecision(4)}\u00a0min` : `${+ v.toPrecision(6)}\u00a0s`;
  if (unit === "plain" && step < 1000) {
    if (step < 1e-4) return v.toExponential(1).replace("-", "\u2212").replace("e+", "e");
    let decimals = 0;
    while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals++;
    return v.toFixed(decimals).replace("-", "\u2212");
  }
  const names = ["", "k", "M", "G", "T", "P", "E"];
  const i = Math.min(6, Math.max(0, Math.floor(Math.log10(Math.abs(v) * 1.0001) / 3)));
  return `${+ (v / 1000 ** i).toPrecision(4)}${i ? "\u00a0" + names[i] : ""}`;
}

// ---- runs --------------------------------------------------------------------------------------------------------
const data = JSON.parse(document.getElementById("data").textContent);
const {runs, groups} = data;
const column = (run, metric) => run.series[metric];
const cumulative = (values) => {
  let sum = 0;
  return values.map((v) => (sum += finite(v) ? v : 0));
};
// The sum over metrics, a value where one of them has one; undefined where the run has none of them.
function added(run, metrics) {
  const columns = metrics.map((m) => column(run, m)).filter(Boolean);
  if (!columns.length) return undefined;
  return run.steps.map((_, i) => columns.reduce((s, c) => (finite(c[i]) ? (s ?? 0) + c[i] : s), null));
}
const withPrefix = (run, prefix) => Object.keys(run.series).filter((m) => m.startsWith(prefix));
const metricNames = [...new Set(runs.flatMap((r) => Object.keys(r.series)))].sort();

// What can stand on the horizontal axis.
const axes = {
  step: {label: "step", unit: "count", of: (r) => r.steps},
  tokens: {label: "tokens generated", unit: "count", of: (r) => total(r, ["tokens/generated", "rpo/init_tokens"])},
  flops: {label: "FLOPs", unit: "count", of: (r) => total(r, withPrefix(r, "flops/"))},
  seconds: {label: "seconds", unit: "seconds", of: (r) => total(r, ["timing_s/step", "timing_s/testing"])},
};
function total(run, metrics) {
  const sum = added(run, metrics);
  return sum && cumulative(sum);
}
const axisNames = Object.keys(axes).filter((a) => runs.every((r) => axes[a].of(r)));
const state = {
  axis: "step",
  smooth: true,
  cursor: null
};

// A running mean over about 1/30 of the points; short curves stay as they are.
function runningMean(values) {
  const half = Math.floor(values.length / 60);
  if (half === 0) return values;
  const sums = [0, ...cumulative(values)];
  return values.map((_, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

// A group's curve: at each step the mean over its runs, the lowest and the highest, and the mean without smoothing.
function curve(group, values, smooth) {
  const at = new Map();
  for (const i of group.runs) {
    const run = runs[i], y = values(run), x = axes[state.axis].of(run);
    if (!y) continue;
    const index = run.steps.map((_, k) => k).filter((k) => finite(y[k]));
    const raw = index.map((k) => y[k]), drawn = smooth ? runningMean(raw) : raw;
    index.forEach((k, n) => {
      const step = run.steps[k];
      if (!at.has(step)) at.set(step, {step, x: [], y: [], raw: []});
      const p = at.get(step);
      p.x.push(x[k]), p.y.push(drawn[n]), p.raw.push(raw[n]);
    });
  }
  const mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
  return [...at.values()].sort((a, b) => a.step - b.step).map((p) => ({
                                                                step: p.step,
                                                                x: mean(p.x),
                                                                y: mean(p.y),
                                                                low: Math.min(...p.y),
                                                                high: Math.max(...p.y),
                                                                raw: mean(p.raw),
                                                                runs: p.y.length,
                                                              }));
}

// ---- charts ------------------------------------------------------------------------------------------------------
const height = 168, bottom = 20, top_ = 8, right = 10;
const charts = [];  // {draw, point}: all are drawn again when the axis or the width changes
const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x)
      low = middle;
    else
      high = middle;
  }
  return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? points[low] : points[high];
};
const path = (points, x, y) => points.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p).toFixed(1)}`).join("");

// Frame, gridlines and labels for values in [low, high]; returns the scales.
function frame(svg, width, low, high, unit) {
  const marks = low === high ? {list: [low], step: Math.abs(low) || 1} : ticks(low, high, 5);
  const labels = marks.list.map((v) => tickText(v, marks.step, unit));
  const left = 10 + 6.3 * Math.max(...labels.map((t) => t.length));
  const end = Math.max(...groups.flatMap((g) => g.runs.map((i) => axes[state.axis].of(runs[i]).at(-1)))) || 1;
  const x = (v) => left + (v / end) * (width - left - right);
  const y = (v) => top_ + (1 - (high > low ? (v - low) / (high - low) : 0.5)) * (height - top_ - bottom);
  marks.list.forEach((v, i) => {
    svg.append(make("line", {class: "rule", x1: left, x2: width - right, y1: y(v), y2: y(v)}));
    svg.append(make("text", {x: left - 6, y: y(v) + 3.8, "text-anchor": "end"}, labels[i]));
  });
  svg.append(make("line", {class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
  const across = ticks(0, end, Math.max(2, Math.min(5, Math.floor((width - left) / 62))));
  for (const v of across.list)
    svg.append(make(
      "text", {x: x(v), y: height - 5, "text-anchor": x(v) > width - right - 14 ? "end" : "middle"},
      tickText(v, across.step, axes[state.axis].unit)));
  return {x, y, inverse: (px) => ((px - left) / (width - left - right)) * end};
}
// A card with a title, a line of values and the drawing; `draw(svg, width)` returns {inverse, show}.
function card(title, what, draw) {
  const when = make("small"), readout = make("div", {class: "readout"});
  const svg = make("svg", {role: "img", "aria-label": title});
  const node = make(
    "figure", {class: "card"}, make("header", {}, make("h3", {}, title), when),
    what ? make("p", {class: "what"}, what) : null, readout, svg);
  let drawn = null;
  const chart = {
    node,
    draw() {
      const width = Math.round(node.clientWidth - 28) || 320;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      drawn = draw(svg, width);
      chart.point();
    },
    point() {  // the values at the cursor, or the last ones
      const {text, parts} = drawn.show(state.cursor);
      when.textContent = text;
      readout.replaceChildren(...parts);
    },
  };
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    state.cursor = drawn.inverse(((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width);
    charts.forEach((c) => c.point());
  };
  const leave = () => {
    state.cursor = null;
    charts.forEach((c) => c.point());
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
  charts.push(chart);
  return node;
}
const whenText = (cursor, points) => {
  if (cursor === null) return "end";
  const p = nearest(points, cursor);
  return `step ${p.step}`;
};

// One line a group. spec: title, what, unit, values(run) -> column, zero (the axis starts at 0), sum (smooth already)
function lineChart(spec) {
  const shown = groups.map((g, i) => ({group: g, index: i}))
                  .filter(({group}) => group.runs.some((r) => spec.values(runs[r])?.some(finite)));
  if (!shown.length) return null;
  const unit = spec.unit || "plain";
  return card(spec.title, spec.what, (svg, width) => {
    const curves = shown.map(({group, index}) => ({
                               index,
                               many: group.runs.length > 1,
                               points: curve(group, spec.values, state.smooth && !spec.sum),
                             }));
    const smoothed = state.smooth && !spec.sum && curves.some((c) => c.points.length >= 60);
    const all = curves.flatMap((c) => c.points);
    let low = lowest(all.map((p) => (smoothed ? Math.min(p.low, p.raw) : p.low)));
    let high = highest(all.map((p) => (smoothed ? Math.max(p.high, p.raw) : p.high)));
    if (low < high && low >= 0 && (low < 0.6 * high || spec.zero)) low = 0;
    const pad = (high - low) * 0.04, s = frame(svg, width, low === 0 ? 0 : low - pad, high + pad, unit);
    if (low === high)
      svg.append(
        make("text", {x: width / 2, y: s.y(low) - 12, "text-anchor": "middle"}, `${units[unit](low)} at every step`));
    for (const {index, many, points} of curves) {
      const style = groupColor(index), x = (p) => s.x(p.x);
      if (many && points.some((p) => p.high > p.low))
        svg.append(make("path", {
          class: "band",
          style,
          d: path(points, x, (p) => s.y(p.high)) + path([...points].reverse(), x, (p) => s.y(p.low)).replace("M", "L") +
            "Z"
        }));
      if (!many && smoothed) svg.append(make("path", {class: "raw", style, d: path(points, x, (p) => s.y(p.raw))}));
    }
    for (const {index, points} of curves) {
      const style = groupColor(index);
      svg.append(make("path", {class: `line g${index}`, style, d: path(points, (p) => s.x(p.x), (p) => s.y(p.y))}));
      if (points.length <= 12)
        for (const p of points) svg.append(make("circle", {class: "mark", style, cx: s.x(p.x), cy: s.y(p.y), r: 3}));
    }
    const marks = curves.map(({index}) => make("circle", {class: "mark", style: groupColor(index), r: 4}));
    const cursor = make("line", {class: "cursor", y1: top_, y2: height - bottom});
    svg.append(cursor, ...marks);
    return {
      inverse: s.inverse,
      show(at) {
        const parts = curves.map(({index, points}, i) => {
          const p = at === null ? points.at(-1) : nearest(points, at);
          marks[i].setAttribute("cx", s.x(p.x)), marks[i].setAttribute("cy", s.y(p.y));
          marks[i].style.display = at === null ? "none" : "";
          const range = p.high > p.low ? `${units[unit](p.low)} to ${units[unit](p.high)}` : "";
          return make(
            "span", {title: groups[index].name}, make("span", {class: "dot", style: groupColor(index)}),
            units[unit](p.y), range && at !== null ? make("small", {}, ` ${range}`) : null);
        });
        cursor.style.display = at === null ? "none" : "";
        if (at !== null)
          cursor.setAttribute("x1", s.x(nearest(curves[0].points, at).x)),
            cursor.setAttribute("x2", cursor.getAttribute("x1"));
        return {text: whenText(at, curves[0].points), parts};
      },
    };
  });
}

// Parts of a whole, one chart a group on a common scale. parts(run): [{name, values}], the same names for every run.
function stackCharts(spec) {
  const bins = 64;
  const stacked = () => groups.map((g, index) => {
    const points = new Map();  // bin -> sums
    for (const i of g.runs) {
      const run = runs[i], x = axes[state.axis].of(run), end = highest(x) || 1;
      const parts = spec.parts(run);
      run.steps.forEach((step, k) => {
        const v = parts.map((p) => (finite(p.values?.[k]) ? p.values[k] : 0));
        if (v.every((a) => a === 0)) return;
        const bin = run.steps.length <= bins ? step : Math.min(bins - 1, Math.floor((x[k] / end) * bins));
        const b = points.get(bin) || {n: 0, x: 0, step: 0, v: v.map(() => 0)};
        b.n++, b.x += x[k], b.step += step, v.forEach((a, j) => (b.v[j] += a));
        points.set(bin, b);
      });
    }
    const list =
      [...points.values()].map((b) => ({x: b.x / b.n, step: Math.round(b.step / b.n), v: b.v.map((a) => a / b.n)}));
    return {group: g, index, points: list.sort((a, b) => a.x - b.x)};
  });
  const first = stacked();
  const names = spec.parts(runs[0]).map((p) => p.name);
  const used = names.map((_, j) => first.some((c) => c.points.some((p) => p.v[j] > 0)));
  if (!used.some(Boolean)) return [];
  return first.filter((c) => c.points.length)
    .map(({group,
           index}) => card(groups.length > 1 ? `${spec.title}: ${group.name}` : spec.title, spec.what, (svg, width) => {
           const every = stacked();
           const high = highest(every.flatMap((c) => c.points.map((p) => p.v.reduce((a, b) => a + b, 0))));
           const points = every[index].points, s = frame(svg, width, 0, high * 1.04, spec.unit);
           const below = points.map(() => 0);
           names.forEach((_, j) => {
             if (!used[j]) return;
             const line = points.map((p, k) => ({x: p.x, low: below[k], high: (below[k] += p.v[j])}));
             svg.append(make("path", {
               class: "area",
               style: stackColor(j),
               d: path(line, (p) => s.x(p.x), (p) => s.y(p.high)) +
                 path(line.reverse(), (p) => s.x(p.x), (p) => s.y(p.low)).replace("M", "L") + "Z"
             }));
           });
           const cursor = make("line", {class: "cursor", y1: top_, y2: height - bottom});
           svg.append(cursor);
           return {
             inverse: s.inverse,
             show(at) {
               const p = at === null ? spec.rest(points) : nearest(points, at);
               cursor.style.display = at === null ? "none" : "";
               cursor.setAttribute("x1", s.x(p.x)), cursor.setAttribute("x2", s.x(p.x));
               const parts = names.flatMap(
                 (name, j) => (!used[j] ? [] : [make(
                                                 "span", {}, make("span", {class: "box", style: stackColor(j)}),
                                                 `${name} ${units[spec.unit](p.v[j])}`)]));
               return {text: at === null ? spec.restText : whenText(at, points), parts};
             },
           };
         }));
}
)js"
