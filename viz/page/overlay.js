/** Marks above the rows: a selection with what it waits for, a path, a gap with its chain, a counter-example. */
import { curve, outline } from "./timeline.js";

/** Draw the marks above the rows: selection, what it waits for, a path, a gap, a counter-example. */
export function paintOver(app) {
  const { view } = app;
  const context = app.over.getContext("2d");
  context.clearRect(0, 0, view.width, view.height);
  context.save();
  context.beginPath();
  context.rect(view.left, 0, view.plotWidth, view.height);
  context.clip();
  const glow = view.is.glow;
  if (app.path) paintPath(app, context, app.path.rows, glow);
  const shown = app.hovered >= 0 ? app.hovered : app.selected;
  if (shown >= 0 && app.waits && !app.path) paintWaits(app, context, shown);
  if (shown >= 0) drawBox(app, context, shown, glow, 2.5);
  if (app.gap) paintGap(app, context);
  for (const [here, there] of app.cycle ?? []) paintCycle(app, context, here, there);
  for (const [row, , culprit] of view.marked ?? []) drawBox(app, context, row, culprit ? view.is.bad : view.is.accent, culprit ? 4 : 2.5);
  for (const row of app.matches ?? []) drawBox(app, context, row, glow, 2);
  app.playground.paint(context);
  context.restore();
}

function drawBox(app, context, row, colour, line) {
  const { view } = app;
  view.lanes.forEach((scene, lane) => {
    if (scene.plan !== app.plan) return;
    const { y, height } = view.band(app.plan.rank[row], lane);
    const x0 = view.x(scene.run.start[row]), x1 = view.x(scene.run.end[row]);
    outline(context, x0 - 1, y - 1, Math.max(x1 - x0, 3) + 1, height + 2, colour, line);
  });
}

function paintPath(app, context, rows, colour) {
  paintChain(app, context, rows, () => [colour, 2], colour);
  if (rows[app.path.at] !== undefined) drawBox(app, context, rows[app.path.at], app.view.is.accent, 3.5);
}

/** Draw rows that follow each other, earliest first, with curves between ranks. */
function paintChain(app, context, rows, look, colour) {
  const { start, end } = app.run, { rank } = app.plan, boxes = withoutMessages(app, rows);
  boxes.forEach((row, at) => {
    drawBox(app, context, row, ...look(row));
    const next = boxes[at + 1];
    if (next !== undefined && rank[next] !== rank[row]) curve(context, app.view, rank[row], end[row], rank[next], start[next], colour, 2, 0.9);
  });
}

/** Rows that are drawn as boxes: a message is the curve between two of them. */
function withoutMessages({ plan }, rows) { return rows.filter((row) => plan.tables.ops[plan.op[row]].message === null); }

function paintWaits(app, context, row) {
  const { waits, plan, view } = app;
  const { start, end } = app.run;
  const event = waits.events.of[row];
  const shown = (e) => waits.events.firstRows[e];
  const before = waits.before(event).slice(0, 24), after = waits.after(event).slice(0, 24);
  for (const [events, tint] of [[before, view.is.bad], [after, view.is.good]]) {
    for (const other of events) drawBox(app, context, shown(other), tint, 2);
  }
  for (const e of sources(app, event, "before")) curve(context, view, plan.rank[shown(e)], end[shown(e)], plan.rank[row], start[row],
    view.is.bad, 2, 0.9);
  for (const e of sources(app, event, "after")) curve(context, view, plan.rank[row], end[row], plan.rank[shown(e)], start[shown(e)],
    view.is.good, 2, 0.9);
}

/** Computations of other ranks that an event waits for, or that wait for it, through their messages. */
function sources(app, event, side) {
  const { waits, plan } = app;
  const found = new Set();
  const message = (e) => plan.tables.ops[plan.op[waits.events.firstRows[e]]].message !== null;
  const home = plan.rank[waits.events.firstRows[event]];
  for (const other of waits[side](event).slice(0, 24)) {
    if (!message(other)) continue;
    for (const far of waits[side](other)) {
      const row = waits.events.firstRows[far];
      if (!message(far) && plan.rank[row] !== home && plan.unit[row] === plan.unit[waits.events.firstRows[other]]) found.add(far);
    }
  }
  return [...found];
}

function paintGap(app, context) {
  const { view, gap } = app;
  const { y, height } = view.band(gap.rank, view.home);
  const x0 = view.x(gap.start), x1 = view.x(gap.end);
  context.fillStyle = `${gap.colour}33`;
  context.fillRect(x0, y, x1 - x0, height);
  outline(context, x0, y, x1 - x0, height, gap.colour, 2);
  const rows = gap.chain.slice(0, 80).map((event) => app.waits.events.firstRows[event]).reverse();
  paintChain(app, context, rows, (row) => (gap.culprits.has(row) ? [view.is.bad, 3] : [view.is.glow, 1.5]), view.is.glow);
}

function paintCycle(app, context, here, there) {
  const { view } = app;
  for (const row of [here, there]) drawBox(app, context, row, view.is.bad, 3);
  const { start, end } = app.run;
  curve(context, view, app.plan.rank[here], end[here], app.plan.rank[there], start[there], view.is.bad, 2.5, 0.9);
}
