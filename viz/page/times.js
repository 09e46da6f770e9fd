/** Durations of events under a cost model, the times of a plan, and the memory of its ranks. */
import { breach } from "./check_input.js";
import { runEarly } from "./early_reductions.js";
import { flowsOf } from "./dataflow.js";
import { eventsOf, graphOf } from "./graph.js";
import { range } from "./layout.js";

/** Costs of a plan, with the scalars for a whole rank spread over stages if their blocks are known. */
export class Costs {
  constructor(plan, values) {
    this.plan = plan;
    this.values = spread(plan, { ...plan.tables.costs, ...checked(plan, values) });
    this.spec = plan.schedule;
    this.parts = this.spec.chunks * this.spec.slices;
    this.cached = {};
  }

  #of(name) { return this.values[name] ?? this.values[this.plan.tables.instead[name]]; }

  #ofStages(name) {
    const value = this.#of(name);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value.stages : value;
  }

  /** Factors of a cost per unit (of `keys`: per microbatch); null if all are 1. */
  #factors(name) {
    if (name in this.cached) return this.cached[name];
    const value = this.#of(name);
    const form = value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
    const microbatches = form.microbatches ?? this.values.microbatches;
    const slices = form.slices ?? this.values.slices;
    let found = null;
    if (name === "keys") found = microbatches ?? null;
    else if (microbatches || slices) {
      const each = slices ?? Array(this.spec.slices).fill(1);
      found = (microbatches ?? Array(this.spec.microbatches).fill(1)).flatMap((m) => each.map((s) => m * s));
    }
    return (this.cached[name] = found);
  }

  #each(name, stage, unit) {
    const value = this.#ofStages(name), own = this.#of(name), factors = this.#factors(name);
    let each = Number(Array.isArray(value) ? value[stage] : value);
    if (own?.cells) each *= own.cells[stage][unit];
    return factors ? each * factors[unit] : each;
  }

  /** Cost of a computation, times the plan's chunks and slices, so that whole numbers stay exact. */
  ofUnit(name, stage, unit) {
    const each = this.#each(name, stage, unit);
    return Array.isArray(this.#ofStages(name)) ? each * this.parts : each;
  }

  ofMicrobatch(name, stage, microbatch) {
    const each = this.#each(name, stage, microbatch) * this.spec.slices;
    return Array.isArray(this.#ofStages(name)) ? each * this.spec.chunks : each;
  }

  ofStage(name, stage) {
    const value = this.#ofStages(name);
    return Array.isArray(value) ? value[stage] * this.spec.chunks * this.spec.slices : value * this.spec.slices;
  }

  experts(stage) { return Array.isArray(this.values.experts) ? this.values.experts[stage] : this.values.experts; }

  #wire(source, destination) {
    const { p2p } = this.values;
    const same = (a, b) => (link) => link.source === a && link.destination === b;
    const link = (p2p.links ?? []).find(same(source, destination)) ?? (p2p.links ?? []).findLast(same(destination, source));
    if (link) return link;
    if (!p2p.nodes) return p2p;
    return (p2p.nodes[source] === p2p.nodes[destination] ? p2p.within : p2p.across) ?? p2p;
  }

  /** Time of a message with lent activations, times the plan's chunks and slices. */
  loan(stage, unit, source, destination) {
    const size = this.ofUnit("activation_message", stage, unit) / this.parts, { p2p } = this.values;
    if (p2p === null || typeof p2p !== "object") return p2p * size * this.parts;
    const { latency, bandwidth } = this.#wire(source, destination);
    return (latency + size / (bandwidth ?? Infinity)) * this.parts;
  }

  message(stage, unit, source, destination) {
    const { p2p, message, microbatches, slices } = this.values;
    const wires = p2p !== null && typeof p2p === "object";
    if (!wires && typeof message === "number" && !microbatches?.length && !slices?.length) return p2p * message * this.parts;
    const size = this.#each("message", stage, unit);
    if (!wires) return p2p * size * this.parts;
    const { latency, bandwidth } = this.#wire(source, destination);
    return (latency + size / (bandwidth ?? Infinity)) * this.parts;
  }
}

/** Return costs; those that the planner refuses raise an error. */
function checked(plan, values) {
  const broken = breach(plan.tables.forms.costs, values), lengths = { microbatches: plan.schedule.microbatches, slices: plan.schedule.slices };
  if (broken) throw new Error(`the costs: ${broken}`);
  for (const [name, value] of Object.entries(values)) {
    const list = value?.stages ?? value, due = lengths[name] ?? plan.layout.stages;
    if (Array.isArray(list) && list.length !== due) throw new Error(`the cost ${name} has ${list.length} values, not ${due}`);
  }
  return values;
}

function spread(plan, values) {
  const { blocks_per_stage: blocks, mesh } = plan.head;
  if (!blocks) return values;
  const { costs_as_they_are: asTheyAre, costs_per_slice: perSlice } = plan.tables;
  const whole = plan.layout.routes[0].stages.reduce((sum, stage) => sum + blocks[stage], 0);
  const pp = Object.fromEntries(mesh).pp ?? 1;
  const perStage = (name, value) => Array.isArray(value) ? value
    : blocks.map((count) => (value * (count * pp / whole)) / (perSlice.includes(name) ? plan.schedule.slices : 1));
  return Object.fromEntries(Object.entries(values).map(([name, value]) => {
    if (value === null || asTheyAre.includes(name)) return [name, value];
    const form = typeof value === "object" && !Array.isArray(value);
    return [name, form ? { ...value, stages: perStage(name, value.stages) } : perStage(name, value)];
  }));
}

/** Return the duration of each event, times the plan's chunks and slices. */
export function durationsOf(plan, costs) {
  const events = eventsOf(plan);
  return Float64Array.from(events.firstRows, (row) => durationOf(plan, costs, row));
}

/** Return the duration of one instruction, times the plan's chunks and slices. */
export function durationOf(plan, costs, row) {
  const { layout, tables } = plan;
  const op = tables.ops[plan.op[row]];
  if (!op.costs.length) return 0;
  const stage = plan.stage[row], unit = plan.unit[row];
  if (op.loan) {
    const ends = [plan.rank[row], plan.peer[row]];
    return costs.loan(stage, unit, ...(op.message === "send" ? ends : ends.reverse()));
  }
  if (op.message) {
    let of = op.between_inputs ? layout.stageBefore(stage, unit) : stage;
    if (op.fields.includes("skip")) of = Object.fromEntries(layout.skips)[plan.value("skip", row)][0];
    const ends = [plan.rank[row], plan.peer[row]];
    return costs.message(of, unit, ...(op.message === "send" ? ends : ends.reverse()));
  }
  const added = (names, s, u) => names.reduce((sum, name) => sum + costs.ofUnit(name, s, u), 0);
  if (op.name === "Overlap") {
    const sides = [["Fwd", plan.value("forward", row)], ["Bwd", plan.value("backward", row)]].map(([name, at]) => {
      const side = tables.ops[tables.code[name]];
      return [added(side.costs, ...at), added(side.exchanges, ...at)];
    });
    const [[forward, forwardExchange], [backward, backwardExchange]] = sides;
    return forward + backward + Math.max(forwardExchange - backward, backwardExchange - forward, 0);
  }
  if (op.computes) return added([...op.costs, ...op.exchanges], stage, unit);
  if (op.host_copy) {
    const { host_latency: latency, host_bandwidth: bandwidth } = costs.values;
    return latency * costs.parts + costs.ofUnit("activation", stage, unit) / (bandwidth ?? Infinity);
  }
  const once = (s) => op.costs.reduce((sum, name) => sum + costs.ofStage(name, s), 0);
  if (op.on_bucket) return share(plan, costs, stage, plan.column("bucket")[row]) * once(stage);
  if (op.whole_mesh) return Math.max(...layout.heldBy.map((held) => held.reduce((sum, s) => sum + once(s), 0)));
  if (op.fields.includes("stages")) return plan.value("stages", row).reduce((sum, s) => sum + once(s), 0);
  return once(stage);
}

function share(plan, costs, stage, bucket) {
  const dense = plan.head.buckets_per_stage;
  const experts = plan.layout.mesh.ep > 1 ? costs.experts(stage) : 0;
  return bucket === dense ? experts : (1 - experts) / dense;
}

/**
 * Times of all rows of a plan, as `plan.simulate(costs)` has them. If the plan cannot finish: null, or with `partial`
 * a run whose `stuck` rows never begin; they are placed behind those before them on their rank, to be seen.
 */
export function simulate(plan, values = {}, partial = false) {
  const costs = new Costs(plan, values);
  const events = eventsOf(plan);
  const durations = durationsOf(plan, costs);
  const broken = plan.stage[events.firstRows[durations.findIndex((time) => !(time >= 0))]];
  if (broken >= 0 && broken < plan.layout.stages) throw new Error(`a cost of stage ${broken} is missing, below 0 or no number`);
  const { run } = runEarly(plan, costs, graphOf(plan, "channel"), durations);
  if (!run.finished && !partial) return null;
  const stuck = run.finished ? null : placeStuck(events, run, durations);
  const { parts } = plan;
  const start = Float64Array.from(events.of, (event) => run.start[event] / parts);
  const end = Float64Array.from(events.of, (event) => run.end[event] / parts);
  return runOf(plan, start, end, null, { costs, stuck, unit: costs.values.unit, name: "planned" });
}

/** Return a run of a plan with the figures that follow from its times. */
export function runOf(plan, start, end, wait, about) {
  const busy = new Float64Array(plan.ranks);
  let makespan = 0;
  for (let row = 0; row < plan.length; row++) {
    if (end[row] > makespan) makespan = end[row];
    if (plan.tables.computes[plan.op[row]]) busy[plan.rank[row]] += end[row] - start[row] - (wait ? wait[row] : 0);
  }
  const total = busy.reduce((one, other) => one + other, 0);
  return { plan, start, end, wait, busy, makespan, bubble: makespan ? 1 - total / (busy.length * makespan) : 0, ...about };
}

/** Place the events that never begin behind the last one of their rank; returns their rows. */
function placeStuck(events, run, durations) {
  const { plan } = events;
  const stuck = new Set(), ends = new Float64Array(plan.ranks);
  for (let row = 0; row < plan.length; row++) {
    const event = events.of[row], rank = plan.rank[row];
    if (run.waiting[event] > 0) {
      stuck.add(row);
      run.start[event] = Math.max(run.start[event], ends[rank]);
      run.end[event] = run.start[event] + durations[event];
    }
    ends[rank] = Math.max(ends[rank], run.end[event]);
  }
  return stuck;
}

/** Call `visit(row, stage, number, kind, made, size)` for each activation that a row makes or takes. */
function eachActivation(plan, costs, visit) {
  const flows = flowsOf(plan);
  const { tables } = plan;
  const kinds = Object.entries({ ...tables.held, ...tables.held_for_others });
  if (plan.schedule.slices > 1) kinds.push(["KEYS", "keys"]);
  const names = new Map(kinds.map(([kind, name]) => [tables.kind[kind], name]));
  for (const [uses, made] of [[flows.PRODUCES, true], [flows.CONSUMES, false]]) {
    const rows = uses.rows.array, places = uses.places.array;
    for (let i = 0; i < rows.length; i++) {
      const key = flows.key(places[i]);
      const kind = flows.kindOf(key);
      const name = names.get(kind);
      if (name === undefined) continue;
      const offset = key - flows.firsts[kind], count = flows.counts[kind];
      const stage = Math.floor(offset / count), number = offset % count, { slices } = plan.schedule;
      if (name === "keys" && number % slices) continue;
      const size = name === "keys" ? costs.ofMicrobatch(name, stage, number / slices) : costs.ofUnit(name, stage, number);
      visit(rows[i], tables.kinds[kind], made, size);
    }
  }
}

/** Return each rank's peak of activations in program order, in microbatches of a whole rank. */
export function peakActivations(plan, costs) {
  const [net, made, held, lent] = range(4).map(() => new Float64Array(plan.length));
  const before = new Int32Array(plan.length);
  for (let k = 0; k < plan.ranks; k++) {
    for (let row = plan.first[k], latest = -1; row < plan.first[k + 1]; row++) {
      before[row] = latest < 0 ? row : latest;
      if (plan.tables.computes[plan.op[row]]) latest = row;
    }
  }
  eachActivation(plan, costs, (row, kind, produced, size) => {
    const other = kind in plan.tables.held_for_others; // held for another rank, from the computation before on
    if (other) held[produced ? before[row] : row] += produced ? size : -size;
    else net[row] += produced ? size : -size;
    if (produced) (other ? lent : made)[other ? before[row] : row] += size;
  });
  const peaks = new Float64Array(plan.ranks);
  for (let k = 0; k < plan.ranks; k++) {
    let now = 0;
    for (let row = plan.first[k]; row < plan.first[k + 1]; row++) {
      const most = lent[row] + (plan.is(row, "Overlap") ? made[row] : Math.max(net[row], 0));
      peaks[k] = Math.max(peaks[k], (now + most) / plan.parts);
      now += net[row] + held[row];
    }
  }
  return peaks;
}

/** Return the peak of a run's fullest rank; 0 before its memory is known. */
export function peakOf({ held }) { return (held ?? []).reduce((most, { peak }) => Math.max(most, peak), 0); }

/** Return for each rank the activations held over time: `amounts[i]` from `times[i]` on, and the peak. */
export function heldOverTime(run) {
  const { plan, costs, start, end, makespan } = run;
  const peaks = peakActivations(plan, costs);
  const changes = Array.from({ length: plan.ranks }, () => []);
  eachActivation(plan, costs, (row, kind, made, size) => {
    const at = made && kind !== "PENDING" ? start[row] : end[row]; // the rest of an input half replaces it at its end
    changes[plan.rank[row]].push({ at, size: made ? size : -size, place: 2 * row + (made ? 1 : 0) });
  });
  return changes.map((mine, rank) => {
    mine.sort((one, other) => one.at - other.at || one.place - other.place);
    const times = new Float64Array(mine.length + 1), amounts = new Float64Array(mine.length + 1);
    let now = 0, last = 0;
    for (const { at, size } of mine) {
      now += size;
      if (at - times[last] > makespan * 1e-9) times[++last] = at;
      amounts[last] = now / plan.parts;
    }
    return { times: times.subarray(0, last + 1), amounts: amounts.subarray(0, last + 1), peak: peaks[rank] };
  });
}
