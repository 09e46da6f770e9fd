/**
 * Data flow: the values that each instruction consumes, reads and produces, by the planner's table of terms.
 *
 *     Fwd   CONSUMES the OUTPUT of the stage BEFORE, of its UNIT;   PRODUCES its OWN OUTPUT where it is NOT_LAST
 *
 * A place is a (value, rank) pair: the value's key on the rank that holds its stage, the key plus `size` elsewhere.
 */

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
  KEEPS: (l, s) => l.trains && !l.recomputing[s],
  RECOMPUTES: (l, s) => l.trains && l.recomputing[s] === 1,
  STAYS: (l, s, u) => !l.fetched[s * l.units + u],
  FETCHED: (l, s, u) => l.fetched[s * l.units + u] === 1,
  HAS_EARLIER: (l, s, u) => u % l.slices > 0,
  HAS_LATER: (l, s, u) => u % l.slices < l.slices - 1,
};

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
    const { layout, plan } = this;
    if (term.skips) return this.#skips(term, row, stage, unit);
    switch (term.whose) {
      case "OWN":
        return this.#select(term, row, stage, unit, at);
      case "BEFORE": {
        const before = layout.stageBefore(stage, unit);
        if (before >= 0) this.#select(term, row, before, unit, at);
        break;
      }
      case "HELD":
        for (const held of layout.heldBy[plan.rank[row]]) this.#select(term, row, held, unit, at);
        break;
      case "NAMED":
        for (const named of plan.value("stages", row)) {
          if (layout.holders[named] === plan.rank[row]) this.#select(term, row, named, unit, at);
        }
        break;
      default: // RANK
        this.#emit(term, row, 0, plan.rank[row]);
    }
  }

  #select(term, row, stage, unit, at) {
    const { layout, plan } = this;
    const { cell } = term;
    const buckets = layout.buckets.length;
    if (term.which === "EVERY_UNIT") {
      for (const other of layout.unitsOf[stage]) {
        if (!cell || cell(layout, stage, other)) this.#emit(term, row, stage, other);
      }
      return;
    }
    if (cell && !cell(layout, stage, unit)) return;
    switch (term.which) {
      case "UNIT":
        return this.#emit(term, row, stage, unit);
      case "EARLIER":
        return this.#emit(term, row, stage, unit - 1);
      case "GATHERING":
        return this.#emit(term, row, stage, this.gatherings ? this.gatherings[at] : 0);
      case "BUCKET":
        return this.#emit(term, row, stage, Math.max(plan.column("part")[row], 0) * buckets + plan.column("bucket")[row]);
      case "TIE": {
        const params = plan.value("params", row);
        return this.#emit(term, row, stage, layout.ties.findLast((tie) => tie.params === params)?.number ?? 0);
      }
      case "REDUCTION_BEFORE": {
        const before = layout.reductionOf[stage * layout.units + unit] - 1;
        if (before >= 0) for (const bucket of layout.reducedBuckets) this.#emit(term, row, stage, before * buckets + bucket);
        break;
      }
      case "EVERY_BUCKET":
        for (const bucket of layout.reducedBuckets) this.#emit(term, row, stage, bucket);
        break;
      case "EVERY_REDUCTION":
        for (let number = 0; number < layout.numReductions[stage]; number++) {
          for (const bucket of layout.reducedBuckets) this.#emit(term, row, stage, number * buckets + bucket);
        }
        break;
      case "EVERY_TIE":
        for (const tie of layout.tiesOf[stage]) this.#emit(term, row, stage, tie.number);
        break;
      case "REDUCED_UNITS": {
        const part = plan.column("part")[row];
        for (const other of layout.unitsOf[stage]) {
          if (layout.reductionOf[stage * layout.units + other] === part) this.#emit(term, row, stage, other);
        }
        break;
      }
      default:
        throw new Error(`no way to select ${term.which}`);
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
