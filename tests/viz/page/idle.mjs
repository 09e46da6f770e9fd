// Explains every gap of so many random plans, and tries each explanation: node idle.mjs TABLES COUNT SEED
// What is named is made shorter by a little: the gap must shrink by as much. Something else: it must not.
import { readFileSync } from "node:fs";
import { headOf, lower, misfit, ordersOf, SCHEDULES } from "../../../viz/page/compile.js";
import { readTables } from "../../../viz/page/plan.js";
import { simulate } from "../../../viz/page/times.js";
import { Waits } from "../../../viz/page/idle_reasons.js";

const tables = readTables(JSON.parse(readFileSync(process.argv[2], "utf8")));
let seed = Number(process.argv[4]);
const random = () => {
  seed = (seed + 0x6d2b79f5) | 0;
  let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
};
const draw = (list) => list[Math.floor(random() * list.length)];

function randomPlan() {
  for (;;) {
    const name = draw(Object.keys(SCHEDULES));
    const shape = { pp: 1 + Math.floor(random() * 6), microbatches: 1 + Math.floor(random() * 10), chunks: SCHEDULES[name].chunked ? 2 : 1, dp: draw([1, 2]) };
    if (misfit(name, shape)) continue;
    const orders = ordersOf(name, shape);
    if (random() < 0.4) { // another order, if it can run
      const order = draw(orders), at = Math.floor(random() * order.length);
      order.splice(Math.floor(random() * order.length), 0, ...order.splice(at, 1));
    }
    const { plan } = lower(tables, headOf(name, shape), orders);
    if (plan) return plan;
  }
}

function randomCosts(plan) {
  const time = () => 0.2 + random() * 2;
  const perStage = () => (random() < 0.3 ? 1 : Array.from({ length: plan.layout.stages }, time));
  return {
    forward: perStage(), backward_input: perStage(), backward_weight: perStage(), p2p: draw([0, 0, random() * 0.3, random() * 3]),
    clip: draw([0, 0.4]), reduce_scatter: draw([0, random()]), all_gather: draw([0, random()]), optimizer: draw([0, 0.3]),
  };
}

const found = { gaps: 0, named: 0, shrunk: 0, others: 0, kept: 0, causes: {}, wrong: [] };
for (let number = 0; number < Number(process.argv[3]); number++) {
  const plan = randomPlan();
  const run = simulate(plan, randomCosts(plan));
  run.cap = random() < 0.4 ? Math.ceil(random() * plan.ranks) : null;
  const waits = new Waits(run);
  const little = run.makespan * plan.parts * 1e-6;
  for (let rank = 0; rank < plan.ranks; rank++) {
    for (const gap of waits.gaps(rank)) {
      const why = waits.explain(gap);
      found.gaps++;
      found.causes[why.cause] = (found.causes[why.cause] ?? 0) + 1;
      if (!(why.cause in tables.causes) || !why.sentence.startsWith(`Rank ${rank} `)) found.wrong.push(`no cause: ${why.sentence}`);
      if (gap.row < 0) continue;
      if (!why.last.length) found.wrong.push(`${plan.title}: nothing named: ${why.sentence}`);
      for (const row of [...why.culprits, ...why.messages].slice(0, 1).map((event) => waits.events.firstRows[event])) {
        if (!why.culprits.length || !why.sentence.includes(waits.name(row))) found.wrong.push(`not in words: ${why.sentence}`);
      }
      const length = (events) => {
        const durations = waits.durations.slice();
        for (const event of events) durations[event] -= little;
        const { start, end } = waits.graph.run(durations);
        const before = gap.before < 0 ? 0 : end[waits.events.of[gap.before]];
        return start[waits.events.of[gap.row]] - before;
      };
      const whole = length([]);
      found.named++;
      if (Math.abs(whole - length(why.last) - little) < little * 0.01) found.shrunk++;
      else found.wrong.push(`${plan.title}, gap of rank ${rank} at ${gap.start}: ${whole - length(why.last)} for ${little}; ${why.sentence}`);
      const others = [...waits.durations.keys()].filter((event) => waits.durations[event] > little && !why.last.includes(event) && !why.culprits.includes(event));
      if (others.length) {
        found.others++;
        if (whole - length([draw(others)]) < little * 0.5) found.kept++;
      }
    }
  }
}
console.log(JSON.stringify({ ...found, wrong: found.wrong.slice(0, 5), wrongs: found.wrong.length }));
