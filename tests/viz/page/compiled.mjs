// Compiles what each line of standard input asks for, {tables} first, and prints the plans or why there are none.
import { createInterface } from "node:readline";
import { headOf, lower, misfit, ordersIn, ordersOf } from "../../../viz/page/compile.js";
import { Plan, readTables } from "../../../viz/page/plan.js";
import { readLink, readOrders, writeLink } from "../../../viz/page/link.js";

let tables = null;
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  if (asked.tables) tables = readTables(asked.tables);
  else if (asked.plan) { // an order that Python lowered: take it apart and lower it again
    const plan = Plan.fromJson(tables, asked.plan);
    console.log(JSON.stringify({ plan: JSON.parse(lower(tables, plan.head, ordersIn(plan)).plan.toJson()) }));
  } else if (asked.orders) { // an order of a level
    const found = lower(tables, headOf("1f1b", asked), readOrders(asked.orders));
    console.log(JSON.stringify({ plan: found.plan ? JSON.parse(found.plan.toJson()) : null }));
  } else {
    const fault = misfit(asked.name, asked);
    const orders = fault ? null : readLink(writeLink({ orders: ordersOf(asked.name, asked) })).orders;
    console.log(JSON.stringify(fault ? { fault } : { plan: JSON.parse(lower(tables, headOf(asked.name, asked), orders).plan.toJson()) }));
  }
}
