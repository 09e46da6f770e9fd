/** Link of a small plan: its settings and, if it was edited, its orders, in the fragment of the address. */
const LETTERS = { Fwd: "F", Bwd: "B", BwdInput: "I", BwdWeight: "W" };
const OPS = Object.fromEntries(Object.entries(LETTERS).map(([op, letter]) => [letter, op]));
const KEYS = ["schedule", "pp", "microbatches", "chunks", "costs", "cap", "dp", "mesh", "zero", "stage_to_pp", "buckets_per_stage"], MOST_LINKED = 4000;

/** Return the fragment `#play=…`; null for a plan that is too large for it. */
export function writeLink({ orders, ...settings }) {
  if (orders.flat().length > MOST_LINKED) return null;
  return `#play=${encodeURIComponent(JSON.stringify({ ...settings, orders: writeOrders(orders) }))}`;
}

/** Read a fragment; null if it is none of ours. Throws for one that is broken. */
export function readLink(fragment) {
  if (!fragment.startsWith("#play")) return null;
  if (!fragment.startsWith("#play=")) return {};
  const read = JSON.parse(decodeURIComponent(fragment.slice("#play=".length))), { orders, ...settings } = read;
  const unknown = Object.keys(settings).find((key) => !KEYS.includes(key));
  if (unknown || String(read) !== "[object Object]") throw new Error(`it is broken${unknown ? `: ${unknown}` : ""}`);
  return { ...settings, ...(orders ? { orders: readOrders(orders) } : {}) };
}

/** Orders of all ranks as text: "0F0 0B0 …". */
export function writeOrders(orders) {
  return orders.map((order) => order.map(({ op, stage, microbatch }) => `${stage}${LETTERS[op]}${microbatch}`).join(" "));
}

/** Orders of all ranks from text. */
export function readOrders(texts) {
  return texts.map((text) => [...text.matchAll(/(?<![A-Z_\d])(\d+)([FBIW])(\d+)(?![A-Z_\d])/g)].map(([, stage, letter, microbatch]) =>
    ({ op: OPS[letter], stage: Number(stage), microbatch: Number(microbatch) })));
}
