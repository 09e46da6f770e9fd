/**
 * Playground: choose a schedule, sizes, costs and a cap; drag computations to another place; proof, times and memory
 * follow. A plan that another tool made is edited in the same way.
 */
import { headOf, isPlain, lower, misfit, ordersIn, ordersOf, SCHEDULES } from "./compile.js";
import { h, download } from "./dom.js";
import { judge, judgeOrder } from "./judge.js";
import { Plan } from "./plan.js";
import { PUZZLES, solved } from "./puzzles.js";
import { readLink, readOrders, writeLink } from "./link.js";
import { simulate } from "./times.js";
import { outline } from "./timeline.js";
import { number } from "./why.js";

const MOST_UNDONE = 200;

export class Playground {
  constructor(app) {
    this.app = app;
    this.editing = false;
    this.past = [];
    this.future = [];
    this.puzzle = null;
  }

  /** Show the page's own plan, or the one of the link; without either, the playground. */
  start(data) {
    const linked = readLink(location.hash);
    if (data.runs.length && !linked) this.app.open(data);
    else {
      this.settings = { schedule: "1f1b", pp: 4, microbatches: 8, chunks: 1, costs: {}, cap: null, ...(linked ?? {}) };
      this.editing = true;
      this.orders = linked?.orders ?? null;
      this.#bar();
      this.#make(!this.orders);
    }
  }

  toggle() {
    const { app } = this;
    this.editing = !this.editing;
    app.playButton.classList.toggle("on", this.editing);
    app.timeline.classList.toggle("editing", this.editing);
    app.playBar.hidden = !this.editing;
    if (!this.editing) return app.resize();
    const { plan } = app;
    this.original = { ...app.run, name: "before", scene: null };
    const { name, microbatches, chunks } = plan.schedule;
    const costs = app.run.costs?.values ?? {};
    this.settings = { schedule: name, pp: plan.ranks, microbatches, chunks, costs, cap: app.cap };
    this.head = plan.head;
    this.orders = ordersIn(plan);
    this.programs = isPlain(plan) ? null : plan.programs();
    this.#bar();
    return app.resize();
  }

  #bar() {
    const { app, settings } = this;
    app.playButton.classList.add("on");
    app.timeline.classList.add("editing");
    app.playBar.hidden = false;
    const change = (name, read = Number) => (event) => {
      settings[name] = read(event.target.value);
      this.puzzle = null;
      this.#make(true);
    };
    const field = (label, name, least = 1) => h("label", {}, label,
      h("input", { type: "number", min: least, max: 512, value: settings[name], onchange: change(name) }));
    const cost = (label, name, otherwise) => h("label", {}, label, h("input", {
      class: "cost", value: typeof settings.costs[name] === "object" ? "…" : settings.costs[name] ?? otherwise, onchange: (event) => {
        const value = Number(event.target.value);
        if (!(value >= 0)) return;
        settings.costs = { ...settings.costs, [name]: value };
        this.#make(false);
      },
    }));
    const names = [...new Set([...Object.keys(SCHEDULES), settings.schedule])];
    this.says = h("span", {});
    app.playBar.replaceChildren(
      h("select", { "aria-label": "schedule", onchange: change("schedule", String) },
        names.map((name) => h("option", { selected: name === settings.schedule, disabled: !(name in SCHEDULES) }, name))),
      field("ranks", "pp"), field("microbatches", "microbatches"), field("chunks", "chunks"),
      cost("forward", "forward", 1), cost("input half", "backward_input", 1), cost("weight half", "backward_weight", 1), cost("message", "p2p", 0),
      h("label", {}, "cap", h("input", { class: "cost", value: settings.cap ?? "", placeholder: "none", onchange: (event) => {
        settings.cap = event.target.value.trim() === "" ? null : Number(event.target.value);
        this.#make(false);
      } })),
      h("button", { onclick: () => this.undo(false), title: "Ctrl+Z" }, "undo"), h("button",
        { onclick: () => this.#split(), title: "split all backwards into their halves, or join them" }, "split B"),
      h("button", { onclick: () => download("plan.json", this.app.plan.toJson()), title: "then: quintsched check plan.json" }, "save plan"),
      h("button", { onclick: () => this.#share() }, "share link"),
      h("select", { "aria-label": "puzzle", onchange: (event) => this.#puzzle(PUZZLES[Number(event.target.value)]) },
        h("option", { value: "" }, "puzzles …"), PUZZLES.map((puzzle, at) => h("option", { value: at, selected: puzzle === this.puzzle },
          `${at + 1}. ${puzzle.name}${solved(puzzle) ? " ✓" : ""}`))),
      this.says);
  }

  /** Compile from the settings, or lower the orders as they are, and show the result. */
  #make(fresh, remember = true) {
    const { app, settings } = this;
    if (remember) this.#remember();
    if (fresh) {
      if (!(settings.schedule in SCHEDULES)) return;
      const { chunked } = SCHEDULES[settings.schedule];
      settings.chunks = chunked ? Math.max(settings.chunks, 2) : 1;
      const fault = misfit(settings.schedule, settings);
      if (fault) {
        this.says.replaceChildren(h("span", { class: "fault" }, fault));
        return;
      }
      this.programs = null;
      this.head = headOf(settings.schedule, settings);
      this.orders = ordersOf(settings.schedule, settings);
      this.#bar();
    }
    this.head ??= headOf(settings.schedule, settings);
    this.#show(fresh);
  }

  #show(fresh = false) {
    const { app, settings } = this;
    const began = performance.now();
    const found = this.programs ? { plan: Plan.fromPrograms(app.tables, this.head, this.programs) } : lower(app.tables, this.head, this.orders);
    const plan = found.plan ?? found.bare;
    const verdict = found.plan ? judge(plan) : judgeOrder(plan);
    const run = { ...simulate(plan, settings.costs, true), name: "edited", verdict };
    this.judged = performance.now() - began;
    plan.givenTitle = this.puzzle?.name;
    app.open({ runs: [run, ...(this.original ? [this.original] : [])], cap: settings.cap, keepView: !fresh });
    this.#say(run, found.plan ? verdict : null);
  }

  #say(run, verdict) {
    const { settings } = this;
    const parts = [];
    const peak = verdict ? Math.max(...verdict.peaks) : 0;
    if (!verdict) parts.push(h("span", { class: "fault" }, "deadlock: this order cannot run"));
    else if (settings.cap !== null && peak > settings.cap + 1e-9) parts.push(h("span", { class: "fault" },
      `over the cap: ${number(peak)} of ${number(settings.cap)}`));
    if (this.puzzle) parts.push(this.#score(run, verdict, peak));
    this.says.replaceChildren(...parts);
  }

  /** Words about a puzzle: its task, or that it is solved. */
  #score(run, verdict, peak) {
    const { task, par, floor, proved = floor, goal, cap } = this.puzzle;
    const value = goal === "span" ? longestSpan(run) : run.makespan;
    const within = cap === null || peak <= cap + 1e-9;
    const won = verdict?.sound() && within && value <= par * (1 + 1e-9);
    if (!won) return h("span", {}, `${task} ${goal} ${number(value)}, par ${number(par)}.`);
    solved(this.puzzle, true);
    const bound = proved >= par * (1 - 1e-9) ? "no order is faster" : `no order is below ${number(proved)}`;
    return h("span", { class: "won" }, `Solved: ${goal} ${number(value)}, and ${bound}.`);
  }

  #remember() {
    if (!this.orders) return;
    this.past.push(JSON.stringify({ settings: this.settings, head: this.head, orders: this.orders, programs: this.programs }));
    if (this.past.length > MOST_UNDONE) this.past.shift();
    this.future = [];
  }

  undo(again) {
    const [from, to] = again ? [this.future, this.past] : [this.past, this.future];
    if (!from.length || !this.editing) return;
    to.push(JSON.stringify({ settings: this.settings, head: this.head, orders: this.orders, programs: this.programs }));
    Object.assign(this, JSON.parse(from.pop()));
    this.#bar();
    this.#show();
  }

  /** Split every whole backward into its halves, or join all halves. */
  #split() {
    if (this.programs) return;
    const whole = this.orders.some((order) => order.some(({ op }) => op === "Bwd"));
    this.#remember();
    this.orders = this.orders.map((order) => order.flatMap((i) => {
      if (whole) return i.op === "Bwd" ? [{ ...i, op: "BwdInput" }, { ...i, op: "BwdWeight" }] : [i];
      return i.op === "BwdInput" ? [{ ...i, op: "Bwd" }] : i.op === "BwdWeight" ? [] : [i];
    }));
    this.#make(false, false);
  }

  #puzzle(puzzle) {
    if (!puzzle) return;
    this.#remember();
    Object.assign(this, { puzzle, original: null });
    const { pp, microbatches, chunks, costs, cap } = puzzle;
    this.settings = { schedule: "1f1b", pp, microbatches, chunks, costs, cap };
    this.head = { ...headOf("1f1b", this.settings), stage_to_pp: puzzle.stage_to_pp };
    this.orders = readOrders(puzzle.start);
    this.programs = null;
    this.#bar();
    this.#show(true);
  }

  #share() {
    const link = `${location.href.split("#")[0]}${writeLink({ ...this.settings, orders: this.orders })}`;
    history.replaceState(null, "", link);
    navigator.clipboard?.writeText(link).catch(() => {});
    this.says.replaceChildren(h("span", {}, "the link is in the address bar"));
  }

  /** Take hold of a computation. */
  grab(event) {
    if (!this.editing) return false;
    const hit = this.app.hit(event.offsetX, event.offsetY);
    if (!hit || hit.scene !== this.app.scenes[0] || hit.row < 0 || !this.app.plan.tables.computes[this.app.plan.op[hit.row]]) return false;
    this.held = { row: hit.row, rank: hit.rank, from: event.clientX, moved: false, before: null };
    return true;
  }

  drag(event) {
    if (!this.held) return false;
    this.held.moved ||= Math.abs(event.clientX - this.held.from) > 4;
    if (!this.held.moved) return true;
    const { view, scenes } = this.app;
    const scene = scenes[0], { rank } = this.held, time = view.time(event.offsetX);
    let at = scene.first[rank];
    while (at < scene.first[rank + 1] && (scene.start[at] + scene.end[at]) / 2 < time) at++;
    this.held.before = at < scene.first[rank + 1] ? scene.rows[at] : -1;
    this.held.x = at < scene.first[rank + 1] ? view.x(scene.start[at]) : view.x(scene.end[at - 1]);
    this.app.tip.hidden = true;
    this.app.paintOver();
    return true;
  }

  release() {
    const { held } = this;
    this.held = null;
    if (!held) return false;
    if (!held.moved) {
      this.app.select(held.row);
      return true;
    }
    this.move(held.row, held.before);
    return true;
  }

  /** Move a computation of a rank before another one of it (-1: to its end), judge and show the plan. */
  move(row, before) {
    const { plan } = this.app;
    const rank = plan.rank[row];
    if (row === before) return;
    this.#remember();
    const list = this.programs ? this.programs[rank] : this.orders[rank];
    const place = (r) => (this.programs ? plan.index(r) : this.#orderIndex(plan, r));
    const from = place(row), computed = before < 0 ? -1 : before;
    let to = computed < 0 ? (this.programs ? this.#behindLast(plan, rank) : list.length) : place(computed);
    const [moved] = list.splice(from, 1);
    if (to > from) to--;
    list.splice(to, 0, moved);
    this.#make(false, false);
  }

  #orderIndex(plan, row) {
    let index = 0;
    for (let r = plan.first[plan.rank[row]]; r < row; r++) if (plan.tables.computes[plan.op[r]]) index++;
    return index;
  }

  #behindLast(plan, rank) {
    let last = plan.first[rank];
    for (let row = last; row < plan.first[rank + 1]; row++) if (plan.tables.computes[plan.op[row]]) last = row;
    return plan.index(last) + 1;
  }

  /** Draw where a held computation would go, and those that never begin. */
  paint(context) {
    const { app, held } = this;
    const { view } = app;
    if (app.run.stuck && view.lanes.includes(app.scene)) {
      for (const row of app.run.stuck) {
        if (!app.plan.tables.computes[app.plan.op[row]]) continue;
        const { y, height } = view.band(app.plan.rank[row], view.home);
        const x0 = view.x(app.run.start[row]), x1 = view.x(app.run.end[row]);
        context.fillStyle = `${view.is.ground}80`;
        context.fillRect(x0, y, x1 - x0, height);
        outline(context, x0, y, x1 - x0, height, view.is.bad, 1.5);
      }
    }
    if (held?.moved && held.before !== null) {
      const { y, height } = view.band(held.rank, 0);
      context.fillStyle = view.is.accent;
      context.fillRect(held.x - 2, y - 3, 4, height + 6);
    }
  }
}

/** Longest time of a rank from its first computation to its last. */
function longestSpan({ plan, start, end }) {
  let longest = 0;
  for (let rank = 0; rank < plan.ranks; rank++) {
    let first = Infinity, last = 0;
    for (let row = plan.first[rank]; row < plan.first[rank + 1]; row++) {
      if (plan.tables.computes[plan.op[row]]) [first, last] = [Math.min(first, start[row]), Math.max(last, end[row])];
    }
    longest = Math.max(longest, last - first);
  }
  return longest;
}
