// On pages with several recorded steps: the selector and its two buttons show one of them.
(() => {
  const section = document.querySelector("#rollouts"), select = section.querySelector("select");
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
