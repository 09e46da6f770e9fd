/** Search: `stage 3 microbatch 7`, `F7`, `B2 rank 1`, `rank 5`, `OptStep`, `time 12.5`. */
const WORDS = {
  stage: /\b(?:stage|s)\s*=?\s*(\d+)\b/i,
  unit: /\b(?:microbatch|mb|unit)\s*=?\s*(\d+)\b/i,
  rank: /\b(?:rank|r)\s*=?\s*(\d+)\b/i,
  time: /\b(?:time|t)\s*=?\s*(\d+(?:\.\d+)?)/i,
};

/** Return the rows that a query means, or a rank, or a time. */
export function search(plan, query, most = 500) {
  const found = Object.fromEntries(Object.entries(WORDS).map(([name, word]) => {
    const match = query.match(word);
    return [name, match ? Number(match[1]) : null];
  }));
  let rest = query;
  for (const word of Object.values(WORDS)) rest = rest.replace(word, " ");
  const letters = rest.match(/\b([A-Za-z]+)(\d+)\b/);
  const names = rest.toLowerCase().match(/[a-z]+/g) ?? [];
  let ops = null, unit = found.unit;
  if (letters) {
    ops = plan.tables.ops.map((op) => op.letters.toLowerCase() === letters[1].toLowerCase());
    unit ??= Number(letters[2]);
  } else if (names.length) {
    ops = plan.tables.ops.map((op) => names.some((n) => op.name.toLowerCase().startsWith(n) || op.letters.toLowerCase() === n || op.label.includes(n)));
  }
  const rows = [];
  if (ops !== null || unit !== null || found.stage !== null) {
    for (let row = 0; row < plan.length && rows.length < most; row++) {
      const sides = plan.is(row, "Overlap") ? [plan.value("forward", row), plan.value("backward", row)] : [[plan.stage[row], plan.unit[row]]];
      const op = plan.op[row];
      if (ops ? !ops[op] : !plan.tables.computes[op]) continue;
      if (found.rank !== null && plan.rank[row] !== found.rank) continue;
      if (sides.some(([s, u]) => (found.stage === null || s === found.stage) && (unit === null || u === unit))) rows.push(row);
    }
  }
  return { rows, rank: found.rank, time: found.time };
}
