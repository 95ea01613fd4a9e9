// View: sites, the links between them, and which site has what.

import { about, ask } from "./api.js";
import { bar, h, mark, notes, table, when } from "./dom.js";
import { bytes, count, counted, dollars, percent, rate } from "./format.js";
import { Panel, empty } from "./panel.js";

/** Runs whose latest step is looked for at each site. */
const RUNS = 12;

export const sites = { id: "sites", title: "Sites", create };

function create() {
  const all = new Panel({
    title: "Sites",
    every: 5,
    load: (signal) => ask(about("/v1/sites"), { signal }),
    draw: (list) => [siteTable(list.sites), notes(list.notes)],
  });
  const links = new Panel({
    title: "Links between sites",
    every: 5,
    load: (signal) => ask(about("/v1/sites"), { signal }),
    draw: linkTable,
  });
  const where = new Panel({
    title: "What is where",
    quiet: `the latest step of the ${RUNS} newest runs`,
    every: 10,
    load: (signal) => holdings(signal),
    draw: holdingsTable,
  });
  return {
    element: h("div", { class: "stack" }, all.element, where.element, links.element),
    panels: [all, where, links],
  };
}

function siteTable(sites) {
  if (!sites.length) return empty("The sites file has no sites.");
  const rows = sites.flatMap((site) => [{ site }, ...site.agents.map((agent) => ({ site, agent }))]);
  const sum = (agents, of) => agents.reduce((all, agent) => all + agent[of], 0);
  const of = ({ site, agent }, name) => (agent ? agent[name] : sum(site.agents, name));
  const gpus = ({ gpus }) =>
    gpus
      .map(({ model, count: number, usd_micro_hour }) => `${count(number)} ${model} at ${dollars(usd_micro_hour)}/h`)
      .join("; ");
  return table(
    [
      {
        title: "Site",
        cell: ({ site, agent }) =>
          agent
            ? `\u2003${agent.agent.split("/")[1]}`
            : [h("strong", {}, site.name), " ", site.has_repository && mark("repository", "good")].filter(Boolean),
      },
      {
        title: "Where",
        cell: ({ site, agent }) =>
          agent ? "" : [site.provider, site.region, ...site.jurisdictions].filter(Boolean).join(", "),
      },
      { title: "GPUs", cell: ({ site, agent }) => (agent ? "" : gpus(site)) },
      {
        title: "Cache",
        cell: (row) => [
          bar(
            [of(row, "promised"), Math.max(0, of(row, "used") - of(row, "promised"))],
            of(row, "capacity"),
            `${bytes(of(row, "used"))} used, ${bytes(of(row, "promised"))} promised to pins`,
          ),
        ],
      },
      { title: "Used", number: true, cell: (row) => `${bytes(of(row, "used"))} of ${bytes(of(row, "capacity"))}` },
      { title: "Pinned", number: true, cell: (row) => bytes(of(row, "promised")) },
      { title: "Chunks", number: true, cell: (row) => count(of(row, "chunks")) },
      {
        title: "Inventory",
        cell: ({ site, agent }) =>
          agent
            ? [agent.is_false ? mark("contradicted by samples", "bad") : when(agent.at)]
            : site.agents.length
              ? ""
              : "none",
      },
    ],
    rows,
    { label: "Sites and their agents" },
  );
}

function linkTable({ links, measured }) {
  const pair = (from, to) => measured.find((link) => link.from === from && link.to === to);
  const rows = links.map((link) => ({ ...link, measured: pair(link.from, link.to) }));
  const known = new Set(links.map(({ from, to }) => `${from} ${to}`));
  for (const link of measured) {
    if (!known.has(`${link.from} ${link.to}`))
      rows.push({ from: link.from ?? "repository", to: link.to, path: "-", measured: link });
  }
  if (!rows.length) return empty("No link is described in the sites file, and none is measured.");
  return table(
    [
      { title: "From", cell: ({ from }) => from },
      { title: "To", cell: ({ to }) => to },
      { title: "Path", cell: ({ path }) => path },
      { title: "Configured rate", number: true, cell: (link) => rate(link.rate) },
      { title: "Delay", number: true, cell: ({ delay_ms }) => (delay_ms ? `${delay_ms.toFixed(1)} ms` : "-") },
      { title: "Measured rate", number: true, cell: ({ measured }) => rate(measured?.rate) },
      { title: "Samples", number: true, cell: ({ measured }) => count(measured?.samples ?? 0) },
      {
        title: "Median error of hints",
        number: true,
        cell: ({ measured }) =>
          measured?.median_error == null
            ? "-"
            : `${(100 * measured.median_error).toFixed(0)} % (${counted(measured.outcomes, "transfer")})`,
      },
      { title: "Price of a GB", number: true, cell: ({ usd_micro_gb }) => dollars(usd_micro_gb) },
    ],
    rows,
    { label: "Links between sites" },
  );
}

/** What each site has of the latest step of the newest runs: rows of a name with the candidates of a hint, or an error. */
async function holdings(signal) {
  const { runs } = await ask(about("/v1/runs"), { signal });
  const newest = [...runs].sort((one, other) => (one.saved < other.saved ? 1 : -1)).slice(0, RUNS);
  return Promise.all(newest.map(({ latest }) => holdingsOf(latest, signal)));
}

async function holdingsOf(name, signal) {
  const body = { apiVersion: "towline.dev/v1", inputs: [{ ref: name }] };
  try {
    const { candidates } = await ask(about("/v1/hints", { wait: "2s" }), { signal, body });
    return { name, candidates };
  } catch (error) {
    // One that the policy keeps away from here, or that was just removed, hides no other.
    if (error.name === "AbortError" || [0, 401].includes(error.status)) throw error;
    return { name, candidates: [], error: error.message };
  }
}

function holdingsTable(rows) {
  if (!rows.length) return empty("No run is saved.");
  const places = [...new Set(rows.flatMap(({ candidates }) => candidates.map(({ site }) => site)))].sort();
  if (!places.length) places.push("any site");
  const cell = ({ candidates, error }, place) => {
    if (error) return "";
    const candidate = candidates.find(({ site }) => site === place);
    if (!candidate) return "-";
    if (candidate.verdict !== "allow") return [mark(candidate.verdict, "bad")];
    const { present, in_flight, missing } = candidate.bytes;
    const stored = present + in_flight + missing;
    const label = `${bytes(present)} of ${bytes(stored)}, ${bytes(in_flight)} in flight`;
    const text = missing ? `${percent(present, stored)}, ${bytes(missing)} missing` : "100 %";
    return [bar([present, in_flight], stored, label), h("span", { class: "quiet" }, text)];
  };
  return table(
    [
      { title: "Step", cell: ({ name, error }) => [name, error && h("p", { class: "bad" }, error)] },
      ...places.map((place) => ({ title: place, cell: (row) => cell(row, place) })),
    ],
    rows,
    { label: "What each site has" },
  );
}
