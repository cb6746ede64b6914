// Draws the figures of a page, again where another axis is chosen, and on a live page whenever the run has gone on.
"use strict";
const LIVE_SECONDS = 5;
let { figures, axes } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let axis = "round";
let smoothing = 0;
let turn = Promise.resolve();
const views = {};

/** The specification with "round" on its x axis replaced by the chosen one. */
function against(name, node) {
  if (Array.isArray(node)) return node.map((item) => against(name, item));
  if (node === null || typeof node !== "object") return node;
  const changed = {};
  for (const [key, value] of Object.entries(node)) {
    if (key === "x" && value?.field === "round") changed.x = { ...value, field: name, title: axes[name] };
    else if (key === "x2" && value?.field === "round_end") changed.x2 = { ...value, field: `${name}_end` };
    else changed[key] = against(name, value);
  }
  return changed;
}

/** The points with the values of every curve replaced by their exponential moving average, without its bias. */
function smooth(points, name) {
  if (!name || !smoothing) return points;
  const sums = {};
  return points.map((point) => {
    const sum = (sums[[point.series, point.kind]] ??= { value: 0, weight: 0 });
    if (typeof point[name] !== "number" || point.saved) return point;
    sum.value = smoothing * sum.value + (1 - smoothing) * point[name];
    sum.weight = smoothing * sum.weight + (1 - smoothing);
    return { ...point, [name]: sum.value / sum.weight };
  });
}

/** What figures look like on this page, light or dark. */
function style() {
  const styles = getComputedStyle(document.documentElement);
  const [ink, quiet, line] = ["--ink", "--quiet", "--line"].map((name) => styles.getPropertyValue(name).trim());
  return {
    background: "transparent",
    view: { strokeWidth: 0 },
    axis: { gridColor: line, domainColor: quiet, tickColor: quiet, labelColor: ink, titleColor: ink },
    legend: { labelColor: ink, titleColor: ink },
    text: { color: ink },
  };
}

/** What clicks in legends have chosen, by the data that hold it: it stays chosen when the figure is drawn again. */
function chosenIn(view) {
  return view ? view.getState({ signals: () => false, data: (name) => /^chosen_.*_store$/.test(name) }).data : {};
}

/** The ranges of a figure's axes that the wheel and the mouse change, by the signals that hold them. */
function ranges(view) {
  return view ? view.getState({ signals: (name) => name.startsWith("zoom_"), data: () => false }).signals : {};
}

/** Zoom in to what was zoomed in to before, unless the figure has another axis now. */
function zoom(view, before) {
  const zoomed = Object.entries(before).filter(([, range]) => Array.isArray(range));
  if (zoomed.every(([name]) => name in ranges(view))) zoomed.forEach(([name, range]) => view.signal(name, range));
}

async function draw() {
  delete document.body.dataset.drawn;
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
  }
  for (const { name, specification, points, smoothed } of figures) {
    const drawn = { ...against(axis, specification), datasets: { rows: smooth(points, smoothed) } };
    const actions = { export: true, source: false, compiled: false, editor: false };
    const chosen = chosenIn(views[name]);
    const before = ranges(views[name]);
    const { view } = await vegaEmbed(`#figure-${name}`, drawn, { actions, downloadFileName: name, config: style() });
    views[name] = view;
    for (const [name, values] of Object.entries(chosen)) if (values.length) view.data(name, values);
    zoom(view, before);
    await view.runAsync();
  }
  document.body.dataset.drawn = axis;
}

/** Draw after what is being drawn, so that two never draw at once. */
function drawNext() {
  turn = turn.then(draw);
  return turn;
}

async function renew() {
  try {
    const answer = await fetch("state", { cache: "no-store" });
    if (!answer.ok) return;
    const state = await answer.json();
    if (state.version === document.body.dataset.version) return;
    figures = state.figures;
    document.getElementById("content").innerHTML = state.content;
    document.getElementById("smoothing").value = smoothing;
    document.body.dataset.version = state.version;
    await drawNext();
  } catch {
    // The run's machine cannot be reached, or the page's process has ended: what is shown stays.
  } finally {
    setTimeout(renew, LIVE_SECONDS * 1000);
  }
}

document.addEventListener("click", (event) => {
  const chosen = event.target.dataset?.axis;
  if (chosen) {
    axis = chosen;
    drawNext();
  }
});
document.addEventListener("change", (event) => {
  if (event.target.id !== "smoothing") return;
  smoothing = Number(event.target.value);
  drawNext();
});
dark.addEventListener("change", drawNext);
drawNext();
if (document.body.dataset.live) setTimeout(renew, LIVE_SECONDS * 1000);
