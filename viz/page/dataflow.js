/**
 * Data flow: the values that each instruction consumes, reads and produces, by the planner's table of terms.
 *
 *     Fwd   CONSUMES the OUTPUT of the stage BEFORE, of its UNIT;   PRODUCES its OWN OUTPUT where it is NOT_LAST
 *
 * A place is a (value, rank) pair: the value's key on the rank that holds its stage, the key plus `size` elsewhere.
 */
import { range } from "./layout.js";

/** List of integers that grows. */
export class Ints {
  constructor(room = 1024) {
    this.values = new Int32Array(room);
    this.length = 0;
  }

  push(value) {
    if (this.length === this.values.length) {
      const larger = new Int32Array(this.length * 2);
      larger.set(this.values);
      this.values = larger;
    }
    this.values[this.length++] = value;
  }

  get array() { return this.values.subarray(0, this.length); }
}

function usesOf(room) { return { rows: new Ints(room), places: new Ints(room) }; }

const OF_PLAN = {
  STEPS_SHARDS: (layout) => layout.zero.stage === 1 || layout.zero.stage === 2,
  SHARDS_GRADIENTS: (layout) => layout.zero.stage >= 2,
  SHARDS_WEIGHTS: (layout) => layout.zero.stage >= 3,
};

const OF_CELL = {
  NOT_LAST: (l, s, u) => l.stageAfter(s, u) >= 0,
  HAS_LOSS: (l, s, u) => l.hasLoss(s, u),
  KEEPS: (l, s, u) => l.trains && !l.recomputing[s * l.units + u],
  RECOMPUTES: (l, s, u) => l.trains && l.recomputing[s * l.units + u] === 1,
  STAYS: (l, s, u) => !l.fetched[s * l.units + u],
  FETCHED: (l, s, u) => l.fetched[s * l.units + u] === 1,
  HAS_EARLIER: (l, s, u) => u % l.slices > 0,
  HAS_LATER: (l, s, u) => u % l.slices < l.slices - 1,
};

/** Stages whose values a term means, beside its OWN. */
const OF_WHOSE = {
  BEFORE: ({ layout }, row, s, u) => [layout.stageBefore(s, u)].filter((stage) => stage >= 0),
  HELD: ({ layout, plan }, row) => layout.heldBy[plan.rank[row]],
  NAMED: ({ layout, plan }, row) => plan.value("stages", row).filter((stage) => layout.holders[stage] === plan.rank[row]),
};

/** Numbers of the values of a stage that a term means, beside its UNIT. */
const OF_WHICH = {
  EVERY_UNIT: ({ layout }, row, s) => layout.unitsOf[s],
  EARLIER: (_, row, s, u) => [u - 1],
  GATHERING: ({ gatherings }, row, s, u, at) => [gatherings ? gatherings[at] : 0],
  BUCKET: ({ plan, layout }, row) => [Math.max(plan.column("part")[row], 0) * layout.buckets.length + plan.column("bucket")[row]],
  TIE: ({ plan, layout }, row) => [layout.ties.findLast(({ params }) => params === plan.value("params", row))?.number ?? 0],
  REDUCTION_BEFORE: ({ layout }, row, s, u) => reducedBy(layout, layout.reductionOf[s * layout.units + u] - 1),
  EVERY_BUCKET: ({ layout }) => layout.reducedBuckets,
  EVERY_REDUCTION: ({ layout }, row, s) => range(layout.numReductions[s]).flatMap((number) => reducedBy(layout, number)),
  EVERY_TIE: ({ layout }, row, s) => layout.tiesOf[s].map(({ number }) => number),
  REDUCED_UNITS: ({ plan, layout }, row, s) =>
    layout.unitsOf[s].filter((u) => layout.reductionOf[s * layout.units + u] === plan.column("part")[row]),
};

/** Buckets of a stage's reduction, numbered over all of them; none before the first. */
function reducedBy({ reducedBuckets, buckets }, number) {
  return number < 0 ? [] : reducedBuckets.map((bucket) => number * buckets.length + bucket);
}

/** Return the data flow of all instructions of a well-formed plan. */
export function flowsOf(plan) { return plan.once("flows", () => new Flows(plan)); }

class Flows {
  constructor(plan) {
    const { layout, tables, apart } = plan;
    Object.assign(this, { plan, layout, tables });
    this.gatherings = layout.zero.stage >= 3 ? gatheringsOf(plan) : null;
    this.#number();
    const room = apart.length * 2 + 16;
    this.CONSUMES = usesOf(room);
    this.READS = usesOf(room);
    this.PRODUCES = usesOf(room);
    this.FOLLOWS = usesOf(64);
    const rules = tables.rules.map((terms) => terms.map((term) => this.#compile(term)).filter((term) => term));
    for (let at = 0; at < apart.length; at++) {
      const row = apart.origin ? apart.origin[at] : at;
      for (const term of rules[apart.op[at]]) this.#evaluate(term, row, apart.stage[at], apart.unit[at], at);
    }
  }

  /** Number the values: kind after kind, stage after stage. */
  #number() {
    const { layout, tables } = this;
    const most = this.gatherings ? this.gatherings.reduce((one, other) => Math.max(one, other), 0) : 0;
    const buckets = layout.buckets.length;
    const counts = Object.fromEntries(tables.kinds.map((kind) => [kind, layout.units]));
    counts.METRICS = counts.NORM = layout.ranks;
    counts.REDUCED = buckets * layout.mostReductions;
    counts.TIED = layout.ties.reduce((one, tie) => Math.max(one, tie.number), 0) + 1;
    counts.PARAMS = most + 1;
    counts.STEPPED = buckets;
    counts.SKIP = counts.SKIP_GRAD = layout.units * layout.skips.length;
    this.counts = tables.kinds.map((kind) => counts[kind]);
    this.firsts = [0];
    tables.kinds.forEach((kind, number) => {
      const size = tables.ambient.includes(kind) ? counts[kind] : counts[kind] * layout.stages;
      this.firsts.push(this.firsts[number] + size);
    });
    this.size = this.firsts.at(-1);
    this.travelling = this.firsts[tables.travels.length];
    this.numPlaces = this.size + this.travelling;
  }

  /** Resolve what of a term does not depend on the row; null if it never holds in this plan. */
  #compile([role, kind, whose, which, when]) {
    if (when in OF_PLAN && !OF_PLAN[when](this.layout)) return null;
    const number = this.tables.kind[kind];
    const skips = kind === "SKIP" || kind === "SKIP_GRAD";
    if (skips && !this.layout.skips.length) return null;
    const travels = number < this.tables.travels.length;
    return { uses: this[role], kind: number, whose, which, cell: OF_CELL[when] ?? null, skips, travels, gradients: kind === "SKIP_GRAD" };
  }

  #emit(term, row, stage, number) {
    let place = this.firsts[term.kind] + stage * this.counts[term.kind] + number;
    if (term.travels && this.layout.holders[stage] !== this.plan.rank[row]) place += this.size;
    term.uses.rows.push(row);
    term.uses.places.push(place);
  }

  #evaluate(term, row, stage, unit, at) {
    if (term.skips) this.#skips(term, row, stage, unit);
    else if (term.whose === "RANK") this.#emit(term, row, 0, this.plan.rank[row]);
    else if (term.whose === "OWN") this.#select(term, row, stage, unit, at);
    else for (const other of OF_WHOSE[term.whose](this, row, stage, unit)) this.#select(term, row, other, unit, at);
  }

  #select(term, row, stage, unit, at) {
    const { layout } = this, { cell, which } = term;
    if (cell && which !== "EVERY_UNIT" && !cell(layout, stage, unit)) return;
    if (which === "UNIT") this.#emit(term, row, stage, unit);
    else for (const number of OF_WHICH[which](this, row, stage, unit, at)) {
      if (!cell || which !== "EVERY_UNIT" || cell(layout, stage, number)) this.#emit(term, row, stage, number);
    }
  }

  /** Emit the skips that a term selects; a value belongs to the later stage of its hop. */
  #skips(term, row, stage, unit) {
    const { layout, plan } = this;
    for (const [skip, earlier, later] of term.gradients ? layout.skipChains : layout.skipHops) {
      const [own, other] = term.whose === "LATER" ? [earlier, later] : [later, earlier];
      if (own !== stage) continue;
      if (term.which === "SKIP") {
        if (layout.skipNumber[plan.value("skip", row)] !== skip || layout.holders[other] !== plan.peer[row]) continue;
      }
      this.#emit(term, row, later, unit * layout.skips.length + skip);
    }
  }

  key(place) { return place >= this.size ? place - this.size : place; }

  /** First row that produces, or consumes, the value at each place; -1 if none does. */
  #firstRows(uses, size, placed) {
    const found = new Int32Array(size).fill(-1);
    const rows = uses.rows.array, places = uses.places.array;
    for (let i = 0; i < rows.length; i++) {
      const place = placed(places[i]);
      if (place < size && (found[place] < 0 || rows[i] < found[place])) found[place] = rows[i];
    }
    return found;
  }

  get makers() { return (this.firstMakers ??= this.#firstRows(this.PRODUCES, this.numPlaces, (place) => place)); }
  get takers() { return (this.firstTakers ??= this.#firstRows(this.CONSUMES, this.numPlaces, (place) => place)); }
  get senders() { return (this.firstSenders ??= this.#firstRows(this.PRODUCES, this.travelling, (place) => this.key(place))); }

  kindOf(key) {
    let kind = 0;
    while (this.firsts[kind + 1] <= key) kind++;
    return kind;
  }

  /** Name of the value at a place, for sentences. */
  words(place) {
    const key = this.key(place), kind = this.kindOf(key);
    const name = this.tables.words[kind];
    if (this.tables.ambient.includes(this.tables.kinds[kind])) return `the ${name}`;
    const offset = key - this.firsts[kind], count = this.counts[kind];
    return `the ${name} of stage ${Math.floor(offset / count)}, ${this.tables.counted[kind] ?? "microbatch"} ${offset % count}`;
  }
}

/** Return for each apart row the number of the gathering of its stage's weights that it makes, uses or ends. */
function gatheringsOf(plan) {
  const { apart, tables } = plan;
  const times = new Int32Array(plan.layout.stages);
  return Int32Array.from({ length: apart.length }, (_, row) => {
    const stage = apart.stage[row];
    if (stage < 0) return 0;
    if (apart.op[row] === tables.code.GatherParams) times[stage]++;
    return Math.max(times[stage] - 1, 0);
  });
}
