/** Colours of the page: those of the planner's pictures, on light and on dark ground, distinct for all colour vision. */
import THEMES from "./themes.json" with { type: "json" };

export { THEMES };

const DARK_INSTEAD = { "#000000": "#c9d2dc", "#1F2933": "#e8edf3" };

export function rgb(hex) { return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); }

export class Palette {
  constructor(plan, theme) {
    this.theme = theme;
    this.is = THEMES[theme];
    const chunks = plan ? Math.max(...plan.layout.heldBy.map((held) => held.length), 1) : 1;
    const chunkOf = plan ? Array.from({ length: plan.layout.stages }, (_, s) => plan.layout.chunkOf(s)) : [];
    const colours = plan ? plan.tables.ops.map(({ colour }) => rgb(theme === "dark" ? DARK_INSTEAD[colour] ?? colour : colour)) : [];
    const lightest = Math.min(0.42 * (chunks - 1), 0.62);
    const shades = colours.map((colour) => Array.from({ length: chunks }, (_, chunk) => {
      const share = (lightest * chunk) / Math.max(chunks - 1, 1);
      const towards = theme === "dark" ? 235 : 255;
      return colour.map((c) => Math.round(c + (towards - c) * share));
    }));
    this.texts = shades.map((each) => each.map((colour) => `rgb(${colour.join()})`));
    this.inks = shades.map((each) => each.map(inkOn));
    const { Overlap, Fwd, Bwd } = plan ? plan.tables.code : {};
    this.shadeOf = (row) => [plan.op[row], chunkOf[plan.stage[row]] ?? 0];
    const paired = plan ? [0, 1, 2].map((c) => (colours[Fwd][c] + colours[Bwd][c]) / 2) : null;
    this.colourOf = (row) => (plan.op[row] === Overlap ? paired : shades[plan.op[row]][chunkOf[plan.stage[row]] ?? 0]);
    this.side = (name, stage) => [this.texts[plan.tables.code[name]][chunkOf[stage] ?? 0], this.inks[plan.tables.code[name]][chunkOf[stage] ?? 0]];
  }
}

/** Return white or near black, whichever is easier to read on a colour. */
function inkOn(colour) {
  const [red, green, blue] = colour.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.26 ? "#ffffff" : "#1f2933";
}

/** Return a colour between quiet and strong for an amount between 0 and 1. */
export function heat(theme, amount) {
  const stops = theme === "dark" ? [[28, 35, 45], [70, 70, 140], [150, 100, 200], [240, 200, 255]]
    : [[238, 243, 248], [158, 188, 218], [140, 107, 177], [110, 1, 107]];
  return between(stops, amount);
}

/** Return the colour of a rank's line among those of all ranks. */
export function lineColour(theme, rank, count) {
  const stops = theme === "dark" ? [[120, 130, 255], [60, 190, 200], [240, 220, 90]] : [[68, 1, 84], [33, 145, 140], [150, 190, 40]];
  return `rgb(${between(stops, rank / Math.max(count - 1, 1)).join()})`;
}

function between(stops, amount) {
  const at = Math.min(Math.max(amount, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (at - low)));
}
