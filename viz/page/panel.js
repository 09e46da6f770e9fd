/** Side panel: what is selected, why a rank is idle, and where the time of each rank goes. */
import { h } from "./dom.js";
import { number } from "./why.js";

const MOST_LISTED = 14;

/** Card of an instruction: its fields, its times, what it waited for and who waited for it. */
export function instructionCard(app, row) {
  const { plan, run, waits } = app;
  const { op, ...fields } = plan.instruction(row);
  const unit = app.view.unitName;
  const facts = [["rank", `${plan.rank[row]}, instruction ${plan.index(row)}`]];
  for (const [name, value] of Object.entries(fields)) facts.push([name, Array.isArray(value) ? value.join(", ") : String(value)]);
  for (const one of app.runs.filter((_, at) => !at || at === app.measured)) {
    facts.push([one.name, `${number(one.start[row])} to ${number(one.end[row])}: ${number(one.end[row] - one.start[row])} ${unit}` +
      (one.wait?.[row] ? `, of which ${number(one.wait[row])} waiting` : "")]);
  }
  if (app.runs.length > 1) {
    const late = app.runs[app.measured].end[row] - app.runs[0].end[row];
    facts.push(["difference", `${number(Math.abs(late))} ${unit} ${late >= 0 ? "later" : "earlier"} than planned`]);
  }
  const parts = [h("h2", {}, "instruction"), h("p", { class: "sentence" }, h("b", {}, op), ` ${plan.tables.ops[plan.op[row]].label}`),
    h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))];
  if (waits && !run.wait) {
    const event = waits.events.of[row];
    parts.push(...eventList(app, "waited for", waits.before(event), (e) => (waits.times.end[e] >= waits.times.start[event] - waits.slack ? "no slack" : "")));
    parts.push(...eventList(app, "is waited for by", waits.after(event), () => ""));
  }
  return parts;
}

function eventList(app, title, events, note) {
  if (!events.length) return [];
  return [h("h2", {}, title), rowList(app, events.slice(0, MOST_LISTED).map((event) => [app.waits.events.firstRows[event], note(event)]))];
}

/** List of rows that one can click. */
export function rowList(app, rows, at = -1) {
  const { run } = app;
  return h("ul", { class: "list" }, rows.map(([row, note], place) => {
    const [op, chunk] = app.palette.shadeOf(row);
    return h("li", { class: place === at ? "at" : "", onclick: () => app.select(row) }, h("i", { style: `background:${app.palette.texts[op][chunk]}` }),
      h("span", {}, app.nameOf(row)), h("small", {}, note || `${number(run.start[row])} – ${number(run.end[row])}`));
  }));
}

/** Card that answers why a rank is idle. */
export function gapCard(app, why, events) {
  const { waits } = app;
  const chain = events.slice(0, MOST_LISTED).map((event) => [waits.events.firstRows[event], ""]);
  return [h("h2", {}, "why is this idle?"), h("span", { class: "cause", style: `background:${app.plan.tables.causes[why.cause].colour}` }, why.cause),
    h("p", { class: "sentence" }, why.sentence), h("h2", {}, "the chain without slack, latest first"), rowList(app, chain)];
}

/** Critical path, earliest first. */
export function pathCard(app, path) {
  const rows = path.slice(0, 400).map((event) => [app.waits.events.firstRows[event], ""]);
  return [h("h2", {}, `critical path: ${path.length} steps`), h("p", {}, "To make the step shorter, make one of these shorter."), rowList(app, rows)];
}

/** Bars of all ranks: busy time, and idle time by its cause; the longest gaps. */
export function breakdownCard(app, breakdown) {
  const { plan, run } = app, looks = plan.tables.causes;
  const total = run.makespan || 1;
  const shown = plan.ranks <= 24 ? Array.from({ length: plan.ranks }, (_, k) => k)
    : Array.from({ length: 24 }, (_, k) => Math.floor((k * plan.ranks) / 24));
  const causes = Object.keys(looks).filter((cause) => breakdown.ranks.some((of) => of[cause]));
  const bars = shown.flatMap((rank) => [h("span", {}, `rank ${rank}`),
    h("div", { class: "bar", title: describe(breakdown.ranks[rank], run.busy[rank], total) },
    h("span", { style: `width:${(100 * run.busy[rank]) / total}%;background:var(--accent)` }),
    causes.map((cause) => h("span", { style: `width:${(100 * (breakdown.ranks[rank][cause] ?? 0)) / total}%;background:${looks[cause].colour}` })))]);
  const sum = (cause) => breakdown.ranks.reduce((all, of) => all + (of[cause] ?? 0), 0);
  return [h("h2", {}, "where the time goes"), h("div", { class: "bars" }, bars),
    h("div", { class: "legend", style: "padding:8px 0 0" }, h("span", {}, h("i", { style: "background:var(--accent)" }), "computing"),
      causes.map((cause) => h("span", {}, h("i", { style: `background:${looks[cause].colour}` }),
        `${cause} ${((100 * sum(cause)) / (total * plan.ranks)).toFixed(1)} %`))),
    h("h2", {}, "longest gaps"), h("ul", { class: "list" }, breakdown.gaps.slice(0, 8).map((gap) => h("li", { onclick: () => app.showGap(gap) },
      h("i", { style: `background:${looks[gap.cause].colour}` }), h("span", {}, `rank ${gap.rank}: ${number(gap.end - gap.start)} ${app.view.unitName}`),
      h("small", {}, gap.cause))))];
}

function describe(of, busy, total) {
  return [`computing ${((100 * busy) / total).toFixed(1)} %`,
    ...Object.entries(of).map(([cause, time]) => `${cause} ${((100 * time) / total).toFixed(1)} %`)].join(", ");
}

/** Card of the proof: the profiles, and what is wrong. */
export function verdictCard(app, verdict, cycleWords) {
  const parts = [h("h2", {}, "proof"), h("div", { class: "chips" }, app.plan.tables.profiles.map(({ name, stands_for: means }) =>
    h("span", { class: `chip ${verdict.profiles[name] ? "good" : "bad"}`, title: means }, `${verdict.profiles[name] ? "✓" : "✗"} ${name}`)))];
  for (const [point, words, row] of verdict.faults.slice(0, 5)) {
    parts.push(h("p", { class: "fault", onclick: () => row !== null && app.select(row) }, h("b", {}, `${point}: `), words));
  }
  if (verdict.faults.length > 5) parts.push(h("p", { class: "fault" }, `… and ${verdict.faults.length - 5} more`));
  if (cycleWords.length) parts.push(h("p", {}, "These waits close a circle:"), ...cycleWords.map((line) => h("p", { class: "fault" }, line)));
  return parts;
}

/** Card of the keys. */
export function helpCard() {
  const keys = [["← → ↑ ↓", "pan; up and down with a selection: other rank"], ["+ −", "zoom; wheel too, shift+wheel: rows"], ["f", "whole plan"],
    ["/", "search: stage 3 microbatch 7, F7, rank 2"],
    ["n p", "next and previous instruction of the rank"], ["w", "why is it idle: next gap of the rank"], ["c", "walk the critical path"], ["m",
      "planned, measured, both, difference"],
    ["g", "messages on or off"], ["t", "light or dark"], ["e", "edit: the playground"], ["Ctrl+Z", "undo"], ["Esc", "nothing selected"]];
  return [h("h2", {}, "keys"), h("div", { class: "help" }, keys.flatMap(([key, words]) => [h("span", {}, h("kbd", {}, key)), h("span", {}, words)])),
    h("p", {}, "Drop a plan, a trace's folder or a stall report on the page to look at it.")];
}
