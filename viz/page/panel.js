/** Side panel: what is selected, why a rank is idle, and where the time of each rank goes. */
import { h, picks } from "./dom.js";
import KEYS from "./keys.json" with { type: "json" };
import { peakOf } from "./times.js";
import { counted, lasting, number } from "./numbers.js";

const MOST_LISTED = 14;

/** Card of an instruction: its fields, its times, what it waited for and who waited for it. */
export function instructionCard(app, row) {
  const { plan, run, waits } = app;
  const { op, ...fields } = plan.instruction(row);
  const { unit } = app.view, { label } = plan.tables.ops[plan.op[row]];
  const facts = [["rank", `${plan.rank[row]}, instruction ${plan.index(row)}`]];
  for (const [name, value] of Object.entries(fields)) facts.push([name, Array.isArray(value) ? value.join(", ") : String(value)]);
  for (const one of app.comparing ? [run] : app.shown) {
    facts.push([one.name, `${number(one.start[row])} to ${number(one.end[row])}: ${lasting(one.end[row] - one.start[row], one.unit)}` +
      (one.wait?.[row] ? `, of which ${number(one.wait[row])} waiting` : "")]);
  }
  if (app.runs.length > 1 && !app.comparing) {
    const late = app.runs[app.measured].end[row] - app.runs[0].end[row];
    facts.push(["difference", `${lasting(Math.abs(late), unit)} ${late >= 0 ? "later" : "earlier"} than planned`]);
  }
  const parts = [h("h2", {}, "instruction"), h("p", { class: "sentence" }, h("b", {}, op), label === op ? "" : ` ${label}`),
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
    return h("li", { class: place === at ? "at" : "", ...picks(() => app.select(row)) },
      h("i", { style: `background:${app.palette.texts[op][chunk]}` }), h("span", {}, app.nameOf(row)),
      h("small", {}, note || `${number(run.start[row])} – ${number(run.end[row])}`));
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
  return [h("h2", {}, `critical path: ${counted(path.length, "step")}`),
    h("p", {}, "To make the step shorter, make one of these shorter."), rowList(app, rows)];
}

/** Runs beside each other: makespan, bubble, peak of memory, idle time by cause, and what the second has more of. */
export function compareCard(app) {
  const runs = [...(app.comparing ? app.runs : app.shown)].sort((one, other) => (other.name === "before") - (one.name === "before"));
  const looks = app.plan.tables.causes, batches = new Set(runs.map(({ plan }) => plan.schedule.microbatches));
  const percent = (value) => value.toFixed(1);
  const idle = (cause) => (run) => run.breakdown &&
    (100 * run.breakdown.ranks.reduce((sum, of) => sum + (of[cause] ?? 0), 0)) / (run.makespan * run.plan.ranks || 1);
  const makespan = (run) => (run.stuck ? NaN : run.makespan), each = (run) => batches.size > 1 && makespan(run) / run.plan.schedule.microbatches;
  const rows = [["makespan", makespan, number], ["… per microbatch", each, number], ["bubble, %", (run) => (run.stuck ? NaN : 100 * run.bubble), percent],
    ["peak", (run) => run.held && peakOf(run), number], ...Object.keys(looks).map((cause) => [`${cause}, %`, idle(cause), percent])];
  const signed = ([one, other], words) => {
    const size = words(words(one) === words(other) ? 0 : Math.abs(other - one));
    return size === words(0) ? size : `${other > one ? "+" : "−"}${size}`;
  };
  return [h("h2", {}, "beside each other"), h("table", {},
    h("tr", {}, h("th", {}), runs.map(({ name }) => h("th", {}, name)), runs.length === 2 && h("th", {}, "difference")),
    rows.map(([name, value, words]) => [name, runs.map(value), words]).filter(([, values]) => values.some((value) => value)).map(([name, values, words]) =>
      h("tr", {}, h("th", {}, name), values.map((value) => h("td", {}, value === undefined ? "" : Number.isNaN(value) ? "never ends" : words(value))),
        runs.length === 2 && h("td", {}, values.every(Number.isFinite) ? signed(values, words) : ""))))];
}

/** Computations that took longest against the plan, without what they waited. */
export function lateCard(app) {
  const [planned, measured] = app.shown, took = ({ start, end, wait }, row) => end[row] - start[row] - (wait ? wait[row] : 0);
  const longer = Array.from(app.scene.rows, (row) => [row, took(measured, row) - took(planned, row)]).sort((one, other) => other[1] - one[1]);
  const most = longer.slice(0, 8).filter(([, by]) => by > measured.makespan * 1e-4).map(([row, by]) => [row, `+${lasting(by, measured.unit)}`]);
  return most.length ? [h("h2", {}, "longest against the plan"), rowList(app, most)] : [];
}

/** The rank that holds most, since when, and the computation that was the last to add. */
export function memoryCard(app) {
  const { run, scene, cap } = app, peaks = run.held.map(({ amounts }) => amounts.reduce((one, other) => Math.max(one, other), 0));
  const rank = peaks.indexOf(Math.max(...peaks)), { times, amounts } = run.held[rank];
  const full = (amount) => amount > peaks[rank] * (1 - 1e-9), from = amounts.findIndex(full), until = amounts.findIndex((a, at) => at > from && !full(a));
  const row = scene.rows[scene.at(rank, times[from] + run.makespan * 1e-9)], most = `${number(peaks[rank])}${cap === null ? "" : ` (cap ${number(cap)})`}`;
  const like = peaks.filter(full).length - 1, who = `Rank ${rank}${like ? `, like ${counted(like, "other")},` : ""}`;
  if (row === undefined) return [];
  return [h("h2", {}, "fullest rank"), h("p", {}, `${who} holds most, ${most}, from ${number(times[from])} to ` +
    `${number(times[until] ?? run.makespan)}; the last to add was:`), rowList(app, [[row, ""]])];
}

/** Bars of all ranks: what they run, and idle time by its cause; the longest gaps. */
export function breakdownCard(app, { ranks, gaps }) {
  const { plan, run } = app, { working, causes } = plan.tables, total = run.makespan || 1;
  const colours = { ...working, ...Object.fromEntries(Object.entries(causes).map(([cause, { colour }]) => [cause, colour])) };
  const parts = Object.entries(colours).filter(([part]) => ranks.some((of) => of[part]));
  const percent = (time, of = total) => `${((100 * time) / of).toFixed(1)} %`;
  const most = Math.min(plan.ranks, 24), shown = Array.from({ length: most }, (_, k) => Math.floor((k * plan.ranks) / most));
  const bars = shown.flatMap((rank) => {
    const mine = parts.filter(([part]) => ranks[rank][part]).map(([part, colour]) => [`${part} ${percent(ranks[rank][part])}`, ranks[rank][part], colour]);
    return [h("span", {}, `rank ${rank}`), h("div", { class: "bar", title: mine.map(([words]) => words).join(", ") },
      mine.map(([, time, colour]) => h("span", { style: `width:${(100 * time) / total}%;background:${colour}` })))];
  });
  const sum = (part) => ranks.reduce((all, of) => all + (of[part] ?? 0), 0);
  return [h("h2", {}, "where the time goes"), h("div", { class: "bars" }, bars),
    h("div", { class: "legend", style: "padding:8px 0 0" }, parts.map(([part, colour]) =>
      h("span", {}, h("i", { style: `background:${colour}` }), `${part} ${percent(sum(part), total * plan.ranks)}`))),
    gaps.length > 0 && h("h2", {}, "longest gaps"), h("ul", { class: "list" }, gaps.slice(0, 8).map((gap) => h("li", picks(() => app.showGap(gap)),
      h("i", { style: `background:${colours[gap.cause]}` }), h("span", {}, `rank ${gap.rank}: ${lasting(gap.end - gap.start, run.unit)}`),
      h("small", {}, gap.cause))))];
}

/** Card of the proof: the profiles, and what is wrong. */
export function verdictCard(app, verdict, cycleWords) {
  const chips = app.plan.tables.profiles.map(({ name, stands_for: means }) =>
    h("span", { class: `chip ${verdict.profiles[name] ? "good" : "bad"}`, title: means, ...(verdict.cycles[name] && picks(() => app.showVerdict(name))) },
      `${verdict.profiles[name] ? "✓" : "✗"} ${name}${verdict.cycles[name] ? ": where?" : ""}`));
  const parts = [h("h2", {}, app.comparing ? `proof of ${app.run.name}` : "proof"), h("div", { class: "chips" }, chips)];
  for (const [point, words, row] of verdict.faults.slice(0, 5)) {
    parts.push(h("p", { class: "fault", ...(row !== null && picks(() => app.select(row))) }, h("b", {}, `${point}: `), words));
  }
  if (verdict.faults.length > 5) parts.push(h("p", { class: "fault" }, `… and ${verdict.faults.length - 5} more`));
  if (cycleWords.length) parts.push(h("p", {}, "These waits close a circle:"), ...cycleWords.map((line) => h("p", { class: "fault" }, line)));
  return parts;
}

/** Card of the keys. */
export function helpCard() {
  return [h("h2", {}, "keys"), h("div", { class: "help" }, KEYS.flatMap(([key, words]) => [h("span", {}, h("kbd", {}, key)), h("span", {}, words)])),
    h("p", {}, "Drop a plan, a trace's folder or a stall report on the page to look at it.")];
}
