"use strict";
// The samples of the live page. The address says what is shown (?view=samples&reward_min=0.5#samples), so it can be
// shared; a link or the form fetches a fragment and puts it in the place of the one before.
(() => {
  const live = document.body.dataset.live, SVG = "http://www.w3.org/2000/svg", VIEWS = ["samples", "group", "sample"];
  const shown = () => document.querySelector("[data-own=samples]");
  let newest = 0;

  const load = async (focus) => {
    const parameters = new URLSearchParams(location.search), view = parameters.get("view") || "samples";
    if (!live || !shown() || !VIEWS.includes(view)) return;
    parameters.delete("view");
    const order = ++newest, token = (() => { try { return sessionStorage.getItem("tidemill-token"); } catch { return null; } })();
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch(`${live}${view}?${parameters}`, { cache: "no-store", headers }).catch(() => null);
    if (!answer || order !== newest) return; // offline, or overtaken
    const text = await answer.text();
    if (order !== newest) return;
    const old = shown();
    let fresh = answer.ok && new DOMParser().parseFromString(text, "text/html").querySelector("[data-own=samples]");
    if (!fresh) {
      fresh = Object.assign(document.createElement("p"), { className: "notice", textContent: text.slice(0, 300) });
      fresh.dataset.own = "samples";
    }
    const name = document.activeElement?.closest("[data-own=samples]") ? document.activeElement.name : "";
    old.replaceWith(document.adoptNode(fresh));
    if (name) fresh.querySelector(`[name="${CSS.escape(name)}"]`)?.focus();
    else if (focus) fresh.querySelector("h2")?.scrollIntoView({ block: "nearest" });
    start(fresh);
  };

  const go = (address) => { history.pushState(null, "", address); load(true); };
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-own=samples] a[href]");
    if (!link || !live || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.closest("[data-own=samples]") || !live) return;
    event.preventDefault();
    const filled = [...new FormData(event.target)].filter(([, value]) => value !== "");
    go(`?${new URLSearchParams(filled)}#samples`);
  });
  document.addEventListener("change", ({ target }) => { if (target.matches(".filters select, .filters [type=checkbox]")) target.form.requestSubmit(); });
  addEventListener("popstate", () => load(false));
  document.addEventListener("arrived", () => { if (location.search) load(false); else if (shown()) start(shown()); });
  document.addEventListener("changed", ({ detail }) => {
    const first = !["group", "sample"].includes(new URLSearchParams(location.search).get("view"));
    if (first && shown()?.offsetParent && detail.some((one) => one === "samples" || one === "all") && !shown().querySelector("form:focus-within")) load(false);
  });

  // ---- one sample: colours, chart and details of its tokens
  const start = (view) => {
    const block = view.querySelector(".token-data"), text = view.querySelector(".whole");
    if (!block || !text) return;
    const { tokens, figures } = JSON.parse(block.textContent), spans = new Map();
    for (const span of text.querySelectorAll("[data-at]")) spans.set(Number(span.dataset.at), span);
    const chart = view.querySelector(".token-chart"), detail = view.querySelector(".token-detail");
    const places = [...spans.keys()];
    let chosen = figures[0], current = -1;

    const draw = (kind, attributes) => {
      const node = document.createElementNS(SVG, kind);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      chart.append(node);
      return node;
    };
    const plot = () => {
      const values = chosen.values.map((value, at) => (typeof value === "number" ? value : chosen.levels[at]));
      const known = values.filter((value) => value !== null), low = Math.min(...known), high = Math.max(...known);
      const x = (at) => ((at + 0.5) * 720) / values.length, y = (value) => 82 - (74 * (value - low)) / (high - low || 1);
      chart.replaceChildren();
      let path = "";
      values.forEach((value, at) => { if (value !== null) path += `${at && values[at - 1] !== null ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}h.1`; });
      draw("path", { d: path, class: "line" });
      if (current >= 0) draw("line", { x1: x(current), x2: x(current), y1: 0, y2: 90, class: "at" });
      draw("title", {}).textContent = `${chosen.title}: ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
    };
    const colour = () => {
      for (const [at, span] of spans) {
        const level = chosen.levels[at] ?? null;
        span.className = level === null ? (span.classList.contains("untrained") ? "untrained" : "") : `${chosen.scale}${level}`;
      }
      for (const legend of view.querySelectorAll("[data-legend]")) legend.hidden = legend.dataset.legend !== chosen.name;
      plot();
    };
    const select = (at) => {
      if (!spans.has(at) || at === current) return;
      spans.get(current)?.removeAttribute("aria-current");
      current = at;
      spans.get(at).setAttribute("aria-current", "true");
      const known = figures.filter(({ values }) => values[at] !== null && values[at] !== undefined);
      const said = known.map(({ title, values }) => `${title} ${typeof values[at] === "number" ? Number(values[at].toPrecision(4)) : values[at]}`);
      detail.textContent = `Token ${at} ${JSON.stringify(tokens[at])}: ${said.join(", ") || "not generated by the model, not trained on"}`;
      plot();
    };
    view.addEventListener("change", ({ target }) => {
      if (target.name !== "figure") return;
      chosen = figures.find(({ name }) => name === target.value);
      colour();
    });
    text.addEventListener("mouseover", ({ target }) => { const span = target.closest("[data-at]"); if (span) select(Number(span.dataset.at)); });
    text.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || event.target !== text) return;
      event.preventDefault();
      select(places[Math.min(Math.max(places.indexOf(current) + by, 0), places.length - 1)]);
      spans.get(current).scrollIntoView({ block: "nearest" });
    });
    chart.addEventListener("mousemove", (event) => {
      const at = Math.floor((event.offsetX / chart.clientWidth) * chosen.values.length);
      select(at);
    });
    colour();
  };
  if (shown()) start(shown());
})();
