// Elements of the page. Nothing is ever parsed as HTML: texts of names and errors stay texts.

import { age } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
/** Rows of a table, at most. */
const ROWS_MAX = 500;
/** Characters that are not seen, or change the direction of what is read: as the command line, the page shows their numbers. */
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A text of somebody else, in which every character is seen. */
export function printable(text) {
  return text.replace(HIDDEN, (found) => `\\u{${found.codePointAt(0).toString(16)}}`);
}

/** Sets what `attributes` has: `on...` are listeners, `class` and the like attributes; absent values are left out. */
function assign(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : printable(String(value)));
  }
  return element;
}

/** An element with attributes and children: nodes or texts; absent children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = assign(document.createElement(tag), attributes);
  const there = children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false);
  element.append(...there.map((child) => (child instanceof Node ? child : printable(String(child)))));
  return element;
}

/** As `h`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = assign(document.createElementNS(SVG, tag), attributes);
  element.append(...children);
  return element;
}

/** True if the user has selected something within `parent`. */
export function isSelected(parent) {
  const selection = document.getSelection();
  return !selection.isCollapsed && parent.contains(selection.anchorNode);
}

/** Replaces the children of `parent`. Elements with a `data-key` that is there again keep the focus and their scroll position. */
export function replace(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const places = [...parent.querySelectorAll("[data-key]")]
    .filter(({ scrollLeft, scrollTop }) => scrollLeft || scrollTop)
    .map(({ dataset, scrollLeft, scrollTop }) => [dataset.key, scrollLeft, scrollTop]);
  const find = (key) => parent.querySelector(`[data-key="${CSS.escape(key)}"]`);
  parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
  for (const [key, left, top] of places) find(key)?.scrollTo(left, top);
  if (focused) find(focused)?.focus({ preventScroll: true });
}

/** A bar of `parts` out of `whole`, told by `label`. */
export function bar(parts, whole, label) {
  let from = 0;
  const spans = parts.map((part, place) => {
    const span = h("span", { class: ["", "second", "third"][place] ?? "third" });
    const width = whole > 0 ? Math.min(100 - from, (100 * part) / whole) : 0;
    span.style.setProperty("left", `${from}%`);
    span.style.setProperty("width", `${width}%`);
    from += width;
    return span;
  });
  return h("span", { class: "bar", role: "img", "aria-label": label, title: label }, spans);
}

/** A table with `columns` ({title, number, cell(row)}). The first column heads the rows. */
export function table(columns, rows, { label, chosen } = {}) {
  const head = columns.map(({ title, number }) => h("th", { scope: "col", class: number && "number" }, title));
  const body = rows.slice(0, ROWS_MAX).map((row) => {
    const cells = columns.map(({ number, cell }, place) => {
      const content = [cell(row) ?? "-"].flat();
      return place === 0 ? h("th", { scope: "row" }, content) : h("td", { class: number && "number" }, content);
    });
    return h("tr", { class: chosen?.(row) && "chosen" }, cells);
  });
  const content = h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": label, "data-key": `region ${label}` };
  const more = rows.length > ROWS_MAX && `The first ${ROWS_MAX} of ${rows.length}; the filter finds the others.`;
  return [h("div", region, content), more && h("p", { class: "quiet" }, more)];
}

/** A time, by its age, with the time itself beside the pointer. */
export function when(text) {
  return h("time", { datetime: text, title: text, "data-age": true }, age(text));
}

/** Writes the ages of times anew. */
export function tick() {
  for (const time of document.querySelectorAll("time[data-age]")) {
    const text = age(time.dateTime);
    if (time.textContent !== text) time.textContent = text;
  }
}

/** A text in which what stands between backticks is code. */
export function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** A list of terms: pairs of a term and what it is; pairs without a value are left out. */
export function terms(pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null);
  return h(
    "dl",
    { class: "terms" },
    shown.map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]),
  );
}

/** Notes on what is missing; nothing without any. */
export function notes(texts) {
  if (!texts?.length) return null;
  return h(
    "ul",
    { class: "notes" },
    texts.map((text) => h("li", {}, prose(text))),
  );
}

/** A word in a frame; `tone` is good, bad or warn. */
export function mark(word, tone) {
  return h("span", { class: `mark ${tone ?? ""}` }, word);
}
