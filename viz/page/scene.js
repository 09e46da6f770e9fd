/**
 * Scene of a run: what is drawn on each rank's row, sorted by time, and a density of colours for far views.
 *
 *     boxes    computations, and what else occupies the rank       extras   collectives and copies, beside them
 *     density  4096 cells per rank: the mean colour of what runs, with the share of busy time as its opacity
 */
const CELLS = 4096;

export class Scene {
  constructor(run) {
    const { plan, start, end, wait } = run;
    const { tables } = plan;
    Object.assign(this, { run, plan });
    const boxes = [], extras = [];
    this.first = new Int32Array(plan.ranks + 1);
    this.extraFirst = new Int32Array(plan.ranks + 1);
    const beside = Uint8Array.from(tables.ops, (op) => (op.among_replicas || op.host_copy || op.whole_mesh || op.name === "SyncTied" ? 1 : 0));
    const message = Uint8Array.from(tables.ops, (op) => (op.message ? 1 : 0));
    for (let k = 0; k < plan.ranks; k++) {
      const mine = [];
      for (let row = plan.first[k]; row < plan.first[k + 1]; row++) {
        const op = plan.op[row];
        if (message[op]) continue;
        if (tables.computes[op] || (!beside[op] && end[row] > start[row])) mine.push(row);
        else extras.push(row);
      }
      for (const row of mine.sort((a, b) => start[a] - start[b])) boxes.push(row); // measured ones need not be in program order
      this.first[k + 1] = boxes.length;
      this.extraFirst[k + 1] = extras.length;
    }
    this.rows = Int32Array.from(boxes);
    this.extras = Int32Array.from(extras);
    const timesOf = (rows, of) => Float64Array.from(rows, (row) => of[row]);
    [this.start, this.end, this.wait] = [start, end, wait].map((of) => of && timesOf(this.rows, of));
    [this.extraStart, this.extraEnd] = [start, end].map((of) => timesOf(this.extras, of));
    this.density = null;
  }

  /** Row of another scene's run with the same computation as one of this; -1 if it has none. */
  twins(other, row) {
    if (other.plan === this.plan) return row;
    const key = (plan, r) => (plan.op[r] * plan.layout.stages + plan.stage[r]) * plan.layout.units + plan.unit[r];
    const same = ({ layout, schedule }) => `${layout.stages} ${layout.units} ${schedule.slices}`;
    if (same(this.plan) !== same(other.plan)) return -1;
    other.byComputation ??= new Map(Array.from(other.rows, (r) => [key(other.plan, r), r]));
    return other.byComputation.get(key(this.plan, row)) ?? -1;
  }

  /** Sends that may be seen between two times, at most so many. */
  sendsBetween(t0, t1, most) {
    const { plan, run } = this;
    if (!this.sends) {
      const rows = [];
      for (let row = 0; row < plan.length; row++) if (plan.tables.sends[plan.op[row]]) rows.push(row);
      this.sends = Int32Array.from(rows).sort((a, b) => run.start[a] - run.start[b]);
      this.sendStart = Float64Array.from(this.sends, (row) => run.start[row]);
      this.longest = this.sends.reduce((longest, row) => Math.max(longest, run.end[row] - run.start[row]), 0);
    }
    const first = firstAfter(this.sendStart, 0, this.sends.length, t0 - this.longest);
    const found = [];
    for (let i = first; i < this.sends.length && this.sendStart[i] <= t1 && found.length < most; i++) {
      if (run.end[this.sends[i]] >= t0) found.push(this.sends[i]);
    }
    return found;
  }

  /** Indices [from, to) of a rank's boxes that may be seen between two times. */
  visible(rank, t0, t1) {
    return [firstAfter(this.end, this.first[rank], this.first[rank + 1], t0), firstAfter(this.start, this.first[rank], this.first[rank + 1], t1)];
  }

  /** Box of a rank at a time, as an index; -1 if there is none. */
  at(rank, time) {
    const [from] = this.visible(rank, time, time);
    return from < this.first[rank + 1] && this.start[from] <= time ? from : -1;
  }

  /** Build the density, in the colours of `colourOf(row, side)` as [r, g, b]. */
  buildDensity(colourOf) {
    const { plan } = this;
    const span = this.run.makespan || 1, scale = CELLS / span;
    this.density = new Float32Array(plan.ranks * CELLS * 4);
    for (let k = 0; k < plan.ranks; k++) {
      accumulate(this, k, this.first[k], this.first[k + 1], 0, scale, this.density, k * CELLS, CELLS, colourOf);
    }
  }

  /** Fill `out`, four floats per pixel (red, green, blue, share), with a rank's colours between two times. */
  sample(rank, t0, t1, width, out, colourOf) {
    out.fill(0, 0, width * 4);
    const perCell = (this.run.makespan || 1) / CELLS, perPixel = (t1 - t0) / width;
    const [from, to] = this.visible(rank, t0, t1);
    if (perPixel >= perCell * 0.999 && to - from > CELLS / 2 && this.density) {
      const base = rank * CELLS;
      const first = Math.max(0, Math.floor(t0 / perCell)), last = Math.min(CELLS, Math.ceil(t1 / perCell));
      for (let cell = first; cell < last; cell++) {
        const x = Math.floor((cell * perCell - t0) / perPixel);
        if (x < 0 || x >= width) continue;
        const share = perCell / perPixel, at = (base + cell) * 4, to4 = x * 4;
        for (let c = 0; c < 4; c++) out[to4 + c] += this.density[at + c] * share;
      }
      return;
    }
    accumulate(this, rank, from, to, t0, width / (t1 - t0), out, 0, width, colourOf);
  }
}

/** Add boxes to cells: each cell gets the colour times the share of the cell that the box covers. */
function accumulate(scene, rank, from, to, t0, scale, out, base, count, colourOf) {
  for (let i = from; i < to; i++) {
    const began = scene.wait ? scene.start[i] + scene.wait[i] : scene.start[i];
    const x0 = Math.max((began - t0) * scale, 0), x1 = Math.min((scene.end[i] - t0) * scale, count);
    if (x1 <= x0) continue;
    const colour = colourOf(scene.rows[i]);
    for (let x = Math.floor(x0); x < x1; x++) {
      const share = Math.min(x1, x + 1) - Math.max(x0, x);
      const at = (base + x) * 4;
      out[at] += colour[0] * share;
      out[at + 1] += colour[1] * share;
      out[at + 2] += colour[2] * share;
      out[at + 3] += share;
    }
  }
}

/** First index between two whose value is greater than `time`; `values` rise. */
export function firstAfter(values, from, to, time) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] > time) to = middle;
    else from = middle + 1;
  }
  return from;
}
