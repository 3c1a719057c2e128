// The page of a visitor without a token: takes one from the URL's fragment, or asks for it, and opens the page asked for.
"use strict";
(() => {
  const STORE = "tidemill-token";
  const field = document.getElementById("token");
  const answer = document.getElementById("answer");

  async function open(token) {
    const page = await fetch(location.pathname + location.search, {
      headers: { accept: "text/html", authorization: `Bearer ${token}` },
    });
    if (page.status === 401) {
      sessionStorage.removeItem(STORE);
      answer.textContent = "This token is not valid.";
      return;
    }
    sessionStorage.setItem(STORE, token);
    const text = await page.text();
    if (!page.headers.get("content-type").startsWith("text/html")) {
      answer.textContent = text;
      return;
    }
    document.open(); // the server's own page, in place of this one
    document.write(text);
    document.close();
  }

  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) history.replaceState(null, "", location.pathname + location.search);
  const known = given || sessionStorage.getItem(STORE);
  const tryOpen = (token) => open(token).catch((error) => { answer.textContent = String(error); });
  if (known) tryOpen(known);
  document.getElementById("open").addEventListener("click", () => tryOpen(field.value.trim()));
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") tryOpen(field.value.trim()); });
})();
