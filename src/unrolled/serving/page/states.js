// States as safetensors files, whose metadata describe the state.

import { ask, Refusal, unread } from "./api.js";

const LONGEST = 100e6; // maximum number of bytes of a header, a limit of the format

/** The metadata of a file: { id, model, length }. Throws Refusal if the file is not a state. */
async function describe(file) {
  const refused = new Refusal(`${file.name} is not a state: it is not a safetensors file with a state's metadata.`);
  if (file.size < 8) throw refused;
  const length = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  if (length > Math.min(LONGEST, file.size - 8)) throw refused;
  let told;
  try {
    told = JSON.parse(await file.slice(8, 8 + length).text()).__metadata__;
  } catch {
    throw refused;
  }
  if (!/^[0-9a-f]{64}$/.test(told?.id) || !(Number(told.length) >= 1)) throw refused;
  return { id: told.id, model: told.model, length: Number(told.length) };
}

/** Upload the state in a file; return its metadata. Throws Refusal, also for a state of another model. */
export async function upload(file, model, signal) {
  const state = await describe(file);
  if (state.model !== model.digest) throw new Refusal(`${file.name} is a state of another model than ${model.id}, so this one cannot continue it.`);
  await ask(`v1/states/${state.id}`, { method: "PUT", body: file, type: "application/octet-stream", signal });
  return state;
}

/** Download a state as a file. Throws Refusal. */
export async function download(id, name) {
  const content = await ask(`v1/states/${id}`).then((response) => response.blob().catch(unread));
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60e3); // the browser may still be asking where to save it
}
