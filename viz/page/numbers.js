/** Numbers in words: four significant digits, counts with their nouns, times with their units. */

/** Return a number with four significant digits. */
export function number(value) {
  const rounded = Number(value.toPrecision(4));
  return Math.abs(rounded) >= 1e4 ? Math.round(rounded).toLocaleString("en") : String(rounded);
}

/** Return a number, or the words of one, with its noun: 1 microbatch, 8 microbatches. */
export function counted(value, noun) { return `${value} ${noun}${String(value) === "1" ? "" : noun.endsWith("ch") ? "es" : "s"}`; }

/** Return a time with its unit. */
export function lasting(time, unit) { return unit === "forward" ? counted(number(time), unit) : `${number(time)} ${unit}`; }
