// Fetches the files of this folder; each file is checked before it is used.

import { sha256 } from "./sha256.js";

/** An error to show to the user, in one sentence. */
export class Failure extends Error {}

/** Fetch a file as bytes; `onBytes(n)` is called with the size of each piece that arrives. */
export async function fetchBytes(url, onBytes = () => {}) {
  let response;
  try {
    response = await fetch(url, { cache: "no-cache" }); // a page may be exported again at the same address
  } catch {
    throw new Failure(`${url} could not be fetched: the server does not answer.`);
  }
  if (!response.ok) throw new Failure(`${url} is missing: the server answers ${response.status}.`);
  const pieces = [];
  let size = 0;
  try {
    for (const reader = response.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      pieces.push(value);
      size += value.length;
      onBytes(value.length);
    }
  } catch {
    throw new Failure(`The download of ${url} broke off after ${size} bytes.`);
  }
  const bytes = new Uint8Array(size);
  let end = 0;
  for (const piece of pieces) {
    bytes.set(piece, end);
    end += piece.length;
  }
  return bytes;
}

/** Fetch a file, and check its size and hash against `expected`. */
export async function fetchChecked(url, expected, onBytes) {
  const bytes = await fetchBytes(url, onBytes);
  if (bytes.length !== expected.bytes) {
    throw new Failure(`${url} has ${bytes.length} bytes where ${expected.bytes} were expected: it was cut off or replaced.`);
  }
  if ((await sha256(bytes)) !== expected.sha256) {
    throw new Failure(`${url} is not the file that was exported: its SHA-256 differs from the one on record.`);
  }
  return bytes;
}

export function parseJson(url, bytes) {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    throw new Failure(`${url} is damaged: it is not JSON.`);
  }
}

export async function fetchJson(url) {
  return parseJson(url, await fetchBytes(url));
}
