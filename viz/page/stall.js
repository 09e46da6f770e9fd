/** Stall report on a page: where each rank was, who is to blame, and who waited for whom. */
import { h, picks } from "./dom.js";

const MOST_LISTED = 40;

/** Return the pipeline rank of a global rank: ranks are row-major over the mesh's axes. */
function pipelineRank({ head: { mesh }, ranks }, rank) {
  const inner = mesh.slice(mesh.findIndex(([name]) => name === "pp") + 1);
  return Math.floor(rank / inner.reduce((product, [, size]) => product * size, 1)) % ranks;
}

/** Return the rank of a report whose instruction its plan does not have; undefined if it has all. */
export function strayRank(plan, { culprits, states }) {
  const world = plan.head.mesh.reduce((all, [, size]) => all * size, 1), length = (rank) => plan.first[rank + 1] - plan.first[rank];
  return [...culprits.map(({ place }) => place), ...states.filter(({ program }) => program === plan.head.mode)].find(({ rank, index }) =>
    !(rank >= 0 && rank < world) || !(index === null || (index >= 0 && index < length(pipelineRank(plan, rank)))))?.rank;
}

/** Return the row at which each rank was, as [row, rank, whether it is a culprit]. */
export function standing(plan, stall) {
  const culprits = new Set(stall.culprits.map(({ rank }) => rank));
  return stall.states.filter(({ index, program }) => index !== null && program === plan.head.mode).map(({ rank, index }) =>
    [plan.first[pipelineRank(plan, rank)] + index, rank, culprits.has(rank)]);
}

/** Card of a report: its words, and the ranks with their instructions, culprits first. */
export function stallCard(app) {
  const { plan, stall } = app;
  const at = standing(plan, stall).sort((one, other) => other[2] - one[2] || one[1] - other[1]);
  const words = (stall.words ?? "").split("\n").filter((line) => line);
  const chain = stall.chain.map(({ waiter, waits_for: other }) => `rank ${waiter.rank} waits for rank ${other.rank}`);
  return [h("h2", {}, "stall"), ...(words.length ? words : chain).slice(0, 12).map((line, at) => h("p", { class: at ? "" : "fault" }, line)),
    h("h2", {}, "where the ranks were"), h("ul", { class: "list" }, at.slice(0, MOST_LISTED).map(([row, rank, culprit]) =>
      h("li", picks(() => app.select(row)), h("span", { class: culprit ? "fault" : "" }, `rank ${rank}`), h("span", {}, plan.text(row)))))];
}
