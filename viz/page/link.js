/** Link of a small plan: its settings and, if it was edited, its orders, in the fragment of the address. */
const LETTERS = { Fwd: "F", Bwd: "B", BwdInput: "I", BwdWeight: "W" };
const OPS = Object.fromEntries(Object.entries(LETTERS).map(([op, letter]) => [letter, op]));
const MOST_LINKED = 4000;

/** Return the fragment `#play=…`. */
export function writeLink({ orders, ...settings }) {
  const written = { ...settings };
  const count = (orders ?? []).reduce((sum, order) => sum + order.length, 0);
  if (orders && count <= MOST_LINKED) {
    written.orders = writeOrders(orders);
  }
  return `#play=${encodeURIComponent(JSON.stringify(written))}`;
}

/** Read a fragment; null if it is none of ours. */
export function readLink(fragment) {
  if (!fragment.startsWith("#play")) return null;
  if (!fragment.startsWith("#play=")) return {};
  const read = JSON.parse(decodeURIComponent(fragment.slice("#play=".length)));
  return { ...read, ...(read.orders ? { orders: readOrders(read.orders) } : {}) };
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
