"use strict";
// Verdicts with keys: one sample at a time; its reward is shown once the verdict is stored.
(() => {
  const { keys, page, post } = tidemill;
  const UNDO_MS = 1000;
  let waiting = null; // the timer of a verdict that is not stored yet
  let storing = false;

  const say = (text) => { document.getElementById("last").textContent = text; };
  const store = async (score) => {
    storing = true;
    try {
      const sample = JSON.parse(document.getElementById("sample").dataset.sample);
      const { reward } = await post("verdict", { sample, score });
      const next = await page("check");
      document.getElementById("check").replaceWith(next.getElementById("check"));
      say(score === null ? "Skipped." : `You said ${score}; its reward was ${reward}.`);
    } catch (error) { say(error.message); }
    storing = false;
  };
  const act = (key, work) => {
    keys[key] = () => {
      if (storing || !document.getElementById("sample")) return;
      clearTimeout(waiting);
      work();
    };
  };
  const judge = (key, score) => act(key, () => {
    say(`${score}: stored in a second; u takes it back`);
    waiting = setTimeout(() => store(score), UNDO_MS);
  });

  for (let tenths = 0; tenths < 10; tenths++) judge(tenths, tenths / 10);
  judge("y", 1);
  judge("n", 0);
  act("s", () => store(null));
  act("u", () => say(""));
  document.addEventListener("click", ({ target }) => { if (target.dataset.key) keys[target.dataset.key](); });
})();
