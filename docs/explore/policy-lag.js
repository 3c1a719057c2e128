/* Importance ratios of tokens from an older policy, the weights that a correction makes of them, and the sample size left. */
window.Explore.page("policy-lag", {
  title: "Distribution of importance ratios and weights, and effective sample size over the policy lag",
  example: "Back to the start",
  sliders: (table) => [
    { name: "lag", label: "Policy lag", values: table.lags, show: (value) => `${value} version${value === 1 ? "" : "s"}`, start: 3 },
    { name: "change", label: "Change of a logit per update", values: table.changes, show: String, start: 0.2 },
    { name: "setting", label: "Correction", values: table.settings, show: (each) => (each.bounds ? `${each.kind}, ${each.bounds}` : each.kind), start: table.settings[2] },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, path, circle, told, percent, fixed, figure, panels, legend } = Explore;
    const ratios = table.ratios[at.change], weights = table.weights[at.change];
    const ratio = ratios[at.lag], weight = weights[at.lag][at.setting];
    const y = legend(parent, [["ex-mark", "importance ratio r", "line"], ["ex-fill-1", "weight of the loss"]], { width });
    const { boxes, bottom } = panels(width, [270, 270], { y });
    const widest = Math.max(...ratio.histogram, ...weight.histogram);
    const limits = [Math.exp(-table.span), Math.exp(table.span)];
    const share = (tokens) => tokens / table.tokens;
    const left = axes(parent, boxes[0], {
      x: limits, xLog: true, xTicks: [0.25, 0.5, 1, 2, 4], y: [0, Math.sqrt(share(widest))], yTicks: [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1].filter((tick) => tick <= share(widest)).map(Math.sqrt),
      yText: (root) => percent(root ** 2), xLabel: "r, or its weight (logarithmic)", yLabel: "tokens (square-root scale)",
    });
    const edge = (bin) => limits[0] * Math.exp((2 * table.span * bin) / table.bins);
    weight.histogram.forEach((tokens, bin) => {
      if (tokens) add(rect(left.X(edge(bin)) + 0.5, left.bottom, left.X(edge(bin + 1)) - 0.5, left.Y(Math.sqrt(share(tokens))), "ex-fill-1", `weight: ${tokens} tokens`));
    });
    const outline = ratio.histogram.flatMap((tokens, bin) => [bin, bin + 1].map((at_edge) => [left.X(edge(at_edge)), left.Y(Math.sqrt(share(tokens)))]));
    add(path(outline, "ex-edge"));
    add(line(left.X(1), left.top, left.X(1), left.bottom, "ex-dash"));
    const right = axes(parent, boxes[1], { x: [0, table.lags.at(-1)], y: [0, 1], yTicks: [0, 0.25, 0.5, 0.75, 1], yText: (part) => percent(part), xTicks: table.lags, xLabel: "policy lag", yLabel: "effective sample size" });
    add(path(ratios.map((each, lag) => [right.X(lag), right.Y(each.effective)]), "ex-line-4"));
    add(path(weights.map((each, lag) => [right.X(lag), right.Y(each[at.setting].effective)]), "ex-line-1"));
    add(line(right.X(value.lag), right.top, right.X(value.lag), right.bottom, "ex-dash"));
    add(circle(right.X(value.lag), right.Y(ratio.effective), 4.5, "ex-fill-4"), circle(right.X(value.lag), right.Y(weight.effective), 5.5, "ex-dot"));
    const [truncated, masked] = weight.changed;
    return {
      height: bottom,
      summary: [
        `At a lag of ${value.lag} the ratio has an effective sample size of `, told("effective_sample_size", ratio.effective, percent(ratio.effective, 1)),
        " of the tokens, a mismatch KL of ", told("mismatch_kl", ratio.kl, figure(ratio.kl)), " and a largest value of ", told("ratio_max", ratio.largest, figure(ratio.largest)),
        `. ${value.setting.kind} (weight ${value.setting.formula}) `,
        masked ? `drops ${percent(masked, 1)} of the tokens` : `truncates ${percent(truncated, 1)} of the weights`,
        "; the effective sample size is then ", told("weights_effective", weight.effective, percent(weight.effective, 1)),
        " and the mean weight ", told("weight_mean", weight.mean, fixed(weight.mean, 3)), ".",
      ],
    };
  },
});
