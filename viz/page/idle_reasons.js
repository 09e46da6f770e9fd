/**
 * Idle time: why a rank stands still, and what everything waits for; a twin of the planner's `simulation.idle_time`.
 *
 *     rank 0  [F0][F1]          [B0]      the gap ends when B0 can begin: the chain of events without slack
 *     rank 1      [F0][ B0 ]╱             behind it leads to B0 of rank 1, which is therefore named
 */
import { runEarly } from "./early_reductions.js";
import { flowsOf } from "./dataflow.js";
import { graphOf, group, itemsOf } from "./graph.js";
import { lasting, number } from "./numbers.js";
import { durationsOf, heldOverTime } from "./times.js";

/** What each event of a timed plan waits for. */
export class Waits {
  constructor(run) {
    this.run = run;
    this.plan = run.plan;
    const graph = graphOf(run.plan, "channel");
    this.events = graph.events;
    this.durations = durationsOf(run.plan, run.costs);
    const { run: times, timed } = runEarly(run.plan, run.costs, graph, this.durations);
    Object.assign(this, { times, graph: timed.graph, parts: timed.of });
    this.slack = run.makespan * run.plan.parts * 1e-9;
    this.position = new Int32Array(this.graph.count);
    this.times.order.forEach((event, at) => (this.position[event] = at));
    this.gapLists = new Map();
  }

  /** Events before (or after) an event, those first that ended last (or begin first). */
  #neighbours(event, lists, time) {
    const found = [...itemsOf(lists, event)].map((node) => (node < this.events.count ? node : this.parts[node - this.events.count]));
    return [...new Set(found)].sort((a, b) => time[a] - time[b] || this.position[a] - this.position[b]);
  }

  before(event) { return this.#neighbours(event, this.graph.before, this.times.end).reverse(); }
  after(event) { return this.#neighbours(event, this.graph.after, this.times.start); }

  /** Events before this one that end exactly when it begins. */
  tight(event) { return this.before(event).filter((other) => this.times.end[other] >= this.times.start[event] - this.slack); }

  /** The longest chain: from the event that ends last back to one without predecessors; those that take time. */
  criticalPath() { return this.chain(this.#lastEvent()); }

  #lastEvent() {
    const { end } = this.times;
    return end.indexOf(end.reduce((one, other) => Math.max(one, other), 0));
  }

  /** Events without slack that lead to this one, the latest first, it included; those that take time. */
  chain(event) {
    const path = [];
    for (let at = event; at !== undefined; at = this.before(at)[0]) if (this.durations[at] > 0) path.push(at);
    return path;
  }

  #ranksOf(event) {
    return Array.from(itemsOf(this.events.members, event), (row) => this.plan.rank[row]);
  }

  #isMessage(event) { return this.plan.tables.ops[this.plan.op[this.events.firstRows[event]]].message !== null; }

  #isCollective(event) {
    return this.events.group[this.events.firstRows[event]] >= 0 ||
      this.plan.tables.replicas[this.plan.op[this.events.firstRows[event]]] === 1;
  }

  /** Gaps of a rank: where it neither computes nor runs another instruction that takes time. */
  gaps(rank) {
    if (this.gapLists.has(rank)) return this.gapLists.get(rank);
    const { plan, run } = this;
    const rows = [];
    for (let row = plan.first[rank]; row < plan.first[rank + 1]; row++) {
      const { message, host_copy: copy } = plan.tables.ops[plan.op[row]];
      if (!message && !copy && run.end[row] > run.start[row]) rows.push(row);
    }
    rows.sort((a, b) => run.start[a] - run.start[b]);
    const found = [], least = run.makespan * 1e-9;
    let until = 0, last = -1;
    for (const row of rows) {
      if (run.start[row] > until + least) found.push({ rank, start: until, end: run.start[row], before: last, row });
      if (run.end[row] > until) [until, last] = [run.end[row], row];
    }
    if (run.makespan > until + least) found.push({ rank, start: until, end: run.makespan, before: last, row: -1 });
    this.gapLists.set(rank, found);
    return found;
  }

  /**
   * Explain a gap: `cause`, one `sentence`, the event at its `end` (for `chain`), the `culprits`: the last
   * computations of other ranks on the chains without slack (several if they end together), and the `last` events.
   */
  explain(gap) {
    const { plan, run } = this;
    if (gap.row < 0) return this.#explainTail(gap);
    const target = this.events.of[gap.row];
    const { culprits, last, messages, collective } = this.#behind(target, gap.rank);
    const ready = this.#ready(gap);
    const cause = this.#cause(gap, culprits, messages, collective, ready);
    const rows = culprits.map((event) => this.events.firstRows[event]);
    const what = rows.length ? rows.slice(0, 3).map((row) => this.name(row)).join(" and ") : "its own earlier work";
    const wire = messages.length ? `, then for its message (${number(this.durations[messages[0]] / plan.parts)} on the wire)` : "";
    const sentence = `Rank ${gap.rank} waits ${lasting(gap.end - gap.start, run.unit)} before ` +
      `${this.name(gap.row)} for ${what}${wire}: ${plan.tables.causes[cause].meaning}${ready ? this.#readyWords(gap, ready) : ""}.`;
    return { cause, sentence, culprits, last, messages, ready, end: target };
  }

  /**
   * Walk back through all chains without slack: `culprits` are the first computations of other ranks on them, `last`
   * the first events that take time, messages included.
   */
  #behind(target, rank) {
    const culprits = new Set(), last = new Set();
    let collective = this.#isCollective(target);
    const walk = (stops) => {
      const seen = new Set([target]), stack = [target];
      while (stack.length) {
        for (const event of this.tight(stack.pop())) {
          if (seen.has(event)) continue;
          seen.add(event);
          const takesTime = this.durations[event] > 0, message = this.#isMessage(event);
          collective ||= takesTime && this.#isCollective(event);
          if (takesTime && stops(event, message)) continue;
          stack.push(event);
        }
      }
    };
    walk((event, message) => !message && !this.#ranksOf(event).includes(rank) && culprits.add(event));
    walk((event, message) => (message || !this.#ranksOf(event).includes(rank)) && last.add(event));
    return { culprits: [...culprits], last: [...last], messages: [...last].filter((e) => this.#isMessage(e)), collective };
  }

  #cause(gap, culprits, messages, collective, ready) {
    const { plan } = this;
    if (collective && !plan.tables.computes[plan.op[gap.row]]) return "collective";
    const half = (gap.end - gap.start) * plan.parts / 2;
    if (messages.some((event) => this.durations[event] >= half)) return "message";
    if (this.#phase(gap) === "warm-up") return "warm-up";
    if (this.#phase(gap) === "cool-down") return "cool-down";
    if (ready) return ready.over ? "cap" : "order";
    const mine = this.durations[this.events.of[gap.before]] ?? 0;
    if (culprits.some((event) => this.durations[event] > mine + this.slack)) return "imbalance";
    return messages.length ? "message" : "imbalance";
  }

  /** Whether a rank has begun no backward before a gap, or has no forward left after it. */
  #phase(gap) {
    const { plan } = this, { ops, code: { Fwd, Overlap } } = plan.tables;
    this.phases ??= Array.from({ length: plan.ranks }, (_, rank) => {
      const begin = plan.first[rank], mine = plan.op.subarray(begin, plan.first[rank + 1]);
      const backward = mine.findIndex((op) => ops[op].begins_backward || op === Overlap);
      return { backward: backward < 0 ? plan.length : begin + backward, forward: begin + mine.findLastIndex((op) => op === Fwd || op === Overlap) };
    });
    const { backward, forward } = this.phases[gap.rank];
    if (gap.row <= backward) return "warm-up";
    return gap.row > forward ? "cool-down" : "steady";
  }

  /** A later computation of the rank whose inputs were there early in the gap, if there is one. */
  #ready(gap) {
    const { plan } = this;
    if (!plan.tables.computes[plan.op[gap.row]]) return null;
    let seen = 0;
    for (let row = gap.row + 1; row < plan.first[gap.rank + 1] && seen < 64; row++) {
      if (!plan.tables.computes[plan.op[row]]) continue;
      seen++;
      const since = this.#inputsAt(row);
      if (since <= (gap.start + gap.end) / 2) return { row, since, over: this.#overCap(gap, row) };
    }
    return null;
  }

  /** When everything that a row takes is there. */
  #inputsAt(row) {
    const { plan, run } = this;
    const flows = flowsOf(plan);
    this.takes ??= [flows.CONSUMES, flows.READS].map((uses) => ({ places: uses.places.array, ...group(uses.rows.array, plan.length) }));
    let latest = 0;
    for (const { starts, items, places } of this.takes) {
      for (let i = starts[row]; i < starts[row + 1]; i++) {
        const maker = flows.makers[places[items[i]]];
        if (maker >= 0) latest = Math.max(latest, run.end[maker]);
      }
    }
    return latest;
  }

  /** Whether a forward in this gap would hold more than the cap until its own place comes. */
  #overCap(gap, row) {
    const { plan, run } = this;
    if (!plan.is(row, "Fwd") || (run.cap ?? null) === null) return false;
    this.held ??= heldOverTime(run);
    const { times, amounts } = this.held[gap.rank];
    let most = 0;
    for (let at = 0; at < times.length && times[at] < run.start[row]; at++) {
      if ((times[at + 1] ?? Infinity) > gap.start) most = Math.max(most, amounts[at]);
    }
    return most + run.costs.ofUnit("activation", plan.stage[row], plan.unit[row]) / plan.parts > run.cap + 1e-9;
  }

  #readyWords(gap, ready) {
    const late = ready.over ? "held back by the cap" : "which the order runs later";
    return `; ${this.name(ready.row)} was ready, ${late}`;
  }

  #explainTail(gap) {
    const { plan, run } = this;
    const last = this.#lastEvent();
    const row = this.events.firstRows[last];
    const cause = this.#isCollective(last) ? "collective" : "cool-down";
    const sentence = `Rank ${gap.rank} has nothing left to do for ${lasting(gap.end - gap.start, run.unit)}: ` +
      `the step ends with ${this.name(row)}, and ${plan.tables.causes[cause].meaning}.`;
    return { cause, sentence, culprits: [last], last: [last], messages: [], ready: null, end: last };
  }

  name(row) {
    const { plan } = this;
    const several = plan.layout.stages > plan.ranks && plan.stage[row] >= 0 ? ` of stage ${plan.stage[row]}` : "";
    return `${plan.short(row) || plan.name(row)}${several} on rank ${plan.rank[row]}`;
  }
}
