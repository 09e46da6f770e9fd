// Answers, one line per line of standard input: {tables} first, then {plan, costs} with what the page's engine finds.
import { createInterface } from "node:readline";
import { Plan, readTables } from "../../../viz/page/plan.js";
import { describeCycle, judge } from "../../../viz/page/judge.js";
import { Costs, peakActivations, simulate } from "../../../viz/page/times.js";

let tables = null;
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  if (asked.tables) tables = readTables(asked.tables);
  else {
    try {
      const plan = Plan.fromJson(tables, asked.plan);
      const found = judge(plan);
      const answer = { points: [...new Set(found.faults.map(([point]) => point))].sort(), profiles: found.profiles, peaks: [...found.peaks] };
      answer.cycles = Object.fromEntries(Object.entries(found.cycles).map(([name, cycle]) => [name, describeCycle(plan, cycle).length]));
      if (!answer.points.includes("well-formed")) {
        const run = simulate(plan, asked.costs);
        answer.run = run && {
          start: [...run.start], end: [...run.end], makespan: run.makespan, bubble: run.bubble,
          peaks: [...peakActivations(plan, new Costs(plan, asked.costs))],
        };
      }
      console.log(JSON.stringify(answer));
    } catch (error) {
      console.log(JSON.stringify({ error: error.stack }));
    }
  }
}
