// View: the audit log of this agent, the latest first.

import { ask } from "./api.js";
import { h, mark, prose, table } from "./dom.js";
import { bytes, counted, time } from "./format.js";
import { Panel, empty } from "./panel.js";

export const audit = { id: "audit", title: "Audit", create };

/** Calls for one page of refusals: each looks at some thousands of entries. */
const CALLS_MAX = 10;
/** Seconds until the latest entries are loaded again: all, and refusals alone, which take longer to find. */
const LATEST_EVERY = 3;
const DENIED_EVERY = 15;
/** Earlier entries do not change. */
const NEVER = 86400;

function create() {
  // Entries before this one are shown; null: the latest.
  let before = null;
  const denied = h("input", { type: "checkbox", onchange: () => go(null) });
  const earlier = h("button", { type: "button", onclick: () => go(panel.loaded?.next ?? null) }, "Earlier");
  const newest = h("button", { type: "button", onclick: () => go(null) }, "Latest");
  const panel = new Panel({
    title: "Audit log",
    quiet: "`towline audit verify` checks the chain",
    every: LATEST_EVERY,
    tools: h("div", { class: "tools" }, h("label", {}, denied, "only what was denied"), newest, earlier),
    load: (signal) => entriesBefore(before, denied.checked, signal),
    draw: ({ entries, next, unreadable }) => {
      earlier.disabled = next === undefined;
      newest.disabled = before === null;
      const broken = `${counted(unreadable, "line")} cannot be read: \`towline audit verify\``;
      return [
        unreadable > 0 && h("p", { class: "failure" }, prose(broken)),
        entries.length ? entryTable(entries) : empty(nothing(denied.checked, next)),
      ];
    },
  });
  function go(to) {
    before = to;
    panel.every = before !== null ? NEVER : denied.checked ? DENIED_EVERY : LATEST_EVERY;
    panel.reset();
    panel.begin();
  }
  return { element: panel.element, panels: [panel] };
}

/** Entries before one; of refusals, until some are found. */
async function entriesBefore(before, denied, signal) {
  let found = await page(before, denied, signal);
  let unreadable = found.unreadable;
  for (let calls = 1; denied && !found.entries.length && found.next && calls < CALLS_MAX; calls += 1) {
    found = await page(found.next, denied, signal);
    unreadable += found.unreadable;
  }
  return { ...found, unreadable };
}

function page(before, denied, signal) {
  const asked = new URLSearchParams({ denied, limit: 100, ...(before ? { before } : {}) });
  return ask(`/v1/audit?${asked}`, { signal });
}

function nothing(denied, next) {
  if (!denied) return "The log has no entries.";
  return next ? `Nothing was denied in the entries from ${next} on.` : "Nothing was denied.";
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
  if (kind === "torn") return [mark("damaged", "bad")];
  return kind === "end" ? `end of ${of}` : kind;
}

function what({ kind, name, to, asked, bytes: moved, outcome, origin, digest }) {
  if (kind === "end") return `${bytes(moved)}, ${outcome}`;
  if (kind === "begin") return origin;
  if (kind === "torn") return `${counted(moved, "byte")} at the end were not entries; digest ${digest}`;
  return [name ?? "(no name)", to && ` to ${to}`, asked && `, asked of ${asked}`].filter(Boolean).join("");
}
