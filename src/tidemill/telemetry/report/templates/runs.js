"use strict";
// The table of runs: the selection for a comparison, and rows that follow the runs.
(() => {
  const { filterAll, follow, morph, page } = tidemill;
  const FEWEST = 2;
  const compare = document.getElementById("compare"), rows = document.getElementById("rows");
  const hint = compare.textContent;

  const show = () => {
    const selected = [...rows.querySelectorAll(":checked")].map((box) => `run=${box.value}`);
    const ready = selected.length >= FEWEST && selected.length <= compare.dataset.most;
    compare.textContent = ready ? `Compare ${selected.length} runs` : hint;
    compare.setAttribute("aria-disabled", String(!ready));
    if (ready) compare.href = `/compare?${selected.join("&")}`;
    else compare.removeAttribute("href");
  };
  const update = async () => {
    const fresh = (await page("/")).getElementById("rows");
    if (!fresh) location.reload(); // the folder has become a run
    else morph(rows, fresh);
    filterAll();
    show();
  };

  rows.addEventListener("change", show);
  show();
  follow("/events", update);
})();
