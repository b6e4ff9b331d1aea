"""Style sheet and scripts of the page. Everything is in the file itself: no fonts, scripts or pictures are fetched."""

from __future__ import annotations

from html import escape

from audiorl.report.theme import DARK, LIGHT, variables

CSS = (
    f"""
:root {{ color-scheme: light dark; {variables(LIGHT)}
  --page: #f6f7f9; --card: #ffffff; --edge: #e3e6ec; --good: #0f8a5f; --bad: #cf3b3b; --soft: #f1f3f7;
  --think: #f1edfb; --answer: #e3f4ec;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)}
  --page: #101216; --card: #181b21; --edge: #2a2e37; --good: #4bd19b; --bad: #ff7b7b; --soft: #20242c;
  --think: #241f35; --answer: #16302a; }} }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 var(--sans);
  -webkit-font-smoothing: antialiased; }
main { max-width: 1180px; margin: 0 auto; padding: 44px 24px 80px; }
h1 { margin: 2px 0 0; font-size: 30px; line-height: 1.2; letter-spacing: -.02em; }
h2 { margin: 56px 0 4px; font-size: 22px; letter-spacing: -.015em; }
h3 { margin: 26px 0 10px; font-size: 15px; }
p { margin: 0; }
b { font-weight: 650; }
section > .card, .tables, .panels { margin-top: 16px; }
.over { color: var(--muted); font-size: 13px; letter-spacing: .02em; }
.sub { color: var(--muted); max-width: 80ch; }
.sub b { color: var(--ink); }
.note { color: var(--muted); font-size: 13px; font-style: italic; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 16px 18px; margin: 0; }
.card h3 { margin: 0 0 2px; font-size: 14px; font-weight: 650; }
.card svg { display: block; width: 100%; height: auto; overflow: visible; }

.hero { display: grid; grid-template-columns: 1.15fr 1fr; gap: 28px; align-items: center; margin-top: 22px; }
.hero .say { font-size: 21px; line-height: 1.45; letter-spacing: -.01em; text-wrap: pretty; }
.hero .worse { color: var(--bad); font-weight: 600; margin-top: 8px; }
.hero.alone { grid-template-columns: 1fr; }
.facts-line { display: flex; flex-wrap: wrap; gap: 6px 22px; margin-top: 16px; color: var(--muted); font-size: 13.5px; }
.facts-line b { color: var(--ink); font-variant-numeric: tabular-nums; }
.missing { margin-top: 24px; border-left: 3px solid var(--line1); padding: 10px 16px; background: var(--card);
  border-radius: 0 10px 10px 0; font-size: 14px; }
.missing ul { margin: 4px 0 0; padding-left: 20px; }

.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 16px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; min-height: 21px; margin-bottom: 6px; font-size: 12.5px;
  color: var(--muted); }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; }
.legend i { display: inline-block; width: 9px; height: 9px; border-radius: 3px; margin-right: 6px; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 16px; align-items: start; }

table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 10px 7px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 500; font-size: 12.5px; }
tbody th { font-weight: 500; }
.numbers td, .numbers thead th + th { text-align: right; font-variant-numeric: tabular-nums; padding-right: 0; }
.numbers .task th { padding-left: 16px; font-weight: 400; }
.numbers .worse td:last-child { color: var(--bad); font-weight: 600; }
.scroll-x { overflow-x: auto; }
small { color: var(--muted); font-size: 12px; margin-left: 4px; }

article { margin-top: 16px !important; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); gap: 16px; }
.pairs article { margin-top: 0 !important; }
.question { display: grid; gap: 8px; padding-bottom: 14px; }
.prompt { font-weight: 550; white-space: pre-wrap; overflow-wrap: anywhere; }
.audio { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; }
.audio:empty { display: none; }
.card svg.contour { width: 300px; max-width: 100%; height: 48px; margin: 4px 0; overflow: hidden; }
audio { height: 34px; width: 300px; max-width: 100%; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; }
.fact { color: var(--muted); font-size: 13px; }
.fact b { color: var(--ink); }
.pill { background: var(--soft); color: var(--muted); border-radius: 99px; padding: 1px 9px; font-size: 12px;
  font-weight: 500; white-space: nowrap; }
.chooser { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: center; margin-top: 16px; position: sticky;
  top: 0; z-index: 3; background: var(--page); padding: 6px 0; }
.chooser select, .chooser button { font: inherit; color: var(--ink); background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; padding: 3px 10px; }
.chooser button { cursor: pointer; } .chooser button:disabled { color: var(--muted); opacity: .5; cursor: default; }
.response { border-top: 1px solid var(--edge); padding: 12px 0 10px 14px; position: relative; }
.response::before { content: ""; position: absolute; left: 0; top: 15px; bottom: 13px; width: 3px; border-radius: 2px;
  background: var(--edge); }
.response.up::before { background: var(--good); }
.response.down::before { background: var(--bad); }
.response:last-child { padding-bottom: 0; }
.written { font-size: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
.think, .answer { border-radius: 6px; padding: 2px 6px; -webkit-box-decoration-break: clone;
  box-decoration-break: clone; }
.think { background: var(--think); }
.answer { background: var(--answer); font-weight: 600; }
.tag { font: 11.5px var(--mono); color: var(--muted); opacity: .8; font-weight: 400; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 9px; align-items: center; }
.chip { --tone: var(--muted); border-radius: 99px; padding: 1px 10px; font-size: 12.5px; white-space: nowrap;
  font-variant-numeric: tabular-nums; border: 1px solid transparent;
  background: color-mix(in srgb, var(--tone) calc(8% + 16% * var(--strength)), transparent); color: var(--ink); }
.chip.plus { --tone: var(--good); } .chip.minus { --tone: var(--bad); }
.chip.zero { color: var(--muted); }
.chip.total { border-color: var(--tone); }
.chip.advantage { margin-left: auto; background: none; border-color: var(--edge); }
.chip.advantage b { color: var(--tone); }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
.side { border-top: 3px solid var(--edge); padding-top: 8px; min-width: 0; }
.side.right { border-color: var(--good); } .side.wrong { border-color: var(--bad); }
.when { color: var(--muted); font-size: 12px; }
.side.right .when::after { content: " · right"; color: var(--good); }
.side.wrong .when::after { content: " · wrong"; color: var(--bad); }
.timeline { margin-top: 10px; font-size: 13px; font-variant-numeric: tabular-nums; }
.timeline th, .timeline td { padding: 4px 14px 4px 0; }
.timeline td:last-child { width: 60%; }

.stream { min-width: 0; }
.stream .audio { margin-bottom: 10px; }
.scroll { overflow-x: auto; container-type: inline-size; padding-bottom: 6px; }
.inner { position: relative; width: max-content; min-width: 100%; }
.track { table-layout: fixed; border-collapse: separate; border-spacing: 0; font-size: 13px; }
.track th, .track td { padding: 0; border: 0; }
.track th { position: sticky; left: 0; z-index: 2; background: var(--card); color: var(--muted); font-size: 12px;
  font-weight: 500; padding: 2px 10px 2px 0; overflow-wrap: anywhere; }
.times td { color: var(--muted); font-size: 11px; font-variant-numeric: tabular-nums; white-space: nowrap;
  overflow: hidden; }
.track .times td { border-left: 1px solid var(--grid); padding: 0 0 2px 4px; }
.wave th { vertical-align: middle; }
.track .wave td:not(:last-child) { border-left: 1px solid var(--grid); }
.wave button, .wave .chunk { display: block; width: 100%; height: 46px; padding: 0; border: 0; background: var(--soft);
  color: var(--muted); }
.wave button { cursor: pointer; }
.wave button:hover, .wave button:focus-visible, .wave button[data-now] { color: var(--line0);
  background: color-mix(in srgb, var(--line0) 14%, var(--card)); }
.wave button:focus-visible { outline: 2px solid var(--line0); outline-offset: -2px; }
.card .wave svg { width: 100%; height: 100%; fill: currentColor; overflow: hidden; }
.ref, .output { width: fit-content; max-width: min(100%, 420px); margin: 4px 0 2px; padding: 1px 7px 2px;
  border-left: 2px solid; border-radius: 0 6px 6px 0; line-height: 1.35; overflow-wrap: anywhere; }
.ref { border-color: var(--muted); background: var(--soft); }
.output { border-color: var(--line0); background: color-mix(in srgb, var(--line0) 13%, var(--card)); font-weight: 550; }
.ref small, .output small { display: block; margin: 0; font-weight: 400; }
.band { margin: 10px 0 0; border-top: 1px solid var(--edge); padding: 8px 0 4px; }
.band summary { position: sticky; left: 0; width: fit-content; max-width: 100cqi; }
.band summary .chips { display: inline-flex; margin: 0; vertical-align: middle; max-width: calc(100cqi - 24px); }
.band summary b { color: var(--ink); }
.band .chip.advantage { margin-left: 0; }
.grid th { padding-top: 1px; padding-bottom: 1px; }
.grid .cell { --tone: var(--muted); display: block; height: 18px; margin: 1px 0; border-radius: 4px; font: 11px/18px
  var(--sans); text-align: center; font-variant-numeric: tabular-nums; overflow: hidden;
  background: color-mix(in srgb, var(--tone) calc(10% + 40% * var(--strength)), transparent); }
.grid .plus { --tone: var(--good); } .grid .minus { --tone: var(--bad); }
.grid .write { --tone: var(--line0); font-weight: 600; }
.grid .read { background: none; color: var(--muted); }
.grid .zero { color: var(--muted); }
.grid.total th { color: var(--ink); }
.grid.total td { padding-top: 3px; }
.playhead { position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: var(--line1); z-index: 1;
  pointer-events: none; }

details { margin-top: 18px; }
summary { cursor: pointer; color: var(--muted); font-size: 14px; width: fit-content; }
summary:hover { color: var(--ink); }
code, pre { font: 13px/1.5 var(--mono); }
pre { background: var(--soft); padding: 12px 14px; border-radius: 10px; overflow-x: auto; margin: 12px 0 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.settings { columns: 2; column-gap: 40px; margin-top: 10px; font: 12.5px/1.5 var(--mono); }
.settings div { break-inside: avoid; display: flex; justify-content: space-between; gap: 16px; padding: 3px 0;
  border-bottom: 1px solid var(--grid); }
.settings span { color: var(--muted); } .settings b { font-weight: 500; overflow-wrap: anywhere; text-align: right; }
footer { margin-top: 60px; color: var(--muted); font-size: 13px; }
@media (max-width: 820px) {
  .hero, .sides, .tables, .pairs { grid-template-columns: 1fr; }
  .settings { columns: 1; }
  main { padding: 28px 16px 60px; }
  .chip.advantage { margin-left: 0; }
}
@media print { details { display: block; } audio { display: none; } }
"""
)


def document(title: str, body: str, css: str = "", scripts: str = "") -> str:
    """A whole page: `body` is HTML, `css` is added to the style sheet, `scripts` are elements at the end."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}{css}</style></head>"
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )


# On pages with streams: a click on a chunk plays from there, and a line follows the playback.
STREAM_JS = """(() => {
  const follow = (audio) => {
    const stream = audio.closest(".stream");
    if (!stream) return;
    const now = audio.currentTime, box = stream.querySelector(".scroll"), line = stream.querySelector(".playhead");
    let x = null;
    for (const chunk of stream.querySelectorAll("button[data-at]")) {
      const at = Number(chunk.dataset.at), end = Number(chunk.dataset.end), here = at <= now && now < end;
      chunk.toggleAttribute("data-now", here);
      if (here) {
        const place = chunk.getBoundingClientRect();
        x = place.left + place.width * (now - at) / (end - at) - box.getBoundingClientRect().left + box.scrollLeft;
      }
    }
    line.hidden = x === null;
    if (x === null) return;
    line.style.left = `${x}px`;
    if (!audio.paused) {
      const names = stream.querySelector("th").offsetWidth, seen = x - box.scrollLeft;
      if (seen < names || seen > box.clientWidth - 40) box.scrollLeft = x - names - 40;
      requestAnimationFrame(() => follow(audio));
    }
  };
  document.addEventListener("click", (event) => {
    const chunk = event.target.closest("button[data-at]");
    const audio = chunk && chunk.closest(".stream").querySelector("audio");
    if (!audio) return;
    audio.currentTime = Number(chunk.dataset.at);
    audio.play();
  });
  for (const kind of ["play", "seeked", "ended"])
    document.addEventListener(kind, (event) => {
      if (kind === "play") document.querySelectorAll("audio").forEach((a) => a !== event.target && a.pause());
      follow(event.target);
    }, true);
})();
"""
STREAM_SCRIPT = f"<script>\n{STREAM_JS}</script>"

# On pages with several recorded steps: the selector and its two buttons show one of them.
STEP_SCRIPT = """<script>
(() => {
  const section = document.querySelector(".rollouts"), select = section.querySelector("select");
  const buttons = section.querySelectorAll("button[data-move]");
  const show = () => {
    for (const step of section.querySelectorAll(".step")) {
      step.hidden = step.dataset.step !== select.value;
      if (step.hidden) step.querySelectorAll("audio").forEach((audio) => audio.pause());
    }
    buttons[0].disabled = select.selectedIndex === 0;
    buttons[1].disabled = select.selectedIndex === select.length - 1;
  };
  for (const button of buttons)
    button.addEventListener("click", () => { select.selectedIndex += Number(button.dataset.move); show(); });
  select.addEventListener("change", show);
  show();
})();
</script>"""
