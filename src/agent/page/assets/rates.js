// Rates of tasks, from one look to the next, as `towline top` computes them.

const WEIGHT = 0.4;

/** Rates by the id of a task. */
export class Rates {
  #known = new Map();

  /** Observes `tasks` at `now` (milliseconds). Returns a map from id to `{rate, left}`: bytes a second, and seconds. */
  observe(tasks, now) {
    const known = new Map();
    const found = new Map();
    for (const { id, state, progress } of tasks) {
      if (state !== "running") continue;
      const before = this.#known.get(id);
      const seconds = before ? (now - before.at) / 1000 : 0;
      let rate = before?.rate ?? 0;
      if (seconds > 0) {
        const fresh = Math.max(0, progress.done - before.done) / seconds;
        rate = rate > 0 ? rate + (fresh - rate) * WEIGHT : fresh;
      }
      known.set(id, { at: now, done: progress.done, rate });
      const left = rate > 0 && progress.total > 0 ? Math.max(0, progress.total - progress.done) / rate : null;
      found.set(id, { rate, left });
    }
    this.#known = known;
    return found;
  }
}
