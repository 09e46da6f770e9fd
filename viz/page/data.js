/**
 * Data of a page, as Python embeds it: gzip of a JSON head and typed arrays, in base64.
 *
 *     [4 bytes: length of the head] [head, padded to 8 bytes] [section 0, padded] [section 1, padded] …
 */
import { Plan, readTables } from "./plan.js";
import { Costs, figures, simulate } from "./times.js";

const ARRAYS = { u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

/** Return the bytes of base64 text. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** Decompress and read the data of a page: its tables, and its plan with its runs. */
export async function readData(text) {
  const stream = new Blob([bytesOf(text.trim())]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const tables = readTables(head.tables);
  const padded = (at) => Math.ceil(at / 8) * 8;
  const sections = {};
  let at = padded(4 + length);
  for (const [name, type, count] of head.sections ?? []) {
    sections[name] = new ARRAYS[type](buffer, at, count);
    at = padded(at + sections[name].byteLength);
  }
  return { tables, ...(head.plan ? planOf(tables, head, sections) : {}), stall: head.stall ?? null };
}

function planOf(tables, head, sections) {
  const wide = (array) => (array instanceof Int32Array ? array : Int32Array.from(array));
  const columns = Object.fromEntries(head.columns.map((name) => [name, wide(sections[`column ${name}`])]));
  const plan = new Plan(tables, head.plan, wide(sections.first), sections.op, columns, head.table);
  plan.givenTitle = head.title;
  const runs = head.runs.map(({ name, wait, ...about }, number) => {
    const start = sections[`start ${number}`], end = sections[`end ${number}`];
    return runOf(plan, start, end, wait ? sections[`wait ${number}`] : null, { name, costs: new Costs(plan, head.costs), ...about });
  });
  if (!runs.length) runs.push({ ...simulate(plan, head.costs, true), name: "planned" });
  return { plan, runs, costs: head.costs, window: head.window ?? null };
}

/** Return a run of a plan with the figures that follow from its times. */
export function runOf(plan, start, end, wait, about) {
  const busy = new Float64Array(plan.ranks);
  let makespan = 0;
  for (let row = 0; row < plan.length; row++) {
    if (end[row] > makespan) makespan = end[row];
    if (plan.tables.computes[plan.op[row]]) busy[plan.rank[row]] += end[row] - start[row] - (wait ? wait[row] : 0);
  }
  return { plan, start, end, wait, busy, makespan, ...about, ...figures(busy, makespan) };
}
