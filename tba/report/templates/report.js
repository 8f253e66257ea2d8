"use strict";
// The page of runs: its charts, drawn by uPlot, and its completions.
// What a run wrote enters the page as text nodes only, never as markup.

const { axes, runs } = JSON.parse(document.getElementById("data").textContent);
const several = runs.length > 1;
const DASHES = [[], [7, 4], [2, 3]];
const BORDERS = { "": "solid", "7,4": "dashed", "2,3": "dotted" }; // of the marks in a legend
const LEAST = { positive: 0, share: 0.1, count: 1 }; // top of an axis from 0: small shares look small
const LOOKS = { // in pixels: height of a plot, sizes of its axes, least distance of their labels, and the font
  "": { height: 190, below: 28, beside: 58, apart: 30, text: 12 },
  wide: { height: 320, below: 28, beside: 58, apart: 30, text: 12 },
  small: { height: 124, below: 20, beside: 42, apart: 24, text: 11, padding: [8, null, 0, 0] },
};
const ROWS = 12; // of a line in the table of a chart
const GROUPS = 20; // shown at once
const charts = new Map(); // by the element that contains the plot

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value, form, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (form === "share") return `${+(100 * value).toPrecision(Math.min(digits, 4))}%`;
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  return size > 0 && size < 1e-3 ? (+value.toPrecision(3)).toExponential() : `${+value.toPrecision(size >= 1e4 ? 7 : digits)}`;
}

// Means over a centred window of a twenty-fifth of the run; gaps are left out.
function smooth(values) {
  const half = Math.floor(values.length / 50);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

// The lines of a chart: one for each run and metric that has values.
function linesOf(chart, x) {
  const lines = [];
  runs.forEach((run, r) => chart.metrics.forEach((metric, m) => {
    const evaluated = metric.startsWith("eval/");
    const rows = evaluated ? run.evaluations : run.steps;
    if (!rows[metric]) return;
    const count = chart.form === "count";
    const own = several && chart.metrics.length === 1 ? "" : chart.labels[m] ?? (several ? "" : metric);
    const ofRun = several ? run.name + (own && ",\u00a0") : "";
    lines.push({
      name: ofRun + own,
      label: element("span", {}, element("span", { className: "run" }, ofRun), own), // panels show it without the run
      x: rows[x],
      y: count ? rows[metric].map((value) => value ?? 0) : rows[metric],
      spread: rows[chart.spread[m]],
      form: chart.shares.includes(metric) ? "share" : chart.form,
      scale: chart.shares.includes(metric) ? "share" : "y",
      evaluated,
      smoothed: !evaluated && !count,
      stroke: colour(`--line${(several ? r : m) % 12}`),
      dash: DASHES[m % DASHES.length],
    });
  }));
  return lines;
}

// Add a line to the series, columns and bands of a plot: values, raw values, and edges of its spread.
function addLine(line, series, columns, bands) {
  const y = line.smoothed ? smooth(line.y) : line.y;
  const raw = line.smoothed ? 1 : 0, high = line.spread ? raw + 1 : 0;
  series.push({
    name: line.name, label: line.label, scale: line.scale, stroke: line.stroke, dash: line.dash, width: 2,
    points: { show: line.evaluated || y.length < 3, size: 7, fill: line.stroke },
    value: (plot, _, s, hovered) => {
      const i = hovered ?? plot.data[s].findLastIndex((value) => value != null);
      const error = high ? plot.data[s + high][i] - plot.data[s][i] : NaN;
      return short(plot.data[s + raw][i], line.form) + (error >= 0 ? ` ± ${short(error, line.form, 2)}` : "");
    },
  });
  columns.push(y);
  const addQuiet = (values, look) => {
    series.push({ class: "quiet", scale: line.scale, points: { show: false }, ...look });
    columns.push(values);
  };
  if (raw) addQuiet(line.y, { stroke: `${line.stroke}48`, width: 1 });
  if (high) {
    const spread = line.smoothed ? smooth(line.spread) : line.spread;
    bands.push({ series: [series.length, series.length + 1], fill: `${line.stroke}24` });
    for (const sign of [1, -1]) {
      const edge = y.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
      addQuiet(edge, { width: 0 });
    }
  }
}

// The range of an axis: around the values, or from 0.
function rangeOf(form) {
  const least = LEAST[form];
  return (_, low, high) =>
    least === undefined ? uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true) : [0, Math.max(1.05 * high, least) || 1];
}

function draw(place) {
  charts.get(place)?.destroy();
  const figure = place.closest("figure"), chart = JSON.parse(figure.dataset.chart);
  const x = figure.querySelector("input:checked")?.value ?? "step";
  const series = [{ name: axes[x], label: axes[x], value: (plot, value) => short(value ?? plot.data[0].at(-1)) }];
  const tables = [], bands = [];
  for (const line of linesOf(chart, x)) {
    const columns = [line.x];
    addLine(line, series, columns, bands);
    tables.push(columns);
  }
  const { height, below, beside, apart, text, padding } = LOOKS[figure.dataset.size];
  const axis = {
    stroke: colour("--soft"), font: `${text}px system-ui, sans-serif`, ticks: { show: false },
    grid: { stroke: colour("--rule"), width: 1 },
  };
  const axisOf = (form, look) => ({ ...axis, values: (_, ticks) => ticks.map((tick) => short(tick, form)), ...look });
  const plot = new uPlot({
    width: place.clientWidth, height, padding, series, bands,
    scales: {
      x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { range: rangeOf(chart.form) },
      share: { range: rangeOf("share") },
    },
    axes: [
      axisOf("", { size: below }), axisOf(chart.form, { size: beside, space: apart }),
      axisOf("share", { scale: "share", side: 1, show: chart.shares.length > 0, size: beside, space: apart, grid: { show: false } }),
    ],
    cursor: { y: false, sync: { key: x === "step" ? "step" : null } },
    legend: { markers: { dash: (built, s) => BORDERS[`${built.series[s].dash ?? ""}`] } },
  }, uPlot.join(tables), place);
  charts.set(place, plot);
  const ends = shownSeries(plot).slice(1).map((s) => {
    const first = plot.data[s].findIndex((value) => value != null);
    return `${plot.series[s].name} from ${cell(plot, s, first)} to ${cell(plot, s, null)}`;
  });
  place.setAttribute("aria-label", `${chart.title}: ${ends.join("; ")}. The arrow keys move the cursor.`);
  fillTable(figure.querySelector(".values"), plot);
}

function shownSeries(plot) {
  return plot.series.map((_, s) => s).filter((s) => plot.series[s].class !== "quiet");
}

function cell(plot, s, i) {
  return plot.series[s].value(plot, i === null ? null : plot.data[s][i], s, i);
}

// Write the table of a chart, if it is open: a few rows of each line.
function fillTable(details, plot) {
  details.querySelector("table")?.remove();
  if (!details.open || !plot) return;
  const shown = shownSeries(plot), rows = new Set();
  for (const s of shown.slice(1)) {
    const filled = [...plot.data[s].keys()].filter((i) => plot.data[s][i] != null);
    for (let k = 0; k < ROWS; k++) rows.add(filled[Math.round((k * (filled.length - 1)) / (ROWS - 1))]);
  }
  const table = element("table", {});
  table.createTHead().append(element("tr", {}, ...shown.map((s) => element("th", { scope: "col" }, plot.series[s].name))));
  table.createTBody().append(...[...rows].sort((a, b) => a - b).map((i) =>
    element("tr", {}, ...shown.map((s) => element("td", {}, plot.data[s][i] == null ? "" : cell(plot, s, i))))));
  details.append(table);
}

// Move the cursor of a chart by a fiftieth of its points, and say the values there.
function moveCursor(event, place) {
  const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key], plot = charts.get(place);
  if (!direction || !plot) return;
  event.preventDefault();
  const xs = plot.data[0], last = xs.length - 1, from = plot.cursor.idx ?? (direction > 0 ? -1 : last + 1);
  const i = Math.min(last, Math.max(0, from + direction * Math.ceil(xs.length / 50)));
  plot.setCursor({ left: plot.valToPos(xs[i], "x"), top: 1 });
  const values = shownSeries(plot).map((s) => `${plot.series[s].name} ${cell(plot, s, plot.cursor.idxs[s])}`);
  document.getElementById("cursor").textContent = values.join("; ");
}

// A chart is drawn when its place has a width, which it has not while a section is closed.
const sizes = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const { target } of entries) {
    const plot = charts.get(target), width = target.clientWidth;
    if (width && !plot) draw(target);
    else if (width && plot.width !== width) plot.setSize({ width, height: plot.height });
  }
}));
for (const place of document.querySelectorAll(".plot")) {
  const figure = place.closest("figure"), details = figure.querySelector(".values");
  sizes.observe(place);
  place.addEventListener("keydown", (event) => moveCursor(event, place));
  details.addEventListener("toggle", () => fillTable(details, charts.get(place)));
  figure.querySelector(".switch")?.addEventListener("change", () => draw(place));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...charts.keys()].forEach(draw));

const filter = document.getElementById("filter");
const more = document.getElementById("more");
let matching = [], shownGroups = 0;

// Steps between the weights that began a completion and those that the batch trained.
const ageOf = (completion) => Math.max(0, completion.step - 1 - completion.version);

// The groups of which a completion passes the filter, with those that do.
function matches() {
  const wanted = Object.fromEntries(new FormData(filter));
  const text = wanted.text.toLowerCase();
  const within = (value, name) => {
    const low = wanted[`${name}_min`], high = wanted[`${name}_max`];
    return !(low || high) || (value !== null && (!low || value >= +low) && (!high || value <= +high));
  };
  const found = [];
  runs.forEach((run, r) => {
    if (wanted.run && +wanted.run !== r) return;
    for (const group of run.groups) {
      if (wanted.kind && wanted.kind !== group.kind) continue;
      const inPrompt = group.prompt.toLowerCase().includes(text);
      const kept = group.completions.filter((c) =>
        within(c.step, "step") && within(c.reward, "reward") && within(ageOf(c), "age") &&
        (inPrompt || c.completion.toLowerCase().includes(text)));
      if (kept.length) found.push({ run, group, kept });
    }
  });
  if (!wanted.order) return found;
  const sign = wanted.order === "high" ? -1 : 1;
  const first = ({ kept }) => Math.min(...kept.map((c) => (c.reward === null ? Infinity : sign * c.reward)));
  return found.sort((a, b) => (first(a) < first(b) ? -1 : +(first(a) > first(b))));
}

function shownCompletion(completion, kind, kept) {
  const reward = completion.reward === null ? "not scored" : `reward ${short(completion.reward)}`;
  const held = completion.step === 0 ? "before training" : `at step ${completion.step}`;
  const when = kind === "eval" ? held : `age ${ageOf(completion)}, weights of step ${completion.version}`;
  const notes = Object.entries(completion.notes).map(([name, value]) => ` · ${name} ${typeof value === "number" ? short(value) : value}`);
  return element("div", { className: kept ? "completion" : "completion other" },
    element("p", { className: "chip" }, `${reward} · ${when}`, ...notes, kept ? "" : " · does not match"),
    element("div", { className: "text" }, completion.completion));
}

function shownGroup({ run, group, kept }, whole) {
  const origin = group.kind === "eval" ? "held-out prompt" : `batch of step ${group.completions[0].step}`;
  const shown = whole ? group.completions : kept;
  return element("article", { className: "card group" },
    element("h3", {}, several ? `${run.name} · ${origin}` : origin),
    element("div", { className: "text" }, group.prompt),
    element("div", { className: "side" }, ...shown.map((c) => shownCompletion(c, group.kind, kept.includes(c)))));
}

function showMore() {
  const whole = filter.elements.whole.checked, next = matching.slice(shownGroups, shownGroups + GROUPS);
  document.getElementById("groups").append(...next.map((match) => shownGroup(match, whole)));
  shownGroups += next.length;
  more.hidden = shownGroups === matching.length;
}

function show() {
  matching = matches();
  shownGroups = 0;
  const completions = matching.reduce((sum, { kept }) => sum + kept.length, 0);
  document.getElementById("count").textContent = `${completions} completions of ${matching.length} groups`;
  document.getElementById("groups").replaceChildren();
  showMore();
}

filter.addEventListener("input", show);
filter.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", showMore);
show();
