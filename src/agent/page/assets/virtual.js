// A table of any number of rows, of which only those that can be seen are in the document.

import { h, printable } from "./dom.js";

/** Rows beyond each edge of what can be seen. */
const BEYOND = 8;

/** A sortable table; `columns` are {id, title, width, number, text(row), order(row), tone(row), hover(row), part(row)}. */
export class VirtualTable {
  #rows = [];
  #shown = [];
  #lines = [];
  #sort;

  constructor({ columns, label, sort }) {
    this.columns = columns;
    this.#sort = sort;
    this.heads = columns.map((column) => {
      const button = h("button", { type: "button", onclick: () => this.#sortBy(column.id) }, column.title);
      const head = h("th", { scope: "col", class: column.number && "number" }, button);
      head.style.setProperty("width", column.width);
      return head;
    });
    this.above = h("td", { colspan: columns.length });
    this.below = h("td", { colspan: columns.length });
    this.body = h("tbody");
    const spacer = (cell) => h("tbody", { "aria-hidden": "true" }, h("tr", { class: "spacer" }, cell));
    const head = h("thead", {}, h("tr", {}, this.heads));
    this.table = h("table", {}, head, spacer(this.above), this.body, spacer(this.below));
    this.element = h("div", { class: "virtual", tabindex: "0", role: "region", "aria-label": label }, this.table);
    this.element.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  /** Shows `rows`. */
  show(rows) {
    this.#rows = rows;
    this.#order();
    this.#draw();
  }

  #sortBy(id) {
    const falling = this.#sort.id === id && !this.#sort.falling;
    this.#sort = { id, falling };
    this.show(this.#rows);
  }

  #order() {
    const { id, falling } = this.#sort;
    const { order } = this.columns.find((column) => column.id === id);
    const keyed = this.#rows.map((row) => [order(row), row]);
    const sign = falling ? -1 : 1;
    keyed.sort(([one], [other]) => (one < other ? -sign : one > other ? sign : 0));
    this.#shown = keyed.map(([, row]) => row);
    this.columns.forEach((column, place) => {
      const sorted = column.id === id && (falling ? "descending" : "ascending");
      if (sorted) this.heads[place].setAttribute("aria-sort", sorted);
      else this.heads[place].removeAttribute("aria-sort");
    });
    this.table.setAttribute("aria-rowcount", String(this.#shown.length + 1));
  }

  /** Fills the lines that can be seen, and gives the others their height. */
  #draw() {
    const height =
      this.#lines[0]?.element.offsetHeight || parseFloat(getComputedStyle(document.documentElement).fontSize) * 2.1;
    const first = Math.max(0, Math.floor(this.element.scrollTop / height) - BEYOND);
    const space = this.element.clientHeight || 600;
    const count = Math.max(0, Math.min(this.#shown.length - first, Math.ceil(space / height) + 2 * BEYOND));
    while (this.#lines.length < count) this.#addLine();
    while (this.#lines.length > count) this.#lines.pop().element.remove();
    this.#lines.forEach((line, place) => this.#fill(line, this.#shown[first + place], first + place));
    this.above.style.setProperty("height", `${first * height}px`);
    this.below.style.setProperty("height", `${Math.max(0, this.#shown.length - first - count) * height}px`);
  }

  #addLine() {
    const cells = this.columns.map((column, place) => {
      const attributes = { class: column.number && "number" };
      return place === 0 ? h("th", { scope: "row", ...attributes }) : h("td", attributes);
    });
    const element = h("tr", {}, cells);
    this.body.append(element);
    this.#lines.push({ element, cells });
  }

  #fill({ element, cells }, row, place) {
    element.setAttribute("aria-rowindex", String(place + 2));
    this.columns.forEach((column, at) => {
      const [cell, text] = [cells[at], printable(column.text(row))];
      if (cell.textContent !== text) cell.textContent = text;
      const title = column.hover?.(row) ?? text;
      if (cell.title !== title) cell.title = title;
      const tone = `${column.number ? "number " : ""}${column.tone?.(row) ?? ""}`.trim();
      if (cell.className !== tone) cell.className = tone;
      const part = column.part?.(row);
      if (part !== undefined) cell.style.setProperty("--part", `${part}%`);
    });
  }
}
