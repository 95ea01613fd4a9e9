// Requests to the agent that serves this page, and the token that they carry.

const KEPT = "towline-token";

/** An error of the API, with what to do about it. */
export class ApiError extends Error {
  constructor(status, { kind, message, place, help, causes }) {
    const where = place && !message.includes(place) ? `: ${place}` : "";
    const why = causes?.length ? ` (${causes[causes.length - 1]})` : "";
    super(`${message}${where}${why}`);
    Object.assign(this, { status, kind, help });
  }
}

/** The token of this tab. `towline page` gives it in the fragment of the URL, which browsers send to nobody. */
export const token = {
  value: null,
  /** Takes the one of the fragment, if it has one, or of before; returns true for a new one. */
  take() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      history.replaceState(null, "", `${location.pathname}${location.search}`);
      this.keep(given);
      return true;
    }
    this.value ??= sessionStorage.getItem(KEPT);
    return false;
  },
  keep(value) {
    this.value = value;
    sessionStorage.setItem(KEPT, value);
  },
  drop() {
    this.value = null;
    sessionStorage.removeItem(KEPT);
  },
};

/** The repository that is looked at, by its id; null: the agent's first. */
export const chosen = { repository: null };

/** `path` with `parameters`, about the repository that is looked at. Absent parameters are left out. */
export function about(path, parameters = {}) {
  const all = { ...parameters, repository: chosen.repository };
  const given = Object.entries(all).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Tells when a request is refused for lack of a valid token. */
export const refused = new EventTarget();

/** Gets `path`, or posts `body` to it; returns the JSON of the answer. */
export async function ask(path, { body, signal } = {}) {
  const sent = token.value;
  const headers = sent ? { Authorization: `Bearer ${sent}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the agent does not answer", help: "this page tries again; is it running?" });
  }
  const answer = await response.json().catch(() => null);
  if (response.ok && answer !== null) return answer;
  const error = new ApiError(response.status, answer?.error ?? { message: `unexpected answer: ${response.status}` });
  // A token that was replaced meanwhile is not at fault.
  if (response.status === 401 && sent === token.value) {
    token.drop();
    refused.dispatchEvent(new CustomEvent("refused", { detail: { had: Boolean(sent), help: error.help } }));
  }
  throw error;
}

/** As `ask`, but null where the agent has no such part, such as a cache. */
export async function askIfThere(path, options) {
  try {
    return await ask(path, options);
  } catch (error) {
    if (error.kind === "not-found") return null;
    throw error;
  }
}

/** As `askIfThere`, and null for what the token does not permit. */
export async function askIfPermitted(path, options) {
  try {
    return await askIfThere(path, options);
  } catch (error) {
    if (error.status === 403) return null;
    throw error;
  }
}
