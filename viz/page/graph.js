/**
 * Event graph of a plan under a transport profile: what waits for what, in which order it can run, and when.
 *
 *     rank 0   Fwd ──▶ SendAct ┐
 *                              ├─ one event        an event begins when all its predecessors have ended;
 *     rank 1           RecvAct ┘ ──▶ Fwd           one that never begins is on a cycle, or behind one
 */
import { Ints, flowsOf } from "./dataflow.js";

const NO_QUEUE = -1, COMPUTE = 0, WIRE = 1, REPLICAS = 2, FIRST_OWN = 3;

/** Return the events of a plan: the k-th send of a channel with its k-th receive, the k-th collectives of a group. */
export function eventsOf(plan) { return plan.once("events", () => new Events(plan)); }

class Events {
  constructor(plan) {
    const { tables, length, ranks } = plan;
    const leader = Int32Array.from({ length }, (_, row) => row);
    this.channels = channelsOf(plan);
    for (const { sends, receives } of this.channels) {
      for (let k = 0; k < Math.min(sends.length, receives.length); k++) {
        leader[sends[k]] = leader[receives[k]] = Math.min(sends[k], receives[k]);
      }
    }
    this.group = new Int32Array(length).fill(-1);
    this.groups = groupsOf(plan);
    this.groups.forEach(({ members, issued }, number) => {
      const lists = members.map((rank) => issued.get(rank) ?? []);
      for (const rows of issued.values()) for (const row of rows) this.group[row] = number;
      const together = Math.min(...lists.map((rows) => rows.length));
      for (let k = 0; k < together; k++) {
        const first = Math.min(...lists.map((rows) => rows[k]));
        for (const rows of lists) leader[rows[k]] = first;
      }
    });
    this.of = new Int32Array(length);
    const firstRows = new Ints(length + 1);
    for (let row = 0; row < length; row++) {
      this.of[row] = leader[row] === row ? firstRows.length : this.of[leader[row]];
      if (leader[row] === row) firstRows.push(row);
    }
    this.firstRows = firstRows.array;
    this.count = this.firstRows.length;
    this.channelOf = new Int32Array(length).fill(-1);
    this.channels.forEach(({ sends, receives }, number) => {
      for (const row of sends) this.channelOf[row] = number;
      for (const row of receives) this.channelOf[row] = number;
    });
    Object.assign(this, { plan, tables, ranks });
  }

  /** Rows of each event: `rows[starts[e]]` to `rows[starts[e + 1] - 1]`. */
  get members() { return (this.memberLists ??= group(this.of, this.count)); }

  /** Row of an event on a rank, or else its first row. */
  member(event, rank) { return itemsOf(this.members, event).find((row) => this.plan.rank[row] === rank) ?? this.firstRows[event]; }
}

/** Return the channels, by source and destination, with their sends and receives in program order. */
function channelsOf(plan) {
  const { tables, op, rank, peer, ranks } = plan;
  const found = new Map();
  for (let row = 0; row < plan.length; row++) {
    const sends = tables.sends[op[row]];
    if (!sends && !tables.receives[op[row]]) continue;
    const name = sends ? rank[row] * ranks + peer[row] : peer[row] * ranks + rank[row];
    if (!found.has(name)) found.set(name, { sends: [], receives: [] });
    found.get(name)[sends ? "sends" : "receives"].push(row);
  }
  return [...found].sort(([a], [b]) => a - b).map(([name, ends]) => ({
    source: Math.floor(name / ranks), destination: name % ranks, ...ends,
  }));
}

/** Return the groups of pipeline ranks with the collectives that each member issues, in program order. */
function groupsOf(plan) {
  const { tables, ranks, layout } = plan;
  const all = { members: Array.from({ length: ranks }, (_, k) => k), issued: new Map() };
  const found = new Map([[all.members.join(), all]]);
  for (let row = 0; row < plan.length; row++) {
    const { name, whole_mesh: whole } = tables.ops[plan.op[row]];
    if (!whole && name !== "SyncTied") continue;
    let here = all;
    if (!whole) {
      const members = [...new Set(plan.value("stages", row).map((s) => layout.holders[s]))].sort((a, b) => a - b);
      if (members.length === 1) continue;
      if (!found.has(members.join())) found.set(members.join(), { members, issued: new Map() });
      here = found.get(members.join());
    }
    const rows = here.issued.get(plan.rank[row]) ?? [];
    here.issued.set(plan.rank[row], [...rows, row]);
  }
  return [...found.values()];
}

/** Return the queue of each row on its rank under a profile; NO_QUEUE if it is unordered. */
function queuesOf(events, profile) {
  const { plan, tables } = events;
  const queues = new Int32Array(plan.length).fill(COMPUTE);
  if (profile.queues === "one") return queues;
  const own = Object.fromEntries(tables.own_queues.flatMap((names, at) => names.map((n) => [tables.code[n], FIRST_OWN + at])));
  const firstGroup = FIRST_OWN + tables.own_queues.length;
  const firstChannel = firstGroup + events.groups.length;
  const pairs = new Map();
  for (let row = 0; row < plan.length; row++) {
    const op = plan.op[row];
    if (tables.replicas[op]) queues[row] = profile.queues === "wire" ? WIRE : REPLICAS;
    if (op in own) queues[row] = own[op];
    if (events.group[row] >= 0) queues[row] = profile.queues === "wire" ? WIRE : firstGroup + events.group[row];
    const channel = events.channelOf[row];
    if (channel < 0) continue;
    if (profile.queues === "wire") queues[row] = WIRE;
    else if (profile.queues === "none") queues[row] = NO_QUEUE;
    else if (profile.queues === "channel") queues[row] = firstChannel + channel;
    else {
      const { source, destination } = events.channels[channel];
      const pair = Math.min(source, destination) * plan.ranks + Math.max(source, destination);
      if (!pairs.has(pair)) pairs.set(pair, pairs.size);
      queues[row] = firstChannel + pairs.get(pair);
    }
  }
  return queues;
}

/** Return the event graph under a profile; with `host`, as it is proved, with the waits of each rank's host. */
export function graphOf(plan, profileName, host = false) {
  return plan.once(`graph ${profileName} ${host}`, () => {
    const events = eventsOf(plan);
    const profile = plan.tables.profiles.find(({ name }) => name === profileName);
    const queues = queuesOf(events, profile);
    const edges = new Edges(events, plan.length * 2);
    addQueues(edges, queues);
    if (profile.queues !== "one") {
      addData(edges, flowsOf(plan), queues);
      addRoom(edges, queues, !host && plan.layout.zero.stage >= 2);
      if (host) {
        addHost(edges, profile);
        const launched = (of, row) => (of >= 0 || plan.tables.replicas[plan.op[row]] ? COMPUTE : NO_QUEUE);
        if (profile.queues !== "none") addQueues(edges, events.group.map(launched)); // NCCL may run one at a time
      }
    }
    return new Graph(events, edges);
  });
}

class Edges {
  constructor(events, room) {
    this.events = events;
    this.sources = new Ints(room);
    this.targets = new Ints(room);
    this.ranks = new Ints(room);
  }

  /** Add the edge from one row's event to another's, which waits on `rank`. */
  add(from, to, rank = this.events.plan.rank[to]) {
    this.sources.push(this.events.of[from]);
    this.targets.push(this.events.of[to]);
    this.ranks.push(rank);
  }
}

function addQueues(edges, queues) {
  const { plan } = edges.events;
  for (let k = 0; k < plan.ranks; k++) {
    const last = new Map();
    for (let row = plan.first[k]; row < plan.first[k + 1]; row++) {
      if (queues[row] === NO_QUEUE) continue;
      const before = last.get(queues[row]);
      if (before !== undefined) edges.add(before, row);
      last.set(queues[row], row);
    }
  }
}

/** Add the edges from producers of values to those that take them, unless the order of computations implies them. */
function addData(edges, flows, queues) {
  const { plan } = edges.events;
  const { rank } = plan;
  const { makers, senders } = flows;
  const latest = new Int32Array(plan.length).fill(-1); // maker in the compute queue, of a row outside of it
  for (const uses of [flows.CONSUMES, flows.READS]) {
    const rows = uses.rows.array, places = uses.places.array;
    for (let i = 0; i < rows.length; i++) {
      let maker = makers[places[i]];
      const row = rows[i];
      if (maker < 0) {
        const key = flows.key(places[i]);
        if (key >= flows.travelling || (maker = senders[key]) < 0) continue;
      }
      if (queues[maker] !== COMPUTE || rank[maker] !== rank[row] || maker >= row) edges.add(maker, row);
      else if (queues[row] !== COMPUTE && maker > latest[row]) latest[row] = maker;
    }
  }
  for (let row = 0; row < plan.length; row++) if (latest[row] >= 0) edges.add(latest[row], row);
}

/** Add the edges from rows that free memory to later rows on the rank that allocate it; full gradients, if `reshards`. */
function addRoom(edges, queues, reshards) {
  const { plan } = edges.events;
  const { FreeParams, GatherParams, OffloadAct, FetchAct, ReduceScatterBucket, Overlap } = plan.tables.code;
  const { LendAct, HoldAct, ReturnAct, ReclaimAct } = plan.tables.code;
  const frees = [OffloadAct, LendAct, ReturnAct], takes = [FetchAct, HoldAct, ReclaimAct];
  if (!reshards && ![FreeParams, ...frees, ...takes].some((op) => plan.op.includes(op))) return;
  const { ops, computes } = plan.tables, backward = ops.map((op) => op.begins_backward || op.ends_backward);
  for (let k = 0; k < plan.ranks; k++) {
    let freed = -1, reduced = -1, computed = -1, pending = []; // the rows that freed memory behind `computed`
    let latest = -1, earlier = []; // the latest computation, and what it waited for: a hold counts from it
    for (let row = plan.first[k]; row < plan.first[k + 1]; row++) {
      const op = plan.op[row];
      if (op === GatherParams && freed >= 0) edges.add(freed, row);
      if (takes.includes(op)) {
        const before = op === HoldAct && latest >= 0 ? earlier : [computed, ...pending];
        for (const other of before) if (other >= 0) edges.add(other, row);
      }
      if (queues[row] === COMPUTE) {
        for (const other of pending) edges.add(other, row);
        if (computes[op]) [latest, earlier] = [row, [computed, ...pending]];
        [computed, pending] = [row, []];
      }
      if (reduced >= 0 && (backward[op] || op === Overlap || op === GatherParams)) edges.add(reduced, row);
      if (op === FreeParams) freed = row;
      if (reshards && op === ReduceScatterBucket) reduced = row;
      if (frees.includes(op)) pending.push(row);
    }
  }
}

/** Add the edges of a host that issues its program in order and blocks in computations, loans and the end of a step. */
function addHost(edges, profile) {
  const { plan } = edges.events;
  const { tables } = plan;
  for (let k = 0; k < plan.ranks; k++) {
    let wait = -1;
    for (let row = plan.first[k]; row < plan.first[k + 1]; row++) {
      const op = plan.op[row];
      const ahead = profile.queues === "none" && tables.issued[op] && (tables.sends[op] || tables.receives[op]);
      if (wait >= 0 && !ahead) edges.add(wait, row);
      if (!tables.issued[op]) wait = row;
    }
  }
}

export class Graph {
  constructor(events, edges, count = events.count) {
    this.events = events;
    this.count = count;
    this.sources = edges.sources.array;
    this.targets = edges.targets.array;
    this.ranks = edges.ranks.array;
  }

  get after() { return (this.afterLists ??= group(this.sources, this.count, this.targets)); }
  get before() { return (this.beforeLists ??= group(this.targets, this.count, this.sources)); }

  /** Run every event whose dependencies can be met, as early as possible; O(events + edges). */
  run(durations = null) {
    const { starts, items } = this.after;
    const waiting = new Int32Array(this.count);
    for (let i = 0; i < this.targets.length; i++) waiting[this.targets[i]]++;
    const start = new Float64Array(this.count), end = new Float64Array(this.count);
    const order = new Int32Array(this.count);
    let found = 0;
    for (let event = 0; event < this.count; event++) if (!waiting[event]) order[found++] = event;
    for (let at = 0; at < found; at++) {
      const event = order[at];
      const done = (end[event] = start[event] + (durations ? durations[event] : 0));
      for (let i = starts[event]; i < starts[event + 1]; i++) {
        const target = items[i];
        if (done > start[target]) start[target] = done;
        if (!--waiting[target]) order[found++] = target;
      }
    }
    return { order: order.subarray(0, found), waiting, start, end, finished: found === this.count };
  }

  /** Return one cycle of events that never ran, as [event, rank on which the next one waits for it]. */
  cycle(waiting) {
    const blockers = new Map();
    for (let i = 0; i < this.targets.length; i++) {
      const target = this.targets[i];
      if (!(waiting[target] > 0 && waiting[this.sources[i]] > 0)) continue;
      if (!blockers.has(target)) blockers.set(target, new Map());
      if (!blockers.get(target).has(this.ranks[i])) blockers.get(target).set(this.ranks[i], this.sources[i]);
    }
    let [event, byRank] = blockers.entries().next().value;
    let rank = byRank.keys().next().value;
    const seen = new Map(), walk = [];
    for (;;) {
      byRank = blockers.get(event);
      rank = byRank.has(rank) ? rank : byRank.keys().next().value;
      const name = event * this.events.ranks + rank;
      if (seen.has(name)) return walk.slice(seen.get(name)).reverse();
      seen.set(name, walk.length);
      event = byRank.get(rank);
      walk.push([event, rank]);
    }
  }
}

/** Return a cycle as [row that must end, row that then can begin, rank], steps on one rank merged. */
export function stretches(events, cycle) {
  const starts = cycle.flatMap(([, rank], at) => (rank !== cycle.at(at - 1)[1] ? [at] : []));
  const cuts = starts.length ? starts : cycle.map((_, at) => at);
  return cuts.map((start, at) => {
    const [event, rank] = cycle[start], [following] = cycle[cuts[(at + 1) % cuts.length]];
    return [events.member(event, rank), events.member(following, rank), rank];
  });
}

/** Return `items` grouped by `keys`: those of key k are `items[starts[k]]` to `items[starts[k + 1] - 1]`. */
export function group(keys, count, values = null) {
  const starts = new Int32Array(count + 1);
  for (let i = 0; i < keys.length; i++) starts[keys[i] + 1]++;
  for (let k = 0; k < count; k++) starts[k + 1] += starts[k];
  const next = starts.slice(), items = new Int32Array(keys.length);
  for (let i = 0; i < keys.length; i++) items[next[keys[i]]++] = values ? values[i] : i;
  return { starts, items };
}

/** Return the items of a key in what `group` returned. */
export function itemsOf({ starts, items }, key) { return items.subarray(starts[key], starts[key + 1]); }
