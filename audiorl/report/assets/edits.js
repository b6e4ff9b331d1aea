// Edits: a sound, the regions to be made anew, an instruction; what the flow of a run makes of them.
import { app, element, get } from "./app.js";
import { prepare } from "./players.js";

const field = (name, placeholder, input) => element("input", { type: "search", "aria-label": name, placeholder, oninput: input });
const post = async (path, body) => {
  const reply = await fetch(path, { method: "POST", body });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
};

export const edits = (main) => {
  const before = element("div", { class: "card" }), made = element("div", { class: "members" }), said = element("p", { class: "sub", role: "status" });
  let sounds = [], sound = null, busy = false;

  const show = (box, title, { source }) => {
    box.replaceChildren(element("h3", {}, title), element("audio", { controls: true, preload: "metadata", src: source }));
    prepare(box);
  };
  const words = () => regions.value.split(/[\s,]+/).filter(Boolean);
  const draw = () => {
    const picture = before.querySelector(".picture");
    picture?.querySelectorAll(".region").forEach((old) => old.remove());
    for (const word of words()) {
      const [start, end] = word.split(":").map((n) => Math.min(Number(n) / sound.seconds, 1));
      if (start < end) picture?.append(element("span", { class: "region", style: `left: ${100 * start}%; width: ${100 * (end - start)}%` }));
    }
  };
  // A drag over the picture is a new region; a click without one plays from there, as everywhere.
  const draggable = (picture) => {
    const at = (event) => Math.min(Math.max((event.clientX - picture.getBoundingClientRect().left) / picture.clientWidth, 0), 1);
    let from = null, others = "";
    picture.addEventListener("pointerdown", (event) => { from = at(event); others = words().join(" "); picture.setPointerCapture(event.pointerId); event.preventDefault(); });
    picture.addEventListener("pointermove", (event) => {
      const ends = [from, at(event)].sort((a, b) => a - b).map((x) => (x * sound.seconds).toFixed(2));
      if (from === null || Math.abs(at(event) - from) * picture.clientWidth < 5) return;
      regions.value = `${others} ${ends.join(":")}`.trim();
      draw();
    });
    for (const kind of ["pointerup", "pointercancel"]) picture.addEventListener(kind, () => { from = null; });
    picture.addEventListener("click", (event) => { if (words().join(" ") !== others) event.stopImmediatePropagation(); }, true);
  };
  // A click on an object in a frame: the event that is heard then and there, or nearest to it.
  const film = ({ film: source, shown, events, seconds }) => element("img", { class: "film", src: source, alt: "frames of the video", title: "click on an object to make its sound anew", onclick: (event) => {
    const across = (event.offsetX / event.target.clientWidth) * shown, time = ((Math.floor(across) + 0.5) / shown) * seconds;
    const away = ({ start, end, azimuth }) => Math.max(start - time, time - end, 0) / seconds + Math.abs((across % 1) - 0.5 - 0.36 * (azimuth ?? 0) / 90);
    const { name, start, end } = events.reduce((best, other) => (away(other) < away(best) ? other : best));
    regions.value = [...words(), `${start.toFixed(2)}:${end.toFixed(2)}`].join(" ");
    said.textContent = name;
    draw();
  } });
  const open = (chosen) => {
    sound = chosen;
    show(before, `before: ${sound.name}`, sound);
    draggable(before.querySelector(".picture"));
    if (sound.film && sound.events.length) before.append(film(sound));
    regions.value = "";
  };
  const attempt = async (action) => {
    if (busy) return;
    busy = make.disabled = true;
    said.textContent = "…";
    try { said.textContent = (await action()) ?? ""; } catch (error) { said.replaceChildren(element("span", { class: "error", role: "alert" }, error.message)); }
    busy = make.disabled = false;
  };
  const list = () => attempt(async () => {
    sounds = await (await get(`sounds/${model.value}`)).json();
    select.replaceChildren(...sounds.map(({ name }, i) => element("option", { value: i }, name)));
    select.hidden = !sounds.length;
    if (sounds.length) open(sounds[0]);
    else return "choose a file: this run has made no sound yet";
  });
  const send = () => attempt(async () => {
    if (!sound) throw new Error("choose a sound first");
    const asked = { run: Number(model.value), source: sound.source, regions: words(), text: text.value, thought: thought.value };
    const reply = await post("edits", JSON.stringify(asked)), card = element("div", { class: "card" });
    made.prepend(card);
    show(card, `after: ${[asked.text, ...asked.regions].join(" · ")}`, reply);
    card.append(element("p", { class: "moves" }, element("button", { type: "button", onclick: () => { open(reply); scrollTo(0, 0); } }, "go on from this")));
  });

  const model = element("select", { "aria-label": "model", onchange: list }, ...app.state.runs.flatMap((run, i) => (run.edits ? [element("option", { value: i }, run.name)] : [])));
  const select = element("select", { "aria-label": "sound", onchange: () => open(sounds[select.value]) });
  const file = element("input", { type: "file", accept: "audio/*", "aria-label": "file", onchange: () => attempt(async () => { open(await post(`sounds?${new URLSearchParams({ name: file.files[0].name })}`, file.files[0])); }) });
  const regions = field("regions", "drag over the picture, or 1.2:3.4", draw), text = field("change", "Remove the dog.");
  const thought = element("textarea", { "aria-label": "thought", rows: 2, placeholder: "thought (which events, when, where, how loud)" });
  const make = element("button", { type: "button", onclick: send }, "make");
  main.replaceChildren(element("div", { class: "controls" }, model, select, file), before, element("div", { class: "controls" }, text, regions, thought, make), said, made);
  list();
  return { reopen: () => {} };
};
