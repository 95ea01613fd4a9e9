// View: where a job should run, term by term, and the hints that are committed.

import { about, ask } from "./api.js";
import { bar, h, mark, notes, table, terms } from "./dom.js";
import { bytes, count, counted, dollars, duration, percent, rate, time } from "./format.js";
import { Panel, empty } from "./panel.js";

export const hints = { id: "hints", title: "Hints", create };

const OBJECTIVES = [
  ["time", "the earliest start"],
  ["cost", "the fewest dollars"],
  ["weighted", "dollars and time"],
];
const TONES = { allow: "good", deny: "bad", unknown: "warn" };

function create() {
  let asked = null;
  const names = h("datalist", { id: "names" });
  const inputs = h("input", {
    type: "text",
    list: "names",
    placeholder: "run@latest, dataset/v3",
    required: true,
    "aria-label": "Inputs, separated by commas",
  });
  const gpus = h("input", { type: "number", min: "0", max: "1000000", value: "8", "aria-label": "GPUs" });
  const mode = h(
    "select",
    {},
    OBJECTIVES.map(([value, text]) => h("option", { value }, text)),
  );
  const price = h("input", {
    type: "number",
    min: "0",
    step: "any",
    value: "10",
    "aria-label": "Dollars per hour of waiting",
  });
  const weighted = h("label", { hidden: true }, "Dollars per hour of waiting", price);
  mode.addEventListener("change", () => (weighted.hidden = mode.value !== "weighted"));
  const form = h(
    "form",
    { class: "tools" },
    inputs,
    names,
    h("label", {}, "GPUs", gpus),
    h("label", {}, "Objective", mode),
    weighted,
    h("button", { type: "submit" }, "Compare sites"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const refs = inputs.value
      .split(",")
      .map((text) => text.trim())
      .filter(Boolean);
    const weight = mode.value === "weighted" ? { usd_per_hour: Number(price.value) || 0 } : {};
    asked = {
      apiVersion: "towline.dev/v1",
      inputs: refs.map((ref) => ({ ref })),
      workload: { gpus: Number(gpus.value) || 0 },
      objective: { mode: mode.value, ...weight },
    };
    hint.reset();
    hint.begin();
  });
  const hint = new Panel({
    title: "Where should a job run?",
    every: 10,
    tools: form,
    load: async (signal) => {
      const { runs } = await ask(about("/v1/runs"), { signal });
      names.replaceChildren(...runs.map(({ run }) => h("option", { value: `${run}@latest` })));
      return asked ? ask(about("/v1/hints", { wait: "5s" }), { signal, body: asked }) : {};
    },
    draw: (answer) =>
      answer.candidates ? explained(answer) : empty("Name the inputs of a job: names, or RUN@latest."),
  });
  const committed = new Panel({
    title: "Committed hints",
    quiet: "inputs that this agent holds for jobs",
    every: 2,
    load: (signal) => ask("/v1/hints", { signal }),
    draw: ({ commitments }) =>
      commitments.length
        ? committedTable(commitments)
        : empty("No hint is committed here: `towline hint NAME --commit` commits one."),
  });
  return { element: h("div", { class: "stack" }, hint.element, committed.element), panels: [hint, committed] };
}

function explained({ inputs, candidates, atRisk, complete, valid_until, hint_id, notes: texts }) {
  const risk = atRisk.map(({ input, seconds, steps }) => {
    const several = steps && ` or ${steps < 10 ? steps.toFixed(1) : count(Math.round(steps))} steps`;
    return `${input}: ${duration(seconds)}${several || ""} of work since it was saved`;
  });
  return [
    terms([
      ["Inputs", inputs.join(", ")],
      ["At risk", risk.length ? risk.join("; ") : null],
      [
        "Complete",
        complete ? "everything that counts was known" : "something that counts was not known: see the notes",
      ],
      ["Valid until", time(valid_until)],
      ["Id", h("code", {}, hint_id)],
    ]),
    notes(texts),
    candidates.map(candidate),
  ];
}

function candidate({
  site,
  rank,
  score,
  verdict,
  deny,
  bytes: of,
  eta_s,
  usd_micro,
  capacity,
  sources,
  reasons,
  inventory_age_s,
}) {
  const head = h(
    "header",
    {},
    h("h3", {}, `${rank}. ${site}`),
    mark(verdict, TONES[verdict]),
    h("span", {}, `${duration(eta_s.p50)}, ${dollars(usd_micro.total)}, score ${score}`),
  );
  const stored = of.present + of.in_flight + of.missing;
  const byteTerms = terms([
    ["Uncompressed", bytes(of.logical)],
    ["Uncompressed, each chunk once", bytes(of.unique)],
    ["Compressed", bytes(stored)],
    ["There already", `${bytes(of.present)} (${percent(of.present, stored)}), ${bytes(of.pinned)} of it pinned`],
    ["In flight", bytes(of.in_flight)],
    ["Missing", bytes(of.missing)],
    ["Free in the cache", capacity.free === null ? "not known" : bytes(capacity.free)],
    [
      "Fits",
      capacity.fits === null
        ? "not known"
        : capacity.fits
          ? "yes"
          : `no: ${bytes(capacity.must_evict)} must be evicted`,
    ],
    ["Inventory", inventory_age_s === null ? "none" : `${duration(inventory_age_s)} old`],
  ]);
  const timeTerms = terms([
    ["Median (p50)", duration(eta_s.p50)],
    ["In 9 of 10 cases (p90)", duration(eta_s.p90)],
    ["At best (p10)", duration(eta_s.p10)],
    ["Basis", eta_s.basis ? `${eta_s.basis}, ${counted(eta_s.samples, "sample")}` : "nothing moves"],
    ["Bottleneck", eta_s.bottleneck],
  ]);
  const dollarTerms = terms([
    ["Egress", dollars(usd_micro.egress)],
    ["Requests", dollars(usd_micro.requests)],
    ["Returning checkpoints", dollars(usd_micro.return)],
    ["Idle GPUs while waiting", dollars(usd_micro.stall)],
    ["Total", `${dollars(usd_micro.total)}${usd_micro.complete ? "" : ", without prices that are not known"}`],
    ["Prices", usd_micro.price_book],
  ]);
  const why = [...deny.map(({ input, code, rule }) => `${input}: ${rule} (${code})`), ...reasons];
  return h(
    "article",
    { class: "candidate" },
    head,
    bar(
      [of.present, of.in_flight],
      stored,
      `${bytes(of.present)} there, ${bytes(of.in_flight)} in flight, ${bytes(of.missing)} missing`,
    ),
    h("div", { class: "columns narrow" }, byteTerms, timeTerms, dollarTerms),
    why.length > 0 &&
      h(
        "ul",
        {},
        why.map((text) => h("li", {}, text)),
      ),
    sources.length > 0 &&
      h(
        "ul",
        { class: "quiet" },
        sources.map((share) => h("li", {}, source(share))),
      ),
  );
}

/** Where a part of the missing bytes comes from. */
function source({ site, path, repository, bytes: part, rate: perSecond, egress_micro_usd }) {
  const from = `${repository ? "the repository" : "caches"} at ${site ?? "an unknown site"}`;
  return `${bytes(part)} from ${from}${path ? ` over ${path}` : ""}, at ${rate(perSecond)}, for ${dollars(egress_micro_usd)}`;
}

function committedTable(commitments) {
  return table(
    [
      { title: "Inputs", cell: ({ inputs }) => inputs.join(", ") },
      { title: "Owner", cell: ({ owner }) => owner },
      {
        title: "There",
        cell: ({ bytes: all, missing_bytes }) => [bar([all - missing_bytes], all, percent(all - missing_bytes, all))],
      },
      {
        title: "Missing",
        number: true,
        cell: ({ bytes: all, missing_bytes }) => `${bytes(missing_bytes)} of ${bytes(all)}`,
      },
      {
        title: "State",
        cell: ({ ready, task }) => [ready ? mark("ready", "good") : mark(task ? "fetching" : "waiting", "warn")],
      },
      { title: "GPUs", number: true, cell: ({ gpus }) => (gpus ? count(gpus) : "-") },
      { title: "Until", cell: ({ expires }) => (expires ? time(expires) : "no expiry") },
      { title: "Hint", cell: ({ hint_id }) => [h("code", {}, hint_id)] },
    ],
    commitments,
    { label: "Committed hints" },
  );
}
