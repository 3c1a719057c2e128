/* The clipped surrogate and its gradient over the ratio. */
window.Explore.page("ppo-clip", {
  title: "PPO's clipped objective and its gradient over the probability ratio",
  sliders: (table) => [
    { name: "logprob", label: "Logprob now", values: table.logprobs, show: (value) => Explore.fixed(value, 1), start: -1.5 },
    { name: "advantage", label: "Advantage A", values: table.advantages, show: (value) => Explore.fixed(value, 1), start: 0.8 },
    { name: "low", label: "clip_low", values: table.lows, show: String, start: 0.2 },
    { name: "high", label: "clip_high", values: table.highs, show: String, start: 0.2 },
    { name: "dual", label: "dual_clip", values: table.duals, show: (value) => (value ? String(value) : "none"), start: 0 },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, path, circle, told, fixed, panels, legend, text } = Explore;
    const index = ((at.advantage * table.lows.length + at.low) * table.highs.length + at.high) * table.duals.length + at.dual;
    const [objective, gradient] = table.curves[index].map((one) => table.unique[one]);
    const [here, slope] = table.points[index].map((one) => table.unique[one][at.logprob]);
    const ratio = table.point_ratios[at.logprob], clipped = slope === 0 && value.advantage !== 0;
    const y = legend(parent, [["ex-chosen", "clip range"], ["ex-line-4", "without a clip", "line"], ["ex-line-1", "with the clip", "line"]], { width });
    const { boxes, bottom } = panels(width, [280, 280], { y });
    const range = [0, 4], reach = Math.max(Math.abs(value.advantage), 0.4);
    const charts = [["objective J", objective, value.advantage >= 0 ? [0, 4 * reach] : [-4 * reach, 0], here],
      ["gradient of J by the logprob", gradient, value.advantage >= 0 ? [0, 4 * reach] : [-4 * reach, 0], slope]];
    charts.forEach(([name, curve, limits, mark], chart) => {
      const { X, Y, top, bottom: base } = axes(parent, boxes[chart], { x: range, y: limits, xLabel: "ratio ρ", yLabel: name });
      add(rect(X(1 - value.low), top, X(1 + value.high), base, "ex-chosen"), line(X(1), top, X(1), base, "ex-dash"));
      add(path([[X(0), Y(0)], [X(4), Y(4 * value.advantage)]], "ex-line-4"));
      const points = [[X(0), Y(curve[0] - (curve[1] - curve[0]))]]; // straight to a ratio of 0
      table.ratios.forEach((at_ratio, one) => {
        // The gradient ends at a bound at once: a vertical line, and not a slope to the next ratio.
        const [before, now] = [curve[one - 1], curve[one]];
        if (chart && one && (before === 0) !== (now === 0) && value.advantage) points.push(now === 0 ? [X(table.ratios[one - 1]), Y(0)] : [X(at_ratio), Y(0)]);
        points.push([X(at_ratio), Y(now)]);
      });
      add(path(points, "ex-line-1"));
      add(line(X(ratio), base, X(ratio), Y(mark), "ex-dash"), circle(X(ratio), Y(mark), 6, "ex-dot"));
      add(text(X(ratio) + (ratio > 3 ? -10 : 10), Y(mark) + (value.advantage < 0 ? 18 : -10), mark ? fixed(mark, chart ? 3 : 2) : "0", { class: "ex-strong", "text-anchor": ratio > 3 ? "end" : "start" }));
    });
    return {
      height: bottom,
      summary: [
        `The logprob went from ${fixed(table.proximal, 1)} to ${fixed(value.logprob, 1)}: the ratio is `, told("ratio", ratio, fixed(ratio, 4)),
        ", the objective ", told("objective", here, fixed(here, 2)), " and the loss ", told("loss", -here, fixed(-here, 2)),
        clipped ? ". The token is clipped: its gradient is " : ". The token is not clipped: its gradient is ", told("gradient", slope, slope ? fixed(slope, 3) : "0"), ".",
      ],
    };
  },
});
