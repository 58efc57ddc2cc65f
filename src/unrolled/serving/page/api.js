// Requests to the server, with the key, readable errors and streams.

const KEY = "unrolled:key";

/** An answer with an error, or no answer. `message` is for the user; `status` is 0 if there was no answer. */
export class Refusal extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // the browser stores nothing: the key lasts until the page is closed
}

export const hasKey = () => key !== null;

export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // as above
  }
}

async function refusal(response) {
  const told = await response.json().then((body) => body.error, () => null);
  const after = response.headers.get("Retry-After");
  const message = told?.message ?? `The server answers ${response.status} and does not say why.`;
  return new Refusal(after ? `${message} Try again in ${after} s.` : message, response.status, told?.code ?? null);
}

/** Send a request; the path is relative, so that the page also works under a prefix. Throws Refusal. */
export async function ask(path, { method = "GET", json, body, type, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (json) [headers["Content-Type"], body] = ["application/json", JSON.stringify(json)];
  if (type) headers["Content-Type"] = type;
  let response;
  try {
    response = await fetch(path, { method, headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Throw the error of reading a body again: as a Refusal, unless the user has stopped it. */
export function unread(error) {
  if (error.name === "AbortError") throw error;
  throw new Refusal(error instanceof SyntaxError ? "The answer is not that of this server." : "The connection broke off.");
}

export const askJson = (path, options) => ask(path, options).then((response) => response.json().catch(unread));

/** Yield the chunks of a stream. Throws Refusal if the stream has an error or ends too early. */
export async function* stream(path, json, signal) {
  const response = await ask(path, { method: "POST", json: { ...json, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const piece = await reader.read().catch(unread);
    if (piece.done) throw new Refusal("The answer broke off before its end.");
    const lines = (rest + piece.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(chunk.error.message, 200, chunk.error.code);
      yield chunk;
    }
  }
}
