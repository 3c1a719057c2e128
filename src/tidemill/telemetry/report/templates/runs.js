// The table of runs: filter, selection for a comparison, and rows that follow the runs.
"use strict";
(() => {
  const FEWEST = 2;
  const MOST = 8;
  const filter = document.getElementById("filter");
  const compare = document.getElementById("compare");
  const rows = document.getElementById("rows");
  const selected = new Set();

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows.rows) {
      row.hidden = !words.every((word) => row.dataset.words.includes(word));
      const box = row.querySelector("input");
      if (box) box.checked = selected.has(box.value);
    }
    const ready = selected.size >= FEWEST && selected.size <= MOST;
    compare.textContent = ready ? `Compare ${selected.size} runs` : `Compare: select ${FEWEST} to ${MOST} runs`;
    compare.setAttribute("aria-disabled", String(!ready));
    if (ready) compare.href = "/compare?" + [...selected].map((key) => `run=${key}`).join("&");
    else compare.removeAttribute("href");
  }

  async function update() {
    const answer = await tidemill.get("/");
    if (answer.redirected) location.assign(answer.url); // the folder has become a run
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    rows.replaceChildren(...page.getElementById("rows").children);
    show();
  }

  filter.addEventListener("input", show);
  rows.addEventListener("change", (event) => {
    if (event.target.checked) selected.add(event.target.value);
    else selected.delete(event.target.value);
    show();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    filter.focus();
  });
  show();
  tidemill.follow("/events", update);
})();
