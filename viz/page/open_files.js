/** Files that a reader drops on the page: plans, traces of a run, stall reports, PyTorch's schedule CSV. */
import { lower } from "./compile.js";
import { breach } from "./check_input.js";
import { range } from "./layout.js";
import { readOrders } from "./link.js";
import { Plan } from "./plan.js";
import { strayRank } from "./stall.js";
import { Costs, runOf, simulate } from "./times.js";

/** Read dropped files; returns what `App.open` takes. */
export async function readDropped(app, files) {
  const read = await Promise.all(files.map(async (file) => ({ name: file.name, text: await file.text() })));
  const csv = read.find(({ name }) => /\.csv$/i.test(name));
  if (csv) return { runs: [simulate(readCsv(app.tables, csv.text, csv.name.replace(/\.csv$/i, "")), {}, true)] };
  const records = read.filter(({ name }) => /\.json$/i.test(name)).map(({ name, text }) => ({ name, json: parse(name, text) ?? {} }));
  const stall = records.find(({ json }) => json.format === "quintsched.stall")?.json;
  if (stall) {
    const plan = Plan.fromJson(app.tables, stall.plan);
    const { format, version, plan: _, words, ...entries } = stall;
    const broken = version === 1 ? breach(app.tables.forms.stall, entries) : "/version: it is not 1", stray = broken ?? strayRank(plan, entries);
    if (stray !== undefined) throw new Error(`this is no stall report: ${broken ?? `rank ${stray} was where its plan has no instruction`}`);
    return { runs: [simulate(plan, {}, true)], stall };
  }
  const traces = records.filter(({ json }) => json.format === "quintsched.trace").map(({ json }) => json);
  const plans = records.filter(({ json }) => json.format === "quintsched.plan").map(({ json }) => Plan.fromJson(app.tables, json));
  const costs = records.find(({ json }) => json.format === undefined && Object.keys(json).some((key) => Object.hasOwn(app.tables.costs, key)))?.json;
  if (!plans.length && (traces.length || costs)) plans.push(app.plan);
  if (!plans.length) throw new Error("Give a plan (.json), costs, the files of a trace, a stall report, or a schedule in PyTorch's CSV format.");
  const timed = costs ?? (plans[0] === app.plan ? app.run.costs.values : {});
  return { runs: traces.length ? measured(plans[0], traces, timed) : plans.map((plan) => simulate(plan, timed, true)) };
}

function parse(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

/** Return a plan's simulated run, and the step of a trace with the median makespan. */
function measured(plan, traces, costs) {
  const ofRank = range(plan.ranks).map((rank) => traces.find((trace) => trace.pp_rank === rank));
  const missing = ofRank.findIndex((trace) => !trace);
  if (missing >= 0) throw new Error(`the trace of pipeline rank ${missing} is missing`);
  const broken = traces.map((trace) => breach(plan.tables.forms.trace, trace)).find((fault) => fault);
  if (broken) throw new Error(`this is no trace: ${broken}`);
  if (traces.some((trace) => trace.plan !== (plan.digest ?? traces[0].plan))) throw new Error("the trace is of another plan");
  const steps = ofRank[0].steps.map(({ step }) => step).filter((step) => ofRank.every((t) => t.steps.some((s) => s.step === step)));
  const found = steps.map((step) => measuredStep(plan, ofRank, step)).sort((a, b) => a.makespan - b.makespan);
  if (!found.length) throw new Error("the traces have no step in common");
  const middle = found[Math.floor((found.length - 1) / 2)];
  return [simulate(plan, costs.unit === "s" ? costs : costsOf(plan, middle), true), middle];
}

function measuredStep(plan, ofRank, step) {
  const [start, end, wait] = ["start", "end", "wait"].map((name) => Float64Array.from(ofRank.flatMap((trace, rank) => {
    const times = trace.steps.find((one) => one.step === step)[name];
    if (times.length !== plan.first[rank + 1] - plan.first[rank]) throw new Error("the trace is of another plan");
    return times;
  })));
  if (end.some((time, row) => time < start[row] || wait[row] < 0)) throw new Error(`step ${step}: an instruction takes less than no time`);
  const zero = start.reduce((least, time, row) => (plan.tables.computes[plan.op[row]] ? Math.min(least, time + wait[row]) : least), Infinity);
  for (const times of [start, end]) times.forEach((time, row) => (times[row] = time - zero));
  return runOf(plan, start, end, wait, { name: `measured, step ${step}`, unit: "s", costs: new Costs(plan, { unit: "s" }) });
}

/** Mean costs of a measured step, per stage. */
function costsOf(plan, run) {
  const mean = (name) => range(plan.layout.stages).map((stage) => {
    const rows = range(plan.length).filter((row) => plan.stage[row] === stage && plan.is(row, name));
    const times = rows.map((row) => run.end[row] - run.start[row] - run.wait[row]);
    return times.length ? times.reduce((sum, time) => sum + time) / times.length : 0;
  });
  const whole = mean("Bwd"), input = mean("BwdInput"), weight = mean("BwdWeight");
  const halves = input.some((time) => time > 0);
  return { unit: "s", forward: mean("Fwd"), backward_input: halves ? input : whole.map((t) => t / 2),
    backward_weight: halves ? weight : whole.map((t) => t / 2) };
}

/** Read the computations of PyTorch's CSV, one line per rank, and lower them. */
export function readCsv(tables, text, name) {
  const orders = readOrders(text.trim().split("\n"));
  const stages = [];
  orders.forEach((order, rank) => order.forEach(({ stage }) => (stages[stage] = rank)));
  const units = 1 + Math.max(...orders.flat().map(({ microbatch }) => microbatch));
  if (!stages.length || Object.keys(stages).length < stages.length || !Number.isFinite(units)) throw new Error("this is no schedule in PyTorch's CSV format");
  const chunks = Math.max(1, Math.round(stages.length / orders.length));
  const head = {
    format: "quintsched.plan", version: 1, mode: "train", schedule: { name, microbatches: units, chunks, slices: 1, options: {} },
    mesh: [["pp", orders.length]], stage_to_pp: Array.from(stages,
      (rank) => rank ?? 0), routes: [{ stages: range(stages.length), microbatches: range(units) }],
    buckets_per_stage: 1, program_axes: ["pp"],
  };
  const found = lower(tables, head, orders);
  if (!found.plan) throw new Error("the order of computation cannot run: its computations wait for each other in a circle");
  return found.plan;
}
