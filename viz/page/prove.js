/** Verdict on a plan: well-formed, complete, data flow, channels, collectives, and deadlock under each profile. */
import { flowsOf } from "./dataflow.js";
import { eventsOf, graphOf, stretches } from "./graph.js";
import { Costs, peakActivations } from "./times.js";

const MOST_FINDINGS = 10;

/**
 * Judge a plan as `plan.check()` does: `faults` lists [point, sentence, row], `profiles` says for each transport
 * whether the plan is free of deadlock, `cycles` has the rows of the waits that close a circle.
 */
export function judge(plan) {
  const malformed = malformations(plan);
  if (malformed.length) return { faults: malformed, profiles: {}, cycles: {}, sound: () => false, peaks: [] };
  const faults = [...incomplete(plan), ...brokenFlow(plan), ...brokenChannels(plan), ...brokenCollectives(plan)];
  const profiles = {}, cycles = {};
  if (!faults.some(([point]) => point === "channels" || point === "collectives")) {
    for (const { name } of plan.tables.profiles) {
      const graph = graphOf(plan, name, true);
      const run = graph.run();
      profiles[name] = run.finished;
      if (!run.finished) cycles[name] = stretches(graph.events, graph.cycle(run.waiting));
    }
  }
  const peaks = peakActivations(plan, new Costs(plan, {}));
  return { faults, profiles, cycles, peaks, sound: (profile = "channel") => !faults.length && profiles[profile] === true };
}

/** Rows that never begin where a channel's host issues its program in order. */
export function neverBegin(plan) {
  const graph = graphOf(plan, "channel", true), { waiting } = graph.run();
  return new Set([...graph.events.of.keys()].filter((row) => waiting[graph.events.of[row]] > 0));
}

/** Judge a bare order of computation that cannot run: the verdict has the circle of its computations alone. */
export function judgeOrder(plan) {
  const graph = graphOf(plan, "channel");
  const cycle = stretches(graph.events, graph.cycle(graph.run().waiting));
  const profiles = Object.fromEntries(plan.tables.profiles.map(({ name }) => [name, false]));
  return { faults: [["deadlock", "the order of computation itself cannot run", null]], profiles, cycles: { channel: cycle }, sound: () => false, peaks: [] };
}

const named = (plan, row) => `rank ${plan.rank[row]} instruction ${plan.index(row)}, ${plan.text(row)}`;

/** Return the words of a cycle, one line per rank's part of it. */
export function describeCycle(plan, cycle) {
  return cycle.map(([here, there, rank]) => {
    const at = (row) => `${plan.index(row)} ${plan.text(row)}${plan.rank[row] === rank ? "" : ` of rank ${plan.rank[row]}`}`;
    return `rank ${rank}: ${at(here)} must end before ${at(there)} can begin`;
  });
}

/** Return the instructions of a plan that name what it does not have. */
export function malformations(plan) {
  const found = [];
  for (let row = 0; row < plan.length && found.length < MOST_FINDINGS; row++) {
    const fault = rowFault(plan, row);
    if (fault) found.push(["well-formed", `${named(plan, row)}: ${fault}`, row]);
  }
  return found;
}

function rowFault(plan, row) {
  const { layout, tables } = plan;
  const op = tables.ops[plan.op[row]], rank = plan.rank[row], stage = plan.stage[row], unit = plan.unit[row];
  const stageFault = (s, on = rank) => s < 0 || s >= layout.stages ? `stage ${s} is out of range`
    : layout.holders[s] !== on ? `stage ${s} is on rank ${layout.holders[s]}, not on rank ${on}` : null;
  const unitFault = (s, u, on = rank) => stageFault(s, on) ?? (u < 0 || u >= layout.units ? `microbatch ${u} is out of range`
    : layout.visits(s, u) ? null : `the route of microbatch ${u} does not visit stage ${s}`);
  const zero = op.zero_stages && !op.zero_stages.includes(layout.zero.stage) ? "it has no place under this ZeRO stage" : null;
  if (op.name === "Overlap") {
    const sides = [plan.value("forward", row), plan.value("backward", row)];
    if (!layout.trains) return "there is no backward in a plan that only computes forward";
    if (sides[0].join() === sides[1].join()) return "its two sides are one microbatch of one stage";
    return unitFault(...sides[0]) ?? unitFault(...sides[1]);
  }
  if (op.loan) return loanFault(plan, row, unitFault);
  if (op.message) {
    const fault = unitFault(stage, unit);
    if (fault) return fault;
    if (plan.peer[row] === rank) return `its peer is rank ${rank} itself`;
    const skip = op.fields.includes("skip") ? plan.value("skip", row) : null;
    if (skip !== null && !(skip in layout.skipNumber)) return `the plan has no skip ${skip}`;
    const expected = layout.peerOf(op.name, stage, unit, skip, plan.peer[row]);
    if (expected < 0) return "the route begins or ends here";
    return plan.peer[row] === expected ? null : `peer ${plan.peer[row]} does not hold the other stage; rank ${expected} does`;
  }
  if (op.host_copy) return unitFault(stage, unit) ?? (layout.recomputing[stage * layout.units + unit] ? `stage ${stage} is recomputed` : null);
  if (op.computes) return unitFault(stage, unit);
  if (op.on_bucket) {
    const bucket = layout.buckets.find(([number]) => number === plan.column("bucket")[row]);
    const axes = plan.value("axes", row);
    return stageFault(stage) ?? zero ?? (bucket ? null : "the bucket is out of range") ??
      (axes.length && axes.join() === bucket[1].join() ? null : "the axes must be those of the replicas") ??
      (op.fields.includes("part") && !(plan.column("part")[row] >= 0 && plan.column("part")[row] < layout.numReductions[stage])
        ? "the part is out of range" : null);
  }
  if (op.name === "GatherParams" || op.name === "FreeParams") return stageFault(stage) ?? zero;
  if (op.name === "SyncTied") {
    const stages = plan.value("stages", row);
    const tie = layout.ties.some(({ params, stages: tied }) => params === plan.value("params", row) && tied.join() === stages.join());
    return tie ? (stages.some((s) => layout.holders[s] === rank) ? null : `rank ${rank} holds none of these stages`)
      : "the plan ties no such weight over these stages";
  }
  if (op.name === "OptStep") {
    const stages = plan.value("stages", row);
    if (new Set(stages).size !== stages.length) return "a stage is named twice";
    return stages.map((s) => stageFault(s)).find((fault) => fault) ?? null;
  }
  return null;
}

/** Lent activations go from the rank of their stage to one other, and back. */
function loanFault(plan, row, unitFault) {
  const { layout, tables } = plan, rank = plan.rank[row], stage = plan.stage[row], unit = plan.unit[row];
  if (stage < 0 || stage >= layout.stages) return `stage ${stage} is out of range`;
  const own = layout.holders[stage], lends = ["LendAct", "ReclaimAct"].includes(tables.ops[plan.op[row]].name);
  const fault = unitFault(stage, unit, lends ? rank : own);
  if (fault) return fault;
  if (layout.recomputing[stage * layout.units + unit]) return `stage ${stage} is recomputed`;
  const holder = layout.lentTo[stage * layout.units + unit];
  if (holder < 0 || holder >= layout.ranks || holder === own) return `rank ${own} lends these activations to no other rank`;
  const [here, there] = lends ? [own, holder] : [holder, own];
  return rank === here && plan.peer[row] === there ? null : `rank ${own} lends these activations to rank ${holder}`;
}

/** Each microbatch once forward, and once backward (whole or in halves), on each of its stages. */
function incomplete(plan) {
  const { layout, apart, tables } = plan;
  const { stages, units } = layout;
  const times = Object.fromEntries(["Fwd", "Bwd", "BwdInput", "BwdWeight", "Recompute"].map((name) =>
    [name, new Int32Array(stages * units)]));
  for (let row = 0; row < apart.length; row++) {
    const counted = times[tables.ops[apart.op[row]].name];
    if (counted) counted[apart.stage[row] * units + apart.unit[row]]++;
  }
  const found = [];
  const expect = (name, cell, count, owed) => {
    if (count === owed) return;
    const stage = Math.floor(cell / units), rank = layout.holders[stage];
    const often = owed ? "once" : "never";
    found.push(["complete", `rank ${rank} runs ${name}(stage=${stage}, microbatch=${cell % units}) ${count} times instead of ${often}`, null]);
  };
  for (let cell = 0; cell < stages * units; cell++) {
    const stage = Math.floor(cell / units);
    const owed = layout.visits(stage, cell % units) ? 1 : 0, trained = layout.trains ? owed : 0;
    const whole = times.Bwd[cell], input = times.BwdInput[cell], weight = times.BwdWeight[cell];
    const halves = input > 0 || weight > 0;
    expect("Fwd", cell, times.Fwd[cell], owed);
    expect("Bwd", cell, halves ? whole + Math.min(input, weight) : whole, trained);
    expect("BwdInput", cell, input, halves ? trained : 0);
    expect("BwdWeight", cell, weight, halves ? trained : 0);
    expect("Recompute", cell, times.Recompute[cell], layout.recomputing[cell] ? trained : 0);
  }
  return found;
}

/** Every value is produced once, before its uses on the rank, and consumed; none is left over. */
function brokenFlow(plan) {
  const flows = flowsOf(plan);
  const { makers, takers } = flows;
  const ambient = new Set(plan.tables.ambient.map((kind) => plan.tables.kind[kind]));
  const found = [];
  const fault = (row, words) => found.push(["data flow", `${named(plan, row)} ${words}`, row]);
  const rows = flows.PRODUCES.rows.array, places = flows.PRODUCES.places.array;
  for (let i = 0; i < rows.length; i++) {
    if (makers[places[i]] !== rows[i]) fault(rows[i], `makes ${flows.words(places[i])} a second time`);
    if (takers[places[i]] < 0 && !ambient.has(flows.kindOf(flows.key(places[i])))) {
      fault(rows[i], `makes ${flows.words(places[i])}, and nothing on its rank takes it`);
    }
  }
  for (const uses of [flows.CONSUMES, flows.READS, flows.FOLLOWS]) {
    const users = uses.rows.array, used = uses.places.array;
    for (let i = 0; i < users.length; i++) {
      const made = makers[used[i]], taken = takers[used[i]], row = users[i];
      if (made < 0) fault(row, `needs ${flows.words(used[i])}, which nothing on its rank makes`);
      else if (made >= row) fault(row, `needs ${flows.words(used[i])}, made only later, by ${plan.text(made)}`);
      else if (taken >= 0 && taken < row) fault(row, `needs ${flows.words(used[i])}, which ${plan.text(taken)} has already taken`);
    }
  }
  return found;
}

/** Keys of the value that each message carries: consumed by a send, produced by its receive; of loans, what is held. */
function carried(plan) {
  const { tables } = plan, flows = flowsOf(plan), found = new Int32Array(plan.length).fill(-1);
  for (const uses of [flows.PRODUCES, flows.CONSUMES]) {
    uses.rows.array.forEach((row, i) => (found[row] = flows.key(uses.places.array[i])));
  }
  for (let row = 0; row < plan.length; row++) {
    if (tables.ops[plan.op[row]].loan) found[row] = flows.firsts[tables.kind.LENT] + plan.stage[row] * plan.layout.units + plan.unit[row];
  }
  return found;
}

/** The k-th send of a channel carries the value that its k-th receive expects. */
function brokenChannels(plan) {
  const keys = carried(plan), flows = flowsOf(plan), found = [];
  for (const { source, destination, sends, receives } of eventsOf(plan).channels) {
    const both = Math.min(sends.length, receives.length);
    for (let k = 0; k < both; k++) {
      if (keys[sends[k]] === keys[receives[k]]) continue;
      found.push(["channels", `channel ${source}→${destination}, message ${k}: ${named(plan, sends[k])} sends ` +
        `${flows.words(keys[sends[k]])}, but ${named(plan, receives[k])} expects ${flows.words(keys[receives[k]])}`, receives[k]]);
      break;
    }
    if (sends.length !== receives.length) {
      const lonely = (sends.length > receives.length ? sends : receives)[both];
      found.push(["channels", `channel ${source}→${destination}: ${sends.length} sends but ${receives.length} receives; ` +
        `no partner for ${named(plan, lonely)}`, lonely]);
    }
  }
  return found;
}

/** All members of a group of pipeline ranks issue the same collectives in the same order. */
function brokenCollectives(plan) {
  const found = [];
  for (const { members, issued } of eventsOf(plan).groups) {
    const names = members.map((rank) => (issued.get(rank) ?? []).map((row) => plan.text(row)).join(", "));
    members.forEach((rank, at) => {
      if (names[at] !== names[0]) {
        found.push(["collectives", `rank ${rank} issues ${names[at] || "nothing"}, but rank ${members[0]} issues ` +
          `${names[0] || "nothing"}`, issued.get(rank)?.[0] ?? null]);
      }
    });
  }
  return found;
}
