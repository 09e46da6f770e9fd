/**
 * Timeline: one row per rank over time, drawn on a canvas.
 *
 *     near    boxes with their microbatch's number; marks and bars of collectives; messages as curves
 *     far     per pixel the mean colour of what runs, faded by the share of idle time
 */
import { rgb } from "./colours.js";
import { drawLine, drawText } from "./dom.js";
import { number } from "./numbers.js";

const MOST_BOXES = 6000, MOST_CURVES = 500, SMALL = 9;

/** Draw the rows of a view. */
export function drawTimeline(context, view) {
  const { width, height } = view;
  context.fillStyle = view.is.ground;
  context.fillRect(0, 0, width, height);
  const rows = [];
  let boxes = 0;
  view.lanes.forEach((scene, lane) => {
    for (let rank = 0; rank < scene.plan.ranks; rank++) {
      const band = view.band(rank, lane);
      if (band.y + band.height < 0 || band.y > height) continue;
      const [from, to] = scene.visible(rank, view.t0, view.t1);
      boxes += to - from;
      rows.push({ scene, rank, from, to, ...band });
    }
  });
  const far = boxes > MOST_BOXES || rows.some((row) => row.height < 5);
  if (far) drawFar(context, view, rows);
  else for (const row of rows) drawNear(context, view, row);
  if (rows.length && rows[0].height >= 7) for (const row of rows) drawExtras(context, view, row);
  if (!far && view.showMessages && (view.blocks || view.lanes.length === 1)) view.lanes.forEach((_, lane) => drawMessages(context, view, lane));
}

function drawFar(context, view, rows) {
  const { height, is, ratio } = view;
  const w = Math.max(1, Math.floor(view.plotWidth * ratio)), h = Math.floor(height * ratio);
  view.buffer ??= {};
  if (view.buffer.w !== w || view.buffer.h !== h) {
    view.buffer = { w, h, image: new ImageData(w, h), sample: new Float32Array(w * 4) };
    view.buffer.pixels = new Uint32Array(view.buffer.image.data.buffer);
  }
  const { image, pixels, sample } = view.buffer;
  const pack = (r, g, b) => (255 << 24) | (b << 16) | (g << 8) | r;
  const ground = pack(...rgb(is.ground)), idle = rgb(is.idle);
  pixels.fill(ground);
  for (const row of rows) {
    const y0 = Math.max(0, Math.round(row.y * ratio)), y1 = Math.min(h, Math.max(Math.round((row.y + row.height) * ratio), Math.round(row.y * ratio) + 1));
    if (y1 <= y0) continue;
    row.scene.sample(row.rank, view.t0, view.t1, w, sample, row.scene.palette.colourOf);
    const line = y0 * w;
    for (let x = 0; x < w; x++) {
      const share = Math.min(sample[x * 4 + 3], 1), rest = 1 - share, over = sample[x * 4 + 3] > 1 ? 1 / sample[x * 4 + 3] : 1;
      pixels[line + x] = pack(
        (sample[x * 4] * over + idle[0] * rest) | 0, (sample[x * 4 + 1] * over + idle[1] * rest) | 0,
        (sample[x * 4 + 2] * over + idle[2] * rest) | 0);
    }
    for (let y = y0 + 1; y < y1; y++) pixels.copyWithin(y * w, line, line + w);
  }
  context.putImageData(image, Math.round(view.left * ratio), 0);
}

function drawNear(context, view, { scene, from, to, y, height }) {
  const end = Math.min(view.x(scene.run.makespan), view.left + view.plotWidth);
  context.fillStyle = view.is.idle;
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
    const box = { x: begun, y, width: boxWidth, height, font };
    if (!view.difference || scene === view.lanes[0] || !drawLate(context, view, scene, row, box)) drawBox(context, scene, row, box);
  }
}

/** Write a text into a box, smaller if it would not fit, or not at all. */
function write(context, text, colour, { x, y, width, height, font }) {
  const size = text.length * font * 0.58 + 3 <= width ? font : SMALL;
  if (text.length * size * 0.58 + 1 > width || height < 8) return;
  if (size !== font) context.font = `${size}px system-ui, sans-serif`;
  context.fillStyle = colour;
  context.fillText(text, x + width / 2, y + height / 2 + 0.5);
  if (size !== font) context.font = `${font}px system-ui, sans-serif`;
}

function drawBox(context, { plan, palette }, row, box) {
  const { x, y, width, height } = box;
  if (plan.is(row, "Overlap")) {
    [["Fwd", "forward"], ["Bwd", "backward"]].forEach(([name, field], side) => {
      const [stage, unit] = plan.value(field, row);
      const [colour, ink] = palette.side(name, stage);
      const top = y + (height / 2) * side;
      context.fillStyle = colour;
      context.fillRect(x, top, width, height / 2);
      write(context, String(unit), ink, { ...box, y: top, height: height / 2 });
    });
    return;
  }
  const [op, chunk] = palette.shadeOf(row);
  context.fillStyle = palette.texts[op][chunk];
  context.fillRect(x, y, width, height);
  write(context, plan.unit[row] >= 0 ? String(plan.unit[row]) : plan.tables.ops[op].letters, palette.inks[op][chunk], box);
}

/** Draw a box in the colour of its delay, with the delay: blue where it ends earlier than in the first lane, red later. */
function drawLate(context, view, scene, row, box) {
  const first = view.lanes[0], same = scene.twins(first, row);
  if (same < 0) return false;
  const late = scene.run.end[row] - first.run.end[same];
  const strong = 0.15 + 0.85 * Math.min((Math.abs(late) * 8) / (first.run.makespan || 1), 1);
  context.fillStyle = `rgba(${late > 0 ? "213,94,0" : "0,114,178"},${strong})`;
  context.fillRect(box.x, box.y, box.width, box.height);
  write(context, late > 0 ? `+${number(late)}` : number(late).replace("-", "−"), strong > 0.6 ? "#ffffff" : view.is.ink, box);
  return true;
}

export function outline(context, x, y, width, height, colour, line) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.strokeRect(x + line / 2, y + line / 2, Math.max(width - line, 1), height - line);
}

/** Draw collectives and copies along the lower edge of a row: a bar for their time, a mark where they take none. */
function drawExtras(context, view, { scene, rank, y, height }) {
  const { plan, palette } = scene;
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
function drawMessages(context, view, lane) {
  const scene = view.lanes[lane], { plan } = scene;
  const { start, end } = scene.run;
  const colours = plan.tables.cargo;
  for (const row of scene.sendsBetween(view.t0, view.t1, MOST_CURVES)) {
    const name = plan.name(row);
    const kind = name.startsWith("SendSkip") ? "SKIP" : { SendAct: "OUTPUT", LendAct: "SAVED", ReturnAct: "LENT" }[name] ?? "OUTPUT_GRAD";
    curve(context, view, plan.rank[row], start[row], plan.peer[row], end[row], colours[kind].colour, 1.2, 0.75, lane);
  }
}

/** Draw a curve between two rows. */
export function curve(context, view, rank, time, peer, later, colour, line, strength, lane = view.home) {
  const one = view.band(rank, lane), other = view.band(peer, lane);
  const down = peer > rank;
  const x0 = view.x(time), x1 = view.x(later);
  const y0 = down ? one.y + one.height : one.y, y1 = down ? other.y : other.y + other.height;
  context.globalAlpha = strength;
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
  context.stroke();
  context.globalAlpha = 1;
}

/** Draw the labels at the left of the rows, the share of busy time at the right, and the names of blocks. */
export function drawLabels(context, view) {
  const { is, left, plotWidth, width, height, rowHeight, narrow } = view;
  context.fillStyle = is.ground;
  context.fillRect(0, 0, left, height);
  context.fillRect(left + plotWidth, 0, width - left - plotWidth, height);
  const every = Math.max(1, Math.ceil(15 / rowHeight));
  const label = (text, y, x, align, colour, bold = "") => {
    if (y > -8 && y < height + 8) drawText(context, text, x, view.scroll ? y : Math.max(y, 7), colour, { size: bold ? 13 : 12, align, bold });
  };
  view.lanes.forEach(({ plan, run }, lane) => {
    if (view.blocks) label(run.name, view.top(lane) - view.scroll - 9, left, "left", is.ink, "600 ");
    for (let rank = 0; rank < plan.ranks; rank += rank ? every : Math.floor(every * 1.5)) { // the first is moved down
      const { y, height: tall } = view.band(rank, lane), middle = y + tall / 2;
      const here = view.blocks ? middle : rank * rowHeight - view.scroll + rowHeight / 2;
      const chosen = view.selectedRank === rank && (!view.blocks || lane === view.home);
      if (view.blocks || lane === 0) label(`rank ${rank}`, here, left - 8, "right", chosen ? is.accent : is.ink);
      const busy = run.makespan ? (100 * run.busy[rank]) / run.makespan : 0;
      const words = narrow ? `${busy.toFixed(0)} %` : `${busy.toFixed(1)} % busy`;
      if (!run.stuck && (view.blocks || lane === 0 || tall > 11)) label(words, tall > 11 ? middle : here, left + plotWidth + 8, "left", is.quiet);
    }
  });
}

/** Draw the time axis into a canvas of its own. */
export function drawAxis(context, view, height) {
  const { is, left, plotWidth } = view;
  context.fillStyle = is.ground;
  context.fillRect(0, 0, view.width, height);
  context.strokeStyle = is.line;
  const times = ticks(view.t0, view.t1, plotWidth / 90);
  const decimals = Math.min(Math.max(0, -Math.floor(Math.log10(times[1] - times[0] || 1) + 1e-9)), 15);
  for (const time of times) {
    const x = view.x(time);
    drawLine(context, x, 0, x, 4);
    const text = time.toLocaleString("en", { signDisplay: "negative", maximumFractionDigits: decimals });
    drawText(context, text, Math.min(Math.max(x, left + 8), left + plotWidth - 8), 6, is.quiet, { align: "center", base: "top" });
  }
  drawLine(context, left, 0.5, left + plotWidth, 0.5);
  drawText(context, view.unit === "forward" ? "forwards" : view.unit, left - 8, 6, is.quiet, { align: "right", base: "top" });
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
