"use strict";
// Charts of a run's metrics, in every element with data-charts. They are built when they come into view.
const charts = (() => {
  const HUES = ["--accent", "--accent-2", "--accent-3", "--accent-4", "--accent-5", "--accent-6"];
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3]];
  const HEIGHT = 158, NOISY = 150;
  let data = null, figures = [], view = null, log = false, smoothing = -1;

  const show = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size < 1e-12) return "0";
    if (size < 1e-3 || size >= 1e12) return value.toExponential(1).replace("+", "");
    for (const [limit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (size >= limit) return Number((value / (limit === 1e4 ? 1e3 : limit)).toPrecision(3)) + suffix;
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  };
  // Labels of an axis have the digits that tell its ticks apart; the sums that place them may be off by rounding.
  const tick = (value, step) => {
    if (Math.abs(value) < step * 1e-6) return "0";
    const digits = Math.max(0, 1 - Math.floor(Math.log10(step || 1)));
    return digits > 6 || Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? show(value) : String(Number(value.toFixed(digits)));
  };
  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const lastOf = (values) => values.findLast((value) => value != null) ?? null;

  // A stacked chart draws cumulative sums and fills the area between neighbours.
  const stack = (series) => {
    const sums = [];
    const known = series[0].values.map((_, i) => series.some((one) => one.values[i] != null));
    series.forEach((one, at) => sums.push(one.values.map((value, i) => (known[i] ? (value || 0) + (at ? sums[at - 1][i] : 0) : null))));
    return sums;
  };

  // Running mean over a share of the run, centred.
  const mean = (values, reach) => {
    const sums = [0], counts = [0];
    values.forEach((value, at) => { sums.push(sums[at] + (value ?? 0)); counts.push(counts[at] + (value != null)); });
    return values.map((value, at) => {
      const from = Math.max(0, at - reach), to = Math.min(values.length, at + reach + 1);
      return value == null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  };

  const vertical = (plot, step, style, dash) => {
    const { left, top, width, height } = plot.bbox, x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
    if (x < left || x > left + width) return null;
    plot.ctx.strokeStyle = style;
    plot.ctx.lineWidth = window.devicePixelRatio || 1;
    plot.ctx.setLineDash(dash);
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
    return x;
  };
  const resumeLines = (plot) => {
    plot.ctx.save();
    for (const step of data.resumed) vertical(plot, step, paint("--accent-4"), [4, 4]);
    plot.ctx.restore();
  };
  const markLines = (chart) => (plot) => {
    const context = plot.ctx, scale = window.devicePixelRatio || 1, { left, top, width } = plot.bbox;
    context.save();
    context.fillStyle = paint("--bad");
    context.font = `${11 * scale}px system-ui, sans-serif`;
    (chart.marks || []).forEach(([step, text], at) => {
      const x = vertical(plot, step, paint("--bad"), []), late = x > left + width * 0.8;
      context.textAlign = late ? "right" : "left";
      if (x !== null) context.fillText(`${text} ${step}`, x + (late ? -4 : 4) * scale, top + (12 + 13 * (at % 4)) * scale);
    });
    context.restore();
  };

  const rangeY = (chart, low, high, logarithmic) => {
    if (logarithmic) return low > 0 ? uPlot.rangeLog(low, high, 10, true) : [0.1, 1];
    let bottom = chart.low ?? low, top = chart.high ?? high;
    if (bottom == null || top == null) return [0, 1];
    const room = (top - bottom) * 0.08;
    if (chart.high == null) top += room;
    if (chart.low == null) bottom -= room;
    if (top - bottom < 1e-3 * Math.abs(top) || top <= bottom) { const pad = Math.abs(top) * 0.1 || 1; top += pad; if (chart.low == null) bottom -= pad; }
    return [bottom, top];
  };

  const zoom = (to) => {
    view = to;
    document.querySelectorAll("[data-unzoom]").forEach((button) => { button.hidden = !view; });
    for (const { plot } of figures) plot?.setData(plot.data);
  };

  const build = (figure) => {
    const { chart } = figure, stacked = chart.kind === "stacked", lone = data.steps.length === 1;
    const logarithmic = log && figure.tuned && !stacked && chart.series.some((one) => one.values.some((value) => value > 0));
    const share = smoothing >= 0 && figure.tuned ? smoothing : data.steps.length > NOISY ? 2 : 0;
    const smooth = chart.kind === "line" && share > 0 && data.steps.length > 2;
    const evaluated = (at) => chart.kind === "points" || Boolean(chart.series[at].points);
    const few = (at) => chart.series[at].values.filter((value) => value != null).length <= 60;
    const hue = (at) => HUES[at % HUES.length], dash = (at) => (stacked ? [] : DASHES[at % DASHES.length]);
    const series = chart.series.map((one, at) => ({
      label: one.label, stroke: paint(hue(at), smooth ? 0.3 : 1), width: stacked || smooth ? 1 : 2, dash: smooth ? [] : dash(at), spanGaps: evaluated(at),
      fill: stacked ? (at ? undefined : paint(hue(at), 0.6)) : chart.series.length === 1 && !chart.band.length && !logarithmic ? paint(hue(at), 0.1) : undefined,
      points: { show: (evaluated(at) && few(at)) || lone, size: 6, fill: paint("--card") },
    }));
    const bands = [];
    if (chart.band.length) {
      for (const label of ["above", "below"]) series.push({ label, stroke: "transparent", points: { show: false } });
      bands.push({ series: [series.length - 1, series.length], fill: paint("--accent", 0.14) });
    }
    if (smooth) chart.series.forEach((_, at) => series.push({ label: "mean", stroke: paint(hue(at)), width: 2, dash: dash(at), spanGaps: evaluated(at), points: { show: false } }));
    if (stacked) for (let at = 1; at < series.length; at++) bands.push({ series: [at + 1, at], fill: paint(hue(at), 0.6) });
    figure.columns = () => {
      const drawn = stacked ? stack(chart.series) : chart.series.map((one) => (logarithmic ? one.values.map((value) => (value > 0 ? value : null)) : one.values));
      const edge = (sign) => drawn[0].map((value, i) => { const at = value + sign * chart.band[i]; return value == null || chart.band[i] == null || (logarithmic && at <= 0) ? null : at; });
      const means = smooth ? drawn.map((values) => mean(values, Math.ceil((values.length * share) / 200))) : [];
      return [data.steps, ...drawn, ...(chart.band.length ? [edge(1), edge(-1)] : []), ...means];
    };
    const axis = { stroke: paint("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    figure.marks.forEach((mark, at) => { mark.style.color = paint(hue(at)); mark.className = stacked ? "" : `dash-${at % DASHES.length}`; });
    figure.plot?.destroy();
    figure.plot = new uPlot({
      width: figure.home.clientWidth, height: HEIGHT, legend: { show: false },
      cursor: {
        sync: { key: "steps", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        y: false, points: { show: !stacked }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoom(null) },
      },
      scales: {
        x: { time: false, range: (_, low, high) => view || (lone ? [data.steps[0] - 1, data.steps[0] + 1] : [low, high]) },
        y: { distr: logarithmic ? 3 : 1, range: (_, low, high) => rangeY(chart, low, high, logarithmic) },
      },
      axes: [
        { ...axis, size: 24, gap: 3, grid: { show: false }, values: (_, splits) => splits.map(show), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        { ...axis, size: 46, gap: 4, grid: { stroke: paint("--line"), width: 1 }, values: (_, splits, __, ___, step) => splits.map((value) => (value == null ? "" : logarithmic ? show(value) : tick(value, step))), space: 34 },
      ],
      series: [{ label: "step" }, ...series], bands,
      hooks: {
        drawClear: [resumeLines], draw: [markLines(chart)], setCursor: [(plot) => figure.values(plot.cursor.idx)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (width > 4) zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
        }],
      },
    }, figure.columns(), figure.home);
    figure.values(null);
  };

  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const figure = figures.find((one) => one.home === entry.target);
    if (entry.isIntersecting && figure && !figure.plot) build(figure);
  }), { rootMargin: "400px" });
  const sized = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (target.clientWidth) figures.find((one) => one.home === target)?.plot?.setSize({ width: target.clientWidth, height: HEIGHT });
  }));

  const figureOf = (tuned) => (chart) => {
    const node = element("figure", "card"), caption = element("figcaption"), now = element("span", "now muted");
    caption.append(element("span", "title", chart.title), element("span", "muted", chart.note), now);
    caption.children[1].title = chart.note;
    const home = element("div", "plot"), keys = element("div", "keys");
    node.append(caption, home, keys);
    const labels = chart.series.map((one) => {
      const key = element("span"), mark = element("i"), text = element("span");
      key.append(mark, text);
      keys.append(key);
      return { one, mark, text };
    });
    const values = (index) => {
      now.textContent = index == null ? "" : `step ${data.steps[index]}`;
      labels.forEach(({ one, text }) => { text.textContent = `${chart.series.length > 1 ? `${one.label} ` : index == null ? "now " : ""}${show(index == null ? lastOf(one.values) : one.values[index])}`; });
    };
    figures.push({ chart, home, values, marks: labels.map(({ mark }) => mark), plot: null, tuned });
    seen.observe(home);
    sized.observe(home);
    values(null);
    return node;
  };

  const fold = (constant, noun) => {
    const count = `${constant.length} ${noun}${constant.length === 1 ? " is" : "s are"} constant: `;
    return constant.length ? [element("p", "muted small folded", count + constant.map(([title, value]) => `${title} ${show(value)}`).join(", ") + ".")] : [];
  };
  const fill = () => {
    figures.forEach(({ plot, home }) => { plot?.destroy(); seen.unobserve(home); sized.unobserve(home); });
    figures = [];
    for (const home of document.querySelectorAll("[data-charts]")) {
      const titles = data[home.dataset.charts], shown = titles ? titles.map((title) => data.charts.find((one) => one.title === title)).filter(Boolean) : data.charts;
      const folded = fold(titles ? data.constant.filter(([title]) => titles.includes(title)) : data.constant, "metric");
      if (titles) home.replaceChildren(...shown.map(figureOf(false)), ...folded);
      else home.replaceChildren(...folded, ...[...new Set(shown.map((one) => one.group))].map((group) => {
        const part = element("div", "chart-group"), grid = element("div", "charts");
        grid.append(...shown.filter((one) => one.group === group).map(figureOf(true)));
        part.append(element("h3", "", group), grid);
        return part;
      }));
      if (!home.childElementCount) home.append(element("p", "muted", data.steps.length ? "Nothing to draw." : "No step has been completed yet."));
    }
    document.dispatchEvent(new Event("filled"));
  };

  // Takes the answer to charts.json: the whole, or what follows the points before `start`.
  const take = (answer) => {
    if (answer.start === undefined || !data) { data = answer; return fill(); }
    const join = (old, fresh) => { old.length = answer.start; for (const value of fresh) old.push(value); };
    join(data.steps, answer.steps);
    data.charts.forEach((chart, at) => {
      chart.series.forEach((one, i) => join(one.values, answer.charts[at].series[i].values));
      if (chart.band.length) join(chart.band, answer.charts[at].band);
      chart.marks = answer.charts[at].marks;
    });
    Object.assign(data, { cursor: answer.cursor, resumed: answer.resumed });
    for (const figure of figures) { figure.plot?.setData(figure.columns()); if (!figure.plot || figure.plot.cursor.idx == null) figure.values(null); }
  };
  const rebuild = () => figures.forEach((figure) => { if (figure.plot) build(figure); });
  document.addEventListener("change", ({ target }) => {
    if (target.matches("[data-log]")) log = target.checked;
    else if (target.matches("[data-smoothing]")) smoothing = Number(target.value);
    else return;
    rebuild();
  });
  document.addEventListener("click", ({ target }) => { if (target.matches("[data-unzoom]")) zoom(null); });
  document.addEventListener("themed", rebuild);
  const frozen = document.getElementById("data");
  if (frozen) take(JSON.parse(frozen.textContent));
  const range = (home) => { const { min, max } = figures.find((one) => one.home === home).plot.scales.x; return [min, max]; };
  return {
    take, range, fill: () => data && fill(), drawAll: () => figures.forEach((figure) => figure.plot || build(figure)),
    query: () => (data?.steps.length ? `?after=${data.steps.at(-1)}&cursor=${data.cursor}` : ""),
  };
})();
