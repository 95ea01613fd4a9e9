// Panels: parts of a view that load and draw by themselves, again and again while they can be seen.

import { h, isSelected, prose, replace } from "./dom.js";

/** Seconds after which a panel that failed is tried again, at most. */
const RETRY = 5;
/** Seconds after which one that was refused is: the answer changes only if somebody changes a right. */
const RETRY_REFUSED = 60;

/**
 * A part of a view. `load(signal)` gets what `draw(loaded)` makes nodes of, each `every` seconds; if `always`, also the same.
 */
export class Panel {
  #drawn = null;
  #hasLoaded = false;
  #running = null;

  constructor({ title, every = 5, always = false, load, draw, tools, quiet }) {
    Object.assign(this, { every, always, load, draw });
    this.loaded = null;
    this.side = h("span", { class: "quiet" }, prose(quiet ?? ""));
    this.failure = h("div", { role: "alert" });
    this.body = h("div", { class: "body" });
    const head = title && h("header", {}, h("h2", {}, title), this.side);
    const attributes = { class: title ? "panel" : "", "aria-label": title };
    this.element = h("section", attributes, head, tools, this.failure, this.body);
    this.reset();
  }

  /** Forgets what was loaded: it answers another question than the next one. */
  reset() {
    this.loaded = null;
    this.#hasLoaded = false;
    this.#drawn = null;
    this.failure.replaceChildren();
    this.element.classList.remove("stale");
    this.element.setAttribute("aria-busy", "true");
    this.body.replaceChildren(empty("Loading..."));
  }

  /** Begins to load. */
  begin() {
    this.end();
    const running = new AbortController();
    this.#running = running;
    this.#run(running.signal);
  }

  /** Ends it; what is shown stays. */
  end() {
    this.#running?.abort();
    this.#running = null;
  }

  /** Draws again what was loaded last. */
  redraw() {
    if (this.#hasLoaded) replace(this.body, this.draw(this.loaded));
  }

  async #run(signal) {
    while (!signal.aborted) {
      await pause((await this.#once(signal)) * 1000, signal);
    }
  }

  /** Loads once; returns the seconds until the next time. */
  async #once(signal) {
    try {
      const loaded = await this.load(signal);
      if (signal.aborted) return 0;
      this.loaded = loaded;
      this.#hasLoaded = true;
      this.element.removeAttribute("aria-busy");
      this.element.classList.remove("stale");
      this.failure.replaceChildren();
      // What is the same, or is being copied, stays as it is.
      const text = this.always ? "" : JSON.stringify(loaded);
      if (this.#drawn === null || ((this.always || text !== this.#drawn) && !isSelected(this.body))) {
        this.redraw();
        this.#drawn = text;
      }
      return this.every;
    } catch (error) {
      if (signal.aborted) return 0;
      if (this.#drawn === null) this.body.replaceChildren();
      this.element.removeAttribute("aria-busy");
      this.element.classList.add("stale");
      const shown = failed(error);
      if (this.failure.textContent !== shown.textContent) this.failure.replaceChildren(shown);
      const isRefused = [400, 401, 403, 404].includes(error.status);
      return isRefused ? Math.max(this.every, RETRY_REFUSED) : Math.min(this.every, RETRY);
    }
  }
}

/** An error with its help. */
export function failed(error) {
  const help = error.help && h("span", { class: "quiet" }, prose(error.help));
  return h("p", { class: "failure" }, prose(error.message), help);
}

/** Text of a panel that has nothing to show. */
export function empty(text) {
  return h("p", { class: "empty" }, prose(text));
}

/** Waits, and at least until the page can be seen. */
async function pause(milliseconds, signal) {
  await new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", done);
  });
  while (document.hidden && !signal.aborted) {
    await new Promise((resolve) => {
      const seen = () => {
        signal.removeEventListener("abort", seen);
        document.removeEventListener("visibilitychange", seen);
        resolve();
      };
      document.addEventListener("visibilitychange", seen);
      signal.addEventListener("abort", seen);
    });
  }
}
