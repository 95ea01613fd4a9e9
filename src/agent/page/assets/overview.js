// View: the agent at a glance.

import { about, ask, askIfPermitted, askIfThere, chosen } from "./api.js";
import { bar, h, notes, svg, table, when } from "./dom.js";
import { bytes, count, counted, duration, percent, rate, time } from "./format.js";
import { Panel, empty } from "./panel.js";
import { Rates } from "./rates.js";
import { part, phase, tone } from "./task.js";

/** Moments that the line of rates has: two minutes. */
const MOMENTS = 120;
/** Runs and transfers that are listed. */
const LISTED = 8;

export const overview = { id: "overview", title: "Overview", create };

function create() {
  const rates = new Rates();
  const line = [];
  const tiles = new Panel({
    every: 1,
    always: true,
    load: async (signal) => {
      const [health, { tasks }, cache] = await Promise.all([
        ask("/health", { signal }),
        ask("/v1/tasks", { signal }),
        askIfPermitted("/v1/cache", { signal }),
      ]);
      const found = rates.observe(tasks, performance.now());
      const sum = [...found.values()].reduce((all, { rate }) => all + rate, 0);
      line.push(sum);
      line.splice(0, line.length - MOMENTS);
      return { health, tasks, cache, found, sum };
    },
    draw: (loaded) => [agentTiles(loaded, line), problems(loaded.health), lately(loaded)],
  });
  const sites = new Panel({
    title: "Sites",
    every: 10,
    load: (signal) => askIfThere(about("/v1/sites"), { signal }),
    draw: (list) =>
      list ? sitesTable(list) : empty("This agent is no advisor: `[advisor] sites` in its settings makes it one."),
  });
  const runs = new Panel({
    title: "Runs, the latest first",
    every: 10,
    load: (signal) => ask(about("/v1/runs"), { signal }),
    draw: ({ runs }) => runsTable(runs),
  });
  return {
    element: h("div", { class: "stack" }, tiles.element, h("div", { class: "columns" }, sites.element, runs.element)),
    panels: [tiles, sites, runs],
  };
}

function tile(title, value, ...rest) {
  return h("section", { class: "tile" }, h("h2", {}, title), h("strong", {}, value), ...rest);
}

function agentTiles({ health, tasks, cache, sum }, line) {
  const under = tasks.filter(({ state }) => state === "running").length;
  const failed = tasks.filter(({ state }) => state === "failed").length;
  const stored =
    cache &&
    tile(
      "Cache",
      percent(cache.bytes, cache.capacity),
      bar(
        [cache.pinned_bytes, cache.bytes - cache.pinned_bytes],
        cache.capacity,
        `${bytes(cache.pinned_bytes)} pinned, ${bytes(cache.bytes)} used`,
      ),
      h("p", { class: "quiet" }, `${bytes(cache.bytes)} of ${bytes(cache.capacity)}; ${counted(cache.pins, "pin")}`),
    );
  const reads =
    cache &&
    tile(
      "Reads from the cache",
      percent(cache.hits, cache.hits + cache.misses),
      h("p", { class: "quiet" }, `${count(cache.hits)} hits, ${count(cache.misses)} misses`),
    );
  return h(
    "div",
    { class: "tiles" },
    tile(
      "Transfers",
      `${count(under)} running`,
      h("p", { class: "quiet" }, failed ? `${counted(failed, "recent failure")}` : "no recent failure"),
    ),
    tile("Throughput, uncompressed", rate(sum), spark(line)),
    stored,
    reads,
    tile(
      "Agent",
      health.leaving ? "ending" : health.ready ? "ready" : "not ready",
      health.version && h("p", { class: "quiet" }, `${health.identity ?? "no identity"}, version ${health.version}`),
      health.started && h("p", { class: "quiet" }, `process ${health.pid}, since ${time(health.started)}`),
      repositories(health),
    ),
  );
}

/** The repository that is looked at. */
function repositories({ repositories }) {
  const all = repositories ?? [];
  const shown = all.find(({ id }) => id === chosen.repository) ?? all[0];
  return shown && h("p", { class: "quiet" }, `repository ${shown.location ?? shown.id}`);
}

/** A line of the rates of the last two minutes. */
function spark(line) {
  const most = Math.max(1, ...line);
  const at = (value, place) => `${(place + MOMENTS - line.length).toFixed(0)} ${(30 - (28 * value) / most).toFixed(1)}`;
  const path = line.length > 1 ? `M${line.map(at).join("L")}` : "";
  const label = `Throughput at the last looks; at most ${rate(most)}`;
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${MOMENTS - 1} 32`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: path }),
  );
}

function problems({ preemption, problems }) {
  const texts = [preemption && `The machine will be taken away: ${preemption}`, ...(problems ?? [])];
  return notes(texts.filter(Boolean));
}

/** Transfers that run, and the last ones that ended. */
function lately({ tasks, found }) {
  const isRunning = ({ state }) => state === "running";
  const ended = tasks.filter((task) => !isRunning(task)).reverse();
  const listed = [...tasks.filter(isRunning), ...ended].slice(0, LISTED);
  const head = h("header", {}, h("h2", {}, "Transfers"), h("a", { href: "#transfers", "data-key": "all" }, "all"));
  if (!listed.length) return h("section", { class: "panel" }, head, empty("No transfers yet."));
  const columns = [
    { title: "Name", cell: ({ name }) => name },
    { title: "Kind", cell: ({ kind }) => kind },
    { title: "State", cell: (task) => [h("span", { class: tone(task) }, phase(task))] },
    { title: "Done", cell: (task) => [bar([part(task)], 1, percent(part(task), 1))] },
    { title: "Bytes", number: true, cell: ({ progress }) => `${bytes(progress.done)} of ${total(progress)}` },
    { title: "Rate", number: true, cell: ({ id }) => rate(found.get(id)?.rate) },
    { title: "Left", number: true, cell: ({ id }) => left(found.get(id)) },
  ];
  return h("section", { class: "panel" }, head, table(columns, listed, { label: "Transfers" }));
}

function total({ total }) {
  return total ? bytes(total) : "?";
}

function left(found) {
  return found?.left === null || found === undefined ? "-" : duration(found.left);
}

function sitesTable({ sites }) {
  if (!sites.length) return empty("The sites file has no sites.");
  const sum = (agents, of) => agents.reduce((all, agent) => all + agent[of], 0);
  return table(
    [
      { title: "Site", cell: ({ name, has_repository }) => (has_repository ? `${name} (repository)` : name) },
      {
        title: "Where",
        cell: ({ provider, region, jurisdictions }) => [provider, region, ...jurisdictions].filter(Boolean).join(", "),
      },
      { title: "Agents", number: true, cell: ({ agents }) => count(agents.length) },
      {
        title: "Cache",
        cell: ({ agents }) => [
          bar([sum(agents, "used")], sum(agents, "capacity"), percent(sum(agents, "used"), sum(agents, "capacity"))),
        ],
      },
      { title: "Used", number: true, cell: ({ agents }) => bytes(sum(agents, "used")) },
    ],
    sites,
    { label: "Sites" },
  );
}

function runsTable(runs) {
  if (!runs.length) return empty("No run is saved: `towline save PATH RUN/step-N` makes one.");
  const latest = [...runs].sort((one, other) => (one.saved < other.saved ? 1 : -1)).slice(0, LISTED);
  return table(
    [
      {
        title: "Run",
        cell: ({ run }) => [h("a", { href: `#runs?run=${encodeURIComponent(run)}`, "data-key": run }, run)],
      },
      { title: "Steps", number: true, cell: ({ count: steps }) => count(steps) },
      { title: "Last", number: true, cell: ({ last }) => String(last) },
      { title: "Saved", cell: ({ saved }) => [when(saved)] },
      { title: "Bytes", number: true, cell: ({ bytes: all }) => bytes(all) },
    ],
    latest,
    { label: "Runs" },
  );
}
