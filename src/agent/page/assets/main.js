// The page: views by the fragment of the URL, the token, and keys.

import { ask, chosen, refused, token } from "./api.js";
import { audit } from "./audit.js";
import { cache } from "./cache.js";
import { h, prose, tick } from "./dom.js";
import { hints } from "./hints.js";
import { overview } from "./overview.js";
import { runs } from "./runs.js";
import { sites } from "./sites.js";
import { transfers } from "./transfers.js";
import { usage } from "./usage.js";

const VIEWS = [overview, sites, transfers, cache, runs, hints, usage, audit];
const THEMES = ["", "light", "dark"];
const THEME_KEPT = "towline-theme";
const KEYS_OFF_KEPT = "towline-keys-off";
/** Milliseconds between two looks at the agent's state, and at the ages of times. */
const STATE_EVERY = 5000;
const AGES_EVERY = 1000;

const find = (id) => document.getElementById(id);
let shown = null;

/** Shows the view that the fragment names. */
function route() {
  const [id, asked] = location.hash.slice(1).split("?");
  const view = VIEWS.find((one) => one.id === id) ?? overview;
  const isFirst = shown === null;
  shown?.panels.forEach((panel) => panel.end());
  shown = view.create(new URLSearchParams(asked ?? ""));
  const title = h("h1", { tabindex: "-1" }, view.title);
  find("content").replaceChildren(title, shown.element);
  // Those who hear the page are told that it is another view.
  if (!isFirst) title.focus({ preventScroll: true });
  document.title = `${view.title} - Towline`;
  for (const link of find("views").querySelectorAll("a")) {
    if (link.hash === `#${view.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  begin();
}

/** Begins to load what is shown, unless a token is asked for. */
function begin() {
  if (!find("sign-in").open) shown.panels.forEach((panel) => panel.begin());
}

/** Asks for a token. */
function signIn({ had, help }) {
  const dialog = find("sign-in");
  if (dialog.open) return;
  shown?.panels.forEach((panel) => panel.end());
  const reason = had ? "The token is not valid, or not any more." : "This address needs a token.";
  find("sign-in-reason").textContent = reason;
  find("sign-in-help").replaceChildren(...prose(help ?? ""));
  find("token").value = "";
  dialog.showModal();
}

/** Goes on with the token that is there. */
function goOn() {
  if (find("sign-in").open) find("sign-in").close();
  find("token").value = "";
  begin();
  state();
}

function listen() {
  refused.addEventListener("refused", ({ detail }) => signIn(detail));
  find("sign-in").addEventListener("cancel", (event) => event.preventDefault());
  find("sign-in").addEventListener("submit", () => {
    token.keep(find("token").value.trim());
    setTimeout(goOn);
  });
  window.addEventListener("hashchange", () => {
    // A link with a token may be opened in a tab that has the page already.
    const isNew = token.take();
    route();
    if (isNew) goOn();
  });
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    find("content").focus();
  });
  find("repository").addEventListener("change", () => {
    chosen.repository = find("repository").value;
    route();
  });
  find("shortcuts").addEventListener("click", () => find("keys").showModal());
  find("keys-on").checked = !localStorage.getItem(KEYS_OFF_KEPT);
  find("keys-on").addEventListener("change", ({ target }) => {
    if (target.checked) localStorage.removeItem(KEYS_OFF_KEPT);
    else localStorage.setItem(KEYS_OFF_KEPT, "yes");
  });
  find("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    localStorage.setItem(THEME_KEPT, next);
    theme();
  });
  document.addEventListener("keydown", pressed);
}

function pressed(event) {
  const isTyped =
    event.target.matches("input:not([type=checkbox]), select, textarea") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey;
  if (isTyped || document.querySelector("dialog[open]") || localStorage.getItem(KEYS_OFF_KEPT)) return;
  const view = VIEWS[Number(event.key) - 1];
  const search = find("content").querySelector("input[type=search], input[type=text]");
  if (view) location.hash = view.id;
  else if (event.key === "?") find("keys").showModal();
  else if (event.key === "/" && search) search.focus();
  else return;
  event.preventDefault();
}

/** Applies the theme that was chosen, and returns it. */
function theme() {
  const kept = localStorage.getItem(THEME_KEPT);
  const known = THEMES.includes(kept) ? kept : "";
  document.documentElement.dataset.theme = known;
  find("theme").textContent = `Theme: ${known || "system"}`;
  return known;
}

/** Writes the agent's state into the head of the page, and lists its repositories. */
async function state() {
  const agent = find("agent");
  let [word, name] = ["no answer", null];
  try {
    const health = await ask("/health");
    word = health.leaving ? "ending" : health.ready ? "ready" : "not ready";
    name = health.identity?.split("/").slice(-2).join("/") ?? "agent";
    repositories(health.repositories ?? []);
  } catch {
    // The panels tell why.
  }
  const text = name ? `${name}: ${word}` : word;
  agent.dataset.state = word;
  if (agent.textContent !== text) agent.textContent = text;
}

function repositories(all) {
  const select = find("repository");
  select.hidden = all.length < 2;
  if (select.childElementCount === all.length) return;
  select.replaceChildren(...all.map(({ id, location }) => h("option", { value: id }, location ?? id)));
}

function start() {
  token.take();
  theme();
  const link = ({ id, title }, place) => h("a", { href: `#${id}`, "aria-keyshortcuts": String(place + 1) }, title);
  find("views").append(...VIEWS.map((view, place) => h("li", {}, link(view, place))));
  const keys = [...VIEWS.map(({ title }, place) => [String(place + 1), title]), ["/", "Filter"], ["?", "This list"]];
  find("key-list").className = "terms";
  find("key-list").append(...keys.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
  listen();
  route();
  state();
  setInterval(() => document.hidden || state(), STATE_EVERY);
  setInterval(() => document.hidden || tick(), AGES_EVERY);
}

start();
