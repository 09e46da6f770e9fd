/** Puzzles: reach the par of a level by dragging. No order is below par: `quintsched solve` certifies it, or proves it. */
import levels from "./levels.json" with { type: "json" };

export const PUZZLES = levels;

/** Whether a level is solved on this machine; with `now`, remember that it is. */
export function solved(puzzle, now = false) {
  try {
    if (now) localStorage.setItem(`quintsched ${puzzle.name}`, "solved");
    return localStorage.getItem(`quintsched ${puzzle.name}`) === "solved";
  } catch {
    return false;
  }
}
