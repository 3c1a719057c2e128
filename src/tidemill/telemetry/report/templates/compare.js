"use strict";
// Curves of several runs over the chosen axis. Each run has its own values of the axis: all of them together are the
// places of the common one, and a curve joins the places of its run.
(() => {
  const { follow, morph, page } = tidemill;
  const axis = document.querySelector("[data-axis]");
  let data = null;

  const take = (from) => {
    data = JSON.parse(from.getElementById("compared").textContent);
    draw();
  };
  const draw = () => {
    const places = data.runs.map((run) => run.axes[axis.value] ?? []);
    const steps = [...new Set(places.flat())].sort((one, other) => one - other);
    const at = new Map(steps.map((place, index) => [place, index]));
    const curve = (series) => {
      const values = new Array(steps.length).fill(null);
      places[series.run].forEach((place, index) => { values[at.get(place)] = series.values[index] ?? null; });
      return { label: series.label, values, points: true };
    };
    charts.take({
      steps, resumed: [], constant: data.constant, cursor: "", axis: data.axes[axis.value],
      charts: data.charts.map((chart) => ({ ...chart, kind: "line", low: null, high: null, band: [], series: chart.series.map(curve) })),
    });
  };
  const update = async () => {
    const fresh = await page(location.href);
    morph(document.getElementById("tables"), fresh.getElementById("tables"));
    take(fresh);
  };

  axis.addEventListener("change", draw);
  take(document);
  if (location.protocol !== "file:") follow("/events", update);
})();
