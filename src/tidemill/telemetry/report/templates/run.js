"use strict";
// The page of a run: tabs. In live mode also the sections, which are fetched when they are shown, and the buttons that
// control the run.
(() => {
  const { filterAll, follow, json, keys, morph, morphChildren, notice, page, post, search } = tidemill;
  const { run } = document.body.dataset;
  const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
  const names = $$(".panel").map((panel) => panel.id);
  let current = names[0];

  // ---- tabs
  const show = (name) => {
    current = names.includes(name) ? name : names[0];
    $$(".panel").forEach((panel) => { panel.hidden = panel.id !== current; });
    $$(".tabs a").forEach((tab) => { if (tab.hash === `#${current}`) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current"); });
    refresh();
    wake();
  };
  addEventListener("hashchange", () => { show(location.hash.slice(1)); scrollTo(0, 0); });
  names.forEach((name, at) => { keys[at + 1] = () => { location.hash = name; }; });
  keys["/"] = () => {
    if (!$(`#${current} [type=search]`)) { location.hash = "learning"; show("learning"); }
    search();
  };
  addEventListener("beforeprint", () => {
    $$(".panel").forEach((panel) => { panel.hidden = false; });
    charts.drawAll();
  });
  addEventListener("afterprint", () => show(current));

  // ---- live
  const stale = new Set(names.slice(1)), reads = { charts: true, fleet: true };
  const PAUSE_MS = 600;
  let busy = false, again = false, wake = () => {};
  // Runs that change often are read with a pause, and a server that answers slowly with a longer one.
  const rest = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });
  const swap = async (name) => {
    const fresh = (await page(`section/${name}`)).body, line = fresh.querySelector("#run");
    line.remove();
    morph($("#run"), line);
    const panel = $(`#${name}`), empty = !panel.childElementCount;
    // What comes first is the element that a section's own script looks after, if there is one.
    if (empty || panel.firstElementChild.dataset.own === undefined) morphChildren(panel, fresh);
    if (empty) panel.dispatchEvent(new CustomEvent("arrived", { bubbles: true }));
    if (empty && panel.querySelector("[data-charts]")) charts.fill();
    if (empty && name === "fleet") reads.fleet = true;
    filterAll();
    allow();
  };
  async function refresh() {
    if (!run || document.hidden) return;
    again = true;
    if (busy) return;
    busy = true;
    try {
      while (again) {
        again = false;
        const name = current, began = performance.now();
        if (stale.delete(name)) await swap(name).catch((error) => { stale.add(name); throw error; });
        if (reads.charts && $(`#${name} [data-charts]`)) { reads.charts = false; charts.take(await json(`charts.json${charts.query()}`)); }
        if (reads.fleet && name === "fleet") { reads.fleet = false; drawTimelines(await json("fleet.json")); }
        await rest(Math.max(PAUSE_MS, 4 * (performance.now() - began)));
      }
    } catch (error) { if (error.status) notice(error.message); reads.charts = reads.fleet = true; } finally { busy = false; }
  }
  document.addEventListener("visibilitychange", refresh);
  const changed = (what) => {
    names.forEach((name) => stale.add(name));
    if (what.some((one) => one !== "live" && one !== "samples" && one !== "checks")) reads.charts = reads.fleet = true;
    document.dispatchEvent(new CustomEvent("changed", { detail: what }));
    refresh();
  };

  // ---- control
  const ALIVE = ["running", "stalled", "waiting", "unknown"];
  const ALLOWED = { pause: ALIVE, resume: ["paused"], checkpoint: ALIVE, stop: [...ALIVE, "paused"] };
  const allow = () => $$(".controls button").forEach((button) => {
    button.hidden = !ALLOWED[button.dataset.action ?? button.dataset.asks].includes($("#run").dataset.state);
  });
  document.addEventListener("click", async ({ target }) => {
    const action = target.dataset?.action;
    if (!action) return;
    target.disabled = true;
    try {
      await post("control", { action });
      notice(`${target.textContent}: the run was asked, and does it after its step.`);
    } catch (error) { notice(error.message); }
    target.disabled = false;
  });

  allow();
  show(location.hash.slice(1));
  if (run) follow(`/events?run=${run}`, changed);
})();
