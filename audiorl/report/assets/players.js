// Sound: spectrograms under players with a cursor that follows them, and the small play buttons of lists.
import { element } from "./app.js";

const audition = new Audio();
let playing = null;
const stop = () => { audition.pause(); playing?.removeAttribute("data-on"); playing = null; };
audition.addEventListener("ended", stop);

document.addEventListener("click", (event) => {
  const button = event.target.closest(".play");
  if (!button) return;
  const again = button === playing;
  stop();
  if (again) return;
  playing = button;
  button.setAttribute("data-on", "");
  audition.src = button.dataset.source;
  audition.play().catch(stop);
});
document.addEventListener("play", (event) => {
  stop();
  for (const other of document.querySelectorAll("audio")) if (other !== event.target) other.pause();
}, true);

// A spectrogram for each player that is not part of a stream's timeline.
export const prepare = (box) => {
  for (const audio of box.querySelectorAll("audio")) {
    if (audio.closest(".stream .audio, .spectrogram") && !audio.closest(".band")) continue;
    const line = element("i"), picture = element("img", { src: audio.getAttribute("src").replace("audio/", "spectrogram/"), alt: "spectrogram, 0 to 8 kHz", loading: "lazy" });
    const frame = element("div", { class: "spectrogram" }, element("div", { class: "picture" }, picture, line));
    audio.replaceWith(frame);
    frame.append(audio);
    picture.addEventListener("error", () => picture.parentElement.remove());
    const follow = () => {
      line.style.left = `${100 * audio.currentTime / (audio.duration || Infinity)}%`;
      if (!audio.paused) requestAnimationFrame(follow);
    };
    for (const kind of ["play", "seeked", "timeupdate"]) audio.addEventListener(kind, follow);
    picture.addEventListener("click", (event) => {
      const at = event.offsetX / picture.clientWidth, jump = () => { audio.currentTime = at * audio.duration; audio.play(); };
      if (audio.readyState) jump();
      else { audio.addEventListener("loadedmetadata", jump, { once: true }); audio.load(); }
    });
  }
};
