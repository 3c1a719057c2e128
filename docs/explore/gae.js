/* Advantages of four steps as sums of what each reward and value adds to them. */
window.Explore.page("gae", {
  title: "Advantages of four steps, and what each reward and value adds to them",
  sliders: (table) => {
    const { rewards, values } = table.example;
    const grid = Array.from({ length: 41 }, (_, at) => (at - 20) / 10);
    const fine = Array.from({ length: 21 }, (_, at) => at / 10);
    const two = (value) => Explore.fixed(value, 1);
    return [
      ...rewards.map((start, t) => ({ name: `r${t + 1}`, label: `r${t + 1}`, values: grid, start, show: two, group: "Rewards" })),
      ...values.map((start, t) => ({ name: `v${t + 1}`, label: `V${t + 1}`, values: fine, start, show: two, group: "Values of the states" })),
      { name: "next", label: "V5 (end)", values: fine, start: table.example.next, show: two, group: "Values of the states" },
      { name: "gamma", label: "γ", values: table.gammas, start: table.example.gamma, show: String },
      { name: "lam", label: "λ", values: table.lambdas, start: table.example.lambda, show: String },
      { name: "end", label: "The episode is", values: table.ends, start: table.example.end, show: String },
    ];
  },
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, circle, text, told, fixed, legend } = Explore;
    const inputs = [value.r1, value.r2, value.r3, value.r4, value.v1, value.v2, value.v3, value.v4, value.next];
    const shares = table.shares[at.end][at.gamma];
    // GAE is linear: the table has the advantages for one reward or value of 1, and 0 for the others.
    const parts = (lam, t) => inputs.map((input, one) => input * shares[lam][one][t]);
    const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
    const steps = [0, 1, 2, 3].map((t) => ({ parts: parts(at.lam, t), delta: sum(parts(0, t)) }));
    for (const each of steps) each.advantage = sum(each.parts);
    const tops = steps.map(({ parts: all }) => sum(all.filter((part) => part > 0)));
    const lows = steps.map(({ parts: all }) => sum(all.filter((part) => part < 0)));
    const high = Math.max(...tops, 0.5) * 1.12, low = Math.min(...lows, -0.5) * 1.12;
    const kinds = ["ex-fill-1", "ex-fill-1", "ex-fill-1", "ex-fill-1", "ex-fill-2", "ex-fill-2", "ex-fill-2", "ex-fill-2", "ex-fill-3"];
    const names = ["r1", "r2", "r3", "r4", "V1", "V2", "V3", "V4", "V5"];
    const y = legend(parent, [["ex-fill-1", "from rewards"], ["ex-fill-2", "from values"], ["ex-fill-3", "from V5"], ["ex-mark", "the advantage", "line"]], { width });
    const { X, Y, bottom } = axes(parent, { x: 0, y, width, height: 270 }, { x: [0.5, 4.5], y: [low, high], yLabel: "parts of the advantage", xTicks: [1, 2, 3, 4], xText: (t) => `step ${t}` });
    add(line(X(0.5), Y(0), X(4.5), Y(0), "ex-base"));
    const half = Math.min(46, (X(2) - X(1)) * 0.34);
    steps.forEach(({ parts: all, advantage }, t) => {
      let up = 0, down = 0;
      all.forEach((part, one) => {
        if (Math.abs(part) < 1e-9) return;
        const from = part > 0 ? up : down, to = from + part;
        const box = rect(X(t + 1) - half, Y(from), X(t + 1) + half, Y(to), `${kinds[one]} ex-part`, `${names[one]} adds ${fixed(part, 4)}`);
        add(box);
        if (Math.abs(Y(from) - Y(to)) > 15) add(text(X(t + 1) - half + 5, Math.max(Y(from), Y(to)) - 4, names[one], { class: "ex-on" }));
        if (part > 0) up = to;
        else down = to;
      });
      add(line(X(t + 1) - half - 8, Y(advantage), X(t + 1) + half + 8, Y(advantage), "ex-mark"), circle(X(t + 1), Y(advantage), 4, "ex-dot"));
    });
    const rows = [["δ", steps.map((each) => each.delta)], ["A", steps.map((each) => each.advantage)]];
    rows.forEach(([name, numbers], row) => {
      const place = bottom + 42 + 20 * row;
      add(text(8, place, name, { class: "ex-label" }));
      numbers.forEach((number, t) => add(text(X(t + 1), place, fixed(number, 4), { "text-anchor": "middle", class: row ? "ex-strong" : "" })));
    });
    return {
      height: bottom + 72,
      summary: [
        "The advantages are ",
        ...steps.flatMap(({ advantage }, t) => [told(`A${t + 1}`, advantage, fixed(advantage, 4)), t < 2 ? ", " : t < 3 ? " and " : ""]),
        `; without the later steps (λ = 0) they would be the errors δ: ${steps.map(({ delta }) => fixed(delta, 4)).join(", ")}.`,
      ],
    };
  },
});
