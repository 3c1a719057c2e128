/* Generation and training over time: one after the other, at the same time, and with resized sides. */
window.Explore.page("overlap", {
  title: "Generation and training over time, in three schedules",
  sliders: (table) => [
    { name: "rollout", label: "Rollout of a batch", values: table.rollouts, show: Explore.seconds, start: 60 },
    { name: "training", label: "Training on a batch", values: table.trainings, show: Explore.seconds, start: 40 },
    { name: "gpus", label: "GPUs to divide", values: table.gpus, show: String, start: 8 },
  ],
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, text, told, legend, figure } = Explore;
    const percent = (part) => `${figure(100 * part)} %`;
    const [sequence, overlapped, share] = table.plans[at.rollout][at.training];
    const [makers, learners, resized] = table.resized[at.rollout][at.training][at.gpus];
    let y = legend(parent, [["ex-fill-1", "generates"], ["ex-fill-2", "trains"], ["ex-fill-wait", "waits"]], { width });
    const batches = 4, span = batches * (value.rollout + value.training);
    const schedules = [
      { name: width < 520 ? "lag 0" : "max_policy_lag = 0: one after the other", busy: sequence, rollout: value.rollout, after: 0, training: value.training },
      { name: width < 520 ? "lag 1" : "max_policy_lag = 1: at the same time", busy: overlapped, rollout: value.rollout, after: 1, training: value.training },
    ];
    const height = schedules.length * 86 + 46;
    const { X, top } = axes(parent, { x: 0, y, width, height }, { x: [0, span], y: [0, 1], xLabel: "seconds", yTicks: null });
    let done = 0;
    schedules.forEach((each, row) => {
      const step = each.training / each.busy, // of which the trainer is busy this share
         lane = top + row * 86;
      add(text(X(0), lane + 12, each.name, { class: "ex-strong" }));
      add(text(X(span), lane + 12, `${width < 520 ? "" : "the trainer is "}busy ${percent(each.busy)}`, { "text-anchor": "end" }));
      add(rect(X(0), lane + 20, X(span), lane + 42, "ex-fill-wait"), rect(X(0), lane + 46, X(span), lane + 68, "ex-fill-wait"));
      for (let batch = 0; batch * step < span; batch++) {
        const learned = each.rollout + batch * step;
        const made = each.after ? Math.max(0, learned - step) : batch * step; // beside the training of the batch before
        const parts = [[made, made + each.rollout, lane + 20, "ex-fill-1"], [learned, learned + each.training, lane + 46, "ex-fill-2"]];
        for (const [from, to, bar, kind] of parts) {
          if (from >= span) continue;
          add(rect(X(from) + 0.5, bar, X(Math.min(to, span)) - 0.5, bar + 22, kind, `batch ${batch + 1}`));
          if (X(Math.min(to, span)) - X(from) > 14) add(text((X(from) + X(Math.min(to, span))) / 2, bar + 15, batch + 1, { "text-anchor": "middle", class: "ex-on" }));
        }
      }
    });
    y += height + 8;
    add(text(0, y + 12, "The trainer's share of busy time", { class: "ex-strong" }));
    const bars = [["lag 0", sequence], ["lag 1", overlapped], [`lag 1, ${makers} + ${learners} GPUs`, resized]];
    const left = 140, room = width - left - 60;
    bars.forEach(([name, busy], row) => {
      const bar = y + 28 + row * 26;
      add(text(left - 8, bar + 14, name, { "text-anchor": "end" }), rect(left, bar, left + busy * room, bar + 20, "ex-fill-2"));
      const inside = busy < 1 && busy * room + 58 > room; // the label would cross the frame
      const [x, kind] = inside ? [left + busy * room - 6, "ex-on"] : [left + busy * room + 6, "ex-strong"];
      add(text(x, bar + 14, percent(busy), { class: kind, "text-anchor": inside ? "end" : "start" }));
    });
    add(rect(left, y + 22, left + room, y + 106, "ex-frame"));
    add(rect(left + table.typical[0] * room, y + 76, left + table.typical[1] * room, y + 104, "ex-range"));
    return {
      height: y + 112,
      summary: [
        "In sequence the trainer is busy ", told("utilisation_in_sequence", sequence, percent(sequence)), " of the time; overlapped ",
        told("utilisation_overlapped", overlapped, percent(overlapped)), ". Both sides take equally long with ",
        told("rollout_share", share, percent(share)), ` of the machines generating; of ${value.gpus} GPUs `, told("rollout_gpus", makers, String(makers)),
        ` generate and ${learners} train: at best `, told("utilisation_resized", resized, percent(resized)),
        `. The dashed range, ${figure(100 * table.typical[0])} to ${figure(100 * table.typical[1])} %, is usual after resizing.`,
      ],
    };
  },
});
