"use strict";
// The samples of the live page. The address says what is shown (?view=samples&reward_min=0.5#samples), so it can be
// shared; a link or the form fetches a fragment, which takes the place of the one before.
(() => {
  const live = document.body.dataset.live, shown = () => document.querySelector("[data-own=samples]");
  const view = () => /[?&]view=(group|sample)&/.exec(location.search)?.[1] || "samples";
  let newest = 0;

  const load = async () => {
    if (!live || !shown()) return;
    let token = null;
    try { token = sessionStorage.getItem("tidemill-token"); } catch { /* storage is off */ }
    const order = ++newest, headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch(`${live}${view()}${location.search}`, { cache: "no-store", headers }).catch(() => null);
    const text = answer && (await answer.text().catch(() => ""));
    if (!text || order !== newest) return; // offline, or overtaken
    let fresh = answer.ok && new DOMParser().parseFromString(text, "text/html").querySelector("[data-own=samples]");
    if (!fresh) {
      fresh = Object.assign(document.createElement("p"), { className: "notice", textContent: text.slice(0, 300) });
      fresh.dataset.own = "samples";
    }
    const name = document.activeElement?.closest("[data-own=samples]") && document.activeElement.name;
    shown().replaceWith(document.adoptNode(fresh));
    if (name) fresh.querySelector(`[name="${CSS.escape(name)}"]`)?.focus();
    start();
  };
  const go = (address) => { history.pushState(null, "", address); load(); };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-own=samples] a[href]");
    if (!link || !live || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.closest("[data-own=samples]") || !live) return;
    event.preventDefault();
    go(`?${new URLSearchParams([...new FormData(event.target)].filter(([, value]) => value))}#samples`);
  });
  document.addEventListener("change", ({ target }) => { if (target.matches(".filters select, .filters [type=checkbox]")) target.form.requestSubmit(); });
  addEventListener("popstate", load);
  document.addEventListener("arrived", () => { if (location.search) load(); });
  document.addEventListener("changed", ({ detail }) => {
    if (view() === "samples" && shown()?.offsetParent && /samples|all/.test(detail) && !shown().querySelector("form:focus-within")) load();
  });

  // ---- one sample: colours, chart and details of its tokens
  const start = () => {
    const text = shown()?.querySelector(".whole"), block = shown()?.querySelector(".token-data");
    if (!block) return;
    const { tokens, figures } = JSON.parse(block.textContent);
    const spans = new Map([...text.querySelectorAll("[data-at]")].map((span) => [Number(span.dataset.at), span])), places = [...spans.keys()];
    const chart = shown().querySelector(".token-chart"), detail = shown().querySelector(".token-detail");
    let chosen = Object.values(figures)[0], current = -1;

    const plot = () => {
      const { values, levels } = chosen, numbers = values.map((value, at) => (typeof value === "number" ? value : levels[at]));
      const known = numbers.filter((value) => value !== null), low = Math.min(...known), high = Math.max(...known);
      const x = (at) => ((at + 0.5) * 720) / numbers.length;
      const point = (value, at) => (value === null ? "" : `${at && numbers[at - 1] !== null ? "L" : "M"}${x(at)} ${82 - (74 * (value - low)) / (high - low || 1)}h.1`);
      const lines = { line: numbers.map(point).join(""), at: current < 0 ? "" : `M${x(current)} 0V90` };
      chart.replaceChildren(...Object.entries(lines).map(([name, line]) => {
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        path.setAttribute("class", name);
        path.setAttribute("d", line);
        return path;
      }));
    };
    const colour = (name) => {
      chosen = figures[name] || chosen;
      for (const [at, span] of spans) span.className = chosen.levels[at] == null ? (figures.logprob?.levels[at] == null ? "untrained" : "") : `${chosen.scale}${chosen.levels[at]}`;
      for (const legend of shown().querySelectorAll("[data-legend]")) legend.hidden = figures[legend.dataset.legend] !== chosen;
      plot();
    };
    const select = (at) => {
      if (!spans.has(at)) return;
      spans.get(current)?.removeAttribute("aria-current");
      current = at;
      spans.get(at).setAttribute("aria-current", "true");
      const known = Object.values(figures).filter(({ values }) => values[at] != null);
      const said = known.map(({ title, values }) => `${title} ${typeof values[at] === "number" ? Number(values[at].toPrecision(4)) : values[at]}`);
      detail.textContent = `Token ${at} ${JSON.stringify(tokens[at])}: ${said.join(", ")}${figures.logprob?.values[at] == null ? "; not generated by the model" : ""}`;
      plot();
    };
    shown().querySelector(".figure-switch").addEventListener("change", ({ target }) => colour(target.value));
    text.addEventListener("mouseover", ({ target }) => { const span = target.closest("[data-at]"); if (span) select(Number(span.dataset.at)); });
    chart.addEventListener("mousemove", (event) => select(Math.floor((event.offsetX / chart.clientWidth) * chosen.values.length)));
    text.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || event.target !== text) return;
      event.preventDefault();
      select(places[Math.min(Math.max(places.indexOf(current) + by, 0), places.length - 1)]);
      spans.get(current)?.scrollIntoView({ block: "nearest" });
    });
    colour();
  };
  start();
})();
