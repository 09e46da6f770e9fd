/**
 * Compiler of the playground: a schedule's order of computation, and the passes that lower it to a whole plan.
 *
 *     order ─▶ messages, each send with its receive at one point of a global order ─▶ reductions, norm, step
 *
 * It covers plans without recomputation, skips and tied weights; the result is that of `quintsched compile`.
 */
import { flowsOf } from "./dataflow.js";
import { eventsOf, graphOf } from "./graph.js";
import { malformations } from "./prove.js";
import { range } from "./layout.js";
import { ABSENT, Plan } from "./plan.js";
import { Costs, durationsOf } from "./times.js";

const RECEIVES_OUTSTANDING = 2, MOST_COMPUTED = 20_000;
const [F, B, I, W] = ["Fwd", "Bwd", "BwdInput", "BwdWeight"].map((op) => (stage, microbatch) => ({ op, stage, microbatch }));

/** Lanes of steps, each with a delay, merged beat by beat. */
function alternate(...lanes) {
  const steps = lanes.flatMap(([make, delay, stages, units], lane) => stages.map((s, k) => [delay + k, lane, make(s, units[k])]));
  return steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , step]) => step);
}

function inRounds(shape, rank) {
  const { pp, microbatches, chunks } = shape;
  const units = range(pp > 0 ? microbatches * chunks : 0);
  const held = range(chunks).map((chunk) => rank + chunk * pp);
  const chunkOf = units.map((u) => Math.floor((u % (pp * chunks)) / pp));
  const microbatchOf = units.map((u) => Math.floor(u / (pp * chunks)) * pp + (u % pp));
  return { microbatchOf, forward: chunkOf.map((c) => held[c]), backward: chunkOf.map((c) => held[chunks - 1 - c]) };
}

function oneForwardOneBackward(rank, m, warmup) {
  const order = range(warmup).map((u) => F(rank, u));
  for (let u = warmup; u < m; u++) order.push(F(rank, u), B(rank, u - warmup));
  for (let u = m - warmup; u < m; u++) order.push(B(rank, u));
  return order;
}

/** Steps of a split 1F1B whose input halves are `warmup` forwards late, and whose weight halves `late` more. */
function splitBackward(rank, m, warmup, late) {
  const order = [];
  const starts = [0, warmup, warmup + late];
  for (let k = 0; k < starts[2] + m; k++) {
    if (k < m) order.push(F(rank, k));
    if (k >= warmup && k - warmup < m) order.push(I(rank, k - warmup));
    if (k >= starts[2]) order.push(W(rank, k - starts[2]));
  }
  return order;
}

/** Schedules of the playground: the order of one rank, and what shapes they take. */
export const SCHEDULES = {
  "1f1b": { order: ({ pp, microbatches: m }, rank) => oneForwardOneBackward(rank, m, Math.min(pp - rank - 1, m)) },
  gpipe: { order: ({ microbatches: m }, rank) => [...range(m).map((u) => F(rank, u)), ...range(m).map((u) => B(rank, u))] },
  "eager-1f1b": { order: ({ pp, microbatches: m }, rank) => oneForwardOneBackward(rank, m, Math.min(2 * (pp - rank - 1), m)) },
  "zb-h1": { order: ({ pp, microbatches: m }, rank) => splitBackward(rank, m, Math.min(pp - rank - 1, m), rank) },
  "zb-h2": { order: ({ pp, microbatches: m }, rank) => splitBackward(rank, m, Math.min(2 * (pp - rank - 1), m), 2 * rank) },
  "interleaved-1f1b": {
    chunked: true,
    order: (shape, rank) => {
      const { pp, microbatches, chunks } = shape, { microbatchOf, forward, backward } = inRounds(shape, rank);
      const warmup = Math.min(2 * (pp - rank - 1) + (chunks - 1) * pp, microbatches * chunks);
      return alternate([F, 0, forward, microbatchOf], [B, warmup, backward, microbatchOf]);
    },
  },
  "interleaved-zb": {
    chunked: true,
    order: (shape, rank) => {
      const { microbatchOf, forward, backward } = inRounds(shape, rank), warmup = shape.chunks * shape.pp - rank - 1;
      return alternate([F, 0, forward, microbatchOf], [I, warmup, backward, microbatchOf], [W, warmup + rank, backward, microbatchOf]);
    },
  },
};

/** Return why a plan has no such sizes here; null if it may have. */
export function sizeFault({ pp, microbatches, chunks }) {
  if (![pp, microbatches, chunks].every((size) => Number.isInteger(size) && size > 0)) return "ranks, microbatches and chunks are whole numbers";
  return pp * microbatches * chunks > MOST_COMPUTED ? `more than ${MOST_COMPUTED} forwards: use quintsched compile` : null;
}

/** Return why a schedule does not take a shape; null if it does. */
export function misfit(name, shape) {
  if (sizeFault(shape)) return sizeFault(shape);
  const { pp, microbatches, chunks } = shape, { chunked } = SCHEDULES[name];
  if (chunked && chunks < 2) return `${name} needs 2 or more chunks`;
  if (!chunked && chunks > 1) return `${name} has 1 chunk`;
  if (chunked && microbatches % pp) return `${name} needs a multiple of ${pp} microbatches`;
  return null;
}

/** Return the head of a plan of this shape; further axes of the `mesh` are kept. */
export function headOf(name, { pp, microbatches, chunks, dp = 1, zero = 0, mesh = dp === 1 ? [] : [["dp", dp]], ...more }) {
  const { stage_to_pp = range(pp * chunks).map((stage) => stage % pp), buckets_per_stage = 1 } = more;
  return {
    format: "quintsched.plan", version: 1, mode: "train",
    schedule: { name, microbatches, chunks, slices: 1, options: {} },
    mesh: Object.entries({ ...Object.fromEntries(mesh), pp }),
    stage_to_pp,
    routes: [{ stages: range(pp * chunks), microbatches: range(microbatches) }],
    buckets_per_stage, program_axes: ["pp"], ...(zero !== 0 ? { zero: zero?.stage ? zero : { stage: zero, every: 1 } } : {}),
  };
}

/** Return the orders of all ranks of a schedule. */
export function ordersOf(name, shape) { return range(shape.pp).map((rank) => SCHEDULES[name].order(shape, rank)); }

/** Return what a plan has that the lowering here leaves out; if it is nothing, its order may be lowered again. */
export function besides({ head, op, tables, schedule }) {
  const keys = ["recompute", "tied", "skips", "losses", "stage_to_part", "collectives", "blocks_per_stage"].filter((key) => head[key] !== undefined);
  const rare = ["Overlap", "OffloadAct", "FetchAct", "LendAct"].filter((name) => op.includes(tables.code[name]));
  return [...keys, ...rare, ...(head.mode === "train" ? [] : ["forward mode"]), ...(schedule.slices === 1 ? [] : ["slices"])];
}

/** Return the computations of a plan, as one list per rank. */
export function ordersIn(plan) {
  return plan.programs().map((program) => program.filter(({ op }) => plan.tables.ops[plan.tables.code[op]].computes));
}

/** Lower an order of computation; `{ plan }`, or `{ bare }` with the order alone if it cannot run. */
export function lower(tables, head, orders) {
  const bare = Plan.fromPrograms(tables, head, orders), [broken] = malformations(bare);
  if (broken) throw new Error(broken[1]);
  const durations = durationsOf(bare, new Costs(bare, {}));
  const run = graphOf(bare, "channel").run(durations);
  if (!run.finished) return { bare, run };
  const start = Float64Array.from(eventsOf(bare).of, (event) => run.start[event]);
  const end = Float64Array.from(eventsOf(bare).of, (event) => run.end[event]);
  const programs = withMessages(bare, messagesOf(bare), start, end);
  return { plan: Plan.fromPrograms(tables, head, programs.map((program, rank) => ended(bare, gathered(bare, program), rank))) };
}

/** Values that cross ranks, channel after channel, in the receiver's order: maker, taker, stage, unit and kind. */
function messagesOf(plan) {
  const flows = flowsOf(plan), found = [];
  const rows = flows.CONSUMES.rows.array, places = flows.CONSUMES.places.array;
  for (let i = 0; i < rows.length; i++) {
    const key = flows.key(places[i]);
    if (key >= flows.travelling) continue;
    const made = flows.senders[key], taken = rows[i];
    if (made === ABSENT || plan.rank[made] === plan.rank[taken]) continue;
    const kind = flows.kindOf(key), offset = key - flows.firsts[kind];
    found.push({ made, taken, source: plan.rank[made], target: plan.rank[taken], kind, stage: Math.floor(offset / flows.counts[kind]),
      unit: offset % flows.counts[kind] });
  }
  const channel = (message) => message.source * plan.ranks + message.target;
  return found.sort((a, b) => channel(a) - channel(b) || a.taken - b.taken);
}

/** Return the programs with each send and receive at its message's moment of the global order. */
function withMessages(plan, messages, start, end) {
  const entries = range(plan.ranks).map((k) => range(plan.first[k + 1] - plan.first[k]).map((at) => {
    const row = plan.first[k] + at;
    return { time: start[row], phase: 1, number: row, instruction: plan.instruction(row) };
  }));
  const takersOf = new Map();
  let latest = 0;
  messages.forEach((message, number) => {
    const before = messages[number - 1];
    const channel = message.source * plan.ranks + message.target;
    const fresh = !before || before.source !== message.source || before.target !== message.target;
    const takers = takersOf.get(channel) ?? takersOf.set(channel, []).get(channel);
    if (takers.at(-1) !== message.taken) takers.push(message.taken);
    const older = takers.at(-1 - RECEIVES_OUTSTANDING);
    const freed = older === undefined ? -1 : start[older];
    latest = Math.max(end[message.made], freed, fresh ? -Infinity : latest);
    const phase = freed === latest ? 2 : 0;
    const forward = plan.tables.kinds[message.kind] === "OUTPUT";
    const other = plan.layout.stageAfter(message.stage, message.unit);
    const [sent, received] = forward ? [message.stage, other] : [other, message.stage];
    const of = { microbatch: message.unit };
    entries[message.source].push({ time: latest, phase, number,
      instruction: { op: forward ? "SendAct" : "SendGrad", stage: sent, ...of, peer: message.target } });
    entries[message.target].push({ time: latest, phase, number,
      instruction: { op: forward ? "RecvAct" : "RecvGrad", stage: received, ...of, peer: message.source } });
  });
  return entries.map((of) => of.sort((a, b) => a.time - b.time || a.phase - b.phase || a.number - b.number).map(({ instruction }) => instruction));
}

/** Return a program with instructions before some of its places: `added` has lists by place. */
function inserted(program, added) { return [...program, null].flatMap((i, at) => [...(added.get(at) ?? []), ...(i ? [i] : [])]); }

function add(added, at, ...instructions) { added.set(at, [...(added.get(at) ?? []), ...instructions]); }

/** Gather the weights of each run of a stage's computations while the one before it runs, and free them behind it (ZeRO-3). */
function gathered({ layout, tables }, program) {
  if (layout.zero.stage < 3) return program;
  const code = range(program.length).map((at) => tables.code[program[at].op]);
  const computing = range(program.length).filter((at) => tables.computes[code[at]]), runs = [], added = new Map();
  for (const at of computing.filter((place) => tables.rules[code[place]].some(([, kind]) => kind === "PARAMS"))) {
    const { stage } = program[at];
    if (runs.at(-1)?.stage === stage) runs.at(-1).last = at;
    else runs.push({ stage, first: at, last: at });
  }
  for (const { stage, last } of runs) add(added, last + 1, { op: "FreeParams", stage });
  for (const { stage, first } of runs) add(added, computing[Math.max(computing.indexOf(first) - 1, 0)], { op: "GatherParams", stage });
  return inserted(program, added);
}

/** Add the reductions behind each stage's last backward, from ZeRO-2 on behind every few, and the end of the step. */
function ended(plan, program, rank) {
  const { layout, tables } = plan, { stage: sharding, every } = layout.zero;
  const axes = layout.buckets.filter(([, over]) => over.length), done = {}, last = new Map(), added = new Map();
  program.forEach(({ op, stage }, at) => {
    if (!tables.ops[tables.code[op]].ends_backward) return;
    done[stage] = (done[stage] ?? -1) + 1;
    const part = sharding > 1 ? Math.floor(done[stage] / every) : 0;
    last.set(`${stage} ${part}`, { at, stage, part });
  });
  for (const { at, stage, part } of [...last.values()].sort((a, b) => a.at - b.at || a.stage - b.stage)) {
    let before = at + 1;
    while (["SendGrad", "FreeParams"].includes(program[before]?.op)) before++;
    add(added, before, ...axes.map(([bucket, over]) =>
      sharding ? { op: "ReduceScatterBucket", stage, bucket, axes: over, part } : { op: "AllReduceBucket", stage, bucket, axes: over }));
  }
  const whole = [1, 2].includes(sharding) ? layout.heldBy[rank].flatMap((stage) => axes.map(([bucket, over]) =>
    ({ op: "AllGatherBucket", stage, bucket, axes: over }))) : [];
  return [...inserted(program, added), { op: "ShareMetrics" }, { op: "ClipGrad" }, { op: "OptStep", stages: layout.heldBy[rank] }, ...whole];
}
