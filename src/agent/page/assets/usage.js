// View: what a month has moved, for whom, and what it cost.

import { about, ask } from "./api.js";
import { bar, h, notes, table } from "./dom.js";
import { bytes, count, dollars, percent } from "./format.js";
import { Panel, empty } from "./panel.js";

export const usage = { id: "usage", title: "Spend", create };

function create() {
  const month = h("input", {
    type: "month",
    value: new Date().toISOString().slice(0, 7),
    "aria-label": "Month",
    onchange: again,
  });
  const by = h(
    "select",
    { onchange: again },
    ["tenant", "run", "site", "link"].map((word) => h("option", { value: word }, word)),
  );
  const panel = new Panel({
    title: "Spend of a month",
    every: 60,
    tools: h("div", { class: "tools" }, h("label", {}, "Month", month), h("label", {}, "By", by)),
    load: (signal) => {
      if (!/^\d{4}-\d\d$/.test(month.value)) {
        throw Object.assign(new Error(`no month: ${month.value}`), { help: "write it as 2026-11", status: 400 });
      }
      return ask(about("/v1/usage", { by: by.value, month: month.value }), { signal });
    },
    draw: (used) => {
      panel.side.textContent = `${used.month}, ${used.prices ? `prices of ${used.prices}` : "no prices"}`;
      return [used.rows.length ? usageTable(used) : empty("Nothing was moved in this month."), notes(used.notes)];
    },
  });
  /** Loads what is asked for now. */
  function again() {
    panel.reset();
    panel.begin();
  }
  return { element: panel.element, panels: [panel] };
}

function usageTable({ rows, total, by }) {
  const name = (row) =>
    row === total ? "total" : row.from ? `${row.from} to ${row.to}` : row.name || "everything else";
  return table(
    [
      {
        title: by[0].toUpperCase() + by.slice(1),
        cell: (row) => (row === total ? [h("strong", {}, "Total")] : name(row)),
      },
      { title: "Share of the bytes", cell: (row) => [bar([row.bytes], total.bytes, percent(row.bytes, total.bytes))] },
      { title: "Bytes", number: true, cell: (row) => bytes(row.bytes) },
      { title: "Requests", number: true, cell: ({ requests }) => count(requests) },
      { title: "Dollars", number: true, cell: ({ usd_micro }) => dollars(usd_micro) },
      { title: "GPU hours saved", number: true, cell: ({ gpu_seconds }) => (gpu_seconds / 3600).toFixed(1) },
    ],
    [...rows]
      .sort((one, other) => (other.usd_micro ?? -1) - (one.usd_micro ?? -1) || other.bytes - one.bytes)
      .concat(total),
    { label: "Usage" },
  );
}
