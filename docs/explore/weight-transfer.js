/* Time of a transfer by each path, beside the duration of a step. */
window.Explore.page("weight-transfer", {
  title: "Seconds of a weight transfer by path, against the duration of a step",
  sliders: (table) => [
    { name: "model", label: "Parameters", values: table.parameters, show: Explore.parameters, start: 70e9 },
    { name: "link", label: "Link", values: table.links, show: (value) => `${value} Gbit/s`, start: 400 },
    { name: "workers", label: "Workers that pull", values: table.workers, show: String, start: 1 },
    { name: "step", label: "Duration of a step", values: table.steps, show: Explore.seconds, start: 10 },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, text, told, seconds, gigabytes, legend } = Explore;
    const times = table.seconds[at.model][at.link][at.workers];
    const slack = table.slack[at.model][at.link][at.workers].map((steps) => steps[at.step]);
    const y0 = legend(parent, [["ex-fill-1", "a step hides it"], ["ex-fill-2", "longer than a step"]], { width });
    const height = 56 * table.paths.length + 66;
    const longest = 1.6 * value.step;
    const { X, right, top, bottom } = axes(parent, { x: 0, y: y0, width, height }, {
      x: [0, longest], y: [0, table.paths.length], xLabel: "seconds", yLabel: " ", yTicks: null,
    });
    add(rect(X(0), top, X(value.step), bottom, "ex-chosen"));
    add(text(X(value.step) - 4, top - 6, `step, ${seconds(value.step)}`, { "text-anchor": "end", class: "ex-label" }));
    const names = { broadcast: "broadcast", store: "object store", file: "shared file system", delta: "delta" };
    table.paths.forEach((name, row) => {
      const y = top + 8 + row * 56, long = times[row] > longest;
      add(text(X(0) + 6, y + 11, `${names[name]}: ${width < 520 ? "" : "a worker receives "}${gigabytes(table.sizes[at.model][row] / 1e9)}`, { class: "ex-label" }));
      add(rect(X(0), y + 16, long ? right : Math.max(X(times[row]), X(0) + 2), y + 34, slack[row] >= 0 ? "ex-fill-1" : "ex-fill-2"));
      const inside = X(times[row]) > right - 60;
      add(text(inside ? (long ? right : X(times[row])) - 6 : X(times[row]) + 6, y + 30,
        `${seconds(times[row])}${long ? " →" : ""}`, { "text-anchor": inside ? "end" : "start", class: inside ? "ex-on" : "ex-strong" }));
    });
    add(line(X(value.step), top, X(value.step), bottom, "ex-mark"));
    const fits = slack[0] >= 0;
    return {
      height: y0 + height,
      summary: [
        `A broadcast of ${Explore.parameters(value.model)} parameters in bf16 takes `, told("seconds", times[0], seconds(times[0])),
        fits ? "; a step of " : "; that is ", fits ? `${seconds(value.step)} hides it with ` : told("slack_s", slack[0], seconds(-slack[0])),
        fits ? told("slack_s", slack[0], seconds(slack[0])) : ` longer than the step of ${seconds(value.step)}`,
        fits ? " to spare, if the policy lag is at least 1." : ", which hides only a part of it.",
      ],
    };
  },
});
