/** Layout of a plan: placement of stages, routes of microbatches, and tables that the data flow needs. */
export class Layout {
  constructor(plan) {
    const { head } = plan;
    const stages = (this.stages = head.stage_to_pp.length);
    this.holders = Int32Array.from(head.stage_to_pp);
    this.ranks = plan.ranks;
    this.units = head.schedule.microbatches * head.schedule.slices;
    this.slices = head.schedule.slices;
    this.routes = head.routes ?? [{ stages: range(stages), microbatches: range(this.units) }];
    this.trains = head.mode === "train";
    const chosen = head.recompute_microbatches?.map((microbatches) => new Set(microbatches));
    this.recomputing = Uint8Array.from(range(stages).flatMap((s) => range(this.units).map((u) =>
      (head.recompute?.[s] && (!chosen || chosen[s].has(Math.floor(u / this.slices))) ? 1 : 0))));
    this.losses = new Set(head.losses ?? []);
    this.zero = head.zero ?? { stage: 0, every: 1 };
    this.mesh = Object.fromEntries(head.mesh);
    this.routeOf = new Int32Array(this.units);
    this.before = new Int32Array(this.routes.length * stages).fill(-1);
    this.after = new Int32Array(this.routes.length * stages).fill(-1);
    this.visited = new Uint8Array(this.routes.length * stages);
    this.routes.forEach((route, number) => {
      for (const unit of route.microbatches) this.routeOf[unit] = number;
      route.stages.forEach((stage, at) => {
        this.visited[number * stages + stage] = 1;
        this.before[number * stages + stage] = route.stages[at - 1] ?? -1;
        this.after[number * stages + stage] = route.stages[at + 1] ?? -1;
      });
    });
    this.heldBy = Array.from({ length: this.ranks }, (_, k) => range(stages).filter((s) => this.holders[s] === k));
    this.unitsOf = range(stages).map((s) => range(this.units).filter((u) => this.visits(s, u)));
    this.#addBuckets(head, plan.tables);
    this.#addTies(head);
    this.#addSkips(head);
    this.#addReductions(plan);
  }

  stageBefore(stage, unit) { return this.before[this.routeOf[unit] * this.stages + stage]; }
  stageAfter(stage, unit) { return this.after[this.routeOf[unit] * this.stages + stage]; }
  visits(stage, unit) { return this.visited[this.routeOf[unit] * this.stages + stage] === 1; }
  hasLoss(stage, unit) { return this.stageAfter(stage, unit) < 0 || this.losses.has(stage); }

  /** Stages at the place of `stage` in its rank's list: the chunk's number. */
  chunkOf(stage) { return this.heldBy[this.holders[stage]].indexOf(stage); }

  #addBuckets(head, tables) {
    const axes = head.mesh.filter(([name, size]) => tables.replica_axes.includes(name) && size > 1).map(([name]) => name);
    const experts = this.mesh.ep > 1 ? axes.filter((name) => tables.expert_replica_axes.includes(name)) : [];
    this.buckets = range(head.buckets_per_stage).map((bucket) => [bucket, axes]);
    if (experts.length) this.buckets.push([head.buckets_per_stage, experts]);
    this.reducedBuckets = this.buckets.filter(([, over]) => over.length).map(([bucket]) => bucket);
  }

  #addTies(head) {
    const parts = new Map();
    (head.stage_to_part ?? []).forEach((part, stage) => parts.set(part, [...(parts.get(part) ?? []), stage]));
    const twins = [...parts.values()].filter((stages) => stages.length > 1).sort((a, b) => a[0] - b[0]);
    const named = Object.entries(head.tied ?? {}).sort(([a], [b]) => (a < b ? -1 : 1));
    this.ties = [
      ...twins.map((stages) => ({ params: "stage", stages, number: 0 })),
      ...named.map(([params, stages], at) => ({ params, stages, number: at + 1 })),
    ];
    this.tiesOf = range(this.stages).map((s) => this.ties.filter((tie) => tie.stages.includes(s)));
  }

  #addSkips(head) {
    this.skips = Object.entries(head.skips ?? {}).sort(([a], [b]) => (a < b ? -1 : 1));
    this.skipNumber = Object.fromEntries(this.skips.map(([name], number) => [name, number]));
    this.skipHops = [];
    this.skipChains = [];
    this.skips.forEach(([, [source, ...takers]], skip) => {
      const latest = new Map([[this.holders[source], source]]);
      let previous = source;
      for (const taker of takers) {
        this.skipHops.push([skip, latest.get(this.holders[taker]) ?? source, taker]);
        this.skipChains.push([skip, previous, taker]);
        latest.set(this.holders[taker], taker);
        previous = taker;
      }
    });
  }

  /** Number the reductions that sum each microbatch's gradient, and find the activations that the host or other ranks hold. */
  #addReductions(plan) {
    const { stages, units } = this;
    const { apart, tables } = plan;
    this.fetched = new Uint8Array(stages * units);
    this.lentTo = new Int32Array(stages * units).fill(-1);
    const order = range(stages).map(() => []);
    for (let row = 0; row < apart.length; row++) {
      const stage = apart.stage[row], unit = apart.unit[row];
      if (stage < 0 || stage >= stages || unit < 0 || unit >= units) continue;
      if (tables.ops[apart.op[row]].ends_backward) order[stage].push(unit);
      const cell = stage * units + unit, { FetchAct, ReclaimAct, LendAct } = tables.code;
      if (apart.op[row] === FetchAct || apart.op[row] === ReclaimAct) this.fetched[cell] = 1;
      if (apart.op[row] === LendAct && this.lentTo[cell] < 0) this.lentTo[cell] = plan.peer[apart.origin?.[row] ?? row];
    }
    this.reductionOf = new Int32Array(stages * units);
    if (this.zero.stage >= 2) {
      for (let stage = 0; stage < stages; stage++) {
        if (this.tiesOf[stage].length) continue;
        this.reductionOf.fill(-1, stage * units, (stage + 1) * units);
        order[stage].forEach((unit, at) => (this.reductionOf[stage * units + unit] = Math.floor(at / this.zero.every)));
      }
    }
    this.numReductions = range(stages).map((s) =>
      1 + this.unitsOf[s].reduce((most, u) => Math.max(most, this.reductionOf[s * units + u]), -1));
    this.mostReductions = this.numReductions.reduce((one, other) => Math.max(one, other), 1);
  }

  /** Peer that a message must name; -1 if it has none. */
  peerOf(name, stage, unit, skip, peer) {
    if (name.includes("Skip")) {
      const hops = name.endsWith("Grad") ? this.skipChains : this.skipHops;
      const toLater = name === "SendSkip" || name === "RecvSkipGrad";
      const others = hops.filter(([number, earlier, later]) =>
        number === this.skipNumber[skip] && (toLater ? earlier : later) === stage).map(([, earlier, later]) =>
        this.holders[toLater ? later : earlier]).filter((rank) => rank !== this.holders[stage]);
      return others.includes(peer) ? peer : others[0] ?? -1;
    }
    if (name === "LendAct" || name === "ReclaimAct") return this.lentTo[stage * this.units + unit];
    if (name === "HoldAct" || name === "ReturnAct") return this.holders[stage];
    const forward = name === "SendAct" || name === "RecvGrad";
    const other = forward ? this.stageAfter(stage, unit) : this.stageBefore(stage, unit);
    return other >= 0 ? this.holders[other] : -1;
  }
}

export function range(count) { return Array.from({ length: count }, (_, number) => number); }
