// Metrics of all runs as line charts of uPlot (uplot.js): chosen by a regular expression, smoothed; dragging over a part zooms.
import { app, colour, element, fill, get, shownRuns } from "./app.js";

const data = []; // per run: { epoch, rows, added, offsets, controls, names }
const SHOWN = 60, HEIGHT = 210;
const FIRST = [/^reward\/mean/, /^eval\//, /^reward\//, /loss$/, /^kl/, /entropy/, /^response/, /^policy/];

const options = { pick: "", smooth: "5", axis: "step", together: false, log: false, ...JSON.parse(sessionStorage.curves || "{}") };

const load = async (run) => {
  const old = data[run];
  const reply = await (await get(`metrics/${run}`, { epoch: old?.epoch ?? -1, since: old?.rows.length ?? 0 })).json();
  const rows = reply.start ? old.rows.slice(0, reply.start).concat(reply.rows) : reply.rows;
  data[run] = { ...reply, rows };
};

const number = (value) => typeof value === "number" && Number.isFinite(value);

// The values of a metric in a run: a line of its phases, one after the other, and a line for each control. Steps count from
// the start of the first phase that has the metric. Of a step that was recorded twice the last value counts.
const lines = (run, name) => {
  const { rows, added, offsets, controls } = data[run], phases = new Map();
  for (const row of [...rows, ...added]) {
    const phase = row.phase ?? "", x = options.axis === "time" ? row.time : row.step + (offsets[phase] ?? 0);
    if (!number(row[name]) || !number(x)) continue;
    if (!phases.has(phase)) phases.set(phase, new Map());
    phases.get(phase).set(x, row[name]);
  }
  const start = options.axis === "time" ? 0 : Math.min(...[...phases.keys()].map((phase) => offsets[phase] ?? 0));
  const line = { control: "", xs: [], ys: [], means: [] }, result = [line];
  for (const [phase, points] of phases) {
    const xs = [...points.keys()].sort((a, b) => a - b), ys = xs.map((x) => points.get(x)), means = smooth(ys, Number(options.smooth));
    const at = xs.map((x) => x - start);
    if (controls.includes(phase)) { result.push({ control: phase, xs: at, ys, means }); continue; }
    if (line.xs.length && at[0] > line.xs.at(-1)) // a gap where a phase starts
      for (const [all, value] of [[line.xs, (line.xs.at(-1) + at[0]) / 2], [line.ys, null], [line.means, null]]) all.push(value);
    for (const [all, values] of [[line.xs, at], [line.ys, ys], [line.means, means]]) for (const value of values) all.push(value);
  }
  return result.filter((one) => one.xs.length);
};

// Centred moving average over `width` values; at the ends over those that exist.
const smooth = (values, width) => {
  const half = Math.floor(width / 2), sums = [0];
  if (!half) return values;
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const a = Math.max(0, i - half), b = Math.min(values.length, i + half + 1);
    return (sums[b] - sums[a]) / (b - a);
  });
};

export const show = (value) => {
  if (!number(value)) return "–";
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

const real = (name) => { const given = name.startsWith("var(") ? name.slice(4, -1) : ""; return given ? getComputedStyle(document.documentElement).getPropertyValue(given).trim() : name; };
const faint = (tint) => `${tint}48`;

// The index of the value of a series that is nearest to index i: series of several runs share one axis.
const nearest = (plot, series, i) => {
  const ys = plot.data[series];
  for (let d = 0; d < ys.length; d++) for (const j of [i - d, i + d]) if (ys[j] != null) return j;
  return i;
};

// A chart of series [{ label, colour, dash, xs, ys, means }]; the legend has the value at the pointer, else the last one.
const charts = new Map();
const chart = (title, all) => {
  const usable = (y) => (number(y) && (!options.log || y > 0) ? y : null), smoothed = Number(options.smooth) > 1;
  const series = [{ label: " ", value: (plot, x) => (x == null ? "" : `${options.axis} ${show(x)}`) }], tables = [];
  for (const one of all) {
    const few = one.xs.length < 12, tint = real(one.colour), ys = one.ys.map(usable);
    const last = ys.findLast((y) => y != null), raw = { stroke: few || !smoothed ? tint : faint(tint), width: few || !smoothed ? 1.9 : 1 };
    const common = { tint, dash: one.dash, points: { show: few, size: 6, fill: tint }, spanGaps: false };
    tables.push([one.xs, ys]);
    series.push({ ...common, ...raw, label: one.label || " ", value: (plot, y) => show(y ?? last) });
    if (few || !smoothed) continue;
    tables.push([one.xs, one.means.map(usable)]);
    series.push({ ...common, stroke: tint, width: 1.9, class: "mean" });
  }
  const joined = uPlot.join(tables), key = JSON.stringify([series, options.log, options.axis, real("var(--ink)")]), old = charts.get(title);
  if (old?.key === key) { // the zoom stays
    const { min, max } = old.plot.scales.x, whole = min === old.plot.data[0][0] && max === old.plot.data[0].at(-1);
    old.series.splice(0, Infinity, ...series);
    old.plot.setData(joined, whole);
    if (!whole) old.plot.redraw();
    return old.figure;
  }
  const figure = element("figure", { class: "card chart", "data-metric": title }, element("h3", {}, title)), held = [...series];
  const axis = { stroke: real("var(--muted)"), font: "10px sans-serif", ticks: { show: false }, grid: { stroke: real("var(--grid)"), width: 1 } };
  const plot = new uPlot({
    width: 400, height: HEIGHT, padding: [8, 8, 0, 0], legend: { markers: { width: 0, fill: (u, i) => u.series[i].tint } },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { distr: options.log ? 3 : 1, range: options.log ? undefined : (_, low, high) => {
      if (low == null) return [0, 1];
      const room = (high - low > 1e-9 * Math.abs(high) ? high - low : Math.abs(high) || 1) * 0.05; // means of equal values differ by rounding
      return [low >= 0 && low < 0.25 * high ? 0 : low - room, high + room];
    } } },
    axes: [{ ...axis, size: 26, grid: { show: false }, values: (_, at) => at.map(show) }, { ...axis, size: 50, values: (_, at) => at.map((y) => (y == null ? "" : show(y))) }],
    series: series.map((one, i) => (one.value ? { ...one, value: (u, y) => held[i].value(u, y) } : one)),
    cursor: { sync: { key: options.axis }, dataIdx: (u, s, i) => (s ? nearest(u, s, i) : i), y: false, points: { size: 7 } },
  }, joined, figure);
  charts.set(title, { key, plot, figure, series: held });
  return figure;
};
const fit = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const found = charts.get(target.dataset.metric);
    if (found?.figure === target && target.clientWidth) found.plot.setSize({ width: target.clientWidth - 28, height: HEIGHT });
  }
});

const chosen = () => {
  const all = new Set(shownRuns().flatMap((run) => data[run]?.names ?? []));
  const pattern = new RegExp(options.pick || "", "i");
  const rank = (name) => { const place = FIRST.findIndex((rule) => rule.test(name)); return place < 0 ? FIRST.length : place; };
  return [...all].filter((name) => pattern.test(name)).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
};

const seriesOf = (name, hue) => {
  const runs = shownRuns().filter((run) => data[run]);
  return runs.flatMap((run) => lines(run, name).map((line) => {
    const label = [options.together ? name : "", runs.length > 1 ? app.state.runs[run].name : "", line.control].filter(Boolean).join(" · ");
    return { ...line, label, colour: hue ?? (line.control ? "var(--control)" : colour(run)), dash: line.control ? [6, 4] : [] };
  }));
};

export const curves = (main) => {
  const grid = element("div", { class: "panels charts" }), note = element("p", { class: "note" }), results = element("div");
  const keep = () => { sessionStorage.curves = JSON.stringify(options); render(); };
  const pick = element("input", { type: "search", value: options.pick, placeholder: "metrics, as a regular expression: reward|kl", "aria-label": "metrics", oninput: () => { options.pick = pick.value; keep(); } });
  const smoothing = element("input", { type: "range", min: 1, max: 101, step: 2, value: options.smooth, "aria-label": "smoothing", oninput: () => { options.smooth = smoothing.value; keep(); } });
  const width = element("b", {});
  const axis = element("select", { "aria-label": "x axis", onchange: () => { options.axis = axis.value; keep(); } }, ...["step", "time"].map((v) => element("option", { selected: options.axis === v }, v)));
  const box = (name, text) => element("label", {}, element("input", { type: "checkbox", checked: options[name], onchange: (event) => { options[name] = event.target.checked; keep(); } }), text);
  main.replaceChildren(element("div", { class: "controls" }, pick, element("label", {}, "average over ", smoothing, width), element("label", {}, "x ", axis), box("log", "log y"), box("together", "one plot")), note, grid);
  main.prepend(results);
  const render = () => {
    width.textContent = ` ${options.smooth}`;
    let names = [];
    try { names = chosen(); note.textContent = ""; } catch (error) { note.textContent = error.message; }
    if (!names.length && !note.textContent) note.textContent = options.pick ? "no metric matches" : "no step has been logged yet";
    if (names.length > SHOWN) note.textContent = `${SHOWN} of ${names.length} metrics; narrow them down above`;
    names = names.slice(0, SHOWN);
    const single = shownRuns().length === 1;
    const panels = options.together
      ? [chart(options.pick || "all metrics", names.flatMap((name, i) => seriesOf(name, single || names.length > 1 ? `var(--line${i % 8})` : undefined)))].filter(() => names.length)
      : names.map((name) => [name, seriesOf(name)]).filter(([, series]) => series.length).map(([name, series]) => chart(name, series));
    grid.classList.toggle("together", options.together);
    if (panels.length !== grid.children.length || panels.some((panel, i) => panel !== grid.children[i])) grid.replaceChildren(...panels);
    for (const [title, { figure, plot }] of charts) if (!panels.includes(figure)) { plot.destroy(); charts.delete(title); fit.unobserve(figure); }
    for (const panel of panels) fit.observe(panel);
  };
  let busy = false, again = false;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      await Promise.all(shownRuns().map(load));
      render();
      fill(results, await (await get("results", { runs: shownRuns().join(",") || "-1" })).text());
    } catch (error) { note.textContent = error.message; }
    busy = false;
    if (again) { again = false; refresh(); }
  };
  refresh();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", render);
  return { refresh, reopen: refresh, close: () => { dark.removeEventListener("change", render); for (const { plot } of charts.values()) plot.destroy(); charts.clear(); } };
};
