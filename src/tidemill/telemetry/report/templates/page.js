"use strict";
// What the pages share: theme, filters, keys, requests with the visitor's token, the stream of changes.
// Sections come from the server's templates; nothing here turns text into markup.
const tidemill = (() => {
  const html = document.documentElement;
  const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
  const stored = (store, key) => { try { return window[store].getItem(key); } catch { return null; } }; // storage may be off
  html.classList.add("js");

  // ---- theme; prints are light
  const THEMES = ["system", "light", "dark"];
  const paintWith = (theme) => {
    if (theme === "system") delete html.dataset.theme; else html.dataset.theme = theme;
    document.dispatchEvent(new Event("theme"));
  };
  const setTheme = (theme) => {
    $("#theme").textContent = theme;
    $("#theme").setAttribute("aria-label", `Theme: ${theme}`);
    paintWith(theme);
  };
  const nextTheme = () => {
    const theme = THEMES[(THEMES.indexOf($("#theme").textContent) + 1) % THEMES.length];
    try { localStorage.setItem("tidemill-theme", theme); } catch { /* kept for this page only */ }
    setTheme(theme);
  };
  setTheme(THEMES.find((theme) => theme === stored("localStorage", "tidemill-theme")) || "system");
  addEventListener("beforeprint", () => paintWith("light"));
  addEventListener("afterprint", () => setTheme($("#theme").textContent));

  // ---- filters: what has every word
  const filter = (input) => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const node of $$(input.dataset.filter)) node.hidden = !words.every((word) => node.textContent.toLowerCase().includes(word));
  };
  const filterAll = () => $$("[data-filter]").forEach(filter);
  document.addEventListener("input", ({ target }) => { if (target.matches("[data-filter]")) filter(target); });
  document.addEventListener("filled", filterAll);

  // ---- keys
  const search = () => $$("[type=search]").find((input) => input.checkVisibility())?.focus();
  const keys = { "/": search, t: nextTheme, "?": () => $("#keys").togglePopover() };
  $("#theme").addEventListener("click", nextTheme);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || event.target.closest("input, select, textarea")) return;
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  // ---- requests
  const SHOWN_MS = 12000;
  let clock = 0;
  const notice = (text) => {
    clearTimeout(clock);
    $("#notice").textContent = text;
    $("#notice").hidden = !text;
    if (text) clock = setTimeout(() => notice(""), SHOWN_MS);
  };
  const call = async (address, options = {}) => {
    const token = stored("sessionStorage", "tidemill-token");
    const headers = { ...(token ? { Authorization: `Bearer ${token}` } : {}), ...options.headers };
    const answer = await fetch(address, { cache: "no-store", ...options, headers });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    throw Object.assign(new Error(told?.error?.message || `The server answered ${answer.status}.`), { status: answer.status });
  };
  const json = async (address) => (await call(address)).json();
  const page = async (address) => new DOMParser().parseFromString(await (await call(address)).text(), "text/html");
  const post = async (address, body) => (await call(address, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } })).json();

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

  // ---- stream: calls `changed` with the names of what has changed; after a lost connection, of everything
  const badge = (text) => { $("#badge").textContent = text; $("#badge").dataset.state = text; };
  const SILENT_MS = 30000, LONGEST_WAIT_MS = 10000;
  const follow = async (address, changed) => {
    for (let wait = 500; ; ) {
      const stop = new AbortController();
      let watchdog = setTimeout(() => stop.abort(), SILENT_MS);
      try {
        const answer = await call(address, { signal: stop.signal });
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        badge("live");
        wait = 500;
        for (let text = ""; ; ) {
          const { value, done } = await reader.read();
          if (done) break;
          clearTimeout(watchdog);
          watchdog = setTimeout(() => stop.abort(), SILENT_MS);
          const events = (text + value).split("\n\n");
          text = events.pop();
          for (const event of events) {
            const name = event.match(/^event: (.*)$/m)?.[1];
            if (name === "changed") await changed(JSON.parse(event.match(/^data: (.*)$/m)[1]).changed);
            if (name === "gone") notice("This run was deleted.");
          }
        }
      } catch (error) { if (error.status) notice(error.message); }
      clearTimeout(watchdog);
      badge("reconnecting");
      await new Promise((resolve) => { setTimeout(resolve, wait * (0.75 + Math.random() / 2)); });
      wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    }
  };

  return { filterAll, follow, json, keys, morph, morphChildren, notice, page, post, search };
})();
