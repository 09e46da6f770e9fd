// Answers, one line per line of standard input: {tables} first, then {plan, costs} with what the page's engine finds.
import { createInterface } from "node:readline";
import { Plan, readTables } from "../../../viz/page/plan.js";
import { describeCycle, judge } from "../../../viz/page/prove.js";
import { Costs, peakActivations, simulate } from "../../../viz/page/times.js";
import { Waits } from "../../../viz/page/idle_reasons.js";

/** Each gap of a run, as the planner explains it: [rank, start, end, cause, ranks waited for]. */
function idle(run) {
  const waits = new Waits(run), { members } = waits.events;
  const ranksOf = (event) => [...members.items.subarray(members.starts[event], members.starts[event + 1])].map((row) => run.plan.rank[row]);
  return Array.from({ length: run.plan.ranks }, (_, rank) => waits.gaps(rank).map((gap) => {
    const { cause, culprits } = waits.explain(gap);
    const ranks = [...new Set(culprits.flatMap(ranksOf))].filter((other) => other !== rank).sort((a, b) => a - b);
    return [rank, gap.start, gap.end, cause, ranks];
  })).flat();
}

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
        if (run && "cap" in asked) answer.run.idle = idle({ ...run, cap: asked.cap });
      }
      console.log(JSON.stringify(answer));
    } catch (error) {
      console.log(JSON.stringify({ error: error.stack }));
    }
  }
}
