"use strict";
// The page around the charts: tabs, theme, keys. In live mode also the stream of changes, the sections, and the buttons
// that control the run. Sections come from the server's templates; nothing here turns text into markup.
(() => {
  const html = document.documentElement, { run, live, root } = document.body.dataset;
  const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
  const stored = (store, key) => { try { return window[store].getItem(key); } catch { return null; } }; // storage may be off
  html.classList.add("js");
  const names = $$(".panel").map((panel) => panel.id);
  let current = names[0];

  // ---- theme
  const THEMES = ["system", "light", "dark"];
  const setTheme = (theme) => {
    if (theme === "system") delete html.dataset.theme; else html.dataset.theme = theme;
    $("#theme").textContent = theme;
    $("#theme").setAttribute("aria-label", `Theme: ${theme}`);
    document.dispatchEvent(new Event("theme"));
  };
  const nextTheme = () => {
    const theme = THEMES[(THEMES.indexOf($("#theme").textContent) + 1) % THEMES.length];
    try { localStorage.setItem("tidemill-theme", theme); } catch { /* kept for this page only */ }
    setTheme(theme);
  };
  setTheme(THEMES.find((theme) => theme === stored("localStorage", "tidemill-theme")) || "system");

  // ---- tabs
  const show = (name) => {
    current = names.includes(name) ? name : names[0];
    $$(".panel").forEach((panel) => { panel.hidden = panel.id !== current; });
    $$(".tabs a").forEach((tab) => { if (tab.hash === `#${current}`) tab.setAttribute("aria-current", "page"); else tab.removeAttribute("aria-current"); });
    refresh();
    wake();
  };
  addEventListener("hashchange", () => { show(location.hash.slice(1)); scrollTo(0, 0); });

  // ---- filters
  const filter = (input) => {
    const wanted = input.value.toLowerCase();
    for (const node of input.closest(".panel").querySelectorAll(input.dataset.filter)) node.hidden = !node.textContent.toLowerCase().includes(wanted);
  };
  const filterAll = () => $$("[data-filter]").forEach(filter);
  document.addEventListener("input", ({ target }) => { if (target.matches("[data-filter]")) filter(target); });
  document.addEventListener("filled", filterAll);

  // ---- dialogs
  const ask = (title, content, choices) => new Promise((resolve) => {
    const dialog = $("#dialog"), [heading, text, form] = dialog.children;
    heading.textContent = title;
    text.replaceChildren(...content);
    form.replaceChildren(...choices.map(([label, value]) => Object.assign(document.createElement("button"), { textContent: label, value })));
    dialog.returnValue = "";
    dialog.onclose = () => resolve(dialog.returnValue);
    if (!dialog.open) dialog.showModal();
  });
  const KEYS = [`1-${names.length}: sections`, "/: filter", "t: theme", "?: these keys", "Esc: close"];
  const help = () => ask("Keys", KEYS.map((text) => Object.assign(document.createElement("p"), { textContent: text })), [["Close", ""]]);
  $("#help").addEventListener("click", help);
  $("#theme").addEventListener("click", nextTheme);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || $("#dialog").open || event.target.closest("input, select, textarea")) return;
    const search = () => {
      if (!$(`#${current} [type=search]`)) { location.hash = "learning"; show("learning"); }
      $(`#${current} [type=search]`)?.focus();
    };
    const act = names[Number(event.key) - 1] ? () => { location.hash = names[Number(event.key) - 1]; } : { t: nextTheme, "?": help, "/": search }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  // ---- print: every section and chart, in light colours
  addEventListener("beforeprint", () => {
    $$(".panel").forEach((panel) => { panel.hidden = false; });
    html.dataset.theme = "light";
    document.dispatchEvent(new Event("theme"));
    charts.drawAll();
  });
  addEventListener("afterprint", () => { setTheme($("#theme").textContent); show(current); });

  // ---- live
  const stale = new Set(names.slice(1)), reads = { charts: true, fleet: true };
  const PAUSE_MS = 600, SHOWN_MS = 6000;
  let busy = false, again = false, wake = () => {}, clock = 0;
  const notice = (text, shown) => {
    clearTimeout(clock);
    $("#notice").textContent = text;
    $("#notice").hidden = !text;
    if (shown) clock = setTimeout(() => notice(""), shown);
  };
  // Runs that change often are read with a pause, and a server that answers slowly with a longer one.
  const rest = (ms) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, ms); });
  const call = async (address, options = {}) => {
    const token = stored("sessionStorage", "tidemill-token");
    const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
    const answer = await fetch(address, { cache: "no-store", ...options, headers });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    throw Object.assign(new Error(told?.error?.message || `The server answered ${answer.status}.`), { status: answer.status });
  };

  // Makes one tree like another and keeps what is equal, with its scroll position, focus and opened details.
  const like = (old, fresh) => old.nodeName === fresh.nodeName && old.id === fresh.id && old.dataset?.own === fresh.dataset?.own && old.dataset?.charts === fresh.dataset?.charts;
  const morph = (old, fresh) => {
    if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
    if (old.dataset.own !== undefined) return;
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open" && name !== "hidden") old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
    morphChildren(old, fresh);
  };
  const morphChildren = (old, fresh) => {
    let at = old.firstChild;
    for (const node of [...fresh.childNodes]) {
      let twin = at;
      while (twin && !like(twin, node)) twin = twin.nextSibling;
      if (!twin) { old.insertBefore(document.adoptNode(node), at); continue; }
      while (at !== twin) { const gone = at; at = at.nextSibling; gone.remove(); }
      morph(twin, node);
      at = twin.nextSibling;
    }
    while (at) { const gone = at; at = at.nextSibling; gone.remove(); }
  };
  const swap = async (name) => {
    const text = await (await call(`${live}section/${name}`)).text();
    const fresh = new DOMParser().parseFromString(text, "text/html").body, line = fresh.querySelector("#run");
    if (line) { line.remove(); morph($("#run"), line); }
    const panel = $(`#${name}`), empty = !panel.childElementCount;
    // What comes first is the element that a section's own script looks after, if there is one.
    if (empty || panel.firstElementChild.dataset.own === undefined) morphChildren(panel, fresh);
    panel.dispatchEvent(new CustomEvent(empty ? "arrived" : "swapped", { bubbles: true }));
    if (empty && panel.querySelector("[data-charts]")) charts.fill();
    if (empty && name === "fleet") reads.fleet = true;
    filterAll();
    allow();
  };

  async function refresh() {
    if (!live || document.hidden) return;
    again = true;
    if (busy) return;
    busy = true;
    try {
      while (again) {
        again = false;
        const name = current, began = performance.now();
        if (stale.delete(name)) await swap(name).catch((error) => { stale.add(name); throw error; });
        if (reads.charts && $(`#${name} [data-charts]`)) { reads.charts = false; charts.take(await (await call(`${live}charts.json${charts.query()}`)).json()); }
        if (reads.fleet && name === "fleet") { reads.fleet = false; drawTimelines(await (await call(`${live}fleet.json`)).json()); }
        await rest(Math.max(PAUSE_MS, 4 * (performance.now() - began)));
      }
    } catch (error) { if (error.status) notice(error.message, SHOWN_MS); reads.charts = reads.fleet = true; } finally { busy = false; }
  }
  document.addEventListener("visibilitychange", refresh);
  const changed = (what) => {
    names.forEach((name) => stale.add(name));
    if (what.some((one) => one !== "live" && one !== "samples" && one !== "checks")) reads.charts = reads.fleet = true;
    document.dispatchEvent(new CustomEvent("changed", { detail: what }));
    refresh();
  };

  const badge = (text) => { if ($("#badge").textContent !== text) $("#badge").textContent = text; $("#badge").dataset.state = text; };
  const SILENT_MS = 30000, LONGEST_WAIT_MS = 10000;
  const follow = async () => {
    for (let wait = 500, last = ""; ; ) {
      const stop = new AbortController();
      let watchdog = setTimeout(() => stop.abort(), SILENT_MS);
      try {
        const answer = await call(`${root}events?run=${run}`, { signal: stop.signal, headers: last ? { "Last-Event-ID": last } : {} });
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        badge("live");
        refresh();
        wait = 500;
        for (let text = ""; ; ) {
          const { value, done } = await reader.read();
          if (done) break;
          clearTimeout(watchdog);
          watchdog = setTimeout(() => stop.abort(), SILENT_MS);
          const events = (text + value).split(/\r?\n\r?\n/);
          text = events.pop();
          for (const event of events) {
            last = event.match(/^id: ?(.*)$/m)?.[1].trim() ?? last;
            const [, name] = event.match(/^event: ?(\w+)/m) ?? [], body = event.match(/^data: ?(.*)$/m)?.[1];
            if (name === "changed") changed(JSON.parse(body).changed || ["all"]);
            if (name === "gone") notice("This run was deleted.");
          }
        }
      } catch (error) { if (error.status) notice(error.message, SHOWN_MS); }
      clearTimeout(watchdog);
      badge("reconnecting");
      await new Promise((resolve) => { setTimeout(resolve, wait * (0.75 + Math.random() / 2)); });
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  };

  // ---- control
  const ALIVE = ["running", "stalled", "waiting", "unknown"];
  const ALLOWED = { pause: ALIVE, resume: ["paused"], checkpoint: ALIVE, stop: [...ALIVE, "paused"] };
  const allow = () => {
    const state = $("#run").dataset.state || "", may = live && document.body.dataset.act !== undefined;
    $$("[data-action]").forEach((button) => { button.hidden = !ALLOWED[button.dataset.action].includes(state); });
    $(".controls").hidden = !may;
  };
  document.addEventListener("click", async ({ target }) => {
    const action = target.dataset?.action;
    if (!action) return;
    if (action === "stop" && (await ask("Stop this run?", ["It writes a checkpoint and ends. The same command resumes it."], [["Stop the run", "stop"], ["Cancel", ""]])) !== "stop") return;
    target.disabled = true;
    try {
      await call(`${live}control`, { method: "POST", body: JSON.stringify({ action }), headers: { "Content-Type": "application/json" } });
      notice(`${target.textContent}: the run was asked, and does it after its step.`, SHOWN_MS);
    } catch (error) { notice(error.message, SHOWN_MS); }
    target.disabled = false;
  });

  badge($("#badge").textContent);
  allow();
  show(location.hash.slice(1));
  if (live) follow();
})();
