"use strict";
// Curves of several runs over the chosen axis. Each run has its own values of the axis: all of them together are the
// places of the common one, and a curve joins the places of its run.
(() => {
  const { follow, json, morph, page } = tidemill;
  const axis = document.querySelector("[data-axis]"), inPage = document.getElementById("compared");
  let data = null;

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
    const [fresh, compared] = await Promise.all([page(location.href), json(`/compare.json${location.search}`)]);
    morph(document.getElementById("tables"), fresh.getElementById("tables"));
    data = compared;
    draw();
  };

  axis.addEventListener("change", draw);
  if (inPage) {
    data = JSON.parse(inPage.textContent);
    draw();
  } else follow("/events", update);
})();
