// View: transfers under way and ended, and the links to other agents.

import { ask, askIfThere } from "./api.js";
import { h, table } from "./dom.js";
import { bytes, count, counted, duration, percent, rate, time } from "./format.js";
import { Panel, empty } from "./panel.js";
import { Rates } from "./rates.js";
import { part, phase, tone } from "./task.js";
import { VirtualTable } from "./virtual.js";

export const transfers = { id: "transfers", title: "Transfers", create };

function create() {
  const rates = new Rates();
  let found = new Map();
  const progress =
    (of) =>
    ({ progress }) =>
      progress[of];
  const list = new VirtualTable({
    label: "Transfers",
    sort: { id: "started", falling: true },
    columns: [
      { id: "name", title: "Name", width: "20%", text: ({ name }) => name, order: ({ name }) => name },
      { id: "kind", title: "Kind", width: "6%", text: ({ kind }) => kind, order: ({ kind }) => kind },
      { id: "state", title: "State", width: "9%", text: phase, order: phase, tone },
      {
        id: "done",
        title: "Done",
        width: "7%",
        text: (task) => percent(part(task), 1),
        order: part,
        tone: () => "progress",
        part: (task) => 100 * part(task),
      },
      {
        id: "bytes",
        title: "Bytes",
        width: "9%",
        number: true,
        text: (task) => bytes(task.progress.total || task.progress.done),
        order: progress("total"),
        hover: (task) => `${bytes(task.progress.done)} of ${bytes(task.progress.total)} plain`,
      },
      {
        id: "moved",
        title: "Compressed",
        width: "9%",
        number: true,
        text: (task) => bytes(task.progress.moved),
        order: progress("moved"),
      },
      {
        id: "rate",
        title: "Rate",
        width: "9%",
        number: true,
        text: ({ id }) => rate(found.get(id)?.rate),
        order: ({ id }) => found.get(id)?.rate ?? -1,
      },
      {
        id: "left",
        title: "Left",
        width: "10%",
        number: true,
        text: ({ id }) => duration(found.get(id)?.left ?? NaN),
        order: ({ id }) => found.get(id)?.left ?? Infinity,
      },
      {
        id: "started",
        title: "Started",
        width: "10%",
        text: ({ started }) => time(started),
        order: ({ started }) => started,
        hover: ({ started, seconds, caller }) => `${started}, ${duration(seconds)}${caller ? `, for ${caller}` : ""}`,
      },
      { id: "error", title: "Error", width: "11%", text: fault, order: fault, tone: () => "bad" },
    ],
  });
  const search = h("input", {
    type: "search",
    placeholder: "Name, kind, state or caller",
    "aria-label": "Filter",
    oninput: () => panel.redraw(),
  });
  const only = h(
    "select",
    { onchange: () => panel.redraw() },
    h("option", { value: "" }, "all"),
    h("option", { value: "running" }, "running"),
    h("option", { value: "failed" }, "failed"),
  );
  const shown = h("span", { class: "quiet", role: "status" });
  const nothing = empty("No transfers since the agent started.");
  const panel = new Panel({
    title: "Transfers",
    every: 1,
    always: true,
    tools: h("div", { class: "tools" }, search, h("label", {}, "State", only), shown),
    load: async (signal) => {
      const { tasks } = await ask("/v1/tasks", { signal });
      found = rates.observe(tasks, performance.now());
      return tasks;
    },
    draw: (tasks) => {
      const wanted = search.value.trim().toLowerCase();
      const is = (task) =>
        (!only.value || task.state === only.value) &&
        (!wanted || `${task.name} ${task.kind} ${phase(task)} ${task.caller ?? ""}`.toLowerCase().includes(wanted));
      const rows = wanted || only.value ? tasks.filter(is) : tasks;
      const text = `${count(rows.length)} of ${count(tasks.length)}`;
      if (shown.textContent !== text) shown.textContent = text;
      list.show(rows);
      nothing.hidden = tasks.length > 0;
      list.element.hidden = tasks.length === 0;
      return stable;
    },
  });
  // The table keeps its place and the focus: it is the same each time.
  const stable = [];
  panel.redraw = () => panel.loaded !== null && panel.draw(panel.loaded);
  panel.body.replaceChildren(nothing, list.element);
  nothing.hidden = true;

  const peers = new Panel({
    title: "Links to other agents",
    every: 2,
    load: (signal) => askIfThere("/v1/peers", { signal }),
    draw: (list) =>
      list?.peers.length
        ? peersTable(list.peers)
        : empty("This agent knows no others: `[peers]` of its settings names them."),
  });
  return { element: h("div", { class: "stack" }, panel.element, peers.element), panels: [panel, peers] };
}

function fault({ error }) {
  return error?.message ?? "";
}

function peersTable(peers) {
  const down = ({ connections }) => connections === 0;
  return table(
    [
      { title: "Agent", cell: ({ identity, address }) => identity ?? address },
      { title: "Address", cell: ({ address }) => address },
      {
        title: "Link",
        cell: (peer) => [
          h(
            "span",
            { class: down(peer) ? "warn" : "good" },
            down(peer) ? "down" : `${peer.transport}, ${counted(peer.connections, "connection")}`,
          ),
        ],
      },
      { title: "Delay", number: true, cell: ({ rtt_ms }) => (rtt_ms === null ? "-" : `${rtt_ms.toFixed(1)} ms`) },
      { title: "Rate", number: true, cell: (peer) => rate(peer.rate) },
      { title: "Received", number: true, cell: ({ received }) => bytes(received) },
      { title: "Last error", cell: (peer) => (down(peer) ? (peer.error ?? "") : "") },
    ],
    peers,
    { label: "Links to other agents" },
  );
}
