// On pages with streams: a click on a chunk plays from there, and a line follows the playback.
(() => {
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
