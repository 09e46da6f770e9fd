/**
 * Data of a page, as Python embeds it: gzip of a JSON head and typed arrays, in base64.
 *
 *     [4 bytes: length of the head] [head, padded to 8 bytes] [section 0, padded] [section 1, padded] …
 */
import { Plan, readTables } from "./plan.js";
import { Costs, runOf, simulate } from "./times.js";

const ARRAYS = { u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

/** Return the bytes of base64 text. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
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
  const runs = (head.plans ?? []).flatMap((of, number) => runsOf(tables, of, (name) => sections[`${number} ${name}`]));
  return { tables, runs, stall: head.stall ?? null, window: head.window ?? null };
}

/** Return the runs of a plan: the planned one, and measured ones; a plan without times is simulated. */
function runsOf(tables, of, section) {
  const wide = (array) => (array instanceof Int32Array ? array : Int32Array.from(array));
  const columns = Object.fromEntries(of.columns.map((name) => [name, wide(section(`column ${name}`))]));
  const plan = new Plan(tables, of.plan, wide(section("first")), section("op"), columns, of.table);
  Object.assign(plan, { givenTitle: of.title, digest: of.digest });
  if (!of.runs.length) return [simulate(plan, of.costs, true)];
  return of.runs.map(({ name, wait, ...about }, number) =>
    runOf(plan, section(`start ${number}`), section(`end ${number}`), wait ? section(`wait ${number}`) : null,
      { name, costs: new Costs(plan, of.costs), ...about }));
}
