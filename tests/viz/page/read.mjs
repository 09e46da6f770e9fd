// Reads a page's data from standard input, and prints what it has of the plan and its runs.
import { readFileSync } from "node:fs";
import { readData } from "../../../viz/page/data.js";
import { judge } from "../../../viz/page/prove.js";
import { heldOverTime, simulate } from "../../../viz/page/times.js";

const page = readFileSync(0, "utf8");
const data = await readData(page.match(/<script id="data"[^>]*>([^<]*)</)[1]);
const { runs } = data, [{ plan, costs }] = runs;
const again = simulate(plan, costs.values);
console.log(JSON.stringify({
  title: plan.title,
  json: plan.toJson(),
  sound: judge(plan).sound(),
  peaks: heldOverTime(runs[0]).map((of) => of.peak),
  again: again.makespan,
  runs: runs.map(({ name, unit, makespan, bubble, busy, start, end }) => ({ name, unit, makespan, bubble, busy: [...busy], start: [...start], end: [...end] })),
}));
