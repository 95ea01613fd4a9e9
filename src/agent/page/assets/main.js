// The page: views by the fragment of the URL, the token, and keys.

import { ask, refused, token } from "./api.js";
import { h } from "./dom.js";
import { audit } from "./audit.js";
import { cache } from "./cache.js";
import { hints } from "./hints.js";
import { overview } from "./overview.js";
import { runs } from "./runs.js";
import { sites } from "./sites.js";
import { transfers } from "./transfers.js";
import { usage } from "./usage.js";

const VIEWS = [overview, sites, transfers, cache, runs, hints, usage, audit];
const THEMES = ["", "light", "dark"];
const THEME_KEPT = "towline-theme";
/** Milliseconds between two looks at the agent's state. */
const STATE_EVERY = 5000;

const find = (id) => document.getElementById(id);
let shown = null;

/** Shows the view that the fragment names. */
function route() {
  const [id, asked] = location.hash.slice(1).split("?");
  const view = VIEWS.find((one) => one.id === id) ?? overview;
  shown?.panels.forEach((panel) => panel.end());
  shown = view.create(new URLSearchParams(asked ?? ""));
  find("content").replaceChildren(h("h1", {}, view.title), shown.element);
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
function signIn(reason) {
  const dialog = find("sign-in");
  if (dialog.open) return;
  shown?.panels.forEach((panel) => panel.end());
  find("sign-in-reason").textContent = reason;
  find("token").value = "";
  dialog.showModal();
}

function listen() {
  refused.addEventListener("refused", ({ detail }) => {
    signIn(
      detail.had
        ? "The token is not valid any more: it was revoked, or the agent has started again, with another one."
        : "This agent needs a token on loopback.",
    );
  });
  find("sign-in").addEventListener("cancel", (event) => event.preventDefault());
  find("sign-in").addEventListener("close", () => {
    token.keep(find("token").value.trim());
    find("token").value = "";
    begin();
    state();
  });
  window.addEventListener("hashchange", () => {
    // A link with a token may be opened in a tab that has the page already.
    token.take();
    route();
  });
  find("shortcuts").addEventListener("click", () => find("keys").showModal());
  find("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(localStorage.getItem(THEME_KEPT) ?? "") + 1) % THEMES.length];
    localStorage.setItem(THEME_KEPT, next);
    theme();
  });
  document.addEventListener("keydown", (event) => {
    const isTyped = event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
    if (isTyped || document.querySelector("dialog[open]")) return;
    const view = VIEWS[Number(event.key) - 1];
    const search = find("content").querySelector("input[type=search], input[type=text]");
    if (view) location.hash = view.id;
    else if (event.key === "?") find("keys").showModal();
    else if (event.key === "/" && search) search.focus();
    else return;
    event.preventDefault();
  });
}

function theme() {
  const kept = localStorage.getItem(THEME_KEPT) ?? "";
  document.documentElement.dataset.theme = kept;
  find("theme").textContent = `Theme: ${kept || "system"}`;
}

/** Writes the agent's state into the head of the page. */
async function state() {
  const agent = find("agent");
  try {
    const health = await ask("/health");
    const word = health.leaving ? "ending" : health.ready ? "ready" : "not ready";
    agent.dataset.state = word;
    agent.textContent = `${health.identity?.split("/").slice(-2).join("/") ?? "agent"}: ${word}`;
  } catch {
    agent.dataset.state = "no answer";
    agent.textContent = "no answer";
  }
}

function start() {
  token.take();
  theme();
  find("views").append(
    ...VIEWS.map(({ id, title }, place) =>
      h("li", {}, h("a", { href: `#${id}`, "aria-keyshortcuts": String(place + 1) }, title)),
    ),
  );
  const keys = [...VIEWS.map(({ title }, place) => [String(place + 1), title]), ["/", "Filter"], ["?", "This list"]];
  find("key-list").className = "terms";
  find("key-list").append(...keys.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
  listen();
  route();
  state();
  setInterval(() => document.hidden || state(), STATE_EVERY);
}

start();
