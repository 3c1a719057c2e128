/* Reward and gold of a recorded run, the sums of the guard's two tests, and the step at which limits stop the run. */
window.Explore.page("reward-hacking", {
  title: "Reward, gold and the guard's two sums over the steps of a run with a flawed reward",
  example: "The guard's own limits",
  sliders: (table) => [
    { name: "gain", label: "Limit of the gain test", values: table.gains, show: (value) => `${value} nats`, start: table.default[0] },
    { name: "gap", label: "Limit of the gap test", values: table.gaps, show: (value) => `${value} nats`, start: table.default[1] },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, path, circle, text, told, legend, fixed, percent } = Explore;
    const { flawed, honest } = table, { steps } = flawed, last = steps.at(-1);
    const alarm = flawed.alarms[at.gain][at.gap], mistaken = honest.alarms[at.gain][at.gap];
    const key = [["ex-line-2", "reward", "line"], ["ex-fill-4", "gold, a few samples"], ["ex-line-1", "right answers, all samples", "line"]];
    const y = legend(parent, alarm ? [...key, ["ex-chosen", "from the onset to the decision"]] : key, { width });
    const upper = axes(parent, { x: 0, y, width, height: 240 }, { x: [0, last], y: [0, 1.05 * Math.max(...flawed.reward)], yLabel: "mean of the batch" });
    const marks = (chart) => {
      if (!alarm) return;
      add(rect(chart.X(alarm.onset), chart.top, chart.X(alarm.step), chart.bottom, "ex-chosen"));
      add(line(chart.X(alarm.step), chart.top, chart.X(alarm.step), chart.bottom, "ex-limit"));
    };
    marks(upper);
    const curve = (chart, numbers, kind) => add(path(numbers.map((number, one) => [chart.X(steps[one]), chart.Y(number)]), kind));
    curve(upper, flawed.reward, "ex-line-2");
    curve(upper, flawed.exact, "ex-line-1");
    curve(upper, honest.exact, "ex-line-1 ex-dashed");
    flawed.gold.forEach((gold, one) => gold !== null && add(circle(upper.X(steps[one]), upper.Y(gold), 2.5, "ex-fill-4")));
    if (alarm) add(text(upper.X(alarm.step) + 5, (upper.top + upper.bottom) / 2 + 16, `decision after step ${alarm.step}`, { class: "ex-strong" }));
    let below = y + 250;
    below += legend(parent, [["ex-line-3", "gain test", "line"], ["ex-line-5", "gap test", "line"], ["ex-dash", "dashed: the run with an honest reward", "line"]], { y: below, width });
    const most = 1.5 * Math.max(value.gain, value.gap);
    const lower = axes(parent, { x: 0, y: below, width, height: 240 }, { x: [0, last], y: [0, most], xLabel: "step", yLabel: "sum of a test, in nats" });
    marks(lower);
    // A sum that leaves the drawing ends at its edge.
    const inside = (run, test) => {
      const over = run.sums.findIndex((sums) => sums[test] > most);
      return run.sums.slice(0, over < 0 ? undefined : over + 1).map((sums) => Math.min(sums[test], most));
    };
    [["ex-line-3", value.gain], ["ex-line-5", value.gap]].forEach(([kind, limit], test) => {
      add(line(lower.left, lower.Y(limit), lower.right, lower.Y(limit), `${kind} ex-light`));
      add(text(lower.right, lower.Y(limit) - 4, `limit ${limit}`, { "text-anchor": "end" }));
      curve(lower, inside(honest, test), `${kind} ex-dashed`);
      curve(lower, inside(flawed, test), kind);
    });
    const index = alarm ? steps.indexOf(alarm.step) : steps.length - 1;
    const then = `The mean reward is then ${fixed(flawed.reward[index], 2)}, and ${percent(flawed.exact[index])} of the answers are right.`;
    return {
      height: below + 240,
      summary: [
        ...(alarm
          ? ["The guard decides after step ", told("step", alarm.step, String(alarm.step)), " (", told("test", alarm.test, alarm.test), " test) and dates the onset to step ",
            told("onset", alarm.onset, String(alarm.onset)), `. ${then} `]
          : ["With these limits the guard ", told("step", null, "never decides"), `. ${then} `]),
        "The honest run ", mistaken ? "would be stopped by mistake after step " : "is ", told("honest_step", mistaken && mistaken.step, mistaken ? String(mistaken.step) : "not stopped"), ".",
      ],
    };
  },
});
