/* Model states of all roles, and what one GPU holds, for numbers of GPUs. */
window.Explore.page("memory", {
  title: "Memory of the roles of a run, and of one GPU for each number of GPUs",
  sliders: (table) => [
    { name: "model", label: "Parameters", values: table.parameters, show: Explore.parameters, start: 70e9 },
    { name: "algorithm", label: "Algorithm", values: table.algorithms, show: String, start: "ppo" },
    { name: "gpu", label: "GPU", values: table.gpus, show: (gpu) => gpu.title, start: table.gpus[1] },
    { name: "count", label: "GPUs", values: table.counts, show: String, start: 32 },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, text, told, gigabytes, count, legend } = Explore;
    const plan = table.plans[at.model][at.algorithm][at.gpu];
    const roles = Object.entries(plan.roles);
    let y = legend(parent, [["ex-fill-1", "weights"], ["ex-fill-2", "gradients"], ["ex-fill-3", "optimizer"]], { width });
    add(text(0, y + 16, "Model states of each role, over all GPUs", { class: "ex-strong" }));
    const largest = Math.max(...roles.map(([, parts]) => parts[0] + parts[1] + parts[2]));
    const start = 74, room = width - start - 84;
    for (const [role, parts] of roles) {
      y += 26;
      let x = start, whole = 0;
      parts.forEach((part, kind) => {
        const to = x + (part / largest) * room;
        if (part) add(rect(x, y, to, y + 18, `ex-fill-${kind + 1}`, gigabytes(part)));
        [x, whole] = [to, whole + part];
      });
      add(text(start - 8, y + 13, role, { "text-anchor": "end" }));
      add(text(x + 6, y + 13, gigabytes(whole), { class: "ex-strong" }));
    }
    y += 44;
    const kinds = [["ex-fill-6", "model states"], ["ex-fill-5", "keys and values"], ["ex-fill-1", "engine's weights"],
      ["ex-fill-2", "activations, logits, gathered layers"], ["ex-fill-4", "runtime"]];
    add(text(0, y, "One GPU of so many, with everything", { class: "ex-strong" }));
    y += 8 + legend(parent, kinds, { y: y + 8, width });
    const [activations, logits, gathered, engine, runtime] = plan.fixed;
    const gpu = value.gpu, longest = 1.5 * gpu.memory, rows = table.counts.length;
    const box = { x: 0, y, width, height: 22 * rows + 62 };
    const { X, right, top, bottom } = axes(parent, box, { x: [0, longest], y: [0, rows], xLabel: "GB on one GPU", yLabel: " ", yTicks: [] });
    const labels = [];
    table.counts.forEach((gpus, row) => {
      const [used, states, kv, whole] = plan.each[row], line_y = top + 22 * row;
      if (row === at.count) add(rect(0, line_y, width, line_y + 22, "ex-chosen"));
      add(text(X(0) - 8, line_y + 15, count(gpus), { "text-anchor": "end", class: row === at.count ? "ex-strong" : "" }));
      let x = 0;
      [states, kv, engine, activations + logits + gathered, runtime].forEach((part, kind) => {
        const from = Math.min(x, longest), to = Math.min(x + part, longest);
        if (to > from) add(rect(X(from), line_y + 4, X(to), line_y + 18, `${kinds[kind][0]}${row === at.count ? "" : " ex-light"}`, `${kinds[kind][1]}: ${gigabytes(part)}`));
        x += part;
      });
      const shown = `${gigabytes(whole)}${used === gpus ? "" : ` on ${used} GPUs`}`;
      if (whole > longest) labels.push(text(right - 5, line_y + 15, `${shown} →`, { "text-anchor": "end", class: row === at.count ? "ex-on" : "ex-label" }));
      else if (row === at.count) labels.push(text(X(whole) + 6, line_y + 15, shown, { class: "ex-strong" }));
    });
    add(line(X(plan.usable), top - 4, X(plan.usable), bottom, "ex-limit"), ...labels);
    add(text(X(plan.usable), top - 8, `usable: ${gigabytes(plan.usable)} of ${gigabytes(gpu.memory)}`, { "text-anchor": "middle", class: "ex-label" }));
    const [used, , , whole, missing] = plan.each[at.count];
    return {
      height: box.y + box.height,
      summary: [
        `${value.algorithm} with ${Explore.parameters(value.model)} parameters has `, told("total_bytes", plan.total * 1e9, gigabytes(plan.total)),
        " of model states: at least ", told("min_gpus", plan.least, count(plan.least)), ` × ${gpu.title} for the states alone, and `,
        plan.least_all === null ? told("min_gpus_with_activations", null, "no number") : told("min_gpus_with_activations", plan.least_all, count(plan.least_all)),
        ` with everything else. On ${count(used)} ${used === 1 ? "GPU holds" : "GPUs each holds"} ${gigabytes(whole)}: `,
        missing ? `${gigabytes(missing)} too much.` : "that fits.",
      ],
    };
  },
});
