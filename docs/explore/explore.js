/* Sliders, axes and the text under a drawing. A page registers a function that draws; its numbers are in tables/NAME.js. */
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const MINUS = "−";

  /** An element of HTML, or of SVG if its parent will be one. */
  function make(space, tag, attributes, children) {
    const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value);
    }
    for (const child of [children ?? []].flat()) node.append(child);
    return node;
  }
  const html = (tag, attributes, children) => make(null, tag, attributes, children);
  const svg = (tag, attributes, children) => make(SVG, tag, attributes, children);

  /** 1234.5 as "1,230": significant digits, a true minus, no exponent. */
  function figure(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.floor(Math.log10(Math.abs(value)));
    const places = Math.max(0, Math.min(digits - 1 - size, 12));
    const text = Math.abs(value).toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: places });
    return Number(text.replaceAll(",", "")) === 0 ? "0" : (value < 0 ? MINUS : "") + text;
  }
  const fixed = (value, places) => (value < 0 && Number(value.toFixed(places)) !== 0 ? MINUS : "") +
    Math.abs(value).toFixed(places);
  const percent = (share, places = 0) => `${fixed(100 * share, places)} %`;
  const seconds = (value) => `${figure(value)} s`;
  const count = (value) => value.toLocaleString("en-US");
  /** A number of bytes, given in GB. */
  const gigabytes = (value) => (value >= 1000 ? `${figure(value / 1000)} TB` : `${figure(value)} GB`);
  const parameters = (value) => `${figure(value / 1e9)} B`;

  /** Four to seven round numbers in a range. */
  function ticks(low, high, wanted = 5) {
    const rough = (high - low) / wanted;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
    return found;
  }

  const text = (x, y, content, more = {}) => svg("text", { x, y, ...more }, String(content));
  const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
  function rect(x1, y1, x2, y2, kind, title) {
    const box = { x: Math.min(x1, x2), y: Math.min(y1, y2), width: Math.abs(x2 - x1), height: Math.abs(y2 - y1) };
    return svg("rect", { ...box, class: kind }, title ? [svg("title", {}, title)] : []);
  }
  const path = (points, kind) => svg("path", { d: points.map(([x, y], at) => `${at ? "L" : "M"}${x} ${y}`).join(""), class: kind });
  const circle = (x, y, r, kind) => svg("circle", { cx: x, cy: y, r, class: kind });

  /**
   * Axes in a box of the drawing. `x` and `y` are ranges; `xLog` makes x logarithmic; ticks are numbers, or chosen.
   * Returns the scales and the box.
   */
  function axes(parent, box, { x, y, xLabel, yLabel, xTicks, yTicks, xText = figure, yText = figure, xLog = false }) {
    const left = box.x + (yTicks === null ? 8 : 46), right = box.x + box.width - 10;
    const top = box.y + (yLabel ? 24 : 8), bottom = box.y + box.height - (xLabel ? 38 : 22);
    const place = xLog ? Math.log : (value) => value;
    const X = (value) => left + ((place(value) - place(x[0])) / (place(x[1]) - place(x[0]))) * (right - left);
    const Y = (value) => bottom - ((value - y[0]) / (y[1] - y[0])) * (bottom - top);
    const group = svg("g", { class: "ex-axes" });
    for (const at of yTicks === null ? [] : yTicks ?? ticks(y[0], y[1], 5)) {
      group.append(line(left, Y(at), right, Y(at), "ex-grid"));
      group.append(text(left - 6, Y(at) + 4, yText(at), { "text-anchor": "end" }));
    }
    for (const at of xTicks ?? ticks(x[0], x[1], (right - left) / 75)) {
      group.append(line(X(at), bottom, X(at), bottom + 4, "ex-tick"));
      group.append(text(X(at), bottom + 17, xText(at), { "text-anchor": "middle" }));
    }
    group.append(line(left, bottom, right, bottom, "ex-base"));
    if (yLabel) group.append(text(box.x + 2, box.y + 12, yLabel, { class: "ex-label" }));
    if (xLabel) group.append(text((left + right) / 2, bottom + 34, xLabel, { class: "ex-label", "text-anchor": "middle" }));
    parent.append(group);
    return { X, Y, left, right, top, bottom };
  }

  /** Coloured squares and names, in rows as wide as the drawing. Returns the height. */
  function legend(parent, names, { x = 0, y = 0, width }) {
    let at = x, row = y;
    for (const [kind, name, shape] of names) {
      const needed = 32 + 6.3 * name.length;
      if (at > x && at + needed > x + width) [at, row] = [x, row + 20];
      parent.append(shape === "line" ? line(at, row + 8, at + 14, row + 8, kind) : rect(at, row + 2, at + 12, row + 14, kind));
      parent.append(text(at + 18, row + 12, name));
      at += needed;
    }
    return row - y + 22;
  }

  /** Boxes beside each other, or below each other on a narrow screen. */
  function panels(width, heights, { narrow = 620, y = 0, gap = 14 } = {}) {
    if (width >= narrow) {
      const each = (width - gap * (heights.length - 1)) / heights.length;
      const height = Math.max(...heights);
      return { boxes: heights.map((_, at) => ({ x: at * (each + gap), y, width: each, height })), bottom: y + height };
    }
    let top = y;
    const boxes = heights.map((height) => {
      const box = { x: 0, y: top, width, height };
      top += height + gap;
      return box;
    });
    return { boxes, bottom: top - gap };
  }

  /**
   * Builds a page's sliders and drawing.
   *
   * sliders: {name, label, values, show (value to text), start (a value), group}
   * draw({at, value, table, width, add}) returns {height, summary}; `summary` is a list of strings and of
   * {figure: name, text, value}, which tests and screen readers find in the sentence below the drawing.
   */
  function page(name, { sliders, draw, title, example }) {
    const root = document.querySelector(`.explore[data-explore="${name}"]`);
    const table = (window.TABLES || {})[name];
    if (!root || !table || root.dataset.ready) return;
    const controls = typeof sliders === "function" ? sliders(table) : sliders;
    const inputs = new Map();
    const form = html("form", { class: "ex-controls", "aria-label": "Settings of the drawing" });
    const groups = new Map();
    for (const each of controls) {
      const id = `ex-${name}-${each.name}`;
      const output = html("span", { class: "ex-value", "aria-hidden": "true" }); // the slider has it as its value
      const input = html("input", { type: "range", id, min: 0, max: each.values.length - 1, step: 1, "data-slider": each.name });
      input.value = each.values.indexOf(each.start);
      const field = html("div", { class: "ex-slider" }, [html("label", { for: id }, each.label), output, input]);
      if (!each.group) form.append(field);
      else {
        if (!groups.has(each.group)) {
          groups.set(each.group, html("fieldset", {}, [html("legend", {}, each.group)]));
          form.append(groups.get(each.group));
        }
        groups.get(each.group).append(field);
      }
      inputs.set(each.name, { each, input, output });
    }
    const reset = html("button", { type: "button", class: "ex-reset" }, example || "Worked example");
    form.append(html("div", { class: "ex-buttons" }, [reset]));
    form.addEventListener("submit", (event) => event.preventDefault());
    const summaryId = `ex-${name}-summary`;
    const drawing = svg("svg", { role: "img", "aria-label": title, "aria-describedby": summaryId, class: "ex-drawing" });
    const summary = html("figcaption", { id: summaryId, class: "ex-summary", "aria-live": "polite" });
    const holder = html("figure", {}, [drawing, summary]);
    root.replaceChildren(form, holder);
    root.dataset.ready = "true";

    function show() {
      const at = {}, value = {};
      for (const [slider, { each, input, output }] of inputs) {
        at[slider] = Number(input.value);
        value[slider] = each.values[at[slider]];
        const shown = (each.show || figure)(value[slider]);
        output.textContent = shown;
        input.setAttribute("aria-valuetext", shown);
      }
      const width = Math.max(280, Math.min(Math.floor(holder.clientWidth || 720), 960));
      drawing.replaceChildren();
      const drawn = draw({ at, value, table, width, add: (...nodes) => drawing.append(...nodes), parent: drawing });
      drawing.setAttribute("viewBox", `0 0 ${width} ${drawn.height}`);
      drawing.setAttribute("width", width);
      drawing.setAttribute("height", drawn.height);
      summary.replaceChildren(
        ...drawn.summary.map((part) =>
          typeof part === "string" ? part : html("b", { "data-figure": part.figure, "data-value": part.value }, part.text)),
      );
    }
    form.addEventListener("input", show);
    reset.addEventListener("click", () => {
      for (const { each, input } of inputs.values()) input.value = each.values.indexOf(each.start);
      show();
    });
    show();
    let known = holder.clientWidth;
    if (window.ResizeObserver) {
      new ResizeObserver(() => {
        if (holder.clientWidth !== known) {
          known = holder.clientWidth;
          show();
        }
      }).observe(holder);
    }
  }

  /** A figure of the summary. */
  const told = (name, value, shown) => ({ figure: name, value, text: shown });

  window.Explore = {
    page, told, html, svg, figure, fixed, percent, seconds, count, gigabytes, parameters, ticks,
    text, line, rect, path, circle, axes, legend, panels,
  };
})();
