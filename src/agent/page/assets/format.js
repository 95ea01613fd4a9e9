// Numbers and times as people read them, in the units of the command line.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes, such as `1.5 GiB`. */
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  // Rounded up, it may be one of the next unit.
  if (unit > 0 && unit < UNITS.length - 1 && value >= 1023.95) return `1.0 ${UNITS[unit + 1]}`;
  return unit === 0 ? `${count} B` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

/** Bytes a second; `-` if there is no rate. */
export function rate(perSecond) {
  return perSecond >= 1 ? `${bytes(Math.round(perSecond))}/s` : "-";
}

/** A number with separators. */
export function count(number) {
  return number.toLocaleString("en-US");
}

/** A number of things, such as `1 pin` and `2 pins`. */
export function counted(number, thing) {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

/** A part of a whole in percent; `-` of nothing. */
export function percent(part, whole) {
  if (!(whole > 0)) return "-";
  const value = (100 * part) / whole;
  // Neither 0 % of something nor 100 % of what is not all.
  if (part > 0 && value < 0.1) return "< 0.1 %";
  if (part < whole && value > 99.9) return "99.9 %";
  const places = value < 10 && value > 0 ? 1 : 0;
  const factor = 10 ** places;
  return `${(Math.floor(value * factor + 1e-9) / factor).toFixed(places)} %`;
}

/** Seconds, such as `4 min 10 s`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  if (seconds > 0 && seconds < 0.1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10 && seconds % 1 !== 0) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole === 0) return "0 s";
  const parts = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ].map(([span, unit], place, all) => {
    const above = place === 0 ? Infinity : all[place - 1][0];
    return [Math.floor((whole % above) / span), unit];
  });
  const first = parts.findIndex(([number]) => number > 0);
  return parts
    .slice(first, first + 2)
    .filter(([number]) => number > 0)
    .map(([number, unit]) => `${number} ${unit}`)
    .join(" ");
}

/** An RFC 3339 time by the browser's clock and zone. */
export function time(text) {
  const at = new Date(text);
  if (Number.isNaN(at.getTime())) return text;
  const today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString() : at.toLocaleString();
}

/** Time since an RFC 3339 time, such as `4 min ago`. */
export function age(text) {
  const seconds = (Date.now() - new Date(text).getTime()) / 1000;
  if (!Number.isFinite(seconds)) return text;
  return seconds < 1 ? "now" : `${duration(Math.max(1, Math.round(seconds)))} ago`;
}

/** Micro-dollars; `-` if they are not known. */
export function dollars(micro) {
  if (micro === null || micro === undefined) return "-";
  const value = micro / 1e6;
  return `$${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 6 : 2 })}`;
}
