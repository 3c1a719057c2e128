// For pages without sections: requests with the visitor's token, the stream of changes, the theme.
"use strict";
const tidemill = (() => {
  const RETRY_MS = 2000;
  const THEMES = ["system", "light", "dark"];
  const token = sessionStorage.getItem("tidemill-token");
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const get = (path) => fetch(path, { cache: "no-store", headers: { accept: "text/html", ...headers } });
  const post = (path, body) => fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
  });

  // Calls `update` after changes, once for all that came during the call before.
  async function follow(path, update) {
    const badge = document.getElementById("badge");
    for (;;) {
      try {
        const answer = await fetch(path, { cache: "no-store", headers });
        if (answer.ok) badge.textContent = "live";
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) {
          if (part.value.includes("event:")) await update();
        }
      } catch { /* the server cannot be reached now */ }
      badge.textContent = "reconnecting";
      await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
    }
  }

  document.documentElement.classList.add("js");
  const button = document.getElementById("theme");
  function setTheme(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = theme;
    localStorage.setItem("tidemill-theme", theme);
    document.dispatchEvent(new Event("theme"));
  }
  setTheme(THEMES.includes(localStorage.getItem("tidemill-theme")) ? localStorage.getItem("tidemill-theme") : "system");
  button.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(button.textContent) + 1) % THEMES.length]));
  return { get, post, follow };
})();
