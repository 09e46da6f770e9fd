/** Mouse and keys of the page. */
import { h } from "./dom.js";
import { readDropped } from "./open_files.js";
import { helpCard } from "./panel.js";
import { lasting, number } from "./numbers.js";

export class Controls {
  constructor(app) {
    this.app = app;
    this.#listen();
  }

  #hover(event) {
    const hit = this.app.hit(event.offsetX, event.offsetY);
    const row = hit && hit.scene.plan === this.app.plan ? hit.row : -1;
    if (row !== this.app.hovered) {
      this.app.hovered = row;
      this.app.paintOver();
    }
    this.app.tip.hidden = !hit || (hit.row < 0 && (hit.time > this.app.view.makespan || hit.time < 0));
    if (this.app.tip.hidden) return;
    const { run, plan } = hit.scene;
    if (hit.row >= 0) {
      const [from, to, wait] = [run.start[hit.row], run.end[hit.row], run.wait?.[hit.row]];
      this.app.tip.replaceChildren(h("b", {}, this.app.nameOf(hit.row, plan)), h("br"),
        `${number(from)} to ${number(to)}, ${lasting(to - from, run.unit)}${wait ? `, after waiting ${number(wait)}` : ""}`,
        h("br"), h("small", {}, plan.text(hit.row)));
    } else {
      const gap = this.app.waits && hit.scene === this.app.scene ? this.app.gapAt(hit.rank, hit.time) : null;
      this.app.tip.replaceChildren(gap ? this.app.waits.explain(gap).sentence : `rank ${hit.rank} is idle`);
    }
    const wide = this.app.tip.offsetWidth, tall = this.app.tip.offsetHeight;
    this.app.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - wide - 8)}px`;
    this.app.tip.style.top = `${event.clientY + 18 + tall > innerHeight ? event.clientY - tall - 10 : event.clientY + 18}px`;
  }

  #click(event) {
    const hit = this.app.hit(event.offsetX, event.offsetY);
    if (!hit) return this.app.clear();
    this.app.focus(hit.scene);
    if (hit.row >= 0) return this.app.select(hit.row);
    const gap = hit.scene === this.app.scene ? this.app.gapAt(hit.rank, hit.time) : null;
    return gap ? this.app.showGap(gap) : this.app.clear();
  }

  #listen() {
    let from = null, moved = 0;
    const canvas = this.app.timeline, fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event);
      from = [event.clientX, event.clientY];
      moved = 0;
      canvas.setPointerCapture(event.pointerId);
      if (this.app.playground.grab(event)) from = null;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (fingers.size === 2) return this.#pinch(fingers, event);
      if (this.app.playground.drag(event)) return;
      if (!from) return this.#hover(event);
      const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
      moved += Math.abs(dx) + Math.abs(dy);
      from = [event.clientX, event.clientY];
      if (moved > 4) {
        this.app.tip.hidden = true;
        canvas.classList.add("dragging");
        this.app.view.pan(dx, dy);
        this.app.draw();
      }
    });
    canvas.addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
    canvas.addEventListener("pointerup", (event) => {
      if (fingers.size === 2) [from, this.app.playground.held] = [null, null];
      fingers.delete(event.pointerId);
      canvas.classList.remove("dragging");
      if (!this.app.playground.release(event) && from && moved <= 4) this.#click(event);
      from = null;
    });
    canvas.addEventListener("pointerleave", () => {
      this.app.tip.hidden = true;
      this.app.hovered = -1;
      this.app.paintOver();
    });
    canvas.addEventListener("dblclick", () => { this.app.view.fit(); this.app.draw(); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006);
      if (event.shiftKey) this.app.view.zoomRows(1 / factor, event.offsetY);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.app.view.pan(-event.deltaX, 0);
      else this.app.view.zoom(factor, event.offsetX);
      this.app.draw();
    }, { passive: false });
    new ResizeObserver(() => this.app.plan && this.app.resize()).observe(this.app.canvases);
    addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.#file(event));
  }

  async #file(event) {
    event.preventDefault();
    this.app.dropped.hidden = event.type !== "dragover";
    if (event.type !== "drop") return;
    try {
      this.app.open(await readDropped(this.app, [...event.dataTransfer.files]));
    } catch (error) {
      const words = error instanceof TypeError ? "a file is broken, or of another version" : error.message;
      this.app.show([h("h2", {}, "cannot read this"), h("p", { class: "fault" }, words)]);
    }
  }

  #key(event) {
    if (event.target.matches?.("input, select") || !this.app.plan) return;
    const { view } = this.app;
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") return this.app.playground.undo(event.shiftKey);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const wide = view.plotWidth * 0.2, middle = view.left + view.plotWidth / 2;
    const keys = {
      ArrowLeft: () => view.pan(wide, 0), ArrowRight: () => view.pan(-wide, 0),
      "Shift ArrowLeft": () => this.app.playground.nudge(-1), "Shift ArrowRight": () => this.app.playground.nudge(1),
      ArrowUp: () => this.#otherRank(-1), ArrowDown: () => this.#otherRank(1),
      "+": () => view.zoom(0.7, middle), "=": () => view.zoom(0.7, middle), "-": () => view.zoom(1.4, middle), f: () => view.fit(),
      "/": () => this.app.query.focus(), n: () => this.#along(1), p: () => this.#along(-1), w: () => this.#nextGap(), c: () => this.app.walkPath(),
      m: () => this.app.setMode({ planned: "measured", measured: "both", both: "difference", difference: "planned" }[this.app.mode]),
      g: () => (view.showMessages = !view.showMessages), t: () => this.app.setTheme(), e: () => this.app.playground.toggle(),
      "?": () => this.app.show(helpCard()), Escape: () => this.app.clear(),
    };
    const key = event.shiftKey && event.key.startsWith("Arrow") ? `Shift ${event.key}` : event.key;
    if (!(key in keys)) return;
    event.preventDefault();
    keys[key]();
    this.app.draw();
  }

  /** Zoom by the distance of two fingers. */
  #pinch(fingers, event) {
    const before = fingers.get(event.pointerId), [other] = [...fingers.values()].filter(({ pointerId }) => pointerId !== event.pointerId);
    const [old, now] = [before, event].map(({ offsetX }) => Math.max(Math.abs(offsetX - other.offsetX), 8));
    fingers.set(event.pointerId, event);
    this.app.view.zoom(old / now, (event.offsetX + other.offsetX) / 2);
    this.app.draw();
  }

  #otherRank(by) {
    const { view } = this.app;
    if (view.selectedRank < 0) return view.pan(0, -by * view.rowHeight);
    const rank = Math.min(Math.max(view.selectedRank + by, 0), this.app.plan.ranks - 1);
    const time = this.app.selected >= 0 ? this.app.run.start[this.app.selected] : view.t0;
    const { scene } = this.app;
    const [from] = scene.visible(rank, time, time);
    if (from < scene.first[rank + 1]) this.app.select(scene.rows[from]);
  }

  #along(by) {
    if (this.app.path) return this.app.step(by);
    const { scene } = this.app, rank = Math.max(this.app.view.selectedRank, 0);
    const rows = scene.rows.subarray(scene.first[rank], scene.first[rank + 1]);
    const at = rows.indexOf(this.app.selected);
    if (rows.length) this.app.select(rows[Math.min(Math.max(at + by, 0), rows.length - 1)]);
  }

  #nextGap() {
    const rank = Math.max(this.app.view.selectedRank, 0);
    const gaps = this.app.needWaits().gaps(rank);
    const after = this.app.gap?.rank === rank ? this.app.gap.start : this.app.selected >= 0 ? this.app.run.start[this.app.selected] : -1;
    const gap = gaps.find(({ start }) => start > after + 1e-12) ?? gaps[0];
    if (gap) this.app.showGap(gap);
  }
}
