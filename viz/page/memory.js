/** Memory panel: activations that each rank holds over time, as lines for few ranks and as a heat map for many. */
import { heat, lineColour } from "./colours.js";
import { drawLine, drawText } from "./dom.js";
import { firstAfter } from "./scene.js";
import { number } from "./numbers.js";

const MOST_LINES = 6;

/** Draw a run's activations, on a scale up to `most`. */
export function drawMemory(context, view, { held, name }, cap, most, height) {
  const { is, left, width } = view;
  context.fillStyle = is.ground;
  context.fillRect(0, 0, width, height);
  if (!held) return drawText(context, "activations: being added up …", left, 20, is.quiet);
  if (held.length <= MOST_LINES) drawLines(context, view, held, most, height);
  else drawHeat(context, view, held, most, height);
  if (cap !== null && held.length <= MOST_LINES) drawCap(context, view, cap, most, height);
  const words = view.narrow ? "activations, in microbatches" : "activations held, in microbatches of a whole rank";
  const limit = held.length > MOST_LINES && cap !== null ? `, cap ${number(cap)}` : "";
  drawText(context, `${view.blocks ? `${name}: ` : ""}${words}; peak ${number(Math.max(...held.map((r) => r.peak)))}${limit}`, left, 2, is.quiet,
    { base: "top" });
}

/** Write the peak of a rank at the right of its line or row. */
function drawPeak(context, view, rank, { peak }, y, colour, named) {
  const words = view.narrow ? number(peak) : `${named ? `rank ${rank}: ` : ""}peak ${number(peak)}`;
  drawText(context, words, view.left + view.plotWidth + 8, y, colour);
}

const TOP = 18;

function drawLines(context, view, held, most, height) {
  const { is, left, plotWidth, t0, t1 } = view;
  const y = (amount) => height - 4 - (amount / (most * 1.08)) * (height - TOP - 6);
  context.strokeStyle = is.line;
  context.lineWidth = 1;
  const step = Math.max(1, Math.ceil(most / Math.min(4, height / 24)));
  for (let amount = 0; amount <= most; amount += step) {
    drawLine(context, left, y(amount), left + plotWidth, y(amount));
    drawText(context, number(amount), left - 8, y(amount), is.quiet, { align: "right" });
  }
  context.save();
  context.beginPath();
  context.rect(left, 0, plotWidth, height);
  context.clip();
  held.forEach((of, rank) => {
    context.strokeStyle = lineColour(is.theme, rank, held.length);
    context.lineWidth = 2.4 - (1.2 * rank) / Math.max(held.length - 1, 1);
    context.beginPath();
    let at = Math.max(0, firstAfter(of.times, 0, of.times.length, t0) - 1);
    context.moveTo(view.x(of.times[at] ?? 0), y(of.amounts[at] ?? 0));
    const thin = (t1 - t0) / plotWidth;
    for (; at < of.times.length && of.times[at] <= t1; at++) {
      const x = view.x(of.times[at]);
      context.lineTo(x, y(of.amounts[Math.max(at - 1, 0)]));
      context.lineTo(x, y(of.amounts[at]));
      if (of.times.length > 4 * plotWidth) at = Math.max(at, firstAfter(of.times, at, of.times.length, of.times[at] + thin) - 2);
    }
    context.lineTo(view.x(Math.min(t1, view.makespan)), y(of.amounts[Math.max(at - 1, 0)]));
    context.stroke();
  });
  context.restore();
  const line = Math.min(15, (height - TOP) / held.length);
  held.forEach((of, rank) => drawPeak(context, view, rank, of, TOP + line * (rank + 0.5), lineColour(is.theme, rank, held.length), true));
}

function drawHeat(context, view, held, most, height) {
  const { is, left, plotWidth, t0, t1 } = view;
  const tall = height - TOP - 2, rows = held.length;
  const columns = Math.max(1, Math.floor(plotWidth));
  const image = new ImageData(columns, rows);
  held.forEach(({ times, amounts }, rank) => {
    let at = Math.max(0, firstAfter(times, 0, times.length, t0) - 1);
    for (let x = 0; x < columns; x++) {
      const until = t0 + ((t1 - t0) * (x + 1)) / columns;
      let peak = until - (t1 - t0) / columns > view.makespan || until < 0 ? 0 : amounts[at] ?? 0;
      while (at + 1 < times.length && times[at + 1] <= until) peak = Math.max(peak, amounts[++at]);
      const [r, g, b] = heat(is.theme, peak / most);
      image.data.set([r, g, b, 255], (rank * columns + x) * 4);
    }
  });
  view.heatCanvas ??= document.createElement("canvas");
  view.heatCanvas.width = columns;
  view.heatCanvas.height = rows;
  view.heatCanvas.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = rows > tall;
  context.drawImage(view.heatCanvas, left, TOP, plotWidth, tall);
  const every = Math.max(1, Math.ceil((14 * rows) / tall));
  for (let rank = 0; rank < rows; rank += every) {
    const y = TOP + (tall * (rank + 0.5)) / rows;
    drawText(context, `rank ${rank}`, left - 8, y, is.quiet, { align: "right" });
    drawPeak(context, view, rank, held[rank], y, is.quiet, false);
  }
}

function drawCap(context, view, cap, most, height) {
  const { is, left, plotWidth } = view, y = height - 4 - (cap / (most * 1.08)) * (height - TOP - 6);
  context.strokeStyle = is.bad;
  context.setLineDash([6, 4]);
  drawLine(context, left, y, left + plotWidth, y);
  context.setLineDash([]);
  drawText(context, `cap ${number(cap)}`, left + 4, y - 2, is.bad, { base: "bottom" });
}
