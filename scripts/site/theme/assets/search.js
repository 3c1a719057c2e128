// Search without a server: the index is a script (search-index.js), so that it loads from file://, too.
// A page is ranked by BM25 over its title, keywords, headings and text, and by its best section.
"use strict";

(() => {
  const FIELDS = { title: 9, keywords: 5, names: 5, heading: 3, body: 1 };
  const K1 = 2.5;
  const LENGTH = { title: 0.3, keywords: 0.3, names: 0, heading: 0.4, body: 0.6 };
  const SECTION = 0.7; // weight of the best section beside that of the whole page
  const COVERED = 1.5; // exponent of the share of the query that is found
  const SYNONYM = 0.6;
  const PART = 0.35; // of a word of num_generations
  const PREFIX = 0.6; // of the last word, which may be incomplete
  const WORD = /[\p{L}\p{N}]+(?:[._@+-][\p{L}\p{N}]+)*/gu;
  const MOST_PAGES = 10;
  const MOST_SECTIONS = 3;
  const IGNORED = new Set(
    ("a about am an and any are as at be been but by can could did do does for from get has have how i if in into is it its just like many me much my need no not of " +
      "on or our should so some than that the their them then there these they this to too up us was we what when where which " +
      "while who why will with would you your").split(" "),
  );

  const base = JSON.parse(document.getElementById("__config").textContent).base;
  const form = document.querySelector(".site-search");
  const input = form.querySelector("input");
  const panel = form.querySelector(".site-search__panel");
  const status = form.querySelector(".site-search__status");
  const list = form.querySelector(".site-search__results");
  let engine = null;

  // Words of a text: num_generations is a word, and so are num and generations.
  const known = new Map();
  function words(text) {
    return [...text.toLowerCase().matchAll(WORD)].map(([whole]) => {
      if (!known.has(whole)) known.set(whole, analysed(whole));
      return known.get(whole);
    });
  }

  function analysed(whole) {
    const parts = new Set();
    for (const dotted of whole.split(".")) {
      if (dotted !== whole) parts.add(stem(dotted));
      for (const part of dotted.split(/[_@+-]/)) if (part !== whole) parts.add(stem(part));
    }
    return { whole: parts.size ? whole : stem(whole), parts: [...parts] };
  }

  // English endings, so that evict, evicted and eviction are the same word.
  function stem(word) {
    if (word.length < 4 || /\d/.test(word)) return word;
    let stemmed = word;
    if (/ies$/.test(stemmed)) stemmed = stemmed.slice(0, -3) + "y";
    else if (/(ss|x|ch|sh)es$/.test(stemmed)) stemmed = stemmed.slice(0, -2);
    else if (/[^siu]s$/.test(stemmed)) stemmed = stemmed.slice(0, -1);
    for (const ending of ["ation", "ing", "ion", "ed", "er", "or", "ly"]) {
      const root = stemmed.slice(0, -ending.length);
      if (stemmed.endsWith(ending) && root.length >= 3 && /[aeiouy]/.test(root)) {
        if (ending === "ion" && !/[st]$/.test(root)) break;
        stemmed = ending === "ation" ? root + "at" : root.replace(/([bdfgmnprt])\1$/, "$1");
        break;
      }
    }
    return stemmed.length > 3 ? stemmed.replace(/e$/, "") : stemmed;
  }

  function terms(text) {
    return words(text).flatMap(({ whole, parts }) => [whole, ...parts]);
  }

  // One thing that can be found: a section, or a whole page. Counts of each term by field.
  function counted(fields) {
    const counts = new Map();
    const lengths = {};
    for (const [field, text] of Object.entries(fields)) {
      const found = Array.isArray(text) ? text : terms(text);
      lengths[field] = found.length;
      for (const term of found) {
        const row = counts.get(term) ?? {};
        row[field] = (row[field] ?? 0) + 1;
        counts.set(term, row);
      }
    }
    return { counts, lengths };
  }

  class Collection {
    constructor(documents) {
      this.documents = documents;
      this.postings = new Map();
      this.means = {};
      for (const field of Object.keys(FIELDS)) {
        this.means[field] = documents.reduce((sum, each) => sum + (each.lengths[field] ?? 0), 0) / documents.length || 1;
      }
      documents.forEach(({ counts }, number) => {
        for (const term of counts.keys()) {
          if (!this.postings.has(term)) this.postings.set(term, []);
          this.postings.get(term).push(number);
        }
      });
    }

    rarity(term) {
      const count = this.postings.get(term)?.length ?? 0;
      return Math.log(1 + (this.documents.length - count + 0.5) / (count + 0.5));
    }

    // The weight of a term in a document, from 0 to 1.
    weight(term, number) {
      const { counts, lengths } = this.documents[number];
      let sum = 0;
      for (const [field, count] of Object.entries(counts.get(term) ?? {})) {
        const length = lengths[field] / this.means[field];
        sum += (FIELDS[field] * count) / (1 - LENGTH[field] + LENGTH[field] * length);
      }
      return sum / (K1 + sum);
    }

    // Scores by document. A concept is a word of the query: any of its alternatives stands for it.
    scores(concepts) {
      const scores = new Map();
      let total = 0;
      for (const alternatives of concepts) {
        const known = alternatives.filter(({ term }) => this.postings.has(term));
        if (!known.length) continue;
        const rarity = Math.max(...known.filter(({ factor }) => factor === 1).map(({ term }) => this.rarity(term)), 1);
        total += rarity;
        const best = new Map();
        for (const { term, factor } of known) {
          for (const number of this.postings.get(term)) {
            const weight = factor * this.weight(term, number);
            if (weight > (best.get(number) ?? 0)) best.set(number, weight);
          }
        }
        for (const [number, weight] of best) {
          const row = scores.get(number) ?? { sum: 0, covered: 0 };
          row.sum += rarity * weight;
          row.covered += rarity * Math.min(1, 2 * weight);
          scores.set(number, row);
        }
      }
      return new Map([...scores].map(([number, { sum, covered }]) => [number, sum * (covered / total) ** COVERED]));
    }
  }

  class Engine {
    constructor(index) {
      this.index = index;
      this.synonyms = new Map();
      for (const group of index.synonyms) {
        const stems = group.map((word) => terms(word)[0]);
        for (const one of stems) this.synonyms.set(one, [...(this.synonyms.get(one) ?? []), ...stems.filter((other) => other !== one)]);
      }
      const ofPage = index.pages.map(() => []);
      index.sections.forEach((section, number) => ofPage[section.page].push(number));
      this.sections = new Collection(
        index.sections.map(({ page, title, text, keywords }, number) => {
          const first = number === ofPage[page][0];
          const { title: pageTitle, keywords: pageKeywords } = index.pages[page];
          return counted({
            title: first ? "" : pageTitle,
            heading: first ? `${title} ${title}` : title,
            keywords: [keywords ?? "", first ? pageKeywords : ""].join(" "),
            body: text,
          });
        }),
      );
      this.pages = new Collection(
        index.pages.map(({ title, keywords, names }, page) => {
          const sections = ofPage[page].map((number) => index.sections[number]);
          return counted({
            title,
            keywords,
            names,
            heading: sections.slice(1).map((section) => section.title).join(" "),
            body: sections.map((section) => `${section.text} ${section.keywords ?? ""}`).join(" "),
          });
        }),
      );
      this.vocabulary = [...this.sections.postings.keys()].sort();
    }

    concepts(query, incomplete) {
      const found = words(query);
      const meaningful = found.filter(({ whole }) => !IGNORED.has(whole));
      const used = meaningful.length ? meaningful : found;
      return used.map(({ whole, parts }, number) => {
        const alternatives = [{ term: whole, factor: 1 }, ...parts.map((term) => ({ term, factor: PART }))];
        for (const term of this.synonyms.get(whole) ?? []) alternatives.push({ term, factor: SYNONYM });
        if (incomplete && number === used.length - 1 && whole.length > 1) {
          for (const term of this.startingWith(whole)) alternatives.push({ term, factor: PREFIX });
        }
        return alternatives;
      });
    }

    startingWith(prefix) {
      let low = 0;
      let high = this.vocabulary.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.vocabulary[middle] < prefix) low = middle + 1;
        else high = middle;
      }
      const found = [];
      while (low < this.vocabulary.length && this.vocabulary[low].startsWith(prefix) && found.length < 40) {
        if (this.vocabulary[low] !== prefix) found.push(this.vocabulary[low]);
        low += 1;
      }
      return found;
    }

    // The best pages with their best sections.
    search(query) {
      const concepts = this.concepts(query, !/\s$/.test(query));
      const whole = this.pages.scores(concepts);
      const scores = this.sections.scores(concepts);
      const phrase = concepts.map(([{ term }]) => term).join(" ");
      const pages = new Map();
      for (const [number, score] of scores) {
        const { page, title } = this.index.sections[number];
        const exact = concepts.length > 1 && terms(title).join(" ").includes(phrase) ? 1.3 : 1;
        if (!pages.has(page)) pages.set(page, []);
        pages.get(page).push({ number, score: score * exact });
      }
      const ranked = [...pages].map(([page, sections]) => {
        sections.sort((one, other) => other.score - one.score);
        const { boost } = this.index.pages[page];
        return { page, sections, score: (SECTION * sections[0].score + (whole.get(page) ?? 0)) * boost };
      });
      ranked.sort((one, other) => other.score - one.score || one.page - other.page);
      return { concepts, found: ranked };
    }
  }

  function load() {
    if (engine) return engine;
    engine = new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${base}/assets/search-index.js`;
      script.onload = () => resolve(new Engine(window.SEARCH_INDEX));
      script.onerror = () => reject(new Error("the search index is missing"));
      document.head.append(script);
    });
    return engine;
  }

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // The part of a text with most words of the query; those are marked.
  function excerpt(text, stems) {
    const pieces = [...text.matchAll(WORD)].map((match) => ({
      at: match.index,
      end: match.index + match[0].length,
      hit: terms(match[0]).some((term) => stems.has(term)),
    }));
    let best = 0;
    let most = -1;
    for (let first = 0; first < pieces.length; first += 1) {
      if (!pieces[first].hit && first) continue;
      let hits = 0;
      for (let at = first; at < pieces.length && pieces[at].at < pieces[first].at + 140; at += 1) hits += pieces[at].hit;
      if (hits > most) [best, most] = [first, hits];
    }
    const start = pieces.length ? pieces[Math.max(0, best - 4)].at : 0;
    const stop = start + 170;
    const result = element("p", { class: "site-search__text" });
    let at = start;
    for (const piece of pieces) {
      if (piece.at < start || piece.end > stop || !piece.hit) continue;
      result.append(text.slice(at, piece.at), element("mark", {}, text.slice(piece.at, piece.end)));
      at = piece.end;
    }
    result.append(text.slice(at, stop), stop < text.length ? " …" : "");
    if (start > 0) result.prepend("… ");
    return result;
  }

  async function show() {
    const query = input.value;
    if (!query.trim()) {
      panel.hidden = true;
      form.dataset.shown = query;
      return;
    }
    let loaded;
    try {
      loaded = await load();
    } catch (error) {
      status.textContent = `Search does not work: ${error.message}.`;
      panel.hidden = false;
      return;
    }
    if (query !== input.value) return;
    const { concepts, found } = loaded.search(query);
    const stems = new Set(concepts.flat().map(({ term }) => term));
    const { pages, sections } = loaded.index;
    status.textContent = found.length === 0 ? "Nothing found" : found.length === 1 ? "1 page" : `${found.length} pages`;
    list.replaceChildren(
      ...found.slice(0, MOST_PAGES).map((result) => {
        const { title, url, group } = pages[result.page];
        const best = result.sections.filter(({ score }, number) => number === 0 || score > 0.5 * result.sections[0].score);
        const leading = sections[result.sections[0].number];
        const target = leading.anchor && leading.title !== title ? `${url}#${leading.anchor}` : url;
        const item = element(
          "li",
          { class: "site-search__page" },
          element("a", { href: `${base}/${target}`, class: "site-search__title", "data-page": url }, title),
          element("span", { class: "site-search__group" }, group),
          excerpt(leading.text, stems),
        );
        const others = best.slice(0, MOST_SECTIONS).filter(({ number }) => sections[number].title !== title);
        if (others.length) {
          item.append(
            element(
              "ul",
              { class: "site-search__sections" },
              ...others.map(({ number }) =>
                element("li", {}, element("a", { href: `${base}/${url}#${sections[number].anchor}` }, sections[number].title)),
              ),
            ),
          );
        }
        return item;
      }),
    );
    panel.hidden = false;
    panel.scrollTop = 0;
    form.dataset.shown = query;
  }

  function close() {
    panel.hidden = true;
  }

  function move(step) {
    const links = [...list.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement) + step;
    if (at < 0) input.focus();
    else links[Math.min(at, links.length - 1)]?.focus();
  }

  const toggle = document.getElementById("__search"); // of the theme: shows the field on a phone
  input.addEventListener("focus", () => {
    load().catch(() => {});
    show();
  });
  input.addEventListener("input", show);
  toggle?.addEventListener("change", () => toggle.checked && input.focus());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    list.querySelector("a")?.click();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      close();
      input.blur();
      if (toggle) toggle.checked = false;
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      move(event.key === "ArrowDown" ? 1 : -1);
    } else return;
    event.stopPropagation();
  });
  list.addEventListener("click", (event) => {
    if (event.target.closest("a")) close();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!form.contains(event.target)) close();
  });
  document.addEventListener("keydown", (event) => {
    const writing = event.target.closest?.("input, textarea, select, [contenteditable]");
    const wanted = (event.key === "/" && !writing) || (event.key === "k" && (event.ctrlKey || event.metaKey));
    if (!wanted) return;
    event.preventDefault();
    if (toggle) toggle.checked = true;
    input.focus();
    input.select();
  });
  const asked = new URLSearchParams(location.search).get("q");
  if (asked) {
    input.value = asked;
    input.focus();
  }
})();
