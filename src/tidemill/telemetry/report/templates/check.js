// Verdicts with keys: one sample at a time; its reward is shown once the verdict is stored.
"use strict";
(() => {
  const UNDO_MS = 1000;
  const SCORES = { y: 1, n: 0 };
  let waiting = null; // the timer of a verdict that is not stored yet
  let storing = false;

  const say = (text) => { document.getElementById("last").textContent = text; };

  async function store(score) {
    storing = true;
    const sample = JSON.parse(document.getElementById("sample").dataset.sample);
    const answer = await tidemill.post("verdict", { sample, score });
    const found = await answer.json();
    if (!answer.ok) {
      say(found.error.message);
      return;
    }
    const page = new DOMParser().parseFromString(await (await tidemill.get("check")).text(), "text/html");
    document.getElementById("check").replaceWith(page.getElementById("check"));
    say(score === null ? "Skipped." : `You said ${score}; its reward was ${found.reward}.`);
  }

  const stored = (score) => store(score).catch((error) => say(String(error))).finally(() => { storing = false; });

  function press(key) {
    const score = key in SCORES ? SCORES[key] : /^[0-9]$/.test(key) ? Number(key) / 10 : null;
    if (storing || !document.getElementById("sample") || (score === null && key !== "s" && key !== "u")) return;
    clearTimeout(waiting);
    if (key === "u") say("");
    else if (key === "s") stored(null);
    else {
      say(`${score}: stored in a second; u takes it back`);
      waiting = setTimeout(() => stored(score), UNDO_MS);
    }
  }

  document.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.target.matches("input, textarea")) press(event.key);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-key]");
    if (button) press(button.dataset.key);
  });
})();
