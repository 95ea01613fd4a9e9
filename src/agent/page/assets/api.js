// Requests to the agent that serves this page, and the token that they carry.

const KEPT = "towline-token";

/** An error of the API, with what to do about it. */
export class ApiError extends Error {
  constructor(status, { kind, message, place, help }) {
    super(place ? `${message}: ${place}` : message);
    Object.assign(this, { status, kind, help });
  }
}

/** The token of this tab. `towline page` gives it in the fragment of the URL, which browsers send to nobody. */
export const token = {
  value: null,
  take() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      history.replaceState(null, "", `${location.pathname}${location.search}`);
      this.keep(given);
    } else {
      this.value = sessionStorage.getItem(KEPT);
    }
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

/** Called when a request is refused for lack of a valid token. */
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
  // A token that was replaced meanwhile is not at fault.
  if (response.status === 401 && sent === token.value) {
    token.drop();
    refused.dispatchEvent(new CustomEvent("refused", { detail: { had: Boolean(sent) } }));
  }
  throw new ApiError(response.status, answer?.error ?? { message: `unexpected answer: ${response.status}` });
}

/** As `ask`, but null where the agent has no such part, such as a cache. */
export async function askIfThere(path, options) {
  try {
    return await ask(path, options);
  } catch (error) {
    if (error.kind === "not-found" || error.kind === "denied") return null;
    throw error;
  }
}
