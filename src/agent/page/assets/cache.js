// View: the cache of this agent, and its pins.

import { ask } from "./api.js";
import { bar, h, table, terms, when } from "./dom.js";
import { bytes, count, percent, time } from "./format.js";
import { Panel, empty } from "./panel.js";

export const cache = { id: "cache", title: "Cache", create };

function create() {
  const store = new Panel({
    title: "Cache",
    every: 2,
    load: (signal) => ask("/v1/cache", { signal }),
    draw: (cache) => [contents(cache), tenants(cache.tenants)],
  });
  const search = h("input", {
    type: "search",
    placeholder: "Owner or reason",
    "aria-label": "Filter",
    oninput: () => pins.redraw(),
  });
  const pins = new Panel({
    title: "Pins",
    every: 5,
    tools: h("div", { class: "tools" }, search),
    load: (signal) => ask("/v1/pins", { signal }),
    draw: ({ pins: all }) => {
      const wanted = search.value.trim().toLowerCase();
      const found = all.filter(({ owner, reason }) => `${owner} ${reason}`.toLowerCase().includes(wanted));
      pins.side.textContent = `${count(found.length)} of ${count(all.length)}`;
      return all.length ? pinTable(found) : empty("Nothing is pinned: `towline warm NAME --pin 2h` pins.");
    },
  });
  return { element: h("div", { class: "stack" }, store.element, pins.element), panels: [store, pins] };
}

function contents(cache) {
  const { bytes: used, capacity, pinned_bytes, promised_bytes, hits, misses } = cache;
  return [
    bar(
      [pinned_bytes, Math.max(0, used - pinned_bytes)],
      capacity,
      `${bytes(pinned_bytes)} pinned and ${bytes(used - pinned_bytes)} evictable of ${bytes(capacity)}`,
    ),
    terms([
      ["Used", `${bytes(used)} of ${bytes(capacity)} (${percent(used, capacity)})`],
      ["Pinned", `${bytes(pinned_bytes)} there of ${bytes(promised_bytes)} promised`],
      ["Chunks", count(cache.chunks)],
      ["Reads", `${count(hits)} hits, ${count(misses)} misses (${percent(hits, hits + misses)} hits)`],
      ["Inserted, evicted", `${count(cache.inserts)}, ${count(cache.evictions)}`],
      ["Insertions refused", count(cache.refusals)],
      ["Damaged, dropped", count(cache.damaged)],
      ["Folder", cache.dir],
    ]),
  ];
}

function tenants(all) {
  if (!all?.length) return null;
  return table(
    [
      { title: "Tenant", cell: ({ tenant }) => tenant },
      {
        title: "Used",
        cell: (of) => (of.quota ? [bar([of.bytes], of.quota, percent(of.bytes, of.quota))] : "no quota"),
      },
      {
        title: "Bytes",
        number: true,
        cell: (of) => (of.quota ? `${bytes(of.bytes)} of ${bytes(of.quota)}` : bytes(of.bytes)),
      },
    ],
    all,
    { label: "Tenants of the cache" },
  );
}

function pinTable(pins) {
  return table(
    [
      { title: "Owner", cell: ({ owner }) => owner },
      { title: "Reason", cell: ({ reason }) => reason },
      { title: "Bytes", number: true, cell: (pin) => bytes(pin.bytes) },
      { title: "Chunks", number: true, cell: ({ chunks }) => count(chunks) },
      { title: "Since", cell: ({ created }) => [when(created)] },
      { title: "Until", cell: ({ expires }) => (expires ? time(expires) : "no expiry") },
      { title: "Id", cell: ({ id }) => [h("code", {}, id)] },
    ],
    pins,
    { label: "Pins" },
  );
}
