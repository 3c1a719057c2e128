/* One batch of samples over time, on machines of which one is evicted; a slider steps through the run's events. */
window.Explore.page("eviction", {
  title: "Machines and samples of one batch over time, with an eviction",
  example: "Back to the eviction",
  sliders: (table) => {
    const longest = Math.max(...table.runs.map((run) => run.moments.length));
    const all = Array.from({ length: longest }, (_, at) => at);
    const start = table.runs[0].moments.findIndex((moment) => moment.kind === "eviction");
    return [
      { name: "notice", label: "Notice before the eviction", values: table.notices, show: (value) => (value ? Explore.seconds(value) : "none"), start: 0 },
      { name: "moment", label: "Event", values: all, show: (at) => `${at + 1} of ${longest}`, start },
    ];
  },
  draw({ at, value, table, width, parent, add }) {
    const { axes, rect, line, text, told, seconds, count, legend, circle } = Explore;
    const run = table.runs[at.notice], moment = run.moments[Math.min(at.moment, run.moments.length - 1)], now = moment.at;
    const colours = { "spot-0": "ex-fill-2", "spot-1": "ex-fill-1", "spot-2": "ex-fill-3" };
    const names = Object.keys(run.machines), rows = run.samples.length;
    const narrow = width < 560, lane = 24, row = 15;
    const y = legend(parent, [...names.map((name) => [colours[name], name]), ["ex-fill-bad", "tokens lost"], ["ex-fill-wait", "starts, or waits"]], { width });
    const box = { x: 0, y, width: width - (narrow ? 0 : 40), height: names.length * lane + rows * row + 74 };
    const { X, top, bottom } = axes(parent, box, { x: [0, Math.ceil(run.seconds)], y: [0, 1], xLabel: "seconds", yLabel: " ", yTicks: [] });
    const when = (from) => (from > now ? " ex-later" : "");
    names.forEach((name, at_lane) => {
      const machine = run.machines[name], bar = top + at_lane * lane, end = machine.lease_end ?? run.seconds;
      add(text(X(0) - 5, bar + 15, name, { "text-anchor": "end", class: "ex-small" }));
      add(rect(X(machine.lease), bar + 3, X(machine.join), bar + 19, `ex-fill-wait${when(machine.lease)}`, "starts"));
      const served = machine.notice ?? end;
      const split = Math.max(machine.join, Math.min(now, served));
      add(rect(X(machine.join), bar + 3, X(split), bar + 19, colours[name]));
      add(rect(X(split), bar + 3, X(served), bar + 19, `${colours[name]} ex-later`));
      if (machine.notice !== undefined) add(rect(X(machine.notice), bar + 3, X(end), bar + 19, `${colours[name]} ${machine.notice > now ? "ex-later" : "ex-light"}`, "notice"));
      if (machine.eviction !== undefined) {
        add(line(X(end), bar, X(end), bottom, "ex-limit"));
        if (now >= end) add(text(X(end) + 5, bar + 16, "evicted", { class: "ex-strong ex-small" }));
      }
      if (machine.notice !== undefined && now >= machine.notice) add(text(X(machine.notice) + 4, bar + 15, "notice", { class: "ex-small" }));
    });
    const stretch = (from, to, bar, kind, title) => {
      const seen = Math.min(to, Math.max(from, now));
      if (seen > from) add(rect(X(from), bar + 1, X(seen), bar + row - 3, kind, title));
      if (to > seen) add(rect(X(seen), bar + 1, X(to), bar + row - 3, `${kind} ex-later`, title));
    };
    const first = top + names.length * lane + 12;
    let known = 0, complete = 0;
    run.samples.forEach((sample, at_row) => {
      const bar = first + at_row * row;
      if (!narrow || at_row % 4 === 0) add(text(X(0) - 5, bar + 9, sample.name, { "text-anchor": "end", class: "ex-small" }));
      let tokens = 0;
      sample.pieces.forEach((piece, one) => {
        const next = sample.pieces[one + 1], gone = run.machines[piece.worker].eviction;
        const from = piece.at[0], last = piece.at.at(-1);
        const starts = piece.tokens.findIndex((each) => each > piece.tokens[0]);
        const begin = starts < 0 ? last : piece.at[starts - 1];
        stretch(from, begin, bar, "ex-fill-wait", "waits for a slot");
        stretch(begin, last, bar, colours[piece.worker], piece.worker);
        piece.at.forEach((time, report) => {
          if (time <= now) tokens = piece.tokens[report];
        });
        const lost = next && gone && gone > last && run.evicted.lost > 0;
        if (lost) stretch(last, gone, bar, "ex-fill-bad", "not reported before the eviction");
        if (next) stretch(lost ? gone : last, next.at[0], bar, "ex-fill-wait", "waits");
      });
      const end = sample.pieces.at(-1).at.at(-1);
      if (end <= now) complete += 1;
      known += tokens;
      if (!narrow) add(text(width, bar + 10, count(tokens), { "text-anchor": "end", class: end <= now ? "ex-strong ex-small" : "ex-small" }));
    });
    if (!narrow) add(text(width, first - 5, "tokens", { "text-anchor": "end", class: "ex-small" }));
    add(line(X(now), top - 6, X(now), bottom, "ex-mark"), circle(X(now), top - 6, 4, "ex-dot"));
    return {
      height: box.y + box.height,
      summary: [
        "After ", told("at", now, seconds(now)), `: ${moment.text}. So far `, told("tokens", known, count(known)), ` tokens are reported, and ${complete} of ${rows} samples are complete. `,
        "The eviction moves ", told("samples", run.evicted.samples, String(run.evicted.samples)), " samples; ", told("tokens_kept", run.evicted.kept, count(run.evicted.kept)),
        " tokens are kept and ", told("tokens_lost", run.evicted.lost, count(run.evicted.lost)), " are lost.",
      ],
    };
  },
});
