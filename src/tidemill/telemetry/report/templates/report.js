"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const home = document.getElementById("charts");
  if (!data.charts.length) return;
  home.replaceChildren();

  const HUES = ["--accent", "--accent-2", "--accent-3", "--accent-4"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const canvasColour = (name, alpha) => {
    // Canvases of older browsers do not support color-mix; hexadecimal alpha works everywhere.
    const hex = css(name);
    return hex.length === 7 ? hex + Math.round(alpha * 255).toString(16).padStart(2, "0") : hex;
  };
  const show = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("+", "");
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  };
  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const lastOf = (values) => {
    for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i];
    return null;
  };

  // A stacked chart draws cumulative sums and fills the area between neighbours.
  const stack = (series) => {
    const sums = [];
    const known = series[0].values.map((_, i) => series.some((one) => one.values[i] != null));
    series.forEach((one, at) => sums.push(one.values.map((value, i) => (known[i] ? (value || 0) + (at ? sums[at - 1][i] : 0) : null))));
    return sums;
  };

  // Long runs are noisy: draw the values faintly, and their running mean over 2 % of the run in full colour.
  const smooth = (values) => {
    const reach = Math.ceil(values.length / 100);
    return values.map((value, at) => {
      if (value == null) return null;
      let sum = 0, count = 0;
      for (let i = Math.max(0, at - reach); i <= Math.min(values.length - 1, at + reach); i++) if (values[i] != null) { sum += values[i]; count++; }
      return sum / count;
    });
  };

  const resumeLines = (plot) => {
    const context = plot.ctx;
    context.save();
    context.strokeStyle = css("--accent-4");
    context.setLineDash([4, 4]);
    context.lineWidth = 1;
    for (const step of data.resumed) {
      const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
    }
    context.restore();
  };

  const markLines = (chart) => (plot) => {
    const context = plot.ctx, scale = window.devicePixelRatio || 1, { left, top, width, height } = plot.bbox;
    context.save();
    context.strokeStyle = context.fillStyle = css("--bad");
    context.font = `${11 * scale}px system-ui, sans-serif`;
    context.lineWidth = scale;
    chart.marks.forEach(([step, text], at) => {
      const x = Math.round(plot.valToPos(step, "x", true)) + 0.5, late = x > left + width * 0.8;
      if (x < left || x > left + width) return;
      context.textAlign = late ? "right" : "left";
      context.fillText(`${text} ${step}`, x + (late ? -4 : 4) * scale, top + (12 + 13 * (at % 4)) * scale);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
    });
    context.restore();
  };

  const range = (chart, low, high) => {
    let bottom = chart.low ?? low, top = chart.high ?? high;
    if (bottom == null || top == null) return [0, 1];
    const room = (top - bottom) * 0.08;
    if (chart.high == null) top += room;
    if (chart.low == null) bottom -= room;
    if (top - bottom < 1e-3 * Math.abs(top) || top <= bottom) { const pad = Math.abs(top) * 0.1 || 1; top += pad; if (chart.low == null) bottom -= pad; }
    return [bottom, top];
  };

  const draw = (chart) => {
    const figure = element("figure", "card");
    const caption = element("figcaption", "", chart.title);
    caption.append(element("span", "muted", chart.note));
    const plotHome = element("div", "plot");
    const keys = element("div", "keys");
    figure.append(caption, plotHome, keys);
    home.append(figure);

    const stacked = chart.kind === "stacked";
    const drawn = stacked ? stack(chart.series) : chart.series.map((one) => one.values);
    const figures = chart.series.map((one, at) => {
      const key = element("span");
      const mark = element("i");
      mark.style.background = css(HUES[at % HUES.length]);
      const text = element("span");
      key.append(mark, text);
      keys.append(key);
      return { one, mark, text };
    });
    const showValues = (index) => figures.forEach(({ one, text }) => {
      const value = index == null ? lastOf(one.values) : one.values[index];
      text.textContent = `${chart.series.length > 1 || index != null ? one.label + " " : "now "}${show(value)}`;
    });

    const build = () => {
      const hue = (at) => HUES[at % HUES.length];
      const lone = data.steps.length === 1;
      const noisy = chart.kind === "line" && data.steps.length > 150;
      const evaluated = (at) => chart.kind === "points" || Boolean(chart.series[at].points);
      const fewPoints = (at) => chart.series[at].values.filter((value) => value != null).length <= 60;
      const series = drawn.map((_, at) => ({
        label: chart.series[at].label,
        stroke: noisy ? canvasColour(hue(at), 0.3) : css(hue(at)),
        width: stacked || noisy ? 1 : 2,
        spanGaps: evaluated(at),
        fill: stacked ? (at ? undefined : canvasColour(hue(at), 0.6)) : chart.series.length === 1 && !chart.band.length ? canvasColour(hue(at), 0.1) : undefined,
        points: { show: (evaluated(at) && fewPoints(at)) || lone, size: 6, fill: css("--card") },
      }));
      const columns = [...drawn];
      const bands = [];
      if (chart.band.length) {
        const edge = (sign) => drawn[0].map((value, i) => (value == null || chart.band[i] == null ? null : value + sign * chart.band[i]));
        columns.push(edge(1), edge(-1));
        for (const label of ["above", "below"]) series.push({ label, stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 1, series.length], fill: canvasColour("--accent", 0.14) });
      }
      if (noisy) drawn.forEach((values, at) => {
        columns.push(smooth(values));
        series.push({ label: "mean", stroke: css(hue(at)), width: 2, spanGaps: evaluated(at), points: { show: false } });
      });
      if (stacked) for (let at = 1; at < series.length; at++) bands.push({ series: [at + 1, at], fill: canvasColour(hue(at), 0.6) });
      const axis = { stroke: css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
      return new uPlot({
        width: plotHome.clientWidth, height: 158,
        legend: { show: false },
        cursor: { sync: { key: "steps" }, y: false, points: { show: !stacked }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, low, high) => (lone ? [data.steps[0] - 1, data.steps[0] + 1] : [low, high]) }, y: { range: (_, low, high) => range(chart, low, high) } },
        axes: [
          { ...axis, size: 24, gap: 3, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
          { ...axis, size: 46, gap: 4, grid: { stroke: css("--line"), width: 1 }, values: (_, splits) => splits.map(show), space: 34 },
        ],
        series: [{ label: "step" }, ...series],
        bands,
        hooks: { drawClear: [resumeLines], draw: chart.marks ? [markLines(chart)] : [], setCursor: [(plot) => showValues(plot.cursor.idx)] },
      }, [data.steps, ...columns], plotHome);
    };

    let plot = build();
    showValues(null);
    new ResizeObserver(() => plot.setSize({ width: plotHome.clientWidth, height: 158 })).observe(plotHome);
    return () => {
      plot.destroy();
      figures.forEach(({ mark }, at) => { mark.style.background = css(HUES[at % HUES.length]); });
      plot = build();
    };
  };

  const redraw = data.charts.map(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw.forEach((again) => again()));
})();
