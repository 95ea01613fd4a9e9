// What views say of a task: its phase, and the part that is done.

/** Tones of the states of a task that has ended. */
export const TONES = { failed: "bad", done: "good", cancelled: "warn" };

/** The phase of a running task, or how it ended. */
export function phase({ state, progress }) {
  return state === "running" ? progress.phase : state;
}

/** Part of a task that is done, from 0 to 1. */
export function part({ state, progress }) {
  if (state === "done") return 1;
  return progress.total > 0 ? Math.min(1, progress.done / progress.total) : 0;
}
