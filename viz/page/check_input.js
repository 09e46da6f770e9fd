/**
 * Contract at the page's door: what the planner's readers refuse is refused here, by the planner's own schemas.
 *
 *     file or link ─▶ breach     types, ranges and unknown keys of each entry
 *                  ─▶ headFault  what the entries of a plan's head owe each other, as `verify.wellformed` has it
 */
import { range } from "./layout.js";

const MOST_CELLS = 4_000_000;
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const TYPES = { integer: Number.isInteger, number: Number.isFinite, array: Array.isArray, object: isObject, null: (value) => value === null };

/** Return where and how a value breaks a JSON Schema; null if it does not. */
export function breach(schema, value, defs = schema.$defs, at = "") {
  if (schema.$ref) return breach(defs[schema.$ref.split("/").at(-1)], value, defs, at);
  const any = (schema.anyOf ?? schema.oneOf)?.map((one) => breach(one, value, defs, at));
  if (any) return any.includes(null) ? null : any.reduce((one, other) => (other.indexOf(":") > one.indexOf(":") ? other : one));
  const { type, properties = {}, enum: allowed = "const" in schema ? [schema.const] : null } = schema;
  if (type && !(TYPES[type] ?? ((it) => typeof it === type))(value)) return `${at}: it is not of type ${type}`;
  if (allowed && !allowed.includes(value)) return `${at}: it is not ${allowed.join(" or ")}`;
  const size = value?.length ?? value, least = schema.minimum ?? schema.minItems ?? schema.minLength;
  if (size < least || size > (schema.maximum ?? schema.maxItems ?? schema.maxLength)) return `${at}: it is too ${size < least ? "small" : "large"}`;
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) return `${at}: it has characters that cannot be printed`;
  const missing = schema.required?.find((name) => !Object.hasOwn(value, name));
  if (missing) return `${at}/${missing}: it is missing`;
  for (const name of value !== null && typeof value === "object" ? Object.keys(value) : []) {
    const known = Array.isArray(value) ? schema.prefixItems?.[name] ?? schema.items : Object.hasOwn(properties, name) ? properties[name]
      : schema.additionalProperties;
    const found = known === false ? `${at}/${name}: unknown key` : known && known !== true ? breach(known, value[name], defs, `${at}/${name}`) : null;
    if (found) return found;
  }
  return null;
}

/** Return the first entry of a head, whose form is right, that does not fit the others or the programs; undefined if all do. */
export function headFault({ most: { ranks: mostRanks, names: mostNames, blocks: mostBlocks, axes: replicaAxes }, ops, code }, head, programs) {
  const { format, mode, schedule, mesh, stage_to_pp: placed, stage_to_part: parts, losses, blocks_per_stage: blocks } = head;
  const { recompute, recompute_microbatches: chosen } = head;
  const stages = range(placed.length), units = schedule.microbatches * schedule.slices, sizes = Object.fromEntries(mesh);
  const pieces = parts ?? stages, held = range(new Set(pieces).size), tied = Object.entries(head.tied ?? {}), skips = Object.entries(head.skips ?? {});
  const { stage: sharding, every } = head.zero ?? { stage: 0, every: 1 }, means = head.communication ?? "native", trains = mode === "train";
  const same = (one, other) => String(one) === String(other), once = (list) => new Set(list).size === list.length;
  const rising = (list) => list.every((one, at) => !at || one > list[at - 1]);
  const visits = head.routes?.reduce((sum, route) => sum + route.stages.length * route.microbatches.length, 0) ?? placed.length * units;
  const routes = () => head.routes ?? [{ stages, microbatches: range(units) }], alone = () => routes().length === 1, [route] = head.routes ?? [{ stages }];
  const places = (list) => list.map((stage) => route.stages.indexOf(stage)), empty = (list) => blocks && list.some((stage) => !blocks[stage]);
  const rules = {
    format: () => format === "quintsched.plan",
    programs: () => Math.max(visits, units) <= programs.reduce((sum, program) => sum + program.length, 0) &&
      placed.length * Math.max(units, programs.length) <= MOST_CELLS,
    mesh: () => once(mesh.map(([axis]) => axis)) && (sizes.pp ?? 1) === programs.length && mesh.reduce((all, [, size]) => all * size, 1) <= mostRanks,
    stage_to_pp: () => placed.every((rank) => rank < programs.length),
    routes: () => routes().every(({ stages: of }) => of.length && once(of) && of.every((stage) => stage < placed.length)) &&
      new Set(routes().flatMap(({ stages: of }) => of)).size === placed.length &&
      same(routes().flatMap(({ microbatches }) => microbatches).sort((a, b) => a - b), range(units)),
    stage_to_part: () => pieces.length === placed.length && routes().every(({ stages: of }) => same(of.map((stage) => pieces[stage]), held)) &&
      once(pieces.map((piece, stage) => `${piece} ${placed[stage]}`)),
    recompute_microbatches: () => !chosen || (recompute?.some((of) => of) && chosen.length === placed.length && chosen.every((list, stage) =>
      !recompute[stage] === !list.length && rising(list) && list.every((microbatch) => routes().some(({ stages: of, microbatches }) =>
        of.includes(stage) && microbatches.some((unit) => Math.floor(unit / schedule.slices) === microbatch))))),
    recompute: () => !recompute || (recompute.length === placed.length && (trains || !recompute.some((of) => of))),
    blocks_per_stage: () => !blocks || (blocks.length === placed.length && blocks.every((count) => count <= mostBlocks) &&
      !empty(routes().map(({ stages: of }) => of[0])) && (!parts || pieces.every((piece, stage) => blocks[stage] === blocks[pieces.indexOf(piece)]))),
    tied: () => !tied.length || (!parts && tied.length <= mostNames && tied.every(([name, of]) => /^(?:[^\p{C}\p{Z}]| ){1,200}$/u.test(name) &&
      name !== "stage" && of.length > 1 && rising(of) && routes().some(({ stages: all }) => of.every((stage) => all.includes(stage))))),
    skips: () => !skips.length || (alone() && skips.length <= mostNames && skips.every(([name, of]) =>
      /^[\p{L}\p{Nl}_][\p{L}\p{M}\p{N}\p{Pc}]{0,199}$/u.test(name) && of.length > 1 && rising([-1, ...places(of)]) && !empty(of))),
    losses: () => !losses?.length || (alone() && rising([-1, ...places(losses)]) && losses.at(-1) === route.stages.at(-1) && !empty(losses.slice(0, -1))),
    zero: () => (every === 1 || (sharding >= 2 && trains)) && (!sharding || mesh.some(([axis, size]) => size > 1 && replicaAxes.includes(axis))) &&
      (trains || ![1, 2].includes(sharding)),
    wire: () => !head.wire === !["auto", "two-level"].includes(means),
    collectives: () => {
      const minis = Object.values(head.collectives ?? {}), spelled = minis.map(({ kind, size }) => `${kind} ${size}`);
      const calls = means === "native" ? [] : programs.flat().filter((i) => ops[code[i?.op]]?.on_bucket).map(({ op, axes }) =>
        `${ops[code[op]].on_bucket} ${[axes].flat().reduce((size, axis) => size * (sizes[axis] ?? 1), 1)}`);
      return calls.every((call) => spelled.includes(call)) && spelled.every((mini) => calls.includes(mini)) &&
        (means === "auto" || minis.every(({ algorithm }) => algorithm === means));
    },
  };
  return Object.keys(rules).find((key) => !rules[key]());
}
