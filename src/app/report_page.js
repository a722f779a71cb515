R"js("use strict";
// Draws a report from the JSON in the page (src/app/report_data.h). Texts of runs reach the page as text nodes only.
window.onerror = (message) => document.documentElement.setAttribute("data-error", message);

// ---- elements ----------------------------------------------------------------------------------------------------
const svgTags = new Set(["svg", "path", "line", "text", "circle"]);
function make(tag, attributes, ...children) {
  const e = svgTags.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean" && !name.startsWith("aria-")) e.toggleAttribute(name, value);
    else if (value != null) e.setAttribute(name, value);
  e.append(...children.filter((c) => c != null));
  return e;
}
const groupColor = (g) => `--c: var(--g${g % 8})`;
const stackColor = (i) => `--c: var(--s${Math.min(i, 5)})`;

// ---- numbers -----------------------------------------------------------------------------------------------------
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
  if (v === 0) return "0";
  if (a >= 1e5 || a < 1e-4) return v.toExponential(2).replace("-", "\u2212").replace("e+", "e");
  return (a < 0.01 ? String(+v.toPrecision(3)) : v.toFixed(a >= 1000 ? 0 : a >= 100 ? 1 : a >= 10 ? 2 : 3)).replace("-", "\u2212");
}
const units = {
  plain, seconds,
  count: (v) => scaled(v, ""), bytes: (v) => scaled(v, "B"), flop: (v) => scaled(v, "FLOP"),
};
// At most `count` round numbers in [low, high].
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) list.push(i * step);
  return { list, step };
}
// Ticks have the same number of decimals: as many as their distance needs.
function tickText(v, step, unit) {
  if (Math.abs(v) < step * 1e-9) return "0";
  if (unit === "seconds" && step < 0.9995) return `${+(v * 1000).toPrecision(6)}\u00a0ms`;
  if (unit === "seconds") return step >= 60 ? `${+(v / 60).toPrecision(4)}\u00a0min` : `${+v.toPrecision(6)}\u00a0s`;
  if (unit === "plain" && step < 1000) {
    if (step < 1e-4) return v.toExponential(1).replace("-", "\u2212").replace("e+", "e");
    let decimals = 0;
    while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals++;
    return v.toFixed(decimals).replace("-", "\u2212");
  }
  const names = ["", "k", "M", "G", "T", "P", "E"];
  const i = Math.min(6, Math.max(0, Math.floor(Math.log10(Math.abs(v) * 1.0001) / 3)));
  return `${+(v / 1000 ** i).toPrecision(4)}${i ? "\u00a0" + names[i] : ""}`;
}

// ---- runs --------------------------------------------------------------------------------------------------------
const data = JSON.parse(document.getElementById("data").textContent);
const { runs, groups } = data;
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
  step: { label: "step", unit: "count", of: (r) => r.steps },
  tokens: { label: "tokens generated", unit: "count", of: (r) => total(r, ["tokens/generated"]) },
  flops: { label: "FLOPs", unit: "count", of: (r) => total(r, withPrefix(r, "flops/")) },
  seconds: { label: "seconds", unit: "seconds", of: (r) => total(r, ["timing_s/step", "timing_s/testing"]) },
};
function total(run, metrics) {
  const sum = added(run, metrics);
  return sum && cumulative(sum);
}
const axisNames = Object.keys(axes).filter((a) => runs.every((r) => axes[a].of(r)));
const state = { axis: "step", smooth: true, cursor: null };

// A running mean over about 1/30 of the points; short curves stay as they are.
function runningMean(values) {
  const half = Math.floor(values.length / 60);
  if (half === 0) return values;
  return values.map((_, i) => {
    const window = values.slice(Math.max(0, i - half), i + half + 1);
    return window.reduce((a, b) => a + b, 0) / window.length;
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
      if (!at.has(step)) at.set(step, { step, x: [], y: [], raw: [] });
      const p = at.get(step);
      p.x.push(x[k]), p.y.push(drawn[n]), p.raw.push(raw[n]);
    });
  }
  const mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
  return [...at.values()].sort((a, b) => a.step - b.step).map((p) => ({
    step: p.step, x: mean(p.x), y: mean(p.y), low: Math.min(...p.y), high: Math.max(...p.y), raw: mean(p.raw), runs: p.y.length,
  }));
}

// ---- charts ------------------------------------------------------------------------------------------------------
const height = 168, bottom = 20, top_ = 8, right = 10;
const charts = [];  // {draw, point}: all are drawn again when the axis or the width changes
const nearest = (points, x) => {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x < x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? points[low] : points[high];
};
const path = (points, x, y) => points.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p).toFixed(1)}`).join("");

// Frame, gridlines and labels for values in [low, high]; returns the scales.
function frame(svg, width, low, high, unit) {
  const marks = low === high ? { list: [low], step: Math.abs(low) || 1 } : ticks(low, high, 5);
  const labels = marks.list.map((v) => tickText(v, marks.step, unit));
  const left = 10 + 6.3 * Math.max(...labels.map((t) => t.length));
  const end = Math.max(...groups.flatMap((g) => g.runs.map((i) => axes[state.axis].of(runs[i]).at(-1))), 1e-12);
  const x = (v) => left + (v / end) * (width - left - right);
  const y = (v) => top_ + (1 - (high > low ? (v - low) / (high - low) : 0.5)) * (height - top_ - bottom);
  marks.list.forEach((v, i) => {
    svg.append(make("line", { class: "rule", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    svg.append(make("text", { x: left - 6, y: y(v) + 3.8, "text-anchor": "end" }, labels[i]));
  });
  svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  const across = ticks(0, end, Math.max(2, Math.min(5, Math.floor((width - left) / 62))));
  for (const v of across.list)
    svg.append(make("text", { x: x(v), y: height - 5, "text-anchor": x(v) > width - right - 14 ? "end" : "middle" },
      tickText(v, across.step, axes[state.axis].unit)));
  return { x, y, inverse: (px) => ((px - left) / (width - left - right)) * end };
}
// A card with a title, a line of values and the drawing; `draw(svg, width)` returns {inverse, show}.
function card(title, what, draw) {
  const when = make("small"), readout = make("div", { class: "readout" });
  const svg = make("svg", { role: "img", "aria-label": title });
  const node = make("figure", { class: "card" }, make("header", {}, make("h3", {}, title), when),
    what ? make("p", { class: "what" }, what) : null, readout, svg);
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
      const { text, parts } = drawn.show(state.cursor);
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
  const shown = groups.map((g, i) => ({ group: g, index: i })).filter(({ group }) =>
    group.runs.some((r) => spec.values(runs[r])?.some(finite)));
  if (!shown.length) return null;
  const unit = spec.unit || "plain";
  return card(spec.title, spec.what, (svg, width) => {
    const curves = shown.map(({ group, index }) => ({
      index, many: group.runs.length > 1, points: curve(group, spec.values, state.smooth && !spec.sum),
    }));
    const smoothed = state.smooth && !spec.sum && curves.some((c) => c.points.length >= 60);
    const all = curves.flatMap((c) => c.points);
    let low = Math.min(...all.map((p) => Math.min(p.low, smoothed ? p.raw : p.low)));
    let high = Math.max(...all.map((p) => Math.max(p.high, smoothed ? p.raw : p.high)));
    if (low < high && low >= 0 && (low < 0.6 * high || spec.zero)) low = 0;
    const pad = (high - low) * 0.04, s = frame(svg, width, low === 0 ? 0 : low - pad, high + pad, unit);
    if (low === high)
      svg.append(make("text", { x: width / 2, y: s.y(low) - 12, "text-anchor": "middle" }, `${units[unit](low)} at every step`));
    for (const { index, many, points } of curves) {
      const style = groupColor(index), x = (p) => s.x(p.x);
      if (many && points.some((p) => p.high > p.low))
        svg.append(make("path", { class: "band", style, d:
          path(points, x, (p) => s.y(p.high)) + path([...points].reverse(), x, (p) => s.y(p.low)).replace("M", "L") + "Z" }));
      if (!many && smoothed) svg.append(make("path", { class: "raw", style, d: path(points, x, (p) => s.y(p.raw)) }));
    }
    for (const { index, points } of curves) {
      const style = groupColor(index);
      svg.append(make("path", { class: `line g${index}`, style, d: path(points, (p) => s.x(p.x), (p) => s.y(p.y)) }));
      if (points.length <= 12)
        for (const p of points) svg.append(make("circle", { class: "mark", style, cx: s.x(p.x), cy: s.y(p.y), r: 3 }));
    }
    const marks = curves.map(({ index }) => make("circle", { class: "mark", style: groupColor(index), r: 4 }));
    const cursor = make("line", { class: "cursor", y1: top_, y2: height - bottom });
    svg.append(cursor, ...marks);
    return {
      inverse: s.inverse,
      show(at) {
        const parts = curves.map(({ index, points }, i) => {
          const p = at === null ? points.at(-1) : nearest(points, at);
          marks[i].setAttribute("cx", s.x(p.x)), marks[i].setAttribute("cy", s.y(p.y));
          marks[i].style.display = at === null ? "none" : "";
          const range = p.high > p.low ? `${units[unit](p.low)} to ${units[unit](p.high)}` : "";
          return make("span", { title: groups[index].name }, make("span", { class: "dot", style: groupColor(index) }),
            units[unit](p.y), range && at !== null ? make("small", {}, ` ${range}`) : null);
        });
        cursor.style.display = at === null ? "none" : "";
        if (at !== null) cursor.setAttribute("x1", s.x(nearest(curves[0].points, at).x)), cursor.setAttribute("x2", cursor.getAttribute("x1"));
        return { text: whenText(at, curves[0].points), parts };
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
      const run = runs[i], x = axes[state.axis].of(run), end = Math.max(...x);
      const parts = spec.parts(run);
      run.steps.forEach((step, k) => {
        const v = parts.map((p) => (finite(p.values?.[k]) ? p.values[k] : 0));
        if (v.every((a) => a === 0)) return;
        const bin = run.steps.length <= bins ? step : Math.min(bins - 1, Math.floor((x[k] / end) * bins));
        const b = points.get(bin) || { n: 0, x: 0, step: 0, v: v.map(() => 0) };
        b.n++, b.x += x[k], b.step += step, v.forEach((a, j) => (b.v[j] += a));
        points.set(bin, b);
      });
    }
    const list = [...points.values()].map((b) => ({ x: b.x / b.n, step: Math.round(b.step / b.n), v: b.v.map((a) => a / b.n) }));
    return { group: g, index, points: list.sort((a, b) => a.x - b.x) };
  });
  const first = stacked();
  const names = spec.parts(runs[0]).map((p) => p.name);
  const used = names.map((_, j) => first.some((c) => c.points.some((p) => p.v[j] > 0)));
  if (!used.some(Boolean)) return [];
  return first.filter((c) => c.points.length).map(({ group, index }) =>
    card(groups.length > 1 ? `${spec.title}: ${group.name}` : spec.title, spec.what, (svg, width) => {
      const every = stacked();
      const high = Math.max(...every.flatMap((c) => c.points.map((p) => p.v.reduce((a, b) => a + b, 0))));
      const points = every[index].points, s = frame(svg, width, 0, high * 1.04, spec.unit);
      const below = points.map(() => 0);
      names.forEach((_, j) => {
        if (!used[j]) return;
        const line = points.map((p, k) => ({ x: p.x, low: below[k], high: (below[k] += p.v[j]) }));
        svg.append(make("path", { class: "area", style: stackColor(j), d:
          path(line, (p) => s.x(p.x), (p) => s.y(p.high)) + path(line.reverse(), (p) => s.x(p.x), (p) => s.y(p.low)).replace("M", "L") + "Z" }));
      });
      const cursor = make("line", { class: "cursor", y1: top_, y2: height - bottom });
      svg.append(cursor);
      return {
        inverse: s.inverse,
        show(at) {
          const p = at === null ? spec.rest(points) : nearest(points, at);
          cursor.style.display = at === null ? "none" : "";
          cursor.setAttribute("x1", s.x(p.x)), cursor.setAttribute("x2", s.x(p.x));
          const parts = names.flatMap((name, j) => (!used[j] ? [] :
            [make("span", {}, make("span", { class: "box", style: stackColor(j) }), `${name} ${units[spec.unit](p.v[j])}`)]));
          return { text: at === null ? spec.restText : whenText(at, points), parts };
        },
      };
    }));
}

// ---- what is drawn -------------------------------------------------------------------------------------------------
const taken = new Set();
const use = (metric) => (taken.add(metric), (run) => column(run, metric));
const nonZero = (metric) => runs.some((r) => column(r, metric)?.some((v) => finite(v) && v !== 0));
const differs = (metric, constant) => runs.some((r) => column(r, metric)?.some((v) => finite(v) && v !== constant));
const line = (title, metric, more) => ({ title, what: metric, values: use(metric), ...more });
const each = (prefix, title, more) =>
  metricNames.filter((m) => m.startsWith(prefix)).map((m) => line(title(m.slice(prefix.length)), m, more));

function learning() {
  const reward = metricNames.includes("critic/score/mean") ? "critic/score/mean" : "critic/rewards/mean";
  const shaped = runs.some((r) => column(r, "critic/rewards/mean")?.some((v, i) =>
    finite(v) && column(r, "critic/score/mean") && v !== column(r, "critic/score/mean")[i]));
  taken.add("critic/rewards/mean");
  return [
    line("Reward", reward),
    shaped ? line("Shaped reward", "critic/rewards/mean") : null,
    ...each("val-core/", (m) => `Evaluation: ${m}`),
    line("Loss", "train/loss", { what: "train/loss, nats a token" }),
    line("Response length", "response_length/mean", { unit: "count", what: "response_length/mean, tokens" }),
    nonZero("response_length/clip_ratio") ? line("Cut at the length limit", "response_length/clip_ratio") : null,
    line("Entropy", "actor/entropy", { what: "actor/entropy, nats a token" }),
    ...each("val-aux/", (m) => `Evaluation: ${m}`),
  ];
}
function optimisation() {
  return [
    nonZero("actor/kl_loss") ? line("KL to the reference", "actor/kl_loss", { what: "actor/kl_loss, nats a token" }) : null,
    line("KL to the sampling policy", "actor/ppo_kl", { what: "actor/ppo_kl, nats a token" }),
    line("Clip fraction", "actor/pg_clipfrac"),
    nonZero("actor/pg_clipfrac_lower") ? line("Clip fraction, dual clip", "actor/pg_clipfrac_lower") : null,
    line("Gradient norm", "actor/grad_norm"),
    line("Learning rate", "actor/lr", { sum: true }),
    line("Mismatched tokens", "exact/mismatch_tokens", { unit: "count", what: "exact/mismatch_tokens: log-probs of sampler and learner with different bits" }),
    ...each("rollout_corr/", (m) => m.replaceAll("_", " ")),
    differs("ht/kept_fraction", 1) ? line("Tokens kept for the gradient", "ht/kept_fraction") : null,
    nonZero("filter/zero_std_fraction") ? line("Groups without a signal", "filter/zero_std_fraction") : null,
  ];
}
function costs() {
  taken.add("tokens/generated").add("tokens/trained").add("tokens/loss");
  const sum = (title, metrics, unit) => ({ title, unit, sum: true, what: "running total", values: (r) => total(r, metrics(r)) });
  const arenas = (r) => withPrefix(r, "memory/");
  return [
    sum("Tokens generated", () => ["tokens/generated"], "count"),
    sum("Tokens through the learner", () => ["tokens/trained"], "count"),
    sum("FLOPs", (r) => withPrefix(r, "flops/"), "count"),
    { title: "Peak memory", unit: "bytes", sum: true, zero: true, what: "all arenas, so far", values: (r) => added(r, arenas(r)) },
  ];
}
function stacks() {
  const known = { gen: "rollout", update_actor: "update", testing: "evaluation", ref: "reference", old_log_prob: "old log-probs" };
  const every = (prefix) => metricNames.filter((m) => m.startsWith(prefix));
  for (const p of ["timing_s/", "flops/", "memory/"]) every(p).forEach((m) => taken.add(m));
  // Parts below 1 % of the time go into "other", which also takes what no part accounts for.
  const sums = (m) => runs.reduce((s, r) => s + (column(r, m) || []).reduce((a, v) => a + (v || 0), 0), 0);
  const whole = sums("timing_s/step") + sums("timing_s/testing");
  const times = every("timing_s/").filter((m) => m !== "timing_s/step" && sums(m) >= 0.01 * whole);
  const inside = metricNames.filter((m) => m.startsWith("timing_s/") && m !== "timing_s/step" && m !== "timing_s/testing");
  const rest = (r) => column(r, "timing_s/step")?.map((v, i) =>
    finite(v) ? Math.max(0, v - inside.reduce((s, m) => s + (column(r, m)?.[i] || 0), 0)) : null);
  const timeParts = (r) => [
    ...times.map((m) => ({ name: known[m.slice(9)] || m.slice(9), values: column(r, m) })),
    ...(restTotal >= 0.01 * whole ? [{ name: inside.length ? "other" : "step", values: rest(r) }] : []),
  ];
  const restTotal = runs.reduce((s, r) => s + (rest(r) || []).reduce((a, v) => a + (v || 0), 0), 0);
  const parts = (prefix) => (r) => every(prefix).map((m) => ({ name: m.slice(prefix.length).replaceAll("_", " "), values: column(r, m) }));
  const average = (points) => ({ x: 0, v: points[0].v.map((_, j) => mean(points.map((p) => p.v[j]))) });
  const last = (points) => points.at(-1);
  return [
    { title: "Time of a step", unit: "seconds", parts: timeParts, rest: average, restText: "mean" },
    { title: "FLOPs of a step", unit: "flop", parts: parts("flops/"), rest: average, restText: "mean" },
    { title: "Peak memory by arena", unit: "bytes", parts: parts("memory/"), rest: last, restText: "end" },
  ];
}
const grid = (nodes) => make("div", { class: "grid" }, ...nodes.filter(Boolean));
const section = (title, ...content) => make("section", {}, make("h2", {}, title), ...content);

// ---- head, table ---------------------------------------------------------------------------------------------------
function lead() {
  const open = runs.filter((r) => r.planned && r.totals.steps < r.planned);
  return [
    runs.length === 1 ? "1 run" : groups.length === 1 ? `${runs.length} seeds of one configuration` :
      groups.length === runs.length ? `${runs.length} runs` : `${runs.length} runs of ${groups.length} configurations; runs of one differ in their seed`,
    open.length ? `. Not at its last step: ${open.map((r) => `${r.name} (${r.totals.steps} of ${r.planned})`).join(", ")}` : "",
    groups.length > 1 ? `. Ratios are to ${groups[0].name}, the baseline.` : ".",
  ].join("");
}

const mean = (values) => {
  const v = values.filter(finite);
  return v.length ? v.reduce((a, b) => a + b, 0) / v.length : null;
};
const columns = [
  { head: "Steps", of: (t) => t.steps, text: units.count },
  { head: "Reward reached", of: (t) => t.reward_last, text: (v) => v.toFixed(3), from: (t) => t.reward_first, how: "mean of the last tenth of the steps; small: of the first tenth" },
  { head: "Loss reached", of: (t) => t.loss_last, text: (v) => v.toFixed(4), from: (t) => t.loss_first, how: "mean of the last tenth of the steps; small: of the first tenth" },
  { head: "Best evaluation", of: (t) => t.val_best, text: (v) => v.toFixed(3), from: (t) => t.val_first },
  { head: "Tokens generated", of: (t) => t.generated, text: units.count, ratio: true },
  { head: "Tokens trained", of: (t) => t.trained, text: units.count, ratio: true, how: "tokens that went through the learner" },
  { head: "FLOPs, rollout", of: (t) => t.flops_rollout, text: units.count, ratio: true },
  { head: "FLOPs, learner", of: (t) => t.flops_learner, text: units.count, ratio: true },
  { head: "FLOPs, all", of: (t) => t.flops, text: units.count, ratio: true },
  { head: "Peak memory", of: (t) => t.peak_bytes, text: units.bytes, ratio: true },
  { head: "Time", of: (t) => t.seconds, text: units.seconds, ratio: true },
  { head: "Mismatched tokens", of: (t) => (t.checked ? t.mismatches : null), text: units.count, more: (t) => `of ${units.count(t.checked)}`, how: "log-probs that sampler and learner give different bits" },
];
function comparison() {
  const shown = columns.filter((c) => runs.some((r) => finite(c.of(r.totals)) && (c.of(r.totals) !== 0 || c.more)));
  const cells = (list, base) => shown.map((c) => {
    const all = list.map((r) => r.totals), v = mean(all.map(c.of));
    const label = { "data-label": c.head };
    if (!finite(v)) return make("td", { ...label, class: "none" }, "\u2013");
    const small = [];
    if (c.from && list.length && finite(mean(all.map(c.from)))) small.push(`from ${c.text(mean(all.map(c.from)))}`);
    if (c.more) small.push(c.more({ checked: all.reduce((s, t) => s + t.checked, 0) }));
    const b = base && mean(base.map((r) => c.of(r.totals)));
    if (c.ratio && base && finite(b) && b > 0) small.push(`\u00d7\u00a0${(v / b).toFixed(2)}`);
    const value = c.more ? c.text(all.reduce((s, t) => s + c.of(t), 0)) : c.text(v);
    return make("td", label, make("span", {}, value, ...small.map((s) => make("small", {}, s))));
  });
  const baseRuns = groups[0].runs.map((i) => runs[i]);
  const body = groups.flatMap((g, index) => {
    const members = g.runs.map((i) => runs[i]);
    const note = [members.length > 1 ? `mean of ${members.length} seeds` : "", groups.length > 1 && index === 0 ? "baseline" : ""].filter(Boolean).join(", ");
    const row = make("tr", {}, make("td", {}, make("span", { class: "dot", style: groupColor(index) }), g.name,
      note ? make("small", {}, note) : null), ...cells(index === 0 ? baseRuns : members, groups.length > 1 ? baseRuns : null));
    const single = members.length > 1 ? members.map((r) => make("tr", { class: "one" }, make("td", {}, r.seed ? `seed ${r.seed}` : r.name),
      ...cells([r], null))) : [];
    return [row, ...single];
  });
  return make("div", { class: "scroll" }, make("table", { class: "runs" },
    make("thead", {}, make("tr", {}, make("th", {}, "Run"), ...shown.map((c) => make("th", { title: c.how }, c.head)))), make("tbody", {}, ...body)));
}

function bar() {
  const legend = make("div", { class: "legend" }, ...groups.map((g, i) => make("span", {},
    make("span", { class: "dot", style: groupColor(i) }), g.name,
    g.runs.length > 1 ? make("small", {}, ` ${g.runs.length} seeds: mean, lowest to highest`) : null)));
  const buttons = axisNames.map((name) => make("button", { type: "button", onclick() {
    state.axis = name, state.cursor = null;
    press(), redraw();
  } }, axes[name].label));
  const smooth = make("button", { type: "button", title: "over 1/30 of the curve", onclick() {
    state.smooth = !state.smooth;
    press(), redraw();
  } }, "running mean");
  const press = () => {
    buttons.forEach((b, i) => b.setAttribute("aria-pressed", axisNames[i] === state.axis));
    smooth.setAttribute("aria-pressed", state.smooth);
  };
  press();
  return make("div", { class: "bar" }, legend, make("div", { class: "switch" }, "against", make("span", {}, ...buttons), make("span", {}, smooth)));
}
const redraw = () => charts.forEach((c) => c.node.clientWidth && c.draw());

// ---- samples -------------------------------------------------------------------------------------------------------
// Spaces stay, a line break is also shown as one, control characters become their pictures.
const visible = (text) => text.replace(/\n/g, "\u21b5\n").replace(/[\u0000-\u0009\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\u007f/g, "\u2421");
const tint = (v, scale) => `--tint: var(${v < 0 ? "--down" : "--up"}); --a: ${Math.min(1, Math.abs(v) / scale).toFixed(3) * 0.55}`;

function samples() {
  const withSamples = runs.filter((r) => r.samples.length);
  if (!withSamples.length) return null;
  const view = { run: withSamples[0], step: null, sample: null, color: "logprob" };
  const stepsOf = (run) => [...new Set(run.samples.map((s) => s.step))];
  const atStep = () => view.run.samples.filter((s) => s.step === view.step);
  const pick = make("div", { class: "pick" }), strip = make("div", { class: "strip" }), body = make("div");

  function chooser(label, options, value, change) {
    const at = options.findIndex((o) => o.value === value);
    const select = make("select", { "aria-label": label, onchange: (e) => change(options[e.target.selectedIndex].value) },
      ...options.map((o, i) => make("option", { selected: i === at }, o.text)));
    const go = (d, sign) => make("button", { type: "button", "aria-label": `${label} ${d < 0 ? "before" : "after"}`, disabled: !options[at + d],
      onclick: () => change(options[at + d].value) }, sign);
    return make("span", { class: "switch" }, label, go(-1, "\u2039"), select, go(1, "\u203a"));
  }
  function setRun(run) {
    const before = view.step;
    view.run = run;
    const steps = stepsOf(run);
    setStep(steps.includes(before) ? before : steps.at(-1));
  }
  function setStep(step) {
    view.step = step;
    const list = atStep();
    // The response that teaches something and surprised its sampler most.
    const least = (s) => (s.advantage && s.logprobs ? Math.min(0, ...s.logprobs.filter(finite)) : 1);
    view.sample = list.reduce((a, s) => (least(s) < least(a) ? s : a), list[0]);
    render();
  }
  function render() {
    const list = atStep(), steps = stepsOf(view.run);
    pick.replaceChildren(
      ...(withSamples.length > 1 ? [chooser("run", withSamples.map((r) => ({ value: r, text: r.name })), view.run, setRun)] : []),
      chooser("step", steps.map((s) => ({ value: s, text: s })), view.step, setStep),
      chooser("sample", list.map((s, i) => ({ value: s, text: `${i + 1} of ${list.length}` })), view.sample, (s) => ((view.sample = s), render())),
      colors());
    const scale = Math.max(...list.map((s) => Math.abs(s.advantage || 0)), 1e-9);
    const byPrompt = new Map();
    list.forEach((s) => {
      const key = s.group ?? s.prompt;
      if (!byPrompt.has(key)) byPrompt.set(key, []);
      byPrompt.get(key).push(s);
    });
    strip.replaceChildren(...[...byPrompt.values()].map((group) => make("span", {}, ...group.map((s) => make("button", {
      type: "button", style: tint(s.advantage || 0, scale), "aria-pressed": s === view.sample,
      title: `score ${s.score}, advantage ${plain(s.advantage || 0)}`, "aria-label": `response with score ${s.score}`,
      onclick() { view.sample = s, render(); } })))));
    body.replaceChildren(show(view.sample, scale));
  }
  function colors() {
    return make("span", { class: "switch" }, "colour", make("span", {}, ...["logprob", "advantage"].map((c) =>
      make("button", { type: "button", "aria-pressed": view.color === c, onclick() { view.color = c, render(); } }, c === "logprob" ? "log-prob" : "advantage"))));
  }
  function show(s, scale) {
    const info = make("p", { class: "token" }, "\u00a0");
    const pieces = s.pieces || [s.response];
    const text = make("div", { class: "text" }, ...pieces.map((piece, i) => {
      const lp = s.logprobs?.[i];
      const style = view.color === "advantage" ? (finite(s.advantage) ? tint(s.advantage, scale) : null) : finite(lp) ? tint(lp, 3) : null;
      const about = [s.pieces ? `token ${i + 1} of ${pieces.length}` : null, s.ids && s.pieces ? `id ${s.ids[i]}` : null,
        finite(lp) ? `log-prob ${plain(lp)}, p = ${Math.exp(lp).toPrecision(3)}` : null,
        finite(s.advantage) ? `advantage ${plain(s.advantage)}` : null].filter(Boolean).join(" \u00b7 ");
      return make("span", { style, title: about, onpointerenter: () => (info.textContent = about) }, visible(String(piece)));
    }));
    const gradient = (stops) => `background: linear-gradient(90deg, ${stops.join(", ")})`;
    const legend = view.color === "advantage"
      ? make("span", {}, `\u2212${scale.toFixed(2)}`, make("span", { class: "scale", style: gradient(["rgba(var(--down), .55)", "rgba(var(--down), 0)", "rgba(var(--up), 0)", "rgba(var(--up), .55)"]) }), `${scale.toFixed(2)}`)
      : s.logprobs ? make("span", {}, "likely", make("span", { class: "scale", style: gradient(["rgba(var(--down), 0)", "rgba(var(--down), .55)"]) }), "log-prob \u2264 \u22123") : make("span", {}, "no log-probs recorded");
    const finish = s.finish || (s.finished === true ? "eos" : s.finished === false ? "length" : null);
    const known = s.logprobs?.filter(finite) || [];
    const rows = [
      ["extracted answer", s.extracted === "" ? "none" : s.extracted], ["expected", s.answer], ["score", s.score], ["overlong penalty", s.overlong || null],
      ["KL penalty", s.kl_penalty || null], ["reward", s.reward], ["advantage", s.advantage],
      ["finish", finish === "eos" ? "end of sequence" : finish === "length" ? "cut at the limit" : finish],
      ["tokens", s.ids?.length ?? s.tokens], ["mean log-prob", known.length ? mean(known) : null], ["least likely token", known.length ? Math.min(...known) : null], ["uid", s.uid],
    ].filter(([, v]) => v !== null && v !== undefined);
    return make("div", { class: "sample" },
      make("div", {}, make("p", { class: "label" }, "prompt"), make("div", { class: "text prompt" }, visible(String(s.prompt ?? ""))),
        make("p", { class: "label" }, make("span", {}, `response, coloured by ${view.color === "advantage" ? "advantage" : "log-prob"}`), legend), text, info),
      make("dl", {}, ...rows.flatMap(([k, v]) => [make("dt", {}, k), make("dd", {}, typeof v === "number" ? (Number.isInteger(v) ? String(v).replace("-", "\u2212") : plain(v)) : visible(String(v)))])));
  }
  setRun(withSamples.at(0));
  return section("Samples", pick, make("p", { class: "note", style: "max-width: none" },
    `A square is a response, a cluster the responses to one prompt; blue: more reward than its group, orange: less.${data.sampled > 1 ? ` Every ${data.sampled}th response of rollouts.jsonl is here.` : ""}`), strip, body);
}

// ---- configuration -------------------------------------------------------------------------------------------------
function configuration() {
  const text = (v) => (v === undefined ? "\u2013" : v === "" ? "\u201c\u201d" : v);
  const table = (keys, withDefault) => make("div", { class: "scroll" }, make("table", { class: "config" },
    make("thead", {}, make("tr", {}, make("th", {}, "key"), ...groups.map((g, i) => make("th", {}, make("span", { class: "dot", style: groupColor(i) }), g.name)), withDefault ? make("th", {}, "default") : null)),
    make("tbody", {}, ...keys.map((k) => make("tr", {}, make("td", {}, k), ...groups.map((g) => make("td", {}, text(g.config[k]))), withDefault ? make("td", { class: "same" }, text(data.defaults[k])) : null)))));
  const differ = data.keys.filter((k) => k !== "trainer.default_local_dir" && groups.some((g) => g.config[k] !== groups[0].config[k]));
  const changed = data.keys.filter((k) => groups.some((g) => g.config[k] !== data.defaults[k]));
  if (!data.keys.length) return null;
  return section("Configuration",
    ...(groups.length > 1 ? [make("p", { class: "note", style: "margin: 0 0 8px" }, "In what the runs differ."), table(differ, false)] : []),
    changed.length ? make("details", { open: groups.length === 1 }, make("summary", {}, `${changed.length} keys that are not at their default`), table(changed, true)) : null,
    make("details", {}, make("summary", {}, `All ${data.keys.length} keys`), table(data.keys, false)));
}

// ---- the page ------------------------------------------------------------------------------------------------------
function page() {
  const main = document.querySelector("main");
  document.title = groups.map((g) => g.name).join(", ") + " \u2013 pare report";
  const sections = [["Learning", learning], ["Optimisation", optimisation], ["Cost", costs]].map(([title, list]) => [title, list().filter(Boolean).map(lineChart).filter(Boolean)]);
  sections[2][1].push(...stacks().flatMap(stackCharts));
  const rest = metricNames.filter((m) => !taken.has(m) && m !== "training/global_step");
  const others = rest.length ? make("details", { ontoggle: redraw }, make("summary", {}, `${rest.length} more metrics`), grid(rest.map((m) => lineChart({ title: m, values: use(m) })))) : null;
  main.append(make("h1", {}, groups.map((g) => g.name).join(" \u00b7 ")), make("p", { class: "lead" }, lead()),
    section("Runs", comparison()), bar(),
    ...sections.filter(([, nodes]) => nodes.length).map(([title, nodes]) => section(title, grid(nodes))),
    ...[others, samples(), configuration()].filter(Boolean),
    make("footer", {}, "Written by pare report. Everything it shows is in this file."));
  redraw();
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth !== width) width = main.clientWidth, redraw();
  }).observe(main);
  document.documentElement.setAttribute("data-ready", charts.length);
}
page();
)js"
