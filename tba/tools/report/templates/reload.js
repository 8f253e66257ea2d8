// A page that `tba report --watch` rewrites loads itself again, and keeps its place and settings.
const pause = 1000 * document.body.dataset.reload; // NaN unless it is watched
const caption = (part) => part.closest("figure")?.querySelector("figcaption").textContent ?? "";
const opened = () => [...document.querySelectorAll("main details")].map((part) => [caption(part) + part.firstElementChild.textContent, part]);
const inputs = () => [...document.querySelectorAll("main input, main select")].map((part) => [`${part.name} ${part.type === "radio" ? part.value : ""}`, part]);
const heads = () => [...document.querySelectorAll("main h2, .group")];
const PLACE = ["checked", "value"];

function keep() {
  const head = heads().findLast((part) => part.getBoundingClientRect().top <= 90) ?? heads()[0];
  const zoomed = [...charts].filter(([, plot]) => isZoomed(plot));
  history.replaceState({
    head: heads().indexOf(head), top: head.getBoundingClientRect().top,
    open: opened().filter(([, part]) => part.open).map(([name]) => name),
    inputs: Object.fromEntries(inputs().map(([name, part]) => [name, [part.checked, part.value]])),
    zooms: zoomed.map(([place, { scales: { x } }]) => [caption(place), x.min, x.max]),
    sorted: [...document.querySelectorAll("[aria-sort]")].map((head) => [head.closest("table").dataset.name, head.cellIndex, head.ariaSort === "descending"]),
    shown: document.querySelectorAll(".group").length,
    focus: inputs().find(([, part]) => part === document.activeElement)?.[0],
  }, "");
}

function restore(kept) {
  const fields = Object.fromEntries(inputs());
  for (const [name, values] of Object.entries(kept.inputs)) {
    if (fields[name]) PLACE.forEach((property, i) => { if (property in fields[name]) fields[name][property] = values[i]; });
  }
  for (const [name, part] of opened()) part.open = kept.open.includes(name);
  for (const [name, column, down] of kept.sorted) {
    const table = [...document.querySelectorAll("table[data-name]")].find((each) => each.dataset.name === name);
    if (table) sortBy(table, column, down);
  }
  inputs().find(([name]) => name === kept.focus)?.[1].focus({ preventScroll: true });
  hideRuns();
  show();
  while (document.querySelectorAll(".group").length < kept.shown && !more.hidden) showMore();
  kept.zooms.forEach(([name, min, max]) => zooms.set(name, { min, max }));
  const scroll = () => scrollBy(0, heads()[kept.head].getBoundingClientRect().top - kept.top);
  scroll();
  drawn.then(scroll); // charts have other heights than their places
}

if (history.state?.inputs) restore(history.state);
if (pause) {
  history.scrollRestoration = "manual";
  const since = performance.now();
  let busy = 0;
  for (const kind of ["input", "pointerdown", "keydown", "wheel"]) addEventListener(kind, () => { busy = performance.now(); });
  setInterval(() => {
    const now = performance.now();
    if (document.hidden || now - since < pause || now - busy < 1500 || !getSelection().isCollapsed) return;
    keep();
    location.reload();
  }, 500);
}
