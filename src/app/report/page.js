R"js(
// The page: charts, table of runs, samples and configuration, in this order (after charts.js).
// ---- what is drawn -------------------------------------------------------------------------------------------------
const taken = new Set();
const use = (metric) => (taken.add(metric), (run) => column(run, metric));
const nonZero = (metric) => runs.some((r) => column(r, metric)?.some((v) => finite(v) && v !== 0));
const differs = (metric, constant) => runs.some((r) => column(r, metric)?.some((v) => finite(v) && v !== constant));
const line = (title, metric, more) => ({title, what: metric, values: use(metric), ...more});
const each = (prefix, title, more) =>
  metricNames.filter((m) => m.startsWith(prefix)).map((m) => line(title(m.slice(prefix.length)), m, more));

function learning() {
  const reward = metricNames.includes("critic/score/mean") ? "critic/score/mean" : "critic/rewards/mean";
  const shaped = runs.some(
    (r) => column(r, "critic/rewards/mean")
             ?.some((v, i) => finite(v) && column(r, "critic/score/mean") && v !== column(r, "critic/score/mean")[i]));
  taken.add("critic/rewards/mean");
  return [
    line("Reward", reward),
    shaped ? line("Shaped reward", "critic/rewards/mean") : null,
    ...each("val-core/", (m) => `Evaluation: ${m}`),
    line("Loss", "train/loss", {what: "train/loss, nats a token"}),
    line("Held-out loss", "val/loss", {what: "val/loss, nats a token"}),
    line("Response length", "response_length/mean", {unit: "count", what: "response_length/mean, tokens"}),
    nonZero("response_length/clip_ratio") ? line("Cut at the length limit", "response_length/clip_ratio") : null,
    line("Entropy", "actor/entropy", {what: "actor/entropy, nats a token"}),
    ...each("val-aux/", (m) => `Evaluation: ${m}`),
  ];
}
function optimisation() {
  return [
    nonZero("actor/kl_loss") ? line("KL to the reference", "actor/kl_loss", {what: "actor/kl_loss, nats a token"})
                             : null,
    line("KL to the sampling policy", "actor/ppo_kl", {what: "actor/ppo_kl, nats a token"}),
    line("Clip fraction", "actor/pg_clipfrac"),
    nonZero("actor/pg_clipfrac_lower") ? line("Clip fraction, dual clip", "actor/pg_clipfrac_lower") : null,
    line("Gradient norm", "actor/grad_norm"),
    line("Learning rate", "actor/lr", {sum: true}),
    line(
      "Mismatched tokens", "exact/mismatch_tokens",
      {unit: "count", what: "exact/mismatch_tokens: log-probs of sampler and learner with different bits"}),
    ...each("distill/", (m) => `Sampler's adapters: ${m.replaceAll("_", " ")}`),
    ...each("rollout_corr/", (m) => `Mismatch: ${m.replaceAll("_", " ")}`),
    differs("ht/kept_fraction", 1) ? line("Tokens kept for the gradient", "ht/kept_fraction") : null,
    nonZero("filter/zero_std_fraction") ? line("Groups without a signal", "filter/zero_std_fraction") : null,
  ];
}
function costs() {
  taken.add("tokens/generated").add("tokens/trained").add("tokens/loss").add("perf/max_memory_allocated_gb");
  const sum = (title, metrics, unit) =>
    ({title, unit, sum: true, what: "running total", values: (r) => total(r, metrics(r))});
  return [
    sum("Tokens generated", () => ["tokens/generated", "rpo/init_tokens"], "count"),
    line("Tokens saved by earlier responses", "rpo/saved", {what: "rpo/saved, part of the responses"}),
    sum("Tokens through the learner", () => ["tokens/trained"], "count"),
    sum("FLOPs", (r) => withPrefix(r, "flops/"), "count"),
    {
      title: "Peak memory",
      unit: "bytes",
      sum: true,
      zero: true,
      what: "all arenas, so far",
      values: (r) => column(r, "perf/max_memory_allocated_gb")?.map((v) => finite(v) ? v * 2 ** 30 : v)
    },
  ];
}
function stacks() {
  const known =
    {gen: "rollout", update_actor: "update", update_student: "update of adapters", testing: "evaluation",
     ref: "reference", old_log_prob: "old log-probs"};
  const every = (prefix) => metricNames.filter((m) => m.startsWith(prefix));
  for (const p of ["timing_s/", "flops/", "memory/"]) every(p).forEach((m) => taken.add(m));
  // Parts below 1 % of the time go into "other", which also takes what no part accounts for.
  const sums = (m) => runs.reduce((s, r) => s + (column(r, m) || []).reduce((a, v) => a + (v || 0), 0), 0);
  const whole = sums("timing_s/step") + sums("timing_s/testing");
  const times = every("timing_s/").filter((m) => m !== "timing_s/step" && sums(m) >= 0.01 * whole);
  const inside =
    metricNames.filter((m) => m.startsWith("timing_s/") && m !== "timing_s/step" && m !== "timing_s/testing");
  const rest = (r) =>
    column(r, "timing_s/step")
      ?.map((v, i) => finite(v) ? Math.max(0, v - inside.reduce((s, m) => s + (column(r, m)?.[i] || 0), 0)) : null);
  const timeParts = (r) =>
    [...times.map((m) => ({name: known[m.slice(9)] || m.slice(9), values: column(r, m)})),
     ...(restTotal >= 0.01 * whole ? [{name: inside.length ? "other" : "step", values: rest(r)}] : []),
  ];
  const restTotal = runs.reduce((s, r) => s + (rest(r) || []).reduce((a, v) => a + (v || 0), 0), 0);
  const parts = (prefix) => (r) =>
    every(prefix).map((m) => ({name: m.slice(prefix.length).replaceAll("_", " "), values: column(r, m)}));
  // Kv and scratch may lie in the memory of gradients and activations: then the larger pair is what is taken.
  const pairs = [["kv", "scratch"], ["gradients", "activations"]];
  const arenas = (r) => {
    const all = parts("memory/")(r), total = column(r, "perf/max_memory_allocated_gb");
    const at = (list, i) => list.reduce((s, p) => s + (p.values?.[i] || 0), 0);
    const end = r.steps.findLastIndex((_, i) => finite(total?.[i]));
    if (end < 0 || at(all, end) <= total[end] * 2 ** 30 * 1.000001) return all;
    const [a, b] = pairs.map((names) => all.filter((p) => names.includes(p.name)));
    return all.map((p) => ({
      ...p,
      values: p.values?.map((v, i) => {
        const [less, more] = at(a, i) < at(b, i) ? [a, b] : [b, a];
        return less.includes(p) && more.length ? 0 : v;
      })
    }));
  };
  const shares = runs.some((r) => {
    const all = parts("memory/")(r), kept = arenas(r);
    return kept.some((p, j) => p.values?.some((v, i) => v !== all[j].values[i]));
  });
  const average = (points) => ({x: 0, v: points[0].v.map((_, j) => mean(points.map((p) => p.v[j])))});
  const last = (points) => points.at(-1);
  return [
    {title: "Time of a step", unit: "seconds", parts: timeParts, rest: average, restText: "mean"},
    {title: "FLOPs of a step", unit: "flop", parts: parts("flops/"), rest: average, restText: "mean"},
    {
      title: "Peak memory by arena",
      unit: "bytes",
      what: shares ? "kv and scratch share memory with gradients and activations: the larger pair is shown" : null,
      parts: arenas,
      rest: last,
      restText: "end"
    },
  ];
}
const grid = (nodes) => make("div", {class: "grid"}, ...nodes.filter(Boolean));
const section = (title, ...content) => make("section", {}, make("h2", {}, title), ...content);

// ---- head, table ---------------------------------------------------------------------------------------------------
function lead() {
  const open = runs.filter((r) => r.planned && r.totals.steps < r.planned);
  return [
    runs.length > 1 && groups.length === 1 ? `${runs.length} seeds of one configuration` : many(runs.length, "run"),
    groups.length > 1 && groups.length < runs.length
      ? ` of ${groups.length} configurations; runs of one differ in their seed`
      : "",
    open.length
      ? `. Not at its last step: ${open.map((r) => `${r.name} (${r.totals.steps} of ${r.planned})`).join(", ")}`
      : "",
    groups.length > 1 ? `. Ratios are to ${groups[0].name}, the baseline.` : ".",
  ].join("");
}

const mean = (values) => {
  const v = values.filter(finite);
  return v.length ? v.reduce((a, b) => a + b, 0) / v.length : null;
};
const columns = [
  {head: "Steps", of: (t) => t.steps, text: (v) => Math.round(v).toLocaleString("en")},
  {
    head: "Reward reached",
    of: (t) => t.reward_last,
    text: (v) => v.toFixed(3),
    from: (t) => t.reward_first,
    how: "mean of the last tenth of the steps; small: of the first tenth"
  },
  {
    head: "Loss reached",
    of: (t) => t.loss_last,
    text: (v) => v.toFixed(4),
    from: (t) => t.loss_first,
    how: "mean of the last tenth of the steps; small: of the first tenth"
  },
  {head: "Best evaluation", of: (t) => t.val_best, text: (v) => v.toFixed(3), from: (t) => t.val_first},
  {head: "Tokens generated", of: (t) => t.generated, text: units.count, ratio: true},
  {
    head: "Tokens replayed",
    of: (t) => t.replayed,
    text: units.count,
    how: "tokens of responses that were not sampled but taken from an earlier one"
  },
  {
    head: "Tokens trained",
    of: (t) => t.trained,
    text: units.count,
    ratio: true,
    how: "tokens that went through the learner"
  },
  {head: "FLOPs, rollout", of: (t) => t.flops_rollout, text: units.count, ratio: true},
  {head: "FLOPs, learner", of: (t) => t.flops_learner, text: units.count, ratio: true},
  {head: "FLOPs, distillation", of: (t) => t.flops_distill, text: units.count, ratio: true},
  {head: "FLOPs, all", of: (t) => t.flops, text: units.count, ratio: true},
  {
    head: "Reads saved",
    of: (t) => t.reads_saved || null,
    text: (v) => `${(100 * v).toFixed(0)} %`,
    how: "fraction of the keys and values of a dense cache that a sparse sampler did not read, mean over steps"
  },
  {head: "Peak memory", of: (t) => t.peak_bytes, text: units.bytes, ratio: true},
  {head: "Time", of: (t) => t.seconds, text: units.seconds, ratio: true},
  {
    head: "Mismatch",
    of: (t) => t.mismatches,
    none: (t) => (t.checked === 0 ? "not checked" : null),
    text: units.count,
    more: (t) => `of ${units.count(t.checked)}`,
    how: "tokens whose log-prob differs in any bit between sampler and learner"
  },
];
function comparison() {
  const shown = columns.filter(
    (c) => runs.some((r) => (finite(c.of(r.totals)) && (c.of(r.totals) !== 0 || c.more)) || c.none?.(r.totals)));
  const cells = (list, base) => shown.map((c) => {
    const all = list.map((r) => r.totals), v = mean(all.map(c.of));
    const label = {"data-label": c.head};
    if (!finite(v)) return make("td", {...label, class: "none"}, all.map((t) => c.none?.(t)).find(Boolean) ?? "\u2013");
    const small = [];
    if (c.from && list.length && finite(mean(all.map(c.from)))) small.push(`from ${c.text(mean(all.map(c.from)))}`);
    if (c.more) small.push(c.more({checked: all.reduce((s, t) => s + t.checked, 0)}));
    const b = base && mean(base.map((r) => c.of(r.totals)));
    if (c.ratio && base && finite(b) && b > 0) small.push(`\u00d7\u00a0${(v / b).toFixed(2)}`);
    const value = c.more ? c.text(all.reduce((s, t) => s + c.of(t), 0)) : c.text(v);
    return make("td", label, make("span", {}, value, ...small.map((s) => make("small", {}, s))));
  });
  const baseRuns = groups[0].runs.map((i) => runs[i]);
  const body = groups.flatMap((g, index) => {
    const members = g.runs.map((i) => runs[i]);
    const note =
      [members.length > 1 ? `mean of ${members.length} seeds` : "", groups.length > 1 && index === 0 ? "baseline" : ""]
        .filter(Boolean)
        .join(", ");
    const row = make(
      "tr", {},
      make(
        "td", {}, make("span", {class: "dot", style: groupColor(index)}), g.name,
        note ? make("small", {}, note) : null),
      ...cells(index === 0 ? baseRuns : members, groups.length > 1 ? baseRuns : null));
    const single = members.length > 1
      ? members.map(
          (r) => make("tr", {class: "one"}, make("td", {}, r.seed ? `seed ${r.seed}` : r.name), ...cells([r], null)))
                                                                  : [];
    return [row, ...single];
  });
  return make(
    "div", {class: "scroll"},
    make(
      "table", {class: "runs"},
      make("thead", {}, make("tr", {}, make("th", {}, "Run"), ...shown.map((c) => make("th", {title: c.how}, c.head)))),
      make("tbody", {}, ...body)));
}

function bar() {
  const legend = make(
    "div", {class: "legend"},
    ...groups.map(
      (g, i) => make(
        "span", {}, make("span", {class: "dot", style: groupColor(i)}), g.name,
        g.runs.length > 1 ? make("small", {}, ` ${g.runs.length} seeds: mean, lowest to highest`) : null)));
  const buttons = axisNames.map(
    (name) => make(
      "button", {
        type: "button",
        onclick() {
          state.axis = name, state.cursor = null;
          press(), redraw();
        }
      },
      axes[name].label));
  const smooth = make(
    "button", {
      type: "button",
      title: "over 1/30 of the curve",
      onclick() {
        state.smooth = !state.smooth;
        press(), redraw();
      }
    },
    "running mean");
  const press = () => {
    buttons.forEach((b, i) => b.setAttribute("aria-pressed", axisNames[i] === state.axis));
    smooth.setAttribute("aria-pressed", state.smooth);
  };
  press();
  return make(
    "div", {class: "bar"}, legend,
    make("div", {class: "switch"}, "against", make("span", {}, ...buttons), make("span", {}, smooth)));
}
const redraw = () => charts.forEach((c) => c.node.clientWidth && c.draw());

// ---- samples -------------------------------------------------------------------------------------------------------
// Spaces stay, a line break is also shown as one; control characters, those of text direction and others that take no
// room read as escapes.
const visible = (text) => text.replace(/\n/g, "\u21b5\n")
                            .replace(
                              /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]/g,
                              (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
const tint = (v, scale) =>
  `--tint: var(${v < 0 ? "--down" : "--up"}); --a: ${Math.min(1, Math.abs(v) / scale).toFixed(3) * 0.55}`;

// A row of things to choose from, with buttons to the one before and after.
function chooser(label, options, value, change) {
  const at = options.findIndex((o) => o.value === value);
  const select = make(
    "select", {"aria-label": label, onchange: (e) => change(options[e.target.selectedIndex].value)},
    ...options.map((o, i) => make("option", {selected: i === at}, o.text)));
  const go = (d, sign) => make(
    "button", {
      type: "button",
      "aria-label": `${label} ${d < 0 ? "before" : "after"}`,
      disabled: !options[at + d],
      onclick: () => change(options[at + d].value)
    },
    sign);
  return make("span", {class: "switch"}, label, go(-1, "\u2039"), select, go(1, "\u203a"));
}
// What is known of a response besides its text: [name, value].
function facts(s) {
  const finish = s.finish || (s.finished === true ? "eos" : s.finished === false ? "length" : null);
  const known = s.logprobs?.filter(finite) || [];
  return [
    ["extracted answer", s.extracted === "" ? "none" : s.extracted],
    ["expected", s.answer],
    ["score", s.score],
    ["length reward", s.length_reward || null],
    ["overlong penalty", s.overlong || null],
    ["KL penalty", s.kl_penalty || null],
    ["reward", s.reward],
    ["advantage", s.advantage],
    ["finish",
     finish === "eos"        ? "end of sequence"
       : finish === "stop"   ? "stop token or text"
       : finish === "length" ? "cut at the limit"
                             : finish],
    ["tokens", s.ids?.length ?? s.tokens],
    ["of an earlier response", s.replayed || null],
    ["mean log-prob", known.length ? mean(known) : null],
    ["least likely token", known.length ? lowest(known) : null],
    ["uid", s.uid],
  ].filter(([, v]) => v !== null && v !== undefined);
}
// A prompt and a response to it, with a background for each token; `scale` is the advantage of the full colour.
function response(s, scale, color) {
  const info = make("p", {class: "token"}, "\u00a0");
  const pieces = s.pieces || [s.response];
  const text = make("div", {class: "text"}, ...pieces.map((piece, i) => {
    const lp = s.logprobs?.[i];
    const style = color === "advantage" ? (finite(s.advantage) ? tint(s.advantage, scale) : null)
      : finite(lp)                      ? tint(lp, 3)
                                        : null;
    const replayed = s.pieces && i < (s.replayed || 0);
    const about =
      [
        s.pieces ? `token ${i + 1} of ${pieces.length}` : null, replayed ? "of an earlier response, not sampled" : null, s.ids && s.pieces ? `id ${s.ids[i]}` : null,
        finite(lp) ? `log-prob ${plain(lp)}, p = ${Math.exp(lp).toPrecision(3)}` : null,
        finite(s.advantage) ? `advantage ${plain(s.advantage)}` : null
      ].filter(Boolean)
        .join(" \u00b7 ");
    return make(
      "span", {
        class: replayed ? "replayed" : null,
        style: replayed ? null : style,
        title: about,
        onpointerenter: () => (info.textContent = about)
      },
      visible(String(piece)) || `\u27e8id ${s.ids?.[i] ?? "?"}\u27e9`);
  }));
  const gradient = (stops) => `background: linear-gradient(90deg, ${stops.join(", ")})`;
  const legend = color === "advantage"
    ? make(
        "span", {}, `\u2212${scale.toFixed(2)}`, make("span", {
          class: "scale",
          style:
            gradient(["rgba(var(--down), .55)", "rgba(var(--down), 0)", "rgba(var(--up), 0)", "rgba(var(--up), .55)"])
        }),
        `${scale.toFixed(2)}`)
    : s.logprobs
    ? make(
        "span", {}, "likely",
        make("span", {class: "scale", style: gradient(["rgba(var(--down), 0)", "rgba(var(--down), .55)"])}),
        "log-prob \u2264 \u22123")
    : make("span", {}, "no log-probs recorded");
  return make(
    "div", {class: "sample"},
    make(
      "div", {}, make("p", {class: "label"}, "prompt"),
      make("div", {class: "text prompt"}, visible(String(s.prompt ?? ""))),
      make(
        "p", {class: "label"},
        make(
          "span", {}, `response, coloured by ${color === "advantage" ? "advantage" : "log-prob"}`,
          s.replayed ? "; underlined: the beginning of an earlier response" : ""),
        legend),
      text, info),
    make(
      "dl", {},
      ...facts(s).flatMap(
        ([k, v]) => [make("dt", {}, k), make("dd", {}, typeof v === "number" ? plain(v) : visible(String(v)))])));
}

function samples() {
  const withSamples = runs.filter((r) => r.samples.length);
  if (!withSamples.length) return null;
  const view = {run: withSamples[0], step: null, sample: null, color: "logprob"};
  const stepsOf = (run) => [...new Set(run.samples.map((s) => s.step))];
  const atStep = () => view.run.samples.filter((s) => s.step === view.step);
  const pick = make("div", {class: "pick"}), strip = make("div", {class: "strip"}), body = make("div");

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
      ...(
        withSamples.length > 1 ? [chooser("run", withSamples.map((r) => ({value: r, text: r.name})), view.run, setRun)]
                               : []),
      chooser("step", steps.map((s) => ({value: s, text: s})), view.step, setStep),
      chooser(
        "sample", list.map((s, i) => ({value: s, text: `${i + 1} of ${list.length}`})), view.sample,
        (s) => ((view.sample = s), render())),
      colors());
    const scale = highest([1e-9, ...list.map((s) => Math.abs(s.advantage || 0))]);
    const byPrompt = new Map();
    list.forEach((s) => {
      const key = s.group ?? s.prompt;
      if (!byPrompt.has(key)) byPrompt.set(key, []);
      byPrompt.get(key).push(s);
    });
    strip.replaceChildren(...[...byPrompt.values()].map(
      (group) => make("span", {}, ...group.map((s) => make("button", {
                                                 type: "button",
                                                 style: tint(s.advantage || 0, scale),
                                                 "aria-pressed": s === view.sample,
                                                 title: `score ${s.score}, advantage ${plain(s.advantage || 0)}`,
                                                 "aria-label": `response with score ${s.score}`,
                                                 onclick() { view.sample = s, render(); }
                                               })))));
    body.replaceChildren(response(view.sample, scale, view.color));
  }
  function colors() {
    return make(
      "span", {class: "switch"}, "colour",
      make(
        "span", {},
        ...["logprob", "advantage"].map(
          (c) => make(
            "button", {type: "button", "aria-pressed": view.color === c, onclick() { view.color = c, render(); }},
            c === "logprob" ? "log-prob" : "advantage"))));
  }
  setRun(withSamples.at(0));
  return section(
    "Samples", pick,
    make(
      "p", {class: "note", style: "max-width: none"},
      `A square is a response, a cluster the responses to one prompt; blue: more reward than its group, orange: less.${
        data.sampled > 1 ? ` Every ${data.sampled}th response of rollouts.jsonl is here.` : ""}`),
    strip, body);
}

// ---- configuration -------------------------------------------------------------------------------------------------
function configuration() {
  const text = (v) => (v === undefined ? "\u2013" : v === "" ? "\u201c\u201d" : v);
  const table = (keys, withDefault) => make(
    "div", {class: "scroll"},
    make(
      "table", {class: "config"},
      make(
        "thead", {},
        make(
          "tr", {}, make("th", {}, "key"),
          ...groups.map((g, i) => make("th", {}, make("span", {class: "dot", style: groupColor(i)}), g.name)),
          withDefault ? make("th", {}, "default") : null)),
      make(
        "tbody", {},
        ...keys.map(
          (k) => make(
            "tr", {}, make("td", {}, k), ...groups.map((g) => make("td", {}, text(g.config[k]))),
            withDefault ? make("td", {class: "same"}, text(data.defaults[k])) : null)))));
  const differ = data.keys.filter(
    (k) => k !== "trainer.default_local_dir" && groups.some((g) => g.config[k] !== groups[0].config[k]));
  const changed = data.keys.filter((k) => groups.some((g) => g.config[k] !== data.defaults[k]));
  if (!data.keys.length) return null;
  return section(
    "Configuration",
    ...(
      groups.length > 1
        ? [make("p", {class: "note", style: "margin: 0 0 8px"}, "In what the runs differ."), table(differ, false)]
        : []),
    changed.length ? make(
                       "details", {open: groups.length === 1},
                       make("summary", {}, `${many(changed.length, "key")} not at the default`), table(changed, true))
                   : null,
    make("details", {}, make("summary", {}, `All ${many(data.keys.length, "key")}`), table(data.keys, false)));
}

// ---- the page ------------------------------------------------------------------------------------------------------
function page() {
  const main = document.querySelector("main");
  document.title = groups.map((g) => g.name).join(", ") + " \u2013 pare report";
  const sections = [["Learning", learning], ["Optimisation", optimisation], ["Cost", costs]].map(
    ([title, list]) => [title, list().filter(Boolean).map(lineChart).filter(Boolean)]);
  sections[2][1].push(...stacks().flatMap(stackCharts));
  const rest = metricNames.filter((m) => !taken.has(m) && m !== "training/global_step");
  const others = rest.length
    ? make(
        "details", {ontoggle: redraw}, make("summary", {}, `${many(rest.length, "more metric")}`),
        grid(rest.map((m) => lineChart({title: m, values: use(m)}))))
    : null;
  main.append(
    make("h1", {}, groups.map((g) => g.name).join(" \u00b7 ")), make("p", {class: "lead"}, lead()),
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
