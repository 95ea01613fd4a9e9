// View: the audit log of this agent, the latest first.

import { ask } from "./api.js";
import { h, mark, prose, table } from "./dom.js";
import { bytes, counted, time } from "./format.js";
import { Panel, empty } from "./panel.js";

export const audit = { id: "audit", title: "Audit", create };

function create() {
  // Entries before these are asked for by the button; then nothing is loaded anew by itself.
  let before = null;
  const denied = h("input", { type: "checkbox", onchange: () => go(null) });
  const earlier = h("button", { type: "button", onclick: () => go(panel.loaded?.next ?? null) }, "Earlier");
  const newest = h("button", { type: "button", onclick: () => go(null) }, "Latest");
  const panel = new Panel({
    title: "Audit log",
    quiet: "`towline audit verify` checks the chain",
    every: 3,
    tools: h("div", { class: "tools" }, h("label", {}, denied, "only what was denied"), newest, earlier),
    load: (signal) => {
      const asked = new URLSearchParams({ denied: denied.checked, limit: 100, ...(before ? { before } : {}) });
      return ask(`/v1/audit?${asked}`, { signal });
    },
    draw: ({ entries, next, unreadable }) => {
      earlier.disabled = next === undefined;
      newest.disabled = before === null;
      const broken =
        unreadable > 0 &&
        h("p", { class: "failure" }, prose(`${counted(unreadable, "line")} cannot be read: \`towline audit verify\``));
      return [
        broken,
        entries.length
          ? entryTable(entries)
          : empty(denied.checked ? "Nothing was denied." : "The log has no entries."),
      ];
    },
  });
  function go(to) {
    before = to;
    panel.begin();
  }
  return { element: panel.element, panels: [panel] };
}

function entryTable(entries) {
  return table(
    [
      { title: "Entry", cell: ({ seq }) => String(seq) },
      { title: "Time", cell: ({ time: at }) => [h("time", { datetime: at, title: at }, time(at))] },
      { title: "Verdict", cell: verdict },
      { title: "Action", cell: ({ action }) => action ?? "" },
      { title: "Name", cell: what },
      { title: "By", cell: ({ actor }) => actor ?? "" },
      { title: "Rule", cell: ({ rule }) => rule ?? "" },
    ],
    entries,
    { label: "Entries of the audit log" },
  );
}

function verdict({ kind, verdict, of }) {
  if (kind === "decision") return [mark(verdict, verdict === "deny" ? "bad" : "good")];
  return kind === "end" ? `end of ${of}` : kind;
}

function what({ kind, name, to, asked, bytes: moved, outcome, origin }) {
  if (kind === "end") return `${bytes(moved)}, ${outcome}`;
  if (kind === "begin") return origin;
  return [name ?? "(no name)", to && ` to ${to}`, asked && `, asked of ${asked}`].filter(Boolean).join("");
}
