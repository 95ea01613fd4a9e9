// What views say of a task: its phase, and the part that is done.

const TONES = { failed: "bad", done: "good", cancelled: "warn", incomplete: "warn" };

/** The phase of a running task, or how it ended. */
export function phase(task) {
  return task.state === "running" ? task.progress.phase : ending(task);
}

/** Tone of how a task ended; none while it runs. */
export function tone(task) {
  return TONES[ending(task)];
}

/** The state of a task; `incomplete` for a warm that ended without some of its chunks. */
function ending({ state, report }) {
  return state === "done" && report?.missing > 0 ? "incomplete" : state;
}

/** Part of a task that is done, from 0 to 1. */
export function part({ state, progress }) {
  if (state === "done") return 1;
  return progress.total > 0 ? Math.min(1, progress.done / progress.total) : 0;
}
