/**
 * Plan as columns: one row per instruction, rank after rank.
 *
 *     row     0    1        2    …      `first[k]` is the row of rank k's first instruction
 *     op      Fwd  SendAct  Bwd  …      index into `tables.ops`
 *     stage   0    0        0    …      one column per field; ABSENT where an instruction has no such field;
 *     stages  -1   -1       -1   …      values other than numbers are in `table`, the column holds their index
 *
 * `tables` is what the planner says about instructions: classes, data-flow rules, profiles. Python writes it into
 * every page, so that no rule stands here a second time.
 */
import { breach, headFault } from "./check_input.js";
import { Layout, range } from "./layout.js";
import { counted } from "./numbers.js";

export const ABSENT = -1;

/** Index the planner's tables by name. */
export function readTables(raw) {
  const code = Object.fromEntries(raw.ops.map((op, number) => [op.name, number]));
  const mask = (test) => Uint8Array.from(raw.ops, (op) => (test(op) ? 1 : 0));
  return {
    ...raw,
    code,
    numbers: new Set(raw.numbers),
    computes: mask((op) => op.computes),
    sends: mask((op) => op.message === "send"),
    receives: mask((op) => op.message === "receive"),
    issued: mask((op) => op.issued),
    replicas: mask((op) => op.among_replicas),
    rules: raw.ops.map((op) => raw.rules[op.name] ?? []),
    kind: Object.fromEntries(raw.kinds.map((name, number) => [name, number])),
  };
}

export class Plan {
  constructor(tables, head, first, op, columns, table) {
    Object.assign(this, { tables, head, first, op, columns, table });
    this.length = op.length;
    this.ranks = first.length - 1;
    this.rank = new Int32Array(this.length);
    for (let k = 0; k < this.ranks; k++) this.rank.fill(k, first[k], first[k + 1]);
    this.stage = this.column("stage");
    this.unit = this.column("microbatch");
    this.peer = this.column("peer");
    this.schedule = head.schedule;
    this.parts = head.schedule.chunks * head.schedule.slices;
    this.memo = {};
  }

  /** Build a plan from the JSON of a plan file. */
  static fromJson(tables, file) {
    const { programs, ...head } = file ?? {};
    const broken = programs?.every?.(Array.isArray) ? Plan.brokenHead(tables, head, programs) : "/programs: it is not a list of lists";
    if (broken) throw new Error(`this is no plan: ${broken}`);
    return Plan.fromPrograms(tables, head, programs);
  }

  /** Return where a head is none that the planner reads; null if it is one. */
  static brokenHead(tables, head, programs) {
    const misfit = breach(tables.forms.plan, head) ?? headFault(tables, head, programs);
    return misfit && !misfit.includes(":") ? `/${misfit}: it does not fit the rest of the plan` : misfit ?? null;
  }

  /** Build a plan from one list of instructions, as objects of a plan file, per rank. */
  static fromPrograms(tables, head, programs) {
    const first = new Int32Array(programs.length + 1);
    programs.forEach((program, k) => (first[k + 1] = first[k] + program.length));
    const length = first[programs.length];
    const op = new Uint8Array(length);
    const columns = {};
    const table = [];
    const known = new Map();
    const intern = (value) => {
      const text = JSON.stringify(value);
      if (!known.has(text)) known.set(text, table.push(value) - 1);
      return known.get(text);
    };
    let row = 0;
    for (const program of programs) {
      for (const instruction of program) {
        const code = tables.code[instruction?.op];
        if (code === undefined) throw new Error(`unknown instruction ${instruction?.op}`);
        op[row] = code;
        const { fields } = tables.ops[code];
        if (Object.keys(instruction).length > fields.length + 1) throw new Error(`${instruction.op} has an unknown field`);
        for (const name of fields) {
          columns[name] ??= new Int32Array(length).fill(ABSENT);
          const value = instruction[name], fault = breach(tables.forms.fields[name], value);
          if (fault) throw new Error(`${instruction.op}/${name}${fault}`);
          columns[name][row] = tables.numbers.has(name) ? value : intern(value);
        }
        row++;
      }
    }
    return new Plan(tables, head, first, op, columns, table);
  }

  /** Return a column; of a field that no instruction has, one of ABSENT. */
  column(name) { return this.columns[name] ?? (this.nothing ??= new Int32Array(this.length).fill(ABSENT)); }

  /** Return the value of a field that is no number. */
  value(name, row) { return this.table[this.columns[name][row]]; }

  /** Compute something once. */
  once(name, make) { return (this.memo[name] ??= make()); }

  get layout() { return this.once("layout", () => new Layout(this)); }

  /** Name of the class of a row. */
  name(row) { return this.tables.ops[this.op[row]].name; }
  is(row, name) { return this.op[row] === this.tables.code[name]; }
  index(row) { return row - this.first[this.rank[row]]; }

  /** Return an instruction as in a plan file. */
  instruction(row) {
    const { name, fields } = this.tables.ops[this.op[row]];
    const found = { op: name };
    for (const field of fields) {
      found[field] = this.tables.numbers.has(field) ? this.columns[field][row] : this.value(field, row);
    }
    return found;
  }

  /** Return an instruction as text: Fwd(stage=0, microbatch=3). */
  text(row) {
    const { op, ...fields } = this.instruction(row);
    return `${op}(${Object.entries(fields).map(([name, value]) => `${name}=${Array.isArray(value) ? value.join("+") : value}`).join(", ")})`;
  }

  /** Return an abbreviation: F3, or F3&B1 for an overlapped pair. */
  short(row) {
    const { letters, name } = this.tables.ops[this.op[row]];
    if (name === "Overlap") return `F${this.value("forward", row)[1]}&B${this.value("backward", row)[1]}`;
    const number = this.unit[row] >= 0 ? this.unit[row] : this.column("bucket")[row];
    return letters + (number >= 0 ? number : "");
  }

  /** Rows with overlapped pairs split into their forward and their backward; `origin` is the row in the plan. */
  get apart() {
    return this.once("apart", () => {
      const { Overlap, Fwd, Bwd } = this.tables.code;
      if (!this.op.includes(Overlap)) return { length: this.length, op: this.op, stage: this.stage, unit: this.unit, origin: null };
      const sides = (row) => this.op[row] !== Overlap ? [[this.op[row], this.stage[row], this.unit[row], row]]
        : [[Fwd, ...this.value("forward", row), row], [Bwd, ...this.value("backward", row), row]];
      const all = range(this.length).flatMap(sides), [op, stage, unit, origin] = range(4).map((at) => Int32Array.from(all, (side) => side[at]));
      return { length: all.length, op, stage, unit, origin };
    });
  }

  /** Return one list of instructions per rank, as in a plan file. */
  programs() {
    return Array.from({ length: this.ranks }, (_, k) =>
      Array.from({ length: this.first[k + 1] - this.first[k] }, (_, index) => this.instruction(this.first[k] + index)));
  }

  /** Return the text of a plan file. */
  toJson() {
    const head = Object.entries(this.head).map(([key, value]) => ` ${JSON.stringify(key)}: ${JSON.stringify(value)}`);
    const programs = this.programs().map((program) => `  [${program.map((i) => JSON.stringify(i)).join(",\n   ")}]`);
    return `{${head.join(",\n").slice(1)},\n "programs": [\n${programs.join(",\n")}]}\n`;
  }

  get title() {
    const mesh = this.head.mesh.map(([name, size]) => `${name}=${size}`).join(",");
    const { name, microbatches, chunks, slices } = this.schedule;
    return this.givenTitle ?? `${name} on ${mesh}, ${counted(microbatches, "microbatch")}` +
      (chunks > 1 ? `, ${chunks} chunks` : "") + (slices > 1 ? `, ${slices} slices` : "");
  }
}
