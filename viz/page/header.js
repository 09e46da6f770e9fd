/** Header of the page: figures of the runs in sight, the verdict, and what the colours mean. */
import { h } from "./dom.js";
import { peakOf } from "./times.js";
import { counted, lasting, number } from "./numbers.js";

/** Show the figures of the runs in sight, and the verdict. */
export function showFigures(app) {
  const title = app.view.blocks ? `${counted(app.shown.length, "plan")} compared` : app.plan.title;
  document.title = app.title.textContent = app.title.title = title;
  app.figures.replaceChildren(...(app.view.blocks ? [] : app.shown).flatMap((run) => [
    [`${app.shown.length > 1 ? `${run.name}: ` : ""}makespan `, run.stuck ? "never ends" : lasting(run.makespan, run.unit)],
    ...(run.stuck ? [] : [["bubble ", `${(100 * run.bubble).toFixed(1)} %`]]), ...(run.held?.length ? [["peak ", number(peakOf(run))]] : []),
  ]).map(([name, value]) => h("span", {}, name, h("b", {}, value))));
  if (app.verdict) {
    const free = Object.values(app.verdict.profiles).filter((is) => is).length, sound = app.verdict.sound();
    app.figures.append(h("button", { class: `chip ${sound ? "good" : "bad"}`, onclick: () => app.showVerdict() },
      sound ? `✓ sound · ${free} of ${app.plan.tables.profiles.length} transports` : "✗ not sound"));
  }
}

/** Show what the colours mean. */
export function showLegend(app) {
  const { plan, palette, view } = app;
  const { Overlap, Fwd, Bwd } = plan.tables.code;
  const found = new Set(app.runs.flatMap((run) => [...new Set(run.plan.op)]));
  if (found.delete(Overlap)) found.add(Fwd).add(Bwd);
  const ops = [...found].filter((op) => !plan.tables.ops[op].message).sort((a, b) => a - b);
  const chunks = Math.max(...app.runs.flatMap((run) => run.plan.layout.heldBy.map((held) => held.length)));
  const entries = ops.map((op) => h("span", {}, h("i", { style: `background:${palette.texts[op][0]}` }), plan.tables.ops[op].label));
  if (chunks > 1) entries.push(h("span", {}, "later chunks are lighter"));
  const key = (style, words) => entries.push(h("span", {}, h("i", { style }), words));
  if (app.runs.some((run) => run.wait)) key(`background:${view.is.waitHatch}`, "waiting (measured)");
  if (view.difference) [["0,114,178", "earlier"], ["213,94,0", "later"]].forEach(([colour, words]) =>
    key(`background:linear-gradient(90deg,rgba(${colour},.2),rgb(${colour}))`, `ends ${words} than in the first`));
  key(`background:${view.is.idle};border:1px solid ${view.is.hatch}`, "idle: click for why");
  app.legend.replaceChildren(...entries);
}
