// The frame of the page: runs, routes, events. Each page is a function in pages.js that fills <main>.
import { curves } from "./curves.js";
import { edits } from "./edits.js";
import { evaluations, label, rollout, rollouts } from "./pages.js";
import { prepare } from "./players.js";

export const app = { state: null, hidden: new Set(JSON.parse(sessionStorage.hidden || "[]")), page: null };
export const main = document.querySelector("main");
const pages = { curves, rollouts, rollout, evaluations, label, edits };

export const element = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
};

export const get = async (path, parameters = {}) => {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null);
  const reply = await fetch(given.length ? `${path}?${new URLSearchParams(given)}` : path);
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text;
  try { message = JSON.parse(text).detail ?? text; } catch { /* plain text */ }
  throw new Error(typeof message === "string" ? message : text);
};

export const fill = (box, html) => {
  if (box.listed === html) return;
  box.innerHTML = box.listed = html;
  for (const dot of box.querySelectorAll(".dot[data-run]")) dot.style.background = colour(Number(dot.dataset.run));
  prepare(box);
};
export const colour = (run) => `var(--line${run % 8})`;
export const shownRuns = () => app.state.runs.map((_, i) => i).filter((i) => !app.hidden.has(app.state.runs[i].path));

// "#/rollouts?q=…" is the page rollouts with its parameters; "#/rollout/0/80/17" has arguments.
export const route = () => {
  const [path, query] = (location.hash.slice(2) || "curves").split(/\?(.*)/s);
  const [name, ...rest] = path.split("/");
  return { name, rest, parameters: new URLSearchParams(query || "") };
};
export const go = (path, parameters = {}) => {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value != null);
  location.hash = `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
};

const show = () => {
  const { name } = route();
  for (const link of document.querySelectorAll("nav a"))
    link.toggleAttribute("data-here", link.hash.startsWith(`#/${name}`));
  const open = pages[name] || curves;
  if (app.page?.name !== name || !app.page.reopen) {
    app.page?.close?.();
    main.className = `on-${name}`;
    app.page = { name, ...open(main) };
  } else app.page.reopen();
};

const chips = () => {
  const { runs } = app.state;
  document.querySelector(".runs").replaceChildren(...runs.map((run, i) => {
    const steps = run.lines ? `${run.lines} steps` : "no step yet";
    const note = run.deleted ? "deleted" : run.live ? "training" : "";
    return element("button", {
      type: "button", class: `run${note ? ` ${note}` : ""}`, "aria-pressed": String(!app.hidden.has(run.path)),
      title: `${run.path}: ${steps}, ${run.rollouts} recorded rollouts`, style: `--run: ${colour(i)}`,
      onclick: () => {
        if (!app.hidden.delete(run.path)) app.hidden.add(run.path);
        sessionStorage.hidden = JSON.stringify([...app.hidden]);
        chips();
        app.page?.refresh?.(true);
      },
    }, element("i", { class: "dot" }), element("b", {}, run.name), element("small", {}, [run.recipe, note].filter(Boolean).join(" · ")));
  }));
};

const receive = (state) => {
  const first = !app.state;
  app.state = state;
  document.querySelector("#to-label").hidden = !state.label;
  document.querySelector("#to-edits").hidden = !state.runs.some((run) => run.edits);
  const box = document.querySelector(".problems");
  box.hidden = !state.problems.length;
  box.replaceChildren(...state.problems.slice(0, 5).map((text) => element("p", {}, text)));
  if (state.problems.length > 5) box.append(element("p", {}, `${state.problems.length - 5} more files with damaged rows`));
  chips();
  if (first) show();
  else app.page?.refresh?.(false);
};

const status = document.querySelector(".status");
const events = new EventSource("events");
events.onmessage = (event) => { status.textContent = ""; receive(JSON.parse(event.data)); };
events.onerror = () => { status.textContent = "the server has ended, or is not reachable"; };
addEventListener("hashchange", show);
