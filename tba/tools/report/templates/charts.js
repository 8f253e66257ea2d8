"use strict";
// Shared by all pages: contents, charts drawn by uPlot, and tables to sort and download.
// Text written by a run is inserted as text nodes only, never as markup.

const { axes, runs } = JSON.parse(document.getElementById("data").textContent);
const several = runs.length > 1;
const hidden = new Set(); // indices of the runs that are not drawn
const zooms = new Map(); // by the caption of a chart: the range that is restored when it is drawn
const DASHES = [[], [7, 4], [2, 3]];
const BORDERS = { "": "solid", "7,4": "dashed", "2,3": "dotted" }; // of legend markers
const COLOURS = 10;
const LEAST = { positive: 0, share: 0.1, count: 1 }; // minimum top of an axis that starts at 0, so that small shares look small
const LOOKS = { // in pixels: height of a plot, sizes of its axes, minimum distance of their labels, font size
  "": { height: 190, below: 28, beside: 58, apart: 30, text: 12 },
  wide: { height: 320, below: 28, beside: 58, apart: 30, text: 12 },
  study: { height: 250, below: 28, beside: 58, apart: 30, text: 12 },
  small: { height: 138, below: 20, beside: 42, apart: 24, text: 11, padding: [8, null, 0, 0] },
};
const PAPER = { below: 18, beside: 36, apart: 20, text: 9, padding: [8, null, 0, 0] }; // a plot in print, of two thirds of its height
const NEAR = 4; // values on each side that an outlier is compared with
const charts = new Map(); // by the element that contains the plot

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value, form, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (form === "share") return `${+(100 * value).toPrecision(Math.min(digits, 3))}%`;
  const size = Math.abs(value);
  if (size >= 1e9) return (+value.toPrecision(3)).toExponential();
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e3) return Math.round(value).toLocaleString("en-US");
  return size > 0 && size < 1e-3 ? (+value.toPrecision(Math.min(digits, 3))).toExponential() : `${+value.toPrecision(digits)}`;
}

// Whether each value is an outlier: beyond twice the range of the middle 90 %, unlike its neighbours.
function outliersOf(values) {
  const sorted = (some) => some.filter((value) => value !== null).sort((a, b) => a - b);
  const all = sorted(values), at = (some, share) => some[Math.round(share * (some.length - 1))];
  const low = at(all, 0.05), high = at(all, 0.95), range = high - low || Math.abs(high);
  const far = (value) => value < low - range || value > high + range;
  return values.map((value, i) => all.length >= 20 && range > 0 && value !== null && far(value) &&
    !far(at(sorted(values.slice(Math.max(0, i - NEAR), i + NEAR + 1)), 0.5)));
}

// Means over a centred window of 1/25 of the run; gaps are skipped.
function smooth(values) {
  const half = Math.floor(values.length / 50);
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

// The lines of a chart: its own, or one for each run and metric that has values.
function linesOf(chart, x) {
  if (chart.lines) return chart.lines.map((line) => ({
    ...line, label: line.name, form: chart.form, scale: "y", evaluated: true, outliers: [],
    stroke: colour(line.colour === null ? "--soft" : `--line${line.colour % COLOURS}`), dash: DASHES[line.colour % DASHES.length],
  }));
  const lines = [];
  chart.metrics.forEach((metric, m) => runs.forEach((run, r) => {
    const evaluated = metric.startsWith("eval/");
    const rows = evaluated ? run.evaluations : run.steps;
    if (!rows[metric] || hidden.has(r)) return;
    const count = chart.form === "count";
    const own = several && chart.metrics.length === 1 ? "" : chart.labels[m] || (several ? metric : run.name);
    const ofRun = several ? run.name + (own && ",\u00a0") : "";
    const y = count ? rows[metric].map((value) => value ?? 0) : rows[metric], spread = rows[chart.spread[m]];
    lines.push({
      name: ofRun + own,
      label: element("span", {}, element("span", { className: own && "again" }, ofRun),
        element("span", { className: ofRun && lines.some((line) => line.metric === metric) ? "again" : "" }, own)),
      metric,
      x: rows[x], y, spread,
      form: chart.shares.includes(metric) ? "share" : chart.form,
      scale: chart.shares.includes(metric) ? "share" : "y",
      evaluated,
      smoothed: !evaluated && !count,
      outliers: evaluated || count ? [] : outliersOf(y),
      stroke: colour(`--line${(several ? r : m) % COLOURS}`),
      dash: DASHES[m % DASHES.length],
    });
  }));
  return lines;
}

// Add a line to the series, columns and bands of a plot: values, raw values, and edges of its spread.
function addLine(line, series, columns, bands, hidden) {
  const inside = (values) => values.map((value, i) => (hidden && line.outliers[i] ? null : value));
  const y = line.smoothed ? smooth(inside(line.y)) : line.y;
  const spread = line.spread && (line.smoothed ? smooth(inside(line.spread)) : line.spread);
  const edge = (sign) => y.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
  const [high, low] = spread ? [edge(1), edge(-1)] : [line.high, line.low];
  const raw = line.smoothed ? 1 : 0, top = high ? raw + 1 : 0;
  series.push({
    name: line.name, label: line.label, scale: line.scale, stroke: line.stroke, dash: line.dash, width: 2, line,
    points: { show: y.length < (line.evaluated ? 50 : 3), size: 7, stroke: line.stroke, fill: line.stroke },
    value: (plot, _, s, hovered) => {
      const i = hovered ?? plot.data[s].findLastIndex((value) => value != null), own = plot.data[s + top][i];
      const told = short(plot.data[s + raw][i], line.form);
      if (!top || own == null) return told;
      return told + (spread ? ` ± ${short(own - plot.data[s][i], line.form, 2)}` : ` (${short(plot.data[s + top + 1][i], line.form)} to ${short(own, line.form)})`);
    },
  });
  columns.push(y);
  const addQuiet = (values, look) => {
    series.push({ class: "quiet", scale: line.scale, points: { show: false }, ...look });
    columns.push(values);
  };
  if (raw) addQuiet(line.y, { stroke: `${line.stroke}48`, width: 1 });
  if (high) {
    bands.push({ series: [series.length, series.length + 1], fill: `${line.stroke}24` });
    for (const values of [high, low]) addQuiet(values, { width: 0 });
  }
}

function isZoomed({ scales, data: [x] }) {
  return scales.x.min > x[0] || scales.x.max < x.at(-1);
}

// The range of an axis: around the values, or from 0; limited to `most` while outliers are hidden.
function rangeOf(form, most) {
  const least = LEAST[form];
  return (_, low, high) => {
    if (most && most[0] < high && most[1] > low) [low, high] = [Math.max(low, most[0]), Math.min(high, most[1])];
    return least === undefined ? uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true) : [0, Math.max(1.05 * high, least) || 1];
  };
}

// Draw a chart, or draw it again with its zoom.
function draw(place) {
  const figure = place.closest("figure"), chart = JSON.parse(figure.dataset.chart), before = charts.get(place);
  const caption = figure.querySelector("figcaption").textContent;
  const x = figure.querySelector("input:checked")?.value ?? "step", own = chart.x ?? { label: axes[x] };
  if (before?.series[0].label === own.label && isZoomed(before)) zooms.set(caption, before.scales.x);
  before?.destroy();
  const series = [{ name: own.label, label: own.label, value: (plot, value) => short(value ?? plot.data[0].at(-1)) }];
  const tables = [], bands = [], most = {}, all = figure.dataset.all === "true", lines = linesOf(chart, x);
  const count = lines.reduce((sum, line) => sum + line.outliers.filter(Boolean).length, 0);
  for (const line of lines) {
    const columns = [line.x], kept = line.y.filter((value, i) => value !== null && !line.outliers[i]);
    const ends = kept.concat(most[line.scale] ?? []);
    most[line.scale] = [Math.min(...ends), Math.max(...ends)];
    addLine(line, series, columns, bands, !all);
    tables.push(columns);
  }
  const cut = count && !all ? most : {};
  const isPrinted = document.documentElement.classList.contains("printed"), look = LOOKS[figure.dataset.size];
  const { below, beside, apart, text, padding } = isPrinted ? PAPER : look, height = isPrinted ? 0.65 * look.height : look.height;
  const axis = {
    stroke: colour("--soft"), font: `${text}px system-ui, sans-serif`, ticks: { show: false },
    grid: { stroke: colour("--rule"), width: 1 },
  };
  const inThousands = (ticks) => ticks.at(-1) >= 1e5 && ticks.at(-1) < 1e6; // longer labels would be cut off
  const labels = (ticks, form) => ticks.map((tick) => (inThousands(ticks) && tick ? `${tick / 1000}k` : short(tick, form)));
  const axisOf = (form, look) => ({ ...axis, values: (_, ticks) => labels(ticks, form), ...look });
  const wide = (low, high) => [low - ((high - low) / 12 || 1), high + ((high - low) / 12 || 1)];
  const plot = new uPlot({
    width: place.clientWidth, height, padding, series, bands,
    scales: {
      x: {
        time: false, distr: own.log ? 3 : 1,
        range: (_, low, high) => (own.log ? [low / 1.2, high * 1.2] : chart.lines || low === high ? wide(low, high) : [low, high]),
      },
      y: { range: chart.most ? wide(...chart.most) : rangeOf(chart.form, cut.y) },
      share: { range: rangeOf("share", cut.share) },
    },
    axes: [
      axisOf("", { label: own.label, labelSize: 14, labelGap: 0, labelFont: axis.font, size: below, ...(own.ticks ? { splits: () => own.ticks, filter: (_, splits) => splits } : {}) }),
      axisOf(chart.form, { size: beside, space: apart }),
      axisOf("share", { scale: "share", side: 1, show: chart.shares?.length > 0, size: beside, space: apart, grid: { show: false } }),
    ],
    cursor: { y: false, sync: { key: x === "step" && !chart.lines ? "step" : null } },
    legend: { markers: { dash: (built, s) => BORDERS[`${built.series[s].dash ?? ""}`] } },
  }, uPlot.join(tables), place);
  charts.set(place, plot);
  if (zooms.has(caption)) plot.setScale("x", zooms.get(caption));
  zooms.delete(caption);
  figure.querySelector(".outliers")?.remove();
  if (count) {
    const told = `${count} outlier${count > 1 ? "s" : ""}: ${all ? "leave out" : "show"}`, button = element("button", { className: "outliers", type: "button" }, told);
    button.addEventListener("click", () => { figure.dataset.all = !all; draw(place); });
    figure.querySelector(".values").before(button);
  }
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

// Write the table of a chart, if it is open.
function fillTable(details, plot) {
  details.replaceChildren(details.firstElementChild);
  if (!details.open || !plot) return;
  const shown = shownSeries(plot), rows = [...plot.data[0].keys()];
  const table = element("table", {});
  table.createTHead().append(element("tr", {}, ...shown.map((s) => element("th", { scope: "col" }, plot.series[s].name))));
  table.createTBody().append(...rows.map((i) =>
    element("tr", {}, ...shown.map((s) => element("td", {}, plot.data[s][i] == null ? "" : cell(plot, s, i))))));
  details.append(table);
  equip(table, details.closest("figure").querySelector("figcaption").textContent);
}

// Sort key of a cell: the number that it starts with, or else its text. Empty cells come last.
function keyOf(cell) {
  const text = cell.textContent.trim(), number = parseFloat(text.replaceAll(",", ""));
  if (text === "" || text === "–") return [2, ""];
  const unit = /^[-\d.]+\s?(M|min|h)\b/.exec(text)?.[1];
  return Number.isNaN(number) ? [1, text] : [0, number * ({ M: 1e6, min: 60, h: 3600 }[unit] ?? 1)];
}

function sortBy(table, column, down) {
  const way = ([a, x], [b, y]) => a - b || (down ? -1 : 1) * (a ? x.localeCompare(y) : x - y);
  const body = table.tBodies[0], keys = new Map([...body.rows].map((row) => [row, keyOf(row.cells[column])]));
  body.append(...[...body.rows].sort((a, b) => way(keys.get(a), keys.get(b))));
  [...table.tHead.rows[0].cells].forEach((head, i) => {
    if (i === column) head.ariaSort = down ? "descending" : "ascending";
    else head.removeAttribute("aria-sort");
  });
}

// Quote a cell for CSV. A spreadsheet must not interpret text as a formula.
function quoted(cell) {
  const text = cell.textContent.trim(), formula = /^[=+\-@\t\r]/.test(text) && Number.isNaN(+text.split(" ")[0].replace(/%$/, ""));
  return `"${(formula ? "'" : "") + text.replaceAll('"', '""')}"`;
}

// Make a table sortable by a click on a column heading, and add a button to download it.
function equip(table, name) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = element("button", { className: "sort", type: "button" }, ...head.childNodes);
    button.addEventListener("click", () => sortBy(table, column, head.ariaSort === "ascending"));
    head.append(button);
  });
  const csv = element("button", { className: "csv", type: "button", title: `Download ${name} as CSV` }, "CSV");
  csv.addEventListener("click", () => {
    const lines = [...table.rows].map((row) => [...row.cells].map(quoted).join(","));
    const url = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
    element("a", { href: url, download: `${name.replace(/[^\w@-]+/g, "_")}.csv` }).click();
    URL.revokeObjectURL(url);
  });
  table.after(csv);
}
for (const table of document.querySelectorAll("main table")) equip(table, table.dataset.name);

const contents = document.getElementById("contents");
document.querySelectorAll("main h2").forEach((head, i) => {
  head.id = `part-${i}`;
  contents.append(element("a", { href: `#part-${i}` }, head.textContent));
});

const style = document.documentElement.style; // the names of runs stay below the contents
new ResizeObserver(() => style.setProperty("--contents", `${contents.offsetHeight}px`)).observe(contents);

// Move the cursor of a chart by 1/50 of its points, and announce the values there.
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

// Draw the runs whose boxes are checked.
function hideRuns() {
  const boxes = [...document.querySelectorAll(".key input")], before = [...hidden].join();
  hidden.clear();
  boxes.forEach((box, r) => { if (!box.checked) hidden.add(r); });
  if ([...hidden].join() !== before) [...charts.keys()].forEach(draw);
}
document.querySelector(".key")?.addEventListener("change", hideRuns);

// A chart is drawn once its element has a width; in a closed section it has none.
let isDrawn;
const drawn = new Promise((resolve) => { isDrawn = resolve; });
const sizes = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const { target } of entries) {
    const plot = charts.get(target), width = target.clientWidth;
    if (width && !plot) draw(target);
    else if (width && plot.width !== width) plot.setSize({ width, height: plot.height });
  }
  isDrawn();
}));
// On paper, charts have the width of the printed page, and are smaller.
function fitCharts(isPrinted) {
  document.documentElement.classList.toggle("printed", isPrinted);
  for (const place of charts.keys()) if (place.clientWidth) draw(place);
}
addEventListener("beforeprint", () => fitCharts(true));
addEventListener("afterprint", () => fitCharts(false));
for (const place of document.querySelectorAll(".plot")) {
  const figure = place.closest("figure"), details = figure.querySelector(".values");
  sizes.observe(place);
  place.addEventListener("keydown", (event) => moveCursor(event, place));
  details.addEventListener("toggle", () => fillTable(details, charts.get(place)));
  figure.querySelector(".switch")?.addEventListener("change", () => draw(place));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...charts.keys()].forEach(draw));
