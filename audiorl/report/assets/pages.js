// Rollouts, one rollout with its group, evaluations, labels. Their content comes from the server as HTML.
import { app, element, fill, get, go, route, shownRuns } from "./app.js";
const failed = (box, error) => { box.listed = null; box.replaceChildren(element("p", { class: "error", role: "alert" }, error.message)); };
const choice = (name, values, now, change, first) => element("select", { "aria-label": name, onchange: (e) => change(e.target.value) },
  ...(first ? [element("option", { value: "" }, first)] : []),
  ...values.map((v) => String(v) || "(none)").map((v) => element("option", { value: v, selected: v === now }, v)));

export const rollouts = (main) => {
  const box = element("div", { class: "results" }), controls = element("div", { class: "controls" }), hints = element("p", { class: "hints" });
  main.replaceChildren(controls, hints, box);
  const given = () => Object.fromEntries(route().parameters);
  const set = (changes) => go("rollouts", { ...given(), page: "", ...changes });
  const field = element("input", { type: "search", placeholder: 'words, "a phrase", -without, reward>0.5, accuracy=1, task:…, prompt:…', "aria-label": "search" });
  let waiting, current = 0;
  field.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => set({ q: field.value }), 180); });
  const build = () => {
    const now = given(), { fields, orders, task, phase, step } = app.state;
    if (document.activeElement !== field) field.value = now.q ?? "";
    controls.replaceChildren(field,
      choice("step", [...step].reverse(), now.step, (v) => set({ step: v }), "all steps"),
      ...(task.length > 1 ? [choice("task", task, now.task, (v) => set({ task: v }), "all tasks")] : []),
      ...(phase.length > 1 ? [choice("phase", phase, now.phase, (v) => set({ phase: v }), "all phases")] : []),
      choice("order", orders, now.order ?? orders[0], (v) => set({ order: v === orders[0] ? "" : v })));
    const example = (text) => element("button", { type: "button", onclick: () => set({ q: [now.q, text].filter(Boolean).join(" ") }) }, text);
    hints.replaceChildren(...["reward>0", "advantage<0", "tokens>100", "stop:length", ...fields.parts.map((p) => `${p}>0.5`)].slice(0, 10).map(example));
  };
  const search = async () => {
    const ticket = ++current, now = given();
    try {
      const html = await (await get("rollouts", { ...now, runs: app.hidden.size ? shownRuns().join(",") || "-1" : "" })).text();
      if (ticket === current) fill(box, html);
    } catch (error) { if (ticket === current) failed(box, error); }
  };
  const open = (event) => {
    const hit = event.target.closest("[data-rollout]");
    const page = event.target.closest("[data-page]");
    if (page) { go("rollouts", { ...given(), page: page.dataset.page }); scrollTo(0, 0); }
    else if (hit && !event.target.closest("button, audio, a") && (event.type === "click" || event.key === "Enter")) location.hash = `#/rollout/${hit.dataset.rollout}`;
  };
  box.addEventListener("click", open);
  box.addEventListener("keydown", open);
  const reopen = () => { build(); search(); };
  reopen();
  // New rollouts are shown while nothing plays and the page is not scrolled: what is being read stays in place.
  return { reopen, refresh: (chosen) => { if (chosen || (scrollY < 200 && !document.querySelector(".play[data-on]"))) search(); if (!controls.contains(document.activeElement)) build(); } };
};

const COLOURS = {
  "log-prob": { text: "how unlikely each token was", of: (v) => [1 - Math.exp(v), "warm"] },
  advantage: { text: "the advantage of each token", of: (v, most) => [Math.abs(v) / most, v < 0 ? "down" : "up"] },
  ratio: { text: "its probability after the update over that before", of: (v) => [Math.min(1, Math.abs(Math.log2(v))), v < 1 ? "down" : "up"] },
  entropy: { text: "the entropy of the distribution it was sampled from", of: (v, most) => [v / most, "warm"] },
};

const paint = (box, kind) => {
  const all = [...box.querySelectorAll(".token")];
  const value = (token) => Number(token.getAttribute(`data-${kind}`));
  const most = Math.max(1e-9, ...all.map((t) => Math.abs(value(t)) || 0));
  for (const token of all) {
    const [strength, tone] = COLOURS[kind] && token.hasAttribute(`data-${kind}`) ? COLOURS[kind].of(value(token), most) : [0, "warm"];
    token.style.setProperty("--strength", Number.isFinite(strength) ? strength.toFixed(3) : 0);
    token.dataset.tone = tone;
    token.title = [...token.attributes].filter((a) => a.name.startsWith("data-") && a.name !== "data-tone").map((a) => `${a.name.slice(5)} ${a.value}`).join("\n");
  }
};

export const rollout = (main) => {
  const box = element("div", { class: "fragment" }), controls = element("div", { class: "controls" });
  main.replaceChildren(controls, box);
  const reopen = async () => {
    try {
      fill(box, await (await get(`rollouts/${route().rest.join("/")}`)).text());
      const kinds = Object.keys(COLOURS).filter((kind) => box.querySelector(`.token[data-${kind}]`));
      const kind = kinds.includes(sessionStorage.colour) ? sessionStorage.colour : kinds[0];
      const note = element("span", { class: "note" }, kind ? COLOURS[kind].text : "");
      const select = choice("token colour", [...kinds, "none"], kind, (v) => { sessionStorage.colour = v; note.textContent = COLOURS[v]?.text ?? ""; paint(box, v); });
      controls.replaceChildren(element("button", { type: "button", onclick: () => history.back() }, "◀ back"), ...(kinds.length ? [element("label", {}, "tokens by ", select), note] : []));
      if (kind) paint(box, kind);
    } catch (error) { failed(box, error); }
  };
  reopen();
  scrollTo(0, 0);
  return { reopen };
};

export const evaluations = (main) => {
  const box = element("div", { class: "fragment" }), controls = element("div", { class: "controls" });
  main.replaceChildren(controls, box);
  const all = () => app.state.runs.flatMap((run, i) => run.evaluations.map((name) => [`${i}/${name}`, app.state.runs.length > 1 ? `${run.name}: ${name}` : name]));
  const given = () => {
    const places = all().map(([place]) => place), now = Object.fromEntries(route().parameters);
    const pick = (wanted, end) => (places.includes(wanted) ? wanted : places.find((p) => p.endsWith(end)) ?? places[0]);
    const left = pick(now.left, "/before"), right = pick(now.right ?? (left && `${left.split("/")[0]}/after`), "/after");
    return { left, right, show: now.show ?? "changed", page: now.page };
  };
  const set = (changes) => go("evaluations", { ...given(), page: "", ...changes });
  const side = (name, now) => element("select", { "aria-label": name, onchange: (e) => set({ [name]: e.target.value }) }, ...all().map(([place, text]) => element("option", { value: place, selected: place === now }, text)));
  const reopen = async () => {
    if (!all().length) { box.replaceChildren(element("p", { class: "note" }, "no evaluation has finished yet")); return; }
    const now = given();
    controls.replaceChildren(side("left", now.left), "→", side("right", now.right), element("select", { "aria-label": "show", onchange: (e) => set({ show: e.target.value }) }, ...Object.entries(app.state.changes).map(([v, text]) => element("option", { value: v, selected: v === now.show }, text))));
    try {
      fill(box, await (await get("evaluations", now)).text());
    } catch (error) { failed(box, error); }
  };
  box.addEventListener("click", (event) => {
    const page = event.target.closest("[data-page]");
    if (page) { go("evaluations", { ...given(), page: page.dataset.page }); scrollTo(0, 0); }
  });
  reopen();
  const known = () => JSON.stringify(all());
  let before = known();
  return { reopen, refresh: () => { if (known() !== before) { before = known(); reopen(); } } };
};

const KEYS = {
  pairs: [["a", "a", "A is better"], ["b", "b", "B is better"], ["t", "tie", "tie"], ["s", "skip", "skip"]],
  scores: [...[["1", "bad"], ["2", "poor"], ["3", "fair"], ["4", "good"], ["5", "excellent"]].map(([n, word]) => [n, n, word]), ["s", "skip", "skip"]],
};

export const label = (main) => {
  const box = element("div", { class: "fragment" }), bar = element("div", { class: "verdicts" }), count = element("p", { class: "sub" });
  main.replaceChildren(count, box, bar);
  let question = null, sending = false;
  const next = async () => {
    try {
      question = await (await get("question")).json();
      count.textContent = `${question.count} labels in the file. ${question.problem}`;
      if (!question.id) { bar.replaceChildren(); box.replaceChildren(element("p", { class: "note" }, "nothing is left to label")); return; }
      fill(box, question.html);
      box.dataset.question = question.id;
      bar.replaceChildren(...KEYS[question.mode].map(([key, verdict, text]) => element("button", { type: "button", "data-verdict": verdict, onclick: () => give(verdict) }, element("kbd", {}, key.toUpperCase()), text)));
    } catch (error) { failed(box, error); }
  };
  const give = async (verdict) => {
    if (sending || !question?.id) return;
    sending = true;
    try {
      const reply = await fetch("labels", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ id: question.id, verdict }) });
      if (!reply.ok) throw new Error(await reply.text());
      await next();
      scrollTo(0, 0);
    } catch (error) { count.replaceChildren(element("span", { class: "error", role: "alert" }, `not saved: ${error.message}`)); }
    sending = false;
  };
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, audio")) return;
    const key = event.key.toLowerCase(), verdict = KEYS[question?.mode]?.find(([k]) => k === key)?.[1];
    const audio = [...box.querySelectorAll("audio")];
    if (verdict) give(verdict);
    else if (key === "r") box.querySelector("details")?.toggleAttribute("open");
    else if (key === "p" && audio.length) { const at = audio.findIndex((a) => !a.paused); audio.forEach((a) => a.pause()); audio[(at + 1) % audio.length].play(); }
    else return;
    event.preventDefault();
  };
  addEventListener("keydown", press);
  next();
  return { reopen: () => {}, refresh: () => { if (!question?.id && !sending) next(); }, close: () => removeEventListener("keydown", press) };
};
