/** View: which times and ranks are on the screen, and where. */
export class View {
  constructor(plan, lanes, palette) {
    Object.assign(this, { plan, lanes, palette, left: 70, right: 110, scroll: 0, ratio: 1, marked: null, selectedRank: -1 });
    this.width = this.height = 100;
    this.stretch = 1;
    this.showMessages = true;
    this.difference = false;
    this.fit();
  }

  get makespan() {
    return this.lanes.reduce((most, scene) => Math.max(most, scene.run.makespan), 0) || 1;
  }

  get unitName() {
    const { unit } = this.lanes[0].run;
    return unit === "forward" ? "forwards" : unit;
  }

  get plotWidth() {
    return Math.max(this.width - this.left - this.right, 50);
  }

  fit() {
    this.t0 = 0;
    this.t1 = this.makespan;
    this.stretch = 1;
    this.scroll = 0;
  }

  resize(width, height, ratio) {
    Object.assign(this, { width, height, ratio });
  }

  get rowHeight() {
    const fair = this.height / Math.max(this.plan.ranks, 1);
    return Math.min(Math.max(fair, 0.5), 72) * this.stretch;
  }

  x(time) {
    return this.left + ((time - this.t0) / (this.t1 - this.t0)) * this.plotWidth;
  }

  time(x) {
    return this.t0 + ((x - this.left) / this.plotWidth) * (this.t1 - this.t0);
  }

  /** Vertical place of a rank's lane. */
  band(rank, lane, lanes) {
    const gap = this.rowHeight > 8 ? this.rowHeight * 0.1 : this.rowHeight > 3 ? 1 : 0;
    const each = (this.rowHeight - 2 * gap) / lanes;
    return { y: rank * this.rowHeight - this.scroll + gap + lane * each, height: Math.max(each - (lanes > 1 && each > 6 ? 2 : 0), 0.5) };
  }

  rankAt(y) {
    const rank = Math.floor((y + this.scroll) / this.rowHeight);
    return rank >= 0 && rank < this.plan.ranks ? rank : -1;
  }

  laneAt(y) {
    const rank = this.rankAt(y), lanes = this.lanes.length;
    for (let lane = lanes - 1; lane > 0; lane--) if (y >= this.band(rank, lane, lanes).y) return lane;
    return 0;
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
    if (from < this.t0 || to > this.t1 || to - from < (this.t1 - this.t0) * 0.01) {
      const middle = (from + to) / 2, span = Math.min(wide, Math.max(to - from, 1e-12) * 60);
      this.t0 = middle - span / 2;
      this.t1 = middle + span / 2;
    }
    if (rank >= 0) {
      const top = rank * this.rowHeight;
      if (top < this.scroll || top + this.rowHeight > this.scroll + this.height) this.scroll = top - this.height / 2;
    }
    this.#keepIn();
  }

  #keepIn() {
    const wide = this.t1 - this.t0, most = this.makespan;
    const t0 = Math.min(Math.max(this.t0, -wide * 0.05), Math.max(most - wide * 0.95, -wide * 0.05));
    this.t1 = t0 + wide;
    this.t0 = t0;
    this.scroll = Math.min(Math.max(this.scroll, 0), Math.max(this.plan.ranks * this.rowHeight - this.height, 0));
  }

  /** Hatching of waiting time. */
  waitPattern(context) {
    if (this.pattern?.theme === this.palette.theme) return this.pattern.fill;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = this.palette.is.wait;
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = this.palette.is.waitHatch;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift, 6);
      pen.lineTo(shift + 6, 0);
    }
    pen.stroke();
    this.pattern = { theme: this.palette.theme, fill: context.createPattern(tile, "repeat") };
    return this.pattern.fill;
  }
}
