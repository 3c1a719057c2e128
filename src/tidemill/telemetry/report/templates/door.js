// Opens the page asked for with the token of its address (#token=...) or of an earlier visit.
"use strict";
(() => {
  const say = (text) => { document.getElementById("door").textContent = text; };
  async function open() {
    const address = location.pathname + location.search;
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) sessionStorage.setItem("tidemill-token", given);
    if (given) history.replaceState(null, "", address);
    const token = sessionStorage.getItem("tidemill-token");
    if (!token) return;
    const page = await fetch(address, { headers: { accept: "text/html", authorization: `Bearer ${token}` } });
    const text = await page.text();
    if (page.status === 401) say("This token is not valid: put another one behind #token= in the address.");
    else if (!page.headers.get("content-type").startsWith("text/html")) say(text);
    else {
      document.open(); // the server's own page, in place of this one
      document.write(text);
      document.close();
    }
  }
  addEventListener("hashchange", open);
  open();
})();
