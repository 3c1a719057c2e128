/* Reward and gold of a recorded run, the sums of the guard's two tests, and the step at which limits stop the run. */
window.Explore.page("reward-hacking", {
  title: "Reward, gold and the guard's two sums over the steps of a run with a flawed reward",
  example: "The guard's own limits",
  sliders: (table) => [
    { name: "gain", label: "Limit of the gain test", values: table.gains, show: (value) => `${value} nats`, start: table.default[0] },
    { name: "gap", label: "Limit of the gap test", values: table.gaps, show: (value) => `${value} nats`, start: table.default[1] },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, path, circle, text, told, legend, figure, fixed, panels } = Explore;
    const alarm = table.alarms[at.gain][at.gap], steps = table.steps, last = steps.at(-1);
    const y = legend(parent, [["ex-line-2", "reward (proxy)", "line"], ["ex-fill-4", "gold, a few samples"], ["ex-line-1", "right answers, all samples", "line"]], { width });
    const { boxes, bottom } = panels(width, [260, 260], { narrow: 1e9, y });
    const highest = Math.max(...table.reward, 1);
    const upper = axes(parent, boxes[0], { x: [0, last], y: [0, highest * 1.05], yLabel: "mean of the batch" });
    const top_sum = Math.max(value.gain, value.gap, 10) * 1.6;
    const marks = (chart) => {
      if (!alarm) return;
      add(rect(chart.X(alarm.onset), chart.top, chart.X(alarm.step), chart.bottom, "ex-chosen"));
      add(line(chart.X(alarm.step), chart.top, chart.X(alarm.step), chart.bottom, "ex-limit"));
    };
    marks(upper);
    add(path(table.reward.map((each, one) => [upper.X(steps[one]), upper.Y(each)]), "ex-line-2"));
    add(path(table.exact.map((each, one) => [upper.X(one + 1), upper.Y(each)]), "ex-line-1"));
    table.gold.forEach((each, one) => each !== null && add(circle(upper.X(steps[one]), upper.Y(each), 2.5, "ex-fill-4")));
    const lower = axes(parent, boxes[1], { x: [0, last], y: [0, top_sum], xLabel: "step", yLabel: "sum of each test, in nats" });
    marks(lower);
    [[0, "ex-line-3", value.gain], [1, "ex-line-5", value.gap]].forEach(([test, kind, limit]) => {
      add(line(lower.left, lower.Y(limit), lower.right, lower.Y(limit), `${kind} ex-light`));
      add(path(table.sums.map((sums, one) => [lower.X(steps[one]), lower.Y(Math.min(sums[test], top_sum))]), kind));
      add(text(lower.right, lower.Y(limit) - 4, `limit of ${test ? "gap" : "gain"}: ${limit}`, { "text-anchor": "end" }));
    });
    if (alarm) add(text(upper.X(alarm.step) + 5, upper.top + 12, `step ${alarm.step}`, { class: "ex-strong" }));
    let height = bottom;
    height += legend(parent, [["ex-line-3", "gain", "line"], ["ex-line-5", "gap", "line"], ["ex-chosen", "from the estimated onset to the decision"]], { y: bottom + 4, width });
    const index = alarm ? steps.indexOf(alarm.step) : steps.length - 1;
    return {
      height: height + 4,
      summary: alarm
        ? ["The guard decides after step ", told("step", alarm.step, String(alarm.step)), " (", told("test", alarm.test, alarm.test), " test) and dates the onset to step ",
          told("onset", alarm.onset, String(alarm.onset)), `. The mean reward is then ${fixed(table.reward[index], 2)}, and ${Explore.percent(table.exact[index])} of the answers are right. ${alarm.reason}`]
        : ["With these limits the guard does not decide before the last step: ", told("step", null, "no alarm"),
          `. The reward ends at ${fixed(table.reward.at(-1), 2)} with ${Explore.percent(table.exact.at(-1))} right answers.`],
    };
  },
});
