// View: what a month has moved, for whom, and what it cost.

import { ask } from "./api.js";
import { bar, h, notes, table } from "./dom.js";
import { bytes, count, dollars, percent } from "./format.js";
import { Panel, empty } from "./panel.js";

export const usage = { id: "usage", title: "Spend", create };

function create() {
  const month = h("input", {
    type: "month",
    value: new Date().toISOString().slice(0, 7),
    "aria-label": "Month",
    onchange: () => panel.begin(),
  });
  const by = h(
    "select",
    { onchange: () => panel.begin() },
    ["tenant", "run", "site", "link"].map((word) => h("option", { value: word }, word)),
  );
  const panel = new Panel({
    title: "Spend of a month",
    every: 60,
    tools: h("div", { class: "tools" }, h("label", {}, "Month", month), h("label", {}, "By", by)),
    load: (signal) => {
      const asked = new URLSearchParams({
        by: by.value,
        ...(/^\d{4}-\d\d$/.test(month.value) ? { month: month.value } : {}),
      });
      return ask(`/v1/usage?${asked}`, { signal });
    },
    draw: (used) => {
      panel.side.textContent = used.prices ? `prices of ${used.prices}` : "no prices";
      return [used.rows.length ? usageTable(used) : empty("Nothing was moved in this month."), notes(used.notes)];
    },
  });
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
      { title: "GPU hours not idle", number: true, cell: ({ gpu_seconds }) => (gpu_seconds / 3600).toFixed(1) },
    ],
    [...rows].sort((one, other) => other.bytes - one.bytes).concat(total),
    { label: "Usage" },
  );
}
