// View: runs, their steps, and how a step is stored.

import { about, ask } from "./api.js";
import { bar, h, table, terms, when } from "./dom.js";
import { bytes, count, counted, percent } from "./format.js";
import { Panel, empty } from "./panel.js";

export const runs = { id: "runs", title: "Runs", create };

function create(asked) {
  let run = asked.get("run");
  let tree = asked.get("tree");
  const search = h("input", {
    type: "search",
    placeholder: "Run",
    "aria-label": "Filter",
    oninput: () => all.redraw(),
  });
  const all = new Panel({
    title: "Runs",
    every: 5,
    tools: h("div", { class: "tools" }, search),
    load: (signal) => ask(about("/v1/runs"), { signal }),
    draw: ({ runs }) => {
      const found = runs.filter((one) => one.run.toLowerCase().includes(search.value.trim().toLowerCase()));
      all.side.textContent = `${count(found.length)} of ${count(runs.length)}`;
      return runs.length
        ? runTable(found, choose, run)
        : empty("No run is saved: `towline save PATH RUN/step-N` makes one.");
    },
  });
  const steps = new Panel({
    title: "Steps",
    every: 5,
    load: async (signal) => {
      if (!run) return [];
      const { runs } = await ask(about("/v1/runs", { prefix: run }), { signal });
      return runs.find((one) => one.run === run)?.steps ?? [];
    },
    draw: (list) => {
      steps.side.textContent = run ?? "";
      if (!run) return empty("Choose a run.");
      return list.length ? stepTable([...list].reverse(), open, tree) : empty("This run has no steps.");
    },
  });
  const storage = new Panel({
    title: "How it is stored",
    // A tree never changes under its name, unless it is saved again.
    every: 3600,
    load: (signal) => (tree ? ask(about(`/v1/trees/${encodeURIComponent(tree)}`), { signal }) : {}),
    draw: (stored) => {
      storage.side.textContent = tree ?? "";
      return tree ? storageOf(stored) : empty("Choose a step.");
    },
  });
  function choose(name) {
    [run, tree] = [name, null];
    note();
    all.redraw();
    [steps, storage].forEach(restart);
  }
  function open(name) {
    tree = name;
    note();
    steps.redraw();
    restart(storage);
  }
  function restart(panel) {
    panel.reset();
    panel.begin();
  }
  /** Makes a link to what is chosen, to which the browser goes back. */
  function note() {
    const parts = [
      ["run", run],
      ["tree", tree],
    ].filter(([, value]) => value);
    history.pushState(null, "", `#runs?${new URLSearchParams(parts)}`);
  }
  return {
    element: h("div", { class: "columns" }, all.element, h("div", { class: "stack" }, steps.element, storage.element)),
    panels: [all, steps, storage],
  };
}

function choice(name, act) {
  return h("button", { type: "button", class: "link", "data-key": name, onclick: () => act(name) }, name);
}

function runTable(runs, choose, chosen) {
  return table(
    [
      { title: "Run", cell: ({ run }) => [choice(run, choose)] },
      { title: "Steps", number: true, cell: ({ count: steps }) => count(steps) },
      { title: "First to last", number: true, cell: ({ first, last }) => `${first} to ${last}` },
      { title: "Saved", cell: ({ saved }) => [when(saved)] },
      { title: "Bytes", number: true, cell: ({ bytes: all }) => bytes(all) },
    ],
    runs,
    { label: "Runs", chosen: ({ run }) => run === chosen },
  );
}

function stepTable(steps, open, chosen) {
  const metrics = ({ metrics }) =>
    Object.entries(metrics ?? {})
      .map(([name, value]) => `${name} ${Number(value.toPrecision(4))}`)
      .join(", ");
  const stored = (behind) =>
    behind ? `differences or predictions, ${counted(behind, "save")} after their key step` : "in full";
  const kept = ({ behind, counts }) => `${stored(behind)}${counts ? "" : ", replaced"}`;
  return table(
    [
      { title: "Step", cell: ({ name }) => [choice(name, open)] },
      { title: "Saved", cell: ({ saved }) => [when(saved)] },
      { title: "Bytes", number: true, cell: ({ bytes: all }) => bytes(all) },
      { title: "Files", number: true, cell: ({ files }) => count(files) },
      { title: "Chunks", number: true, cell: ({ chunks }) => count(chunks) },
      { title: "Stored as", cell: kept },
      { title: "Metrics", cell: metrics },
    ],
    steps,
    { label: "Steps", chosen: ({ name }) => name === chosen },
  );
}

function storageOf(stored) {
  const { bytes: plain, stored_bytes, base_bytes, behind, chunks, files, manifest, codecs } = stored;
  return [
    terms([
      ["Uncompressed", `${bytes(plain)} in ${counted(files, "file")}`],
      ["Stored", `${bytes(stored_bytes)} (${percent(stored_bytes, plain)} of that) in ${counted(chunks, "chunk")}`],
      [
        "Needed with it",
        base_bytes
          ? `${bytes(base_bytes)} of earlier steps, which it is decoded from`
          : "nothing: it is read by itself",
      ],
      ["Key step", behind ? `${counted(behind, "save")} before this step` : "this step"],
      ["Manifest", h("code", {}, manifest)],
    ]),
    table(
      [
        { title: "Codec", cell: ({ codec }) => codec },
        {
          title: "Share of the stored bytes",
          cell: (of) => [bar([of.stored_bytes], stored_bytes, percent(of.stored_bytes, stored_bytes))],
        },
        { title: "Chunks", number: true, cell: (of) => count(of.chunks) },
        { title: "Uncompressed", number: true, cell: (of) => bytes(of.plain_bytes) },
        { title: "Stored", number: true, cell: (of) => bytes(of.stored_bytes) },
        {
          title: "Ratio",
          number: true,
          cell: (of) => (of.stored_bytes ? (of.plain_bytes / of.stored_bytes).toFixed(2) : "-"),
        },
      ],
      codecs,
      { label: "Codecs" },
    ),
  ];
}
