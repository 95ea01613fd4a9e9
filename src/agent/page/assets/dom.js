// Elements of the page. Nothing is ever parsed as HTML: texts of names and errors stay texts.

import { age } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** Sets what `attributes` has: `on...` are listeners, `class` and the like attributes; absent values are left out. */
function assign(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return element;
}

/** An element with attributes and children: nodes or texts; absent children are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = assign(document.createElement(tag), attributes);
  element.append(
    ...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false),
  );
  return element;
}

/** As `h`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = assign(document.createElementNS(SVG, tag), attributes);
  element.append(...children);
  return element;
}

/** Replaces the children of `parent`. The element with the focus keeps it, if it has a `data-key` that is there again. */
export function replace(parent, ...children) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
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
  const body = rows.map((row) => {
    const cells = columns.map(({ number, cell }, place) => {
      const content = [cell(row) ?? "-"].flat();
      return place === 0 ? h("th", { scope: "row" }, content) : h("td", { class: number && "number" }, content);
    });
    return h("tr", { class: chosen?.(row) && "chosen" }, cells);
  });
  const content = h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
}

/** A time, by its age, with the time itself beside the pointer. */
export function when(text) {
  return h("time", { datetime: text, title: text }, age(text));
}

/** A text in which what stands between backticks is code. */
export function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** A list of terms: pairs of a term and what it is; pairs without a value are left out. */
export function terms(pairs) {
  const shown = pairs.filter(([, value]) => value !== undefined && value !== null);
  return h("dl", { class: "terms" }, shown.map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]).flat());
}

/** Notes on what is missing; nothing without any. */
export function notes(texts) {
  return texts?.length
    ? h(
        "ul",
        { class: "notes" },
        texts.map((text) => h("li", {}, prose(text))),
      )
    : null;
}

/** A word in a frame; `tone` is good, bad or warn. */
export function mark(word, tone) {
  return h("span", { class: `mark ${tone ?? ""}` }, word);
}
