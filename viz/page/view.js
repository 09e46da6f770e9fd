/**
 * View: which times and ranks are on the screen, and where. A lane is one run: a row per rank, or, where several plans
 * are compared, a block of rows with its name above.
 */
import { drawLine } from "./dom.js";

const TITLE = 22, LEAST_ROW = 0.5, MOST_ROW = 88;

export class View {
  constructor(lanes) {
    Object.assign(this, { lanes, left: 70, right: 110, width: 100, height: 100, ratio: 1, marked: null, selectedRank: -1, home: 0 });
    Object.assign(this, { showMessages: true, difference: false, blocks: false });
    this.fit();
  }

  get makespan() { return this.lanes.reduce((most, scene) => Math.max(most, scene.run.makespan), 0) || 1; }
  get unit() { return this.lanes[0].run.unit; }
  get plotWidth() { return Math.max(this.width - this.left - this.right, 50); }

  fit() {
    this.t0 = 0;
    this.t1 = this.makespan;
    this.stretch = 1;
    this.scroll = 0;
  }

  get ranks() { return Math.max(...this.lanes.map((scene) => scene.plan.ranks)); }

  /** Height of all rows, each of this height, of the lanes before one, and of its title. */
  top(lane, rowHeight = this.rowHeight) {
    if (!this.blocks) return 0;
    return this.lanes.slice(0, lane).reduce((sum, scene) => sum + scene.plan.ranks * rowHeight + TITLE, TITLE);
  }

  /** Height of all rows. */
  tall(rowHeight = this.rowHeight) {
    return this.blocks ? this.top(this.lanes.length, rowHeight) - TITLE : this.ranks * rowHeight;
  }

  /** Height at which rows are as high as they get without being stretched. */
  get wanted() { return this.tall(MOST_ROW); }

  get rowHeight() {
    const titles = this.tall(0), fair = (this.height - titles) / Math.max(this.tall(1) - titles, 1);
    return Math.min(Math.max(fair, LEAST_ROW), MOST_ROW) * this.stretch;
  }

  x(time) { return this.left + ((time - this.t0) / (this.t1 - this.t0)) * this.plotWidth; }
  time(x) { return this.t0 + ((x - this.left) / this.plotWidth) * (this.t1 - this.t0); }

  /** Vertical place of a rank's lane. */
  band(rank, lane) {
    const gap = this.rowHeight > 8 ? this.rowHeight * 0.1 : this.rowHeight > 3 ? 1 : 0;
    const lanes = this.blocks ? 1 : this.lanes.length, each = (this.rowHeight - 2 * gap) / lanes;
    const y = this.top(lane) + rank * this.rowHeight - this.scroll + gap + (this.blocks ? 0 : lane * each);
    return { y, height: Math.max(each - (lanes > 1 && each > 6 ? 2 : 0), 0.5) };
  }

  /** Rank and lane at a height of the screen; null if there is none. */
  at(y) {
    for (let lane = this.lanes.length - 1; lane >= 0; lane--) {
      const rank = Math.floor((y + this.scroll - this.top(lane)) / this.rowHeight);
      const here = this.blocks || lane === 0 || y >= this.band(rank, lane).y;
      if (here && rank >= 0 && rank < this.lanes[lane].plan.ranks) return { rank, lane };
    }
    return null;
  }

  zoom(factor, x) {
    const at = this.time(x), least = this.makespan * 1e-7;
    const wide = Math.min(Math.max((this.t1 - this.t0) * factor, least), this.makespan * 1.1);
    const share = (at - this.t0) / (this.t1 - this.t0);
    this.t0 = at - share * wide;
    this.t1 = this.t0 + wide;
    this.#keepIn();
  }

  zoomRows(factor, y) {
    const rank = (y + this.scroll) / this.rowHeight;
    this.stretch = Math.min(Math.max(this.stretch * factor, 1), 400);
    this.scroll = rank * this.rowHeight - y;
    this.#keepIn();
  }

  pan(dx, dy) {
    const by = (dx / this.plotWidth) * (this.t1 - this.t0);
    this.t0 -= by;
    this.t1 -= by;
    this.scroll -= dy;
    this.#keepIn();
  }

  /** Show these times, with some room on both sides. */
  show(from, to, rank = -1) {
    const wide = Math.max((to - from) * 1.4, (this.t1 - this.t0) * 0.2);
    const tiny = to > from && (to - from) * this.plotWidth < 3 * (this.t1 - this.t0);
    if (from < this.t0 || to > this.t1 || tiny) {
      const middle = (from + to) / 2, span = tiny ? Math.min(wide, (to - from) * 60) : Math.max(wide, this.t1 - this.t0);
      this.t0 = middle - span / 2;
      this.t1 = middle + span / 2;
    }
    if (rank >= 0) {
      const { y, height } = this.band(rank, this.home);
      if (y < 0 || y + height > this.height) this.scroll += y - this.height / 2;
    }
    this.#keepIn();
  }

  #keepIn() {
    const wide = this.t1 - this.t0, most = this.makespan;
    const t0 = Math.min(Math.max(this.t0, -wide * 0.05), Math.max(most - wide * 0.95, -wide * 0.05));
    this.t1 = t0 + wide;
    this.t0 = t0;
    this.scroll = Math.min(Math.max(this.scroll, 0), Math.max(this.tall() - this.height, 0));
  }

  /** Hatching of waiting time. */
  waitPattern(context) {
    if (this.pattern?.is === this.is) return this.pattern.fill;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = this.is.wait;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = this.is.waitHatch;
    for (const shift of [-6, 0, 6]) drawLine(pen, shift, 6, shift + 6, 0);
    this.pattern = { is: this.is, fill: context.createPattern(tile, "repeat") };
    return this.pattern.fill;
  }
}
