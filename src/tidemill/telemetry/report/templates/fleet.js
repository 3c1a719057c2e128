"use strict";
// A colour of the style sheet in the current theme, as canvases take it.
const paint = (() => {
  const probe = document.createElement("i"), known = new Map();
  probe.hidden = true;
  document.body.append(probe);
  const forget = () => { known.clear(); document.dispatchEvent(new Event("themed")); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
  document.addEventListener("theme", forget);
  return (name, alpha = 1) => {
    if (!known.has(name)) { probe.style.color = `var(${name})`; known.set(name, getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3)); }
    return `rgb(${known.get(name).join(" ")} / ${alpha})`;
  };
})();

// One timeline per element of class timeline, in document order; the element before it gets the keys.
const drawTimeline = (fleet, home, keys, zoomed) => {
  const count = fleet.rows.length;
  const tall = Math.max(4, Math.min(24, Math.floor(640 / count)));
  const elastic = fleet.first < count; // no preemptible workers
  const LEFT = 84, RIGHT = 10, HEAD = 22, GAP = elastic ? 12 : 0, CURVE = elastic ? 46 : 0, FOOT = 22;
  const bottom = HEAD + count * tall;
  const height = bottom + GAP + CURVE + FOOT;
  const KINDS = {
    held: ["leased", "--accent-4", 0.26], boot: ["starting", "--accent-4", 0.85], pull: ["pulling weights", "--accent-3", 1],
    decode: ["generating", "--accent", 1], evaluate: ["evaluating", "--accent", 0.5], notice: ["notice", "--bad", 0.6],
    learn: ["training", "--accent-2", 1], train: ["optimizer step", "--accent-2", 1], checkpoint: ["checkpoint", "--accent-2", 0.5],
  };
  const MARKS = { eviction: "evicted", drained: "drained", quarantine: "quarantined", failed: "failed to start" };

  const canvas = document.createElement("canvas");
  const tip = document.createElement("div");
  const ruler = document.createElement("div");
  tip.className = "tip";
  ruler.className = "ruler";
  home.replaceChildren(canvas, ruler, tip);
  let view = zoomed || [0, Math.max(fleet.end, 1e-3)], width = 0, context;
  const x = (time) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
  const timeAt = (left) => view[0] + ((left - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);
  const clock = (seconds, fine) => {
    seconds = Math.max(0, fine ? Math.round(seconds * 10) / 10 : seconds);
    const whole = Math.floor(seconds + 1e-9), two = (n) => String(n).padStart(2, "0");
    const text = whole >= 3600 ? `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}` : `${Math.floor(whole / 60)}:${two(whole % 60)}`;
    return fine ? text + (seconds - whole).toFixed(1).slice(1) : text;
  };

  const upright = (time, style, from, to, dash) => {
    const at = Math.round(x(time)) + 0.5;
    context.strokeStyle = style;
    context.setLineDash(dash || []);
    context.beginPath();
    context.moveTo(at, from);
    context.lineTo(at, to);
    context.stroke();
    context.setLineDash([]);
  };

  const drawBars = () => {
    const inset = tall >= 14 ? 3 : tall >= 8 ? 1.5 : 0.5;
    for (const [row, kind, start, end] of fleet.bars) {
      if (end < view[0] || start > view[1]) continue;
      const [, hue, alpha] = KINDS[fleet.kinds[kind]];
      const left = x(start), wide = Math.max(0.75, x(end) - left);
      // Lower than generation, so that both are visible where they overlap.
      const low = (tall - 2 * inset) * ({ pull: 0.35, notice: 0.65 }[fleet.kinds[kind]] || 0);
      context.fillStyle = paint(hue, alpha);
      context.beginPath();
      context.roundRect(left, HEAD + row * tall + inset + low, wide, tall - 2 * inset - low, wide > 4 && tall >= 14 ? 2 : 0);
      context.fill();
    }
  };

  const drawMarks = () => {
    const size = Math.min(4, tall / 4);
    for (const [row, kind, time] of fleet.marks) {
      if (time < view[0] || time > view[1]) continue;
      const at = x(time), top = HEAD + row * tall, middle = top + tall / 2;
      context.strokeStyle = context.fillStyle = paint(kind === "drained" ? "--accent-2" : "--bad");
      context.lineWidth = tall >= 10 ? 2 : 1.5;
      context.beginPath();
      if (kind === "eviction") {
        context.moveTo(at - size, middle - size); context.lineTo(at + size, middle + size);
        context.moveTo(at + size, middle - size); context.lineTo(at - size, middle + size);
        context.moveTo(at, top + 1); context.lineTo(at, top + tall - 1);
        context.stroke();
      } else if (kind === "drained") {
        context.moveTo(at - size, top + 1); context.lineTo(at + size, top + 1); context.lineTo(at, top + 1 + 1.6 * size);
        context.fill();
      } else {
        context.arc(at, middle, size, 0, 7);
        if (kind === "quarantine") context.fill(); else context.stroke();
      }
      context.lineWidth = 1;
    }
  };

  const drawCurve = () => {
    const most = Math.max(1, ...fleet.serving.map(([, n]) => n));
    const base = bottom + GAP + CURVE, y = (n) => base - (n / most) * (CURVE - 6);
    const points = [...fleet.serving, [fleet.end, fleet.serving[fleet.serving.length - 1][1]]];
    context.beginPath();
    context.moveTo(x(points[0][0]), base);
    points.forEach(([time, n], at) => {
      if (at) context.lineTo(x(time), y(points[at - 1][1]));
      context.lineTo(x(time), y(n));
    });
    context.lineTo(x(fleet.end), base);
    context.fillStyle = paint("--accent", 0.16);
    context.fill();
    context.strokeStyle = paint("--accent");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineWidth = 1;
    return [most, y];
  };

  const label = (text, left, middle, hue, align) => {
    context.fillStyle = paint(hue);
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillText(text, left, middle);
  };

  const drawAxis = () => {
    const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
    const room = ((view[1] - view[0]) * 64) / (width - LEFT - RIGHT);
    const step = STEPS.find((one) => one >= room) || 86400 * Math.ceil(room / 86400);
    for (let time = Math.ceil(view[0] / step) * step; time <= view[1]; time += step) {
      upright(time, paint("--line"), HEAD, height - FOOT);
      label(clock(time), Math.min(x(time), width - RIGHT - 10), height - FOOT + 11, "--muted", "center");
    }
  };

  const draw = () => {
    width = home.clientWidth;
    if (!width) return; // hidden
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    drawAxis();
    context.save();
    context.beginPath();
    context.rect(LEFT - 1, 0, width - LEFT - RIGHT + 2, height);
    context.clip();
    const dense = fleet.publishes.length > (width - LEFT) / 8;
    for (const [time] of fleet.publishes) {
      upright(time, paint("--accent-3", dense ? 0.15 : 0.5), HEAD - 4, bottom, [3, 3]);
      if (dense) continue;
      context.fillStyle = paint("--accent-3");
      context.beginPath();
      context.moveTo(x(time) - 4, HEAD - 10); context.lineTo(x(time) + 4, HEAD - 10); context.lineTo(x(time), HEAD - 4);
      context.fill();
    }
    drawBars();
    drawMarks();
    const [most, y] = elastic ? drawCurve() : [];
    for (const [time, text] of fleet.sessions) {
      upright(time, paint("--ink"), 0, height - FOOT);
      label(text, x(time) + 5, 6, "--ink", "left");
    }
    context.restore();
    if (tall >= 11) fleet.rows.forEach((name, row) => name && label(name.length > 10 ? name.slice(0, 9) + "…" : name, LEFT - 8, HEAD + (row + 0.5) * tall, "--ink", "right"));
    if (!fleet.named && elastic) label(`${count - fleet.first} rows`, LEFT - 8, HEAD + ((fleet.first + count) / 2) * tall, "--muted", "right");
    if (!elastic) return;
    label("workers up", LEFT - 8, y(0) - (CURVE - 6) / 2, "--muted", "right");
    label(String(most), LEFT + 4, y(most) - 5, "--muted", "left");
  };

  const found = (left, top) => {
    const near = (time, reach) => Math.abs(x(time) - left) <= reach;
    const row = Math.floor((top - HEAD) / tall), time = timeAt(left);
    if (top < HEAD) return [...fleet.sessions, ...fleet.publishes].find(([at]) => near(at, 6))?.[1];
    if (row >= count) {
      const there = fleet.serving.filter(([at]) => at <= time).pop();
      return top < height - FOOT && there ? `${there[1]} preemptible worker${there[1] === 1 ? "" : "s"} up` : undefined;
    }
    const mark = fleet.marks.find((one) => one[0] === row && near(one[2], 4));
    if (mark) return mark[3];
    const bars = fleet.bars.filter((one) => one[0] === row && x(one[2]) - 1.5 <= left && left <= x(one[3]) + 1.5);
    return bars.length ? bars[bars.length - 1][4] : undefined;
  };

  let dragged = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const inside = (left) => Math.max(LEFT, Math.min(width - RIGHT, left));
  canvas.addEventListener("pointermove", (event) => {
    const [left, top] = place(event);
    const from = dragged === null ? left : Math.min(dragged, left);
    ruler.hidden = left < LEFT || left > width - RIGHT;
    ruler.style.cssText = `left:${inside(from)}px;width:${dragged === null ? 1 : Math.abs(inside(left) - dragged)}px;height:${height - FOOT}px`;
    const text = dragged === null ? found(left, top) : undefined;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = `${text}\nat ${clock(timeAt(left), true)}`;
    tip.style.left = `${Math.min(left + 14, width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${top + 18}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = ruler.hidden = true; });
  canvas.addEventListener("pointerdown", (event) => { dragged = inside(place(event)[0]); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", (event) => {
    const ends = [dragged, inside(place(event)[0])].sort((a, b) => a - b);
    dragged = null;
    if (ends[1] - ends[0] < 6) return;
    zoomed = view = ends.map(timeAt);
    draw();
  });
  canvas.addEventListener("dblclick", () => { zoomed = null; view = [0, Math.max(fleet.end, 1e-3)]; draw(); });

  const key = (text, hue, alpha, shape) => {
    const one = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = shape || "";
    one.append(swatch, text);
    keys.append(one);
    return () => { swatch.style.setProperty("--hue", paint(hue, alpha)); };
  };
  keys.replaceChildren();
  const present = new Set(fleet.bars.map((one) => fleet.kinds[one[1]]));
  const marked = new Set(fleet.marks.map((one) => one[1]));
  const colours = Object.entries(KINDS).filter(([kind]) => present.has(kind)).map(([, of]) => key(...of));
  if (fleet.publishes.length) colours.push(key("published", "--accent-3", 1, "drained"));
  for (const kind of Object.keys(MARKS)) if (marked.has(kind)) colours.push(key(MARKS[kind], kind === "drained" ? "--accent-2" : "--bad", 1, kind));

  const redraw = () => { colours.forEach((colour) => colour()); draw(); };
  redraw();
  tip.hidden = ruler.hidden = true;
  const sized = new ResizeObserver(draw);
  sized.observe(home);
  document.addEventListener("themed", redraw);
  return { zoomed: () => zoomed, stop: () => { sized.disconnect(); document.removeEventListener("themed", redraw); } };
};
const timelines = [];
const drawTimelines = ({ fleets }) => document.querySelectorAll(".timeline").forEach((home, at) => {
  if (!fleets[at]) return;
  timelines[at]?.stop();
  const hint = home.parentElement.querySelector(".work-from");
  if (hint) hint.textContent = fleets[at].workFrom ? `What workers did in each step is drawn from ${fleets[at].workFrom} on; the report has all of it.` : "";
  timelines[at] = drawTimeline(fleets[at], home, home.previousElementSibling, timelines[at]?.zoomed());
});
if (document.getElementById("data")) drawTimelines(JSON.parse(document.getElementById("data").textContent));
