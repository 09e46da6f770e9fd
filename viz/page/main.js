/** Page of a plan: builds the document, draws, and answers the mouse and the keys. */
import { Palette, THEMES } from "./colours.js";
import { Controls } from "./controls.js";
import { readData } from "./data.js";
import { h } from "./dom.js";
import { describeCycle, judge, neverBegin } from "./prove.js";
import { drawMemory } from "./memory.js";
import { stallCard, standing } from "./stall.js";
import { paintOver } from "./overlay.js";
import styles from "./page.css";
import { breakdownCard, compareCard, gapCard, helpCard, instructionCard, lateCard, memoryCard, pathCard, rowList, verdictCard } from "./panel.js";
import { Playground } from "./playground.js";
import { Scene } from "./scene.js";
import { search } from "./search.js";
import { drawAxis, drawLabels, drawTimeline } from "./timeline.js";
import { showFigures, showLegend } from "./header.js";
import { heldOverTime, peakOf } from "./times.js";
import { View } from "./view.js";
import { Waits } from "./idle_reasons.js";

const AXIS = 24, LEAST_MEMORY = 130, MOST_MEMORY = 340;
const MOST_WAITS_AT_ONCE = 250_000;

class App {
  constructor() {
    this.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    this.mode = "planned";
    this.#build();
  }

  #build() {
    document.head.append(h("style", {}, styles));
    this.title = h("h1", {});
    this.figures = h("div", { class: "figures" });
    this.query = h("input", { type: "search", placeholder: "stage 3 microbatch 7", "aria-label": "search", onkeydown: (e) => this.#searchKey(e),
      oninput: () => this.#search() });
    this.modes = h("select", { "aria-label": "runs shown", hidden: true, onchange: () => this.setMode(this.modes.value) });
    this.stepList = h("select", { "aria-label": "measured step", hidden: true, onchange: () => this.setStep(Number(this.stepList.value)) });
    this.playButton = h("button", { onclick: () => this.playground.toggle() }, "edit");
    this.header = h("header", {}, this.title, this.figures, h("div", { class: "tools" }, this.modes, this.stepList, this.query,
      h("button", { onclick: () => this.walkPath(), title: "walk the critical path (c)" }, "path"), this.playButton,
      h("button", { onclick: () => this.setTheme(), title: "light or dark (t)", "aria-label": "light or dark" }, "◐"),
      h("button", { onclick: () => this.show(helpCard()), title: "keys (?)", "aria-label": "keys" }, "?")));
    this.legend = h("div", { class: "legend" });
    const canvas = (id) => h("canvas", { id });
    [this.timeline, this.over, this.axis, this.memory] = ["timeline", "over", "axis", "memory"].map(canvas);
    this.timeline.tabIndex = 0;
    this.timeline.setAttribute("role", "img");
    this.canvases = h("div", { class: "canvases" }, this.timeline, this.over, this.axis, this.memory);
    this.panel = h("aside", { "aria-live": "polite", tabindex: -1 });
    this.tip = h("div", { class: "tip", hidden: true });
    this.dropped = h("div", { class: "drop", hidden: true }, "drop a plan, a trace or a stall report");
    this.playBar = h("div", { class: "play", hidden: true });
    document.body.append(this.header, this.playBar, h("main", {}, h("div", { class: "stage" }, this.legend, this.canvases), this.panel), this.tip,
      this.dropped);
    this.playground = new Playground(this);
    this.controls = new Controls(this);
  }

  /** Show runs: those of a plan, the planned one first, then measured ones; or those of several plans. */
  open({ runs, cap = null, keepView = false, stall = null, window: shown = null }) {
    const before = this.view;
    Object.assign(this, { runs, cap, stall, active: 0, measured: 1, selected: -1, hovered: -1, gap: null, path: null, cycle: null, matches: null });
    const { plan } = this;
    this.comparing = runs.some((run) => run.plan !== plan);
    runs.forEach((run, at) => {
      run.cap = cap;
      if (this.comparing && run.name === "planned") run.name = `${at + 1}: ${run.plan.schedule.name}`;
    });
    this.scenes = runs.map((run) => (run.scene ??= new Scene(run)));
    this.modes.hidden = runs.length < 2;
    this.stepList.hidden = runs.length < 3;
    this.stepList.replaceChildren(...runs.map((run, at) => h("option", { value: at }, run.name)).slice(1));
    if (!keepView || runs.length < 2) this.mode = this.comparing ? "both" : "planned";
    this.modes.replaceChildren(...["planned", "measured", "both", "difference"].map((mode, at) =>
      h("option", { value: mode, selected: mode === this.mode },
        !this.comparing ? mode : at < 2 ? runs[at].name : mode === "both" && runs.length > 2 ? "all" : mode)));
    this.view = new View(this.scenes.slice(0, 1));
    this.#applyTheme();
    this.#setLanes();
    this.view.fit();
    if (keepView && before && before.ranks === this.view.ranks) {
      Object.assign(this.view, { t0: before.t0, t1: before.t1, scroll: before.scroll, stretch: before.stretch });
      if (Math.abs(before.t1 - before.makespan) < before.makespan * 1e-6) this.view.fit();
    } else if (shown) {
      [this.view.t0, this.view.t1] = shown.time ?? [this.view.t0, this.view.t1];
      if (shown.ranks) {
        this.view.stretch = plan.ranks / (shown.ranks[1] - shown.ranks[0] + 1);
        this.firstRank = shown.ranks[0];
      }
    }
    if (stall) this.view.marked = standing(plan, stall);
    showFigures(this);
    showLegend(this);
    this.panel.replaceChildren();
    this.resize();
    this.#later();
  }

  get run() { return this.runs?.[this.active]; }
  get plan() { return this.run?.plan; }
  get scene() { return this.scenes[this.active]; }
  get palette() { return this.scene.palette; }
  get waits() { return this.run.waits ?? null; }
  get verdict() { return this.run.verdict ?? null; }

  /** Runs in sight. */
  get shown() { return this.comparing ? this.view.lanes.map(({ run }) => run) : this.runs.filter((_, at) => !at || at === this.measured); }

  #lanes() {
    const first = this.scenes[0], other = this.scenes[this.measured];
    if (!other || this.mode === "planned") return [first];
    if (this.mode === "measured") return [other];
    return this.comparing && this.mode === "both" ? this.scenes : [first, other];
  }

  #setLanes() {
    const { view } = this;
    view.lanes = this.#lanes();
    view.difference = this.mode === "difference";
    view.blocks = this.comparing && view.lanes.length > 1;
    if (this.comparing && !view.lanes.includes(this.scene)) this.active = this.scenes.indexOf(view.lanes[0]);
    this.canvases.style.minHeight = `${view.blocks ? 120 * view.lanes.length : 260}px`;
    view.home = Math.max(view.lanes.indexOf(this.scene), 0);
  }

  /** Make the plan of a scene the one that the panel is about. */
  focus(scene) {
    if (!this.comparing || scene === this.scene) return;
    this.active = this.scenes.indexOf(scene);
    this.#setLanes();
    showFigures(this);
    this.clear();
  }

  /** What takes longer than a frame: proof, memory, waits and where the time goes; smallest first. */
  #later() {
    const { runs } = this;
    const steps = runs.filter((run) => !run.wait).flatMap((run) => [
      () => { run.held ??= heldOverTime(run); this.draw(); showFigures(this); },
      () => {
        run.verdict ??= judge(run.plan);
        if (run.verdict.cycles.channel) run.stuck ??= neverBegin(run.plan);
        showFigures(this);
        if (run === this.run && !run.verdict.sound()) this.showVerdict();
      },
      () => run.plan.length <= MOST_WAITS_AT_ONCE && !run.stuck && this.#addUp(run),
    ]);
    steps.push(() => !this.panel.childNodes.length && this.overview(), () => this.stall && this.show(stallCard(this)));
    const next = () => {
      if (this.runs !== runs || !steps.length) {
        if (this.runs === runs) document.body.dataset.ready = "all";
        return;
      }
      try {
        steps.shift()();
      } catch (error) {
        console.warn(error);
      }
      setTimeout(next, 0);
    };
    document.body.dataset.ready = "";
    requestAnimationFrame(() => setTimeout(next, 0));
  }

  needWaits(run = this.run) { return (run.waits ??= new Waits(run)); }

  #addUp(run) {
    const waits = this.needWaits(run);
    const gaps = [];
    const ranks = Array.from({ length: run.plan.ranks }, (_, rank) => {
      const of = {};
      for (const gap of waits.gaps(rank)) {
        const { cause } = waits.explain(gap);
        of[cause] = (of[cause] ?? 0) + gap.end - gap.start;
        gaps.push({ ...gap, cause });
      }
      const [computing, others] = Object.keys(run.plan.tables.working);
      const rest = run.makespan - run.busy[rank] - Object.values(of).reduce((sum, time) => sum + time, 0);
      return { [computing]: run.busy[rank], [others]: rest > run.makespan * 1e-9 ? rest : 0, ...of };
    });
    gaps.sort((a, b) => b.end - b.start - (a.end - a.start));
    run.breakdown = { ranks, gaps };
  }

  #applyTheme() {
    const is = THEMES[this.theme];
    for (const name of ["ground", "panel", "ink", "quiet", "line", "accent", "good", "bad"]) document.documentElement.style.setProperty(`--${name}`,
      is[name]);
    document.documentElement.style.colorScheme = this.theme;
    this.view.is = is;
    for (const scene of this.scenes) {
      if (scene.palette?.theme === this.theme) continue;
      scene.palette = new Palette(scene.plan, this.theme);
      if (scene.rows.length > 20_000) scene.buildDensity(scene.palette.colourOf);
    }
  }

  setTheme() {
    if (!this.view) return;
    this.theme = this.theme === "dark" ? "light" : "dark";
    this.#applyTheme();
    showLegend(this);
    this.resize();
  }

  /** Choose the measured step that is shown. */
  setStep(step) {
    this.measured = step;
    this.setMode(this.mode === "planned" ? "measured" : this.mode);
  }

  setMode(mode) {
    if (this.runs.length < 2) return;
    const whole = this.view.t0 <= 0 && this.view.t1 >= this.view.makespan;
    this.mode = this.modes.value = mode;
    this.#setLanes();
    if (whole) [this.view.t0, this.view.t1] = [0, this.view.makespan];
    showFigures(this);
    showLegend(this);
    if (this.comparing) this.clear();
    this.resize();
  }

  resize() {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const width = this.canvases.clientWidth, all = this.canvases.clientHeight;
    const least = LEAST_MEMORY * (this.view.blocks ? 1.5 : 1), height = Math.max(all - AXIS - least - 6, 60);
    const wanted = Math.min(height, Math.max(this.view.wanted, 60));
    this.memoryHeight = Math.min(Math.max(all - wanted - AXIS - 6, least), MOST_MEMORY);
    for (const [canvas, tall] of [[this.timeline, wanted], [this.over, wanted], [this.axis, AXIS], [this.memory, this.memoryHeight]]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(tall * ratio);
      canvas.style.height = `${tall}px`;
      canvas.style.flex = "none";
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    const narrow = width < 560;
    Object.assign(this.view, { width, height: wanted, ratio, narrow, left: narrow ? 56 : 70, right: narrow ? 44 : 110 });
    if (this.firstRank !== undefined) {
      this.view.scroll = this.firstRank * this.view.rowHeight;
      this.firstRank = undefined;
    }
    this.paint();
  }

  /** Draw at the next frame. */
  draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.paint();
    });
  }

  paint() {
    const { view } = this;
    if (!view) return;
    drawTimeline(this.timeline.getContext("2d"), view);
    drawLabels(this.timeline.getContext("2d"), view);
    drawAxis(this.axis.getContext("2d"), view, AXIS);
    this.#paintMemory();
    this.paintOver();
    if (!document.body.dataset.painted) document.body.dataset.painted = String(performance.now());
  }

  #paintMemory() {
    const runs = this.comparing ? this.shown : [this.run], tall = this.memoryHeight / runs.length, { ratio } = this.view;
    const most = Math.max(this.cap ?? 0, ...runs.map(peakOf)) || 1, context = this.memory.getContext("2d");
    runs.forEach((run, at) => {
      context.setTransform(ratio, 0, 0, ratio, 0, at * tall * ratio);
      drawMemory(context, this.view, run, this.cap, most, tall);
    });
  }

  paintOver() { paintOver(this); }

  nameOf(row, plan = this.plan) {
    const stage = plan.layout.stages > plan.ranks && plan.stage[row] >= 0 ? ` stage ${plan.stage[row]}` : "";
    const letters = plan.tables.computes[plan.op[row]] ? plan.short(row) : plan.name(row) + (plan.unit[row] >= 0 ? ` ${plan.unit[row]}` : "");
    return `${letters}${stage} · rank ${plan.rank[row]}`;
  }

  show(parts) {
    if (this.panel.contains(document.activeElement)) this.panel.focus();
    this.panel.replaceChildren(...parts.filter((part) => part));
    this.panel.scrollTop = 0;
  }

  overview() {
    const { verdict, breakdown } = this.run;
    const parts = [...(this.runs.length > 1 ? compareCard(this) : []), ...(verdict ? verdictCard(this, verdict, []) : []),
      ...(this.runs.length > 1 && !this.comparing ? lateCard(this) : []), ...(breakdown ? breakdownCard(this, breakdown) : []),
      ...(this.run.held && !this.run.stuck ? memoryCard(this) : [])];
    this.show(parts.length ? parts : helpCard());
  }

  showVerdict(chosen) {
    const profile = chosen ?? (this.verdict.profiles.channel === false ? "channel" : Object.keys(this.verdict.cycles)[0]);
    this.cycle = profile ? this.verdict.cycles[profile].map(([here, there]) => [here, there]) : null;
    this.show(verdictCard(this, this.verdict, profile ? [`under ${profile}:`, ...describeCycle(this.plan, this.verdict.cycles[profile])] : []));
    this.draw();
  }

  select(row) {
    Object.assign(this, { selected: row, gap: null, cycle: null, matches: null });
    this.view.selectedRank = this.plan.rank[row];
    this.needWaits();
    if (this.path && !this.path.rows.includes(row)) this.path = null;
    this.show(this.path ? [...instructionCard(this, row), h("h2", {}, "critical path"),
      rowList(this, this.path.rows.map((r) => [r, ""]), this.path.rows.indexOf(row))] : instructionCard(this, row));
    this.view.show(this.run.start[row], this.run.end[row], this.plan.rank[row]);
    this.draw();
  }

  showGap(gap) {
    const waits = this.needWaits(), why = waits.explain(gap);
    const colour = this.view.is.bad;
    this.gap = { ...gap, colour, chain: waits.chain(why.end), culprits: new Set(why.culprits.map((e) => this.waits.events.firstRows[e])) };
    Object.assign(this, { selected: -1, path: null, cycle: null, matches: null });
    this.view.selectedRank = gap.rank;
    this.view.show(gap.start, gap.end, gap.rank);
    this.show(gapCard(this, why, this.gap.chain));
    this.draw();
  }

  walkPath() {
    const waits = this.needWaits();
    if (!this.path) {
      const path = waits.criticalPath().reverse();
      this.path = { rows: path.map((event) => waits.events.firstRows[event]), at: -1 };
      Object.assign(this, { gap: null, selected: -1, cycle: null });
      this.show(pathCard(this, path));
      this.draw();
    } else this.step(1);
  }

  step(by) {
    const { rows } = this.path;
    this.path.at = (this.path.at + by + rows.length) % rows.length;
    this.select(rows[this.path.at]);
  }

  clear() {
    Object.assign(this, { selected: -1, hovered: -1, gap: null, path: null, cycle: null, matches: null });
    this.view.selectedRank = -1;
    this.tip.hidden = true;
    this.overview();
    this.draw();
  }

  #search() {
    const found = search(this.plan, this.query.value);
    this.matches = found.rows;
    if (found.rows.length) {
      const [row] = found.rows;
      this.view.show(this.run.start[row], this.run.end[row], this.plan.rank[row]);
      this.show([h("h2", {}, `${found.rows.length === 500 ? "the first 500" : found.rows.length} found`),
        rowList(this, found.rows.slice(0, 60).map((r) => [r, ""]))]);
    } else if (found.rank !== null && found.rank < this.plan.ranks) {
      this.view.selectedRank = found.rank;
      this.view.show(this.view.t0, this.view.t1, found.rank);
    } else if (found.time !== null) this.view.show(found.time, found.time + (this.view.t1 - this.view.t0) * 0.02);
    this.draw();
  }

  #searchKey(event) {
    if (event.key === "Enter" && this.matches?.length) this.select(this.matches[0]);
    if (event.key === "Escape") this.timeline.focus();
  }

  /** What is under the mouse: a row, or a gap. */
  hit(x, y) {
    const { view } = this, at = view.at(y);
    if (!at || x < view.left || x > view.left + view.plotWidth) return null;
    const { rank, lane } = at, time = view.time(x), scene = view.lanes[lane];
    const { y: top, height } = view.band(rank, lane);
    if (y > top + height - 6 && height >= 12) {
      const slack = ((view.t1 - view.t0) / view.plotWidth) * 3;
      for (let i = scene.extraFirst[rank]; i < scene.extraFirst[rank + 1]; i++) {
        if (scene.extraStart[i] - slack <= time && time <= scene.extraEnd[i] + slack) return { rank, time, scene, row: scene.extras[i] };
      }
    }
    const box = scene.at(rank, time);
    return { rank, time, scene, row: box < 0 ? -1 : scene.rows[box] };
  }

  gapAt(rank, time) { return this.needWaits().gaps(rank).find((gap) => gap.start <= time && time <= gap.end) ?? null; }
}

const app = new App();
window.quintsched = app;
const text = document.getElementById("data").textContent;
readData(text).then((data) => {
  app.tables = data.tables;
  app.playground.start(data);
}).catch((error) => document.body.append(h("p", { class: "fault" }, `This page's data cannot be read: ${error.message}`)));
