"use strict";
// Curves of several runs over the chosen axis. Each run has its own values of the axis: all of them together are the
// places of the common one, and a curve joins the places of its run.
(() => {
  const axis = document.querySelector("[data-axis]"), filter = document.querySelector("[data-filter]");
  const inPage = document.getElementById("compared");
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
    show();
  };
  const show = () => {
    const words = filter.value.toLowerCase();
    for (const figure of document.querySelectorAll("figure")) figure.hidden = !figure.textContent.toLowerCase().includes(words);
  };
  const update = async () => {
    const [json, page] = await Promise.all([tidemill.get(`/compare.json${location.search}`), tidemill.get(location.href)]);
    data = await json.json();
    const fresh = new DOMParser().parseFromString(await page.text(), "text/html");
    document.getElementById("tables").replaceChildren(...fresh.getElementById("tables").children);
    draw();
  };

  axis.addEventListener("change", draw);
  filter.addEventListener("input", show);
  if (inPage) {
    data = JSON.parse(inPage.textContent);
    draw();
  } else {
    update();
    tidemill.follow("/events", update);
  }
})();
