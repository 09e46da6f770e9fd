/**
 * Playground: choose a schedule, sizes, costs and a cap; drag computations to another place; proof, times and memory
 * follow. A plan that another tool made is edited in the same way.
 */
import { besides, headOf, lower, misfit, ordersIn, ordersOf, SCHEDULES, sizeFault } from "./compile.js";
import { h, download } from "./dom.js";
import { judge, judgeOrder } from "./prove.js";
import { range } from "./layout.js";
import { Plan } from "./plan.js";
import PUZZLES from "./levels.json" with { type: "json" };
import { readLink, readOrders, writeLink } from "./link.js";
import { simulate } from "./times.js";
import { outline } from "./timeline.js";
import { number } from "./numbers.js";

const MOST_UNDONE = 200;

/** Whether a puzzle is solved on this machine; with `now`, remember that it is. No order is below par: `quintsched solve` certifies or proves it. */
function solved(puzzle, now = false) {
  try {
    if (now) localStorage.setItem(`quintsched ${puzzle.name}`, "solved");
    return localStorage.getItem(`quintsched ${puzzle.name}`) === "solved";
  } catch { return false; }
}

export class Playground {
  constructor(app) { Object.assign(this, { app, editing: false, past: [], future: [], puzzle: null }); }

  /** Show the page's own plan, or the one of the link; without either, the playground. */
  start(data) {
    let fault = null;
    try {
      const linked = readLink(location.hash);
      if (linked) return this.#open(linked);
    } catch (error) {
      fault = `This link opens no plan: ${error instanceof TypeError ? "it is broken" : error.message}`;
    }
    if (data.runs.length) this.app.open(data);
    else this.#open({});
    if (fault) this.app.show([h("p", { class: "fault" }, fault)]);
  }

  /** Open the playground with settings, and the orders of a link. */
  #open({ orders = null, ...linked }) {
    const settings = { schedule: "1f1b", pp: 4, microbatches: 8, chunks: 1, costs: {}, cap: null, ...linked };
    const fault = sizeFault(settings) ?? (orders && orders.length !== settings.pp ? "each rank has one order" : null);
    if (fault || !(Object.hasOwn(SCHEDULES, settings.schedule) || orders)) throw new Error(fault ?? `there is no schedule ${settings.schedule}`);
    const head = headOf(settings.schedule, settings), broken = Plan.brokenHead(this.app.tables, head, orders ?? ordersOf(settings.schedule, settings));
    if (broken) throw new Error(broken);
    Object.assign(this, { settings, orders, head, editing: true });
    this.#bar();
    this.#make(!orders);
  }

  toggle() {
    const { app } = this;
    this.editing = !this.editing;
    if (this.editing) this.#take(app.plan);
    this.#bar();
    return app.resize();
  }

  /** Take up a plan for editing. */
  #take(plan) {
    const { app } = this;
    this.original = { ...app.run, name: "before", scene: null };
    const { name, microbatches, chunks } = plan.schedule;
    const costs = app.run.costs?.values ?? {}, { mesh, stage_to_pp, zero, buckets_per_stage } = plan.head;
    this.settings = { schedule: name, pp: plan.ranks, microbatches, chunks, costs, cap: app.cap, mesh, zero, stage_to_pp, buckets_per_stage };
    this.head = plan.head;
    this.orders = ordersIn(plan);
    this.left = besides(plan).join(", ");
    this.programs = this.left ? plan.programs() : null;
  }

  #bar() {
    const { app, settings } = this;
    app.playButton.classList.toggle("on", this.editing);
    app.timeline.classList.toggle("editing", this.editing);
    app.playBar.hidden = !this.editing;
    const change = (name, read = Number) => (event) => {
      settings[name] = read(event.target.value);
      this.puzzle = null;
      this.#try(true);
    };
    const field = (label, name, least = 1) => h("label", {}, label,
      h("input", { type: "number", min: least, max: 512, value: settings[name], onchange: change(name) }));
    const cost = (label, name, otherwise) => h("label", {}, label, h("input", {
      class: "cost", value: typeof settings.costs[name] === "object" ? "…" : settings.costs[name] ?? otherwise, onchange: (event) => {
        settings.costs = { ...settings.costs, [name]: Number(event.target.value) };
        this.#try(false);
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
        this.#try(false);
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

  /** Make the plan; what is wrong with a setting is said beside it. */
  #try(fresh) {
    const { head, orders, programs } = this;
    try { this.#make(fresh); } catch ({ message }) {
      Object.assign(this, { head, orders, programs }).says.replaceChildren(h("span", { class: "fault" }, message));
    }
  }

  /** Compile from the settings, or lower the orders as they are, and show the result. */
  #make(fresh, remember = true) {
    const { settings } = this;
    if (settings.cap !== null && !(settings.cap >= 0)) throw new Error("the cap is no number of 0 or more");
    if (remember) this.#remember();
    if (fresh) {
      if (!(settings.schedule in SCHEDULES)) return null;
      const { chunked } = SCHEDULES[settings.schedule];
      settings.chunks = chunked ? Math.max(settings.chunks, 2) : 1;
      const fault = misfit(settings.schedule, settings);
      if (fault) throw new Error(fault);
      this.programs = null;
      delete settings.stage_to_pp;
      this.head = headOf(settings.schedule, settings);
      this.orders = ordersOf(settings.schedule, settings);
      this.#bar();
    }
    return this.#show(fresh);
  }

  #show(fresh = false) {
    const { app, settings } = this;
    const found = this.programs ? { plan: Plan.fromPrograms(app.tables, this.head, this.programs) } : lower(app.tables, this.head, this.orders);
    const plan = found.plan ?? found.bare;
    const verdict = found.plan ? judge(plan) : judgeOrder(plan);
    const run = { ...simulate(plan, settings.costs, true), name: "edited", verdict };
    plan.givenTitle = this.puzzle?.name;
    app.open({ runs: [run, ...(this.original ? [this.original] : [])], cap: settings.cap, keepView: !fresh });
    this.#say(run, found.plan ? verdict : null);
    if (this.left && !this.programs && !this.puzzle) this.says.append(h("span", {}, `compiled without the plan's ${this.left}`));
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
    const { task, par, goal, cap } = this.puzzle;
    const gathers = run.plan.op.reduce((sum, op) => sum + (op === run.plan.tables.code.GatherParams), 0);
    const span = range(run.plan.ranks).reduce((longest, rank) => {
      const rows = this.#computing(run.plan, rank);
      return Math.max(longest, Math.max(...rows.map((row) => run.end[row])) - Math.min(...rows.map((row) => run.start[row])));
    }, 0);
    const value = { makespan: run.makespan, span, gathers }[goal];
    const within = cap === null || peak <= cap + 1e-9;
    const won = verdict?.sound() && within && value <= par * (1 + 1e-9);
    if (!won) return h("span", {}, `${task} ${goal} ${number(value)}, par ${number(par)}.`);
    solved(this.puzzle, true);
    return h("span", { class: "won" }, `Solved: ${goal} ${number(value)}, and no order has less.`);
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
    const { name, task, par, goal, start, ...settings } = puzzle;
    this.settings = { schedule: "1f1b", ...settings };
    this.head = headOf("1f1b", puzzle);
    this.orders = readOrders(puzzle.start);
    this.programs = null;
    this.#bar();
    this.#show(true);
  }

  #share() {
    const fragment = this.programs ? null : writeLink({ ...this.settings, orders: this.orders });
    if (fragment) {
      history.replaceState(null, "", `${location.href.split("#")[0]}${fragment}`);
      navigator.clipboard?.writeText(location.href).catch(() => {});
    }
    this.says.replaceChildren(h("span", {}, fragment ? "the link is in the address bar" : "no link holds this plan: save it"));
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
    void (held.moved ? this.move(held.row, held.before) : this.app.select(held.row));
    return true;
  }

  /** Move a computation of a rank before another one of it (-1: to its end), judge and show the plan. */
  move(row, before) {
    const { plan } = this.app;
    const rank = plan.rank[row];
    if (row === before) return;
    this.#remember();
    const list = this.programs ? this.programs[rank] : this.orders[rank];
    const computing = this.#computing(plan, rank);
    const place = (r) => (this.programs ? plan.index(r) : computing.indexOf(r)), from = place(row);
    let to = before < 0 ? place(computing.at(-1)) + 1 : place(before);
    const [moved] = list.splice(from, 1);
    if (to > from) to--;
    list.splice(to, 0, moved);
    this.#make(false, false);
  }

  /** Move the selected computation a place earlier or later in its rank's order; it stays selected. */
  nudge(by) {
    const { app } = this, { plan, selected } = app;
    if (!this.editing || selected < 0) return;
    const rank = plan.rank[selected], all = this.#computing(plan, rank), at = all.indexOf(selected), words = plan.text(selected);
    if (at < 0 || !(at + by in all)) return;
    this.move(selected, by < 0 ? all[at - 1] : all[at + 2] ?? -1);
    app.select(this.#computing(app.plan, rank).find((row) => app.plan.text(row) === words));
  }

  #computing(plan, rank) {
    return range(plan.first[rank + 1] - plan.first[rank]).map((at) => plan.first[rank] + at).filter((row) => plan.tables.computes[plan.op[row]]);
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
