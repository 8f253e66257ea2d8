// Completions on the page of runs.
const GROUPS = 20; // shown at once
const filter = document.getElementById("filter");
const more = document.getElementById("more");
let matching = [], shownGroups = 0;

// Steps between the weights that started a completion and the weights that the batch trained.
const ageOf = (completion) => Math.max(0, completion.step - 1 - completion.version);

// Compare the rewards of two completions in the chosen order; what has no reward comes last.
function byReward(a, b) {
  const sign = { high: -1, low: 1 }[filter.elements.order.value] ?? 0;
  const [x, y] = [a, b].map(({ reward }) => (reward === null ? Infinity : sign * reward));
  return sign && (x < y ? -1 : +(x > y));
}

// Groups with completions that pass the filter, and these completions.
function matches() {
  const wanted = Object.fromEntries(new FormData(filter));
  const text = wanted.text.toLowerCase(), has = (part) => !text || part.toLowerCase().includes(text);
  const within = (value, name) => {
    const low = wanted[`${name}_min`], high = wanted[`${name}_max`];
    return !(low || high) || (value !== null && (!low || value >= +low) && (!high || value <= +high));
  };
  const found = [];
  runs.forEach((run, r) => {
    if (wanted.run && +wanted.run !== r) return;
    for (const group of run.groups) {
      if (wanted.kind && wanted.kind !== group.kind) continue;
      const inPrompt = has(group.prompt);
      const kept = group.completions.filter((c) =>
        within(c.step, "step") && within(c.reward, "reward") && within(ageOf(c), "age") &&
        (inPrompt || has(c.completion)));
      if (kept.length) found.push({ run, group, kept });
    }
  });
  const order = (a, b) => byReward(a, b) || (wanted.order && b.step - a.step); // the newest of equal rewards first
  const first = new Map(found.map((each) => [each, each.kept.toSorted(order)[0]]));
  return found.sort((a, b) => order(first.get(a), first.get(b)));
}

// Merge equal answers to a prompt: within a batch, or in consecutive evaluations.
function merged(group, kept) {
  const found = [];
  for (const c of group.completions) {
    const equal = (m) => m.completion === c.completion && m.reward === c.reward && m.kept === kept.includes(c);
    const same = group.kind === "eval" ? found.slice(-1).find(equal) : found.find(equal);
    if (same) [same.count, same.all] = [same.count + c.drawn, [...same.all, c]];
    else found.push({ ...c, kept: kept.includes(c), count: c.drawn, all: [c] });
  }
  return found;
}

// The range of some numbers as text: "3", or "3 to 5".
function span(numbers) {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  return low === high ? `${low}` : `${low} to ${high}`;
}

// A reward. If rewards differ, its colour shows its place between the lowest and highest of the run.
function badge(reward, run, count = 1) {
  const [low, high] = run.rewards, differ = reward !== null && high > low;
  const shown = element("span", { className: differ ? "badge scored" : "badge" }, reward === null ? "not scored" : short(reward));
  if (differ) shown.style.setProperty("--share", `${Math.round((100 * (reward - low)) / (high - low))}%`);
  return element("span", { className: "reward" }, shown, count > 1 ? ` × ${count}` : "");
}

const textOf = (value) => (typeof value === "number" ? short(value) : typeof value === "string" ? value : JSON.stringify(value));

function shownCompletion(c, kind, run) {
  const steps = span(c.all.map((each) => each.step)), ages = span(c.all.map(ageOf));
  const held = steps === "0" ? "before training" : `at step${steps.includes("to") ? "s" : ""} ${steps}`;
  const when = kind === "eval" ? held : `age ${ages} step${ages === "1" ? "" : "s"}, weights of step ${span(c.all.map((each) => each.version))}`;
  const notes = Object.entries(c.notes).map(([name, value]) => ` · ${name.replace(/^rewards\//, "")} ${textOf(value)}`);
  return element("div", { className: c.kept ? "completion" : "completion other" },
    badge(c.reward, run, c.count),
    element("p", { className: "chip" }, when, ...notes, c.kept ? "" : " · does not match"),
    element("div", { className: "text" }, ...(c.completion ? shownResponse(c) : [shownToken("(empty)")]), c.cut ? element("span", { className: "cut", title: "the limit of tokens ended it" }, " ✂ cut off") : ""));
}

// The right answer and the other columns of a row.
function shownColumns(columns, answer) {
  const rows = Object.entries(columns).sort(([a], [b]) => (b === answer) - (a === answer)).map(([name, value]) =>
    element("div", { className: name === answer ? "answer" : "" },
      element("dt", {}, name === answer ? "right answer" : name), element("dd", {}, textOf(value))));
  return element("dl", { className: "columns" }, ...rows);
}

function shownGroup({ run, group, kept }, whole) {
  const origin = group.kind === "eval" ? "held-out prompt" : `batch of step ${group.completions[0].step}`;
  const heading = [several ? run.name : "", origin, group.id && group.id !== group.prompt ? `row ${group.id}` : ""];
  const all = merged(group, kept).sort(byReward), counts = new Map();
  for (const c of all) counts.set(c.reward, (counts.get(c.reward) ?? 0) + c.count);
  const rewards = [...counts].sort(([a], [b]) => b - a).map(([reward, count]) => badge(reward, run, count));
  return element("article", { className: "card group" },
    element("h3", {}, heading.filter(Boolean).join(" · ")),
    element("div", { className: "text" }, element("div", {}, ...shownPrompt(group.prompt))), shownColumns(group.columns, run.answer),
    element("p", { className: "rewards" }, group.kind === "eval" ? "rewards of all evaluations " : "rewards of the group ", ...rewards),
    element("div", { className: "side" }, ...all.filter((c) => whole || c.kept).map((c) => shownCompletion(c, group.kind, run))));
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
  const completions = matching.reduce((sum, { kept }) => sum + kept.reduce((all, c) => all + c.drawn, 0), 0);
  document.getElementById("count").textContent = `${completions} completions of ${matching.length} prompts`;
  document.getElementById("groups").replaceChildren();
  showMore();
}

filter.addEventListener("input", show);
filter.addEventListener("submit", (event) => event.preventDefault());
more.addEventListener("click", showMore);
show();
