/**
 * Early reductions: a bucket is reduced as soon as the last backward of its stage has filled it, as in the planner's
 * `simulation.early_reductions`. In the graph that is timed, a fraction of a backward is a node of its own.
 */
import { Graph, itemsOf } from "./graph.js";

/** Run the timed graph of a plan; `of` has the events of its nodes behind the events, whose ends those of events include. */
export function runEarly(plan, costs, graph, durations) {
  const timed = reduceEarly(plan, costs, graph, durations);
  const run = timed.graph.run(timed.durations);
  timed.of.forEach((event, at) => (run.end[event] = Math.max(run.end[event], run.end[graph.count + at])));
  return { run, timed };
}

/** Return {graph, durations, of}: the timed graph, its nodes behind the events with the event that each is a part of. */
function reduceEarly(plan, costs, graph, durations) {
  const found = reductionsOf(plan, costs, graph);
  const of = [], times = [...durations], added = [];
  const begins = new Map(found.filter(({ first }) => first < 1).map(({ event, backward }) => [event, backward]));
  const tied = new Set();
  for (let row = 0; row < plan.length; row++) if (plan.is(row, "SyncTied")) tied.add(graph.events.of[row]);
  const node = (event, share) => {
    times.push(share * durations[event]);
    of.push(event);
    return graph.count + of.length - 1;
  };
  for (const { event, backward, first, full, last } of found) {
    const part = (share, to) => {
      const one = node(backward, share);
      for (const before of itemsOf(graph.before, backward)) added.push([before, one]);
      added.push([one, to]);
    };
    if (first < 1) part(first, event);
    if (last < 1) {
      const piece = node(event, last);
      part(full, piece);
      for (const after of itemsOf(graph.after, event)) added.push([piece, after]);
    }
  }
  if (!of.length) return { graph, durations, of };
  const edges = { sources: [], targets: [], ranks: [] };
  const add = (source, target) => edges.sources.push(source) && edges.targets.push(target) && edges.ranks.push(0);
  for (let i = 0; i < graph.sources.length; i++) {
    const [source, target] = [graph.sources[i], graph.targets[i]];
    if (!begins.has(target) || (source !== begins.get(target) && !tied.has(source))) add(source, target);
  }
  for (const pair of added) add(...pair);
  const arrays = Object.fromEntries(Object.entries(edges).map(([name, all]) => [name, { array: Int32Array.from(all) }]));
  return { graph: new Graph(graph.events, arrays, graph.count + of.length), durations: Float64Array.from(times), of };
}

/** Return the reductions that begin in the last backward of their stage: [{event, backward, first, full, last}]. */
function reductionsOf(plan, costs, graph) {
  const { layout, tables, head } = plan;
  if (layout.zero.stage >= 3) return [];
  const { of } = graph.events, last = new Map();
  const { apart } = plan;
  for (let row = 0; row < apart.length; row++) {
    if (!tables.ops[apart.op[row]].ends_backward) continue;
    last.set(apart.stage[row], { row: apart.origin ? apart.origin[row] : row, split: apart.op[row] === tables.code.BwdWeight });
  }
  const dense = head.buckets_per_stage, found = [];
  for (let row = 0; row < plan.length; row++) {
    if (!plan.is(row, "AllReduceBucket") && !plan.is(row, "ReduceScatterBucket")) continue;
    const stage = plan.stage[row], bucket = plan.column("bucket")[row], ties = layout.tiesOf[stage];
    const at = last.get(stage), part = plan.is(row, "ReduceScatterBucket") ? plan.column("part")[row] : 0;
    const atOnce = ties.some(({ number }) => number === 0) || (!at?.split && (head.recompute?.[stage] ?? 0) > 1);
    if (!at || atOnce || part !== layout.numReductions[stage] - 1 || (ties.length && bucket >= dense - 1)) continue;
    const event = of[row], backward = of[at.row];
    if (!itemsOf(graph.before, event).includes(backward)) continue;
    const { pieces: given } = costs.values, pieces = Array.isArray(given) ? given[stage] : given;
    const [parts, place] = bucket < dense ? [dense, bucket] : [1, 0];
    found.push({ event, backward, first: (place + 1 / pieces) / parts, full: (place + 1) / parts, last: 1 / pieces });
  }
  return found;
}
