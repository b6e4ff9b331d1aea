// Metrics of all runs as line charts: chosen by a regular expression, smoothed, with the values at the pointer.
import { app, colour, element, get, shownRuns } from "./app.js";

const data = []; // per run: { epoch, rows, offsets, controls, names }
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22, SHOWN = 60, POINTS = 400;
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
  const { rows, offsets, controls } = data[run], phases = new Map();
  for (const row of rows) {
    const phase = row.phase ?? "", x = options.axis === "time" ? row.time : row.step + (offsets[phase] ?? 0);
    if (!number(row[name]) || !number(x)) continue;
    if (!phases.has(phase)) phases.set(phase, new Map());
    phases.get(phase).set(x, row[name]);
  }
  const start = options.axis === "time" ? 0 : Math.min(...[...phases.keys()].map((phase) => offsets[phase] ?? 0));
  const line = { control: "", xs: [], ys: [], means: [], starts: new Set() }, result = [line];
  for (const [phase, points] of phases) {
    const order = [...points.keys()].sort((a, b) => a - b), xs = order.map((x) => x - start), ys = order.map((x) => points.get(x)), means = smooth(ys, Number(options.smooth));
    if (controls.includes(phase)) { result.push({ control: phase, xs, ys, means, starts: new Set() }); continue; }
    line.starts.add(line.xs.length);
    for (const [all, values] of [[line.xs, xs], [line.ys, ys], [line.means, means]]) for (const value of values) all.push(value);
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

const ticks = (low, high, count) => {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count) || span;
  const result = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) result.push(Number(at.toPrecision(10)));
  return result;
};

const draw = (tag, attributes, parent) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent?.append(node);
  return node;
};

// The points to draw of a long line: the least and the greatest of each of POINTS parts, and where phases start.
const outline = (s, values) => {
  const all = values.map((_, i) => i), part = values.length / POINTS;
  if (part < 4) return all;
  const chosen = new Set(s.starts);
  for (let from = 0; from < values.length; from += part) {
    const range = all.slice(Math.floor(from), Math.floor(from + part));
    for (const better of [(a, b) => a < b, (a, b) => a > b]) chosen.add(range.reduce((a, b) => (better(values[b], values[a]) ? b : a)));
  }
  return [...chosen, values.length - 1].sort((a, b) => a - b);
};

// A chart of series [{ label, colour, dash, xs, ys, means }].
const chart = (title, series) => {
  const usable = (y) => number(y) && (!options.log || y > 0), scale = options.log ? Math.log10 : (y) => y;
  const xs = series.flatMap((s) => [s.xs[0], s.xs.at(-1)]);
  let low = Infinity, high = -Infinity;
  for (const s of series) for (const y of s.ys) if (usable(y)) { low = Math.min(low, scale(y)); high = Math.max(high, scale(y)); }
  if (low > high) [low, high] = [0, 1];
  if (low >= 0 && low < 0.25 * high && !options.log) low = 0;
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  [low, high] = [low === 0 ? 0 : low - room, high + room];
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const x = (value) => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (value - first) / (last - first) : 0.5);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (scale(value) - low) / (high - low));
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const tick of ticks(low, high, 5)) {
    const at = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (tick - low) / (high - low));
    draw("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at, class: "grid-line" }, svg);
    draw("text", { x: LEFT - 6, y: at + 3.5, "text-anchor": "end" }, svg).textContent = show(options.log ? 10 ** tick : tick);
  }
  for (const tick of ticks(first, last, 6))
    draw("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, svg).textContent = show(tick);
  const path = (s, values) => outline(s, values).map((i) => !usable(values[i]) ? "" :
    `${s.starts.has(i) || !usable(values[i - 1]) ? "M" : "L"}${x(s.xs[i]).toFixed(1)},${y(values[i]).toFixed(1)}`).join("");
  for (const s of series) {
    const few = s.xs.length < 12;
    if (!few && Number(options.smooth) > 1) draw("path", { d: path(s, s.ys), class: "raw", stroke: s.colour }, svg);
    draw("path", { d: path(s, few ? s.ys : s.means), class: "line", stroke: s.colour, "stroke-dasharray": s.dash }, svg);
    if (few) for (const [i, at] of s.xs.entries())
      if (usable(s.ys[i])) draw("circle", { cx: x(at), cy: y(s.ys[i]), r: 2.6, fill: s.colour }, svg);
  }
  const cursor = draw("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" }, svg);
  const legend = element("div", { class: "legend" }), where = element("small", { class: "where" });
  const keys = series.map((s) => {
    const value = element("b", {}, show(s.means.at(-1)));
    legend.append(element("span", {}, element("i", { style: `background:${s.colour}` }), s.label ? `${s.label} ` : "", value));
    return value;
  });
  const point = (at) => {
    cursor.setAttribute("visibility", at == null ? "hidden" : "visible");
    where.textContent = at == null ? "" : `${options.axis} ${show(at)}`;
    if (at != null) { cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); }
    series.forEach((s, i) => { keys[i].textContent = show(at == null ? s.means.at(-1) : s.ys[nearest(s.xs, at)]); });
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const all = series[0].xs, aim = first + Math.min(1, Math.max(0, at)) * (last - first);
    for (const other of charts) other(all.length ? all[nearest(all, aim)] : aim);
  });
  svg.addEventListener("pointerleave", () => { for (const other of charts) other(null); });
  charts.push(point);
  return element("figure", { class: "card chart", "data-metric": title }, element("h3", {}, title, where), legend, svg);
};
let charts = [];

const nearest = (xs, at) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < at) low = middle + 1; else high = middle; }
  return low && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
};

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
    return { ...line, label, colour: hue ?? (line.control ? "var(--control)" : colour(run)), dash: line.control ? "4 2" : "" };
  }));
};

export const curves = (main) => {
  const grid = element("div", { class: "panels charts" }), note = element("p", { class: "note" });
  const keep = () => { sessionStorage.curves = JSON.stringify(options); render(); };
  const pick = element("input", { type: "search", value: options.pick, placeholder: "metrics, as a regular expression: reward|kl", "aria-label": "metrics", oninput: () => { options.pick = pick.value; keep(); } });
  const smoothing = element("input", { type: "range", min: 1, max: 101, step: 2, value: options.smooth, "aria-label": "smoothing", oninput: () => { options.smooth = smoothing.value; keep(); } });
  const width = element("b", {});
  const axis = element("select", { "aria-label": "x axis", onchange: () => { options.axis = axis.value; keep(); } }, ...["step", "time"].map((v) => element("option", { selected: options.axis === v }, v)));
  const box = (name, text) => element("label", {}, element("input", { type: "checkbox", checked: options[name], onchange: (event) => { options[name] = event.target.checked; keep(); } }), text);
  main.replaceChildren(element("div", { class: "controls" }, pick, element("label", {}, "average over ", smoothing, width), element("label", {}, "x ", axis), box("log", "log y"), box("together", "one plot")), note, grid);
  const render = () => {
    width.textContent = ` ${options.smooth}`;
    charts = [];
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
    grid.replaceChildren(...panels);
  };
  let busy = false, again = false;
  const refresh = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const stale = shownRuns().filter((run) => !data[run] || data[run].epoch !== app.state.runs[run].epoch || data[run].rows.length !== app.state.runs[run].lines);
      await Promise.all(stale.map(load));
      render();
    } catch (error) { note.textContent = error.message; }
    busy = false;
    if (again) { again = false; refresh(); }
  };
  refresh();
  return { refresh, reopen: refresh };
};
