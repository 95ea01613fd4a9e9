// Panels: parts of a view that load and draw by themselves, again and again while they can be seen.

import { h, prose, replace } from "./dom.js";

/** Seconds after which a panel that failed is tried again, at most. */
const RETRY = 5;

/** A part of a view. `load(signal)` gets what `draw(loaded)` makes nodes of; `every` is in seconds. */
export class Panel {
  constructor({ title, every = 5, load, draw, tools, quiet }) {
    Object.assign(this, { every, load, draw });
    this.side = h("span", { class: "quiet" }, prose(quiet ?? ""));
    this.failure = h("div", { role: "alert" });
    this.body = h("div", { class: "body" }, h("p", { class: "empty" }, "Loading..."));
    const head = title && h("header", {}, h("h2", {}, title), this.side);
    this.element = h(
      "section",
      { class: title ? "panel" : "", "aria-label": title },
      head,
      tools,
      this.failure,
      this.body,
    );
    this.loaded = null;
    this.running = null;
  }

  /** Begins to load. */
  begin() {
    this.end();
    const running = new AbortController();
    this.running = running;
    this.#run(running.signal);
  }

  /** Ends it; what is shown stays. */
  end() {
    this.running?.abort();
    this.running = null;
  }

  /** Draws again what was loaded last. */
  redraw() {
    if (this.loaded !== null) replace(this.body, this.draw(this.loaded));
  }

  async #run(signal) {
    while (!signal.aborted) {
      const done = await this.#once(signal);
      await pause((done ? this.every : Math.min(RETRY, this.every)) * 1000, signal);
    }
  }

  async #once(signal) {
    try {
      this.loaded = await this.load(signal);
      if (signal.aborted) return true;
      this.redraw();
      replace(this.failure);
      this.element.classList.remove("stale");
      return true;
    } catch (error) {
      if (signal.aborted) return true;
      if (this.loaded === null) replace(this.body);
      this.element.classList.add("stale");
      replace(this.failure, failed(error));
      return false;
    }
  }
}

/** An error with its help. */
export function failed(error) {
  return h("p", { class: "failure" }, error.message, error.help && h("span", { class: "quiet" }, prose(error.help)));
}

/** Text of a panel that has nothing to show. */
export function empty(text) {
  return h("p", { class: "empty" }, prose(text));
}

/** Waits, and at least until the page can be seen. */
async function pause(milliseconds, signal) {
  await new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      document.addEventListener("visibilitychange", resolve, { once: true });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}
