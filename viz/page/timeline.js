/**
 * Timeline: one row per rank over time, drawn on a canvas.
 *
 *     near    boxes with their microbatch's number; marks and bars of collectives; messages as curves
 *     far     per pixel the mean colour of what runs, faded by the share of idle time
 */
import { number } from "./why.js";

export const GUTTER = 0.12;
const MOST_BOXES = 6000, MOST_CURVES = 500, SMALL = 9;

/** Draw the rows of a view; returns what was drawn, for tests and for the legend. */
export function drawTimeline(context, view) {
  const { width, height, palette } = view;
  const { is } = palette;
  context.fillStyle = is.ground;
  context.fillRect(0, 0, width, height);
  const rows = [];
  let boxes = 0;
  const lanes = view.lanes.length, plan = view.plan;
  const top = Math.max(0, Math.floor(view.scroll / view.rowHeight));
  const bottom = Math.min(plan.ranks, Math.ceil((view.scroll + height) / view.rowHeight));
  for (let rank = top; rank < bottom; rank++) {
    view.lanes.forEach((scene, lane) => {
      const [from, to] = scene.visible(rank, view.t0, view.t1);
      boxes += to - from;
      rows.push({ scene, rank, lane, from, to, ...view.band(rank, lane, lanes) });
    });
  }
  const seen = { boxes, far: boxes > MOST_BOXES || rows.some((row) => row.height < 5) };
  if (seen.far) drawFar(context, view, rows);
  else for (const row of rows) drawNear(context, view, row);
  if (view.rowHeight / lanes >= 9) for (const row of rows) drawExtras(context, view, row);
  if (!seen.far && view.showMessages) drawMessages(context, view);
  return seen;
}

function drawFar(context, view, rows) {
  const { width, height, palette } = view;
  const ratio = view.ratio;
  const w = Math.max(1, Math.floor(view.plotWidth * ratio)), h = Math.floor(height * ratio);
  view.buffer ??= {};
  if (view.buffer.w !== w || view.buffer.h !== h) {
    view.buffer = { w, h, image: new ImageData(w, h), sample: new Float32Array(w * 4) };
    view.buffer.pixels = new Uint32Array(view.buffer.image.data.buffer);
  }
  const { image, pixels, sample } = view.buffer;
  const pack = (r, g, b) => (255 << 24) | (b << 16) | (g << 8) | r;
  const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const ground = pack(...hex(palette.is.ground)), idle = hex(palette.is.idle);
  pixels.fill(ground);
  for (const row of rows) {
    const y0 = Math.max(0, Math.round(row.y * ratio)), y1 = Math.min(h, Math.max(Math.round((row.y + row.height) * ratio), Math.round(row.y * ratio) + 1));
    if (y1 <= y0) continue;
    row.scene.sample(row.rank, view.t0, view.t1, w, sample, palette.colourOf);
    const line = y0 * w;
    for (let x = 0; x < w; x++) {
      const share = Math.min(sample[x * 4 + 3], 1), rest = 1 - share, over = sample[x * 4 + 3] > 1 ? 1 / sample[x * 4 + 3] : 1;
      pixels[line + x] = pack(
        (sample[x * 4] * over + idle[0] * rest) | 0, (sample[x * 4 + 1] * over + idle[1] * rest) | 0,
        (sample[x * 4 + 2] * over + idle[2] * rest) | 0);
    }
    for (let y = y0 + 1; y < y1; y++) pixels.copyWithin(y * w, line, line + w);
  }
  const left = Math.round(view.left * ratio);
  context.putImageData(image, left, 0);
  if (width > view.left + view.plotWidth) {
    context.fillStyle = palette.is.ground;
    context.fillRect(view.left + view.plotWidth, 0, width, height);
  }
}

function drawNear(context, view, { scene, rank, from, to, y, height }) {
  const { palette } = view;
  const end = Math.min(view.x(scene.run.makespan), view.left + view.plotWidth);
  context.fillStyle = palette.is.idle;
  const begin = Math.max(view.x(0), view.left);
  if (end > begin) context.fillRect(begin, y, end - begin, height);
  const font = Math.min(13, Math.max(8, height * 0.5));
  context.font = `${font}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = from; i < to; i++) {
    const row = scene.rows[i];
    const x0 = Math.max(view.x(scene.start[i]), view.left - 2), x1 = Math.min(view.x(scene.end[i]), view.left + view.plotWidth + 2);
    let begun = x0;
    if (scene.wait && scene.wait[i] > 0) {
      begun = Math.max(view.x(scene.start[i] + scene.wait[i]), x0);
      context.fillStyle = view.waitPattern(context);
      context.fillRect(x0, y, Math.max(begun - x0, 0), height);
    }
    if (x1 <= view.left || begun >= view.left + view.plotWidth) continue;
    const boxWidth = Math.max(x1 - begun - (x1 - begun > 4 ? 1 : 0), 0.5);
    if (view.difference && scene.run.name !== view.lanes[0].run.name) drawLate(context, view, row, begun, y, boxWidth, height);
    else drawBox(context, view, row, begun, y, boxWidth, height, font);
  }
}

function drawBox(context, view, row, x, y, width, height, font) {
  const { plan, palette } = view;
  const write = (text, colour, top, tall) => {
    const size = text.length * font * 0.58 + 3 <= width ? font : SMALL;
    if (text.length * size * 0.58 + 1 > width || tall < 8) return;
    if (size !== font) context.font = `${size}px system-ui, sans-serif`;
    context.fillStyle = colour;
    context.fillText(text, x + width / 2, top + tall / 2 + 0.5);
    if (size !== font) context.font = `${font}px system-ui, sans-serif`;
  };
  if (plan.is(row, "Overlap")) {
    [["Fwd", "forward"], ["Bwd", "backward"]].forEach(([name, field], side) => {
      const [stage, unit] = plan.value(field, row);
      const [colour, ink] = palette.side(name, stage);
      const top = y + (height / 2) * side;
      context.fillStyle = colour;
      context.fillRect(x, top, width, height / 2);
      write(String(unit), ink, top, height / 2);
    });
    return;
  }
  const [op, chunk] = palette.shadeOf(row);
  context.fillStyle = palette.texts[op][chunk];
  context.fillRect(x, y, width, height);
  write(plan.unit[row] >= 0 ? String(plan.unit[row]) : plan.tables.ops[op].letters, palette.inks[op][chunk], y, height);
}

/** Draw a measured box in the colour of its delay: blue where it is earlier than planned, red where it is later. */
function drawLate(context, view, row, x, y, width, height) {
  const [planned, measured] = [view.lanes[0].run, view.lanes.at(-1).run];
  const late = (measured.end[row] - planned.end[row]) / (planned.makespan || 1);
  const strong = Math.min(Math.abs(late) * 8, 1);
  context.fillStyle = late > 0 ? `rgba(213,94,0,${0.15 + 0.85 * strong})` : `rgba(0,114,178,${0.15 + 0.85 * strong})`;
  context.fillRect(x, y, width, height);
}

export function outline(context, x, y, width, height, colour, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(x + line / 2, y + line / 2, Math.max(width - line, 1), height - line);
}

/** Draw collectives and copies along the lower edge of a row: a bar for their time, a mark where they take none. */
function drawExtras(context, view, { scene, rank, y, height }) {
  const { plan, palette } = view;
  const from = scene.extraFirst[rank], to = scene.extraFirst[rank + 1];
  if (to - from > 3000) return;
  const thick = Math.max(2, Math.min(height * 0.18, 6));
  for (let i = from; i < to; i++) {
    const row = scene.extras[i];
    if (scene.extraEnd[i] < view.t0 || scene.extraStart[i] > view.t1) continue;
    const x0 = view.x(scene.extraStart[i]), x1 = view.x(scene.extraEnd[i]);
    const [op] = palette.shadeOf(row);
    context.fillStyle = palette.texts[op][0];
    if (x1 - x0 >= 1.5) context.fillRect(x0, y + height - thick, x1 - x0, thick);
    else if (plan.tables.ops[op].whole_mesh || plan.tables.ops[op].on_bucket) {
      context.fillRect(x0 - 0.75, y, 1.5, height);
    }
  }
}

/** Draw messages as curves from the sender's row to the receiver's. */
function drawMessages(context, view) {
  const { plan } = view;
  const scene = view.lanes[0];
  const { start, end } = scene.run;
  const colours = plan.tables.cargo;
  for (const row of scene.sendsBetween(view.t0, view.t1, MOST_CURVES)) {
    const name = plan.name(row);
    const kind = name.startsWith("SendSkip") ? "SKIP" : name === "SendAct" ? "OUTPUT" : "OUTPUT_GRAD";
    curve(context, view, plan.rank[row], start[row], plan.peer[row], end[row], colours[kind].colour, 1.2, 0.75);
  }
}

/** Draw a curve between two rows. */
export function curve(context, view, rank, time, peer, later, colour, line, strength) {
  const lanes = view.lanes.length;
  const one = view.band(rank, 0, lanes), other = view.band(peer, 0, lanes);
  const down = peer > rank;
  const x0 = view.x(time), x1 = view.x(later);
  const y0 = down ? one.y + one.height : one.y, y1 = down ? other.y : other.y + other.height;
  context.save();
  context.globalAlpha = strength;
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
  context.stroke();
  context.restore();
}

/** Draw the labels at the left of the rows, and the share of busy time at the right. */
export function drawLabels(context, view) {
  const { plan, palette, left, width, height } = view;
  context.fillStyle = palette.is.ground;
  context.fillRect(0, 0, left, height);
  context.fillRect(left + view.plotWidth, 0, width - left - view.plotWidth, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(15 / view.rowHeight));
  for (let rank = 0; rank < plan.ranks; rank += every) {
    const y = rank * view.rowHeight - view.scroll + Math.min(view.rowHeight / 2, view.rowHeight * every / 2);
    if (y < -8 || y > height + 8) continue;
    context.fillStyle = view.selectedRank === rank ? palette.is.accent : palette.is.ink;
    context.textAlign = "right";
    context.fillText(`rank ${rank}`, left - 8, y);
    context.fillStyle = palette.is.quiet;
    context.textAlign = "left";
    const run = view.lanes[0].run;
    const busy = run.makespan ? (100 * run.busy[rank]) / run.makespan : 0;
    context.fillText(`${busy.toFixed(1)} % busy`, left + view.plotWidth + 8, y);
  }
}

/** Draw the time axis into a canvas of its own. */
export function drawAxis(context, view, height) {
  const { palette, left, plotWidth } = view;
  context.fillStyle = palette.is.ground;
  context.fillRect(0, 0, view.width, height);
  context.strokeStyle = palette.is.line;
  context.fillStyle = palette.is.quiet;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  context.beginPath();
  for (const time of ticks(view.t0, view.t1, plotWidth / 90)) {
    const x = view.x(time);
    context.moveTo(x, 0);
    context.lineTo(x, 4);
    context.fillText(number(time), Math.min(Math.max(x, left + 8), left + plotWidth - 8), 6);
  }
  context.moveTo(left, 0.5);
  context.lineTo(left + plotWidth, 0.5);
  context.stroke();
  context.textAlign = "right";
  context.fillText(view.unitName, left - 8, 6);
}

/** Round times between two, about so many. */
export function ticks(from, to, count) {
  const raw = (to - from) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) found.push(k * step);
  return found;
}
