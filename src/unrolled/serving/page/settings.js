// The sampling settings: the fields of the page, and the fields of a request.

import { Refusal } from "./api.js";

const $ = (id) => document.getElementById(id);
const KEY = "unrolled:settings";
const FIELDS = { max_tokens: "text", temperature: "both", top_p: "both", top_k: "both", min_p: "text", seed: "both" };

const describe = () => {
  const value = Number($("temperature").value);
  $("temperature-shown").textContent = value ? value.toFixed(2) : "0: always the likeliest token";
};

/** Fill the fields with the last values, and store changes. */
export function setUpSettings() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
    for (const name of Object.keys(FIELDS)) if (typeof kept[name] === "string") $(name).value = kept[name];
  } catch {
    // nothing was stored, or not by this page
  }
  describe();
  $("settings").addEventListener("input", () => {
    describe();
    try {
      localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(Object.keys(FIELDS).map((name) => [name, $(name).value]))));
    } catch {
      // the fields keep their values until the page is closed
    }
  });
}

/** Throw Refusal if the value of a field is out of range. */
export function check(field) {
  if (field.checkValidity()) return;
  field.focus();
  throw new Refusal(`${field.labels[0].firstChild.textContent.trim()}: ${field.validationMessage}`);
}

/** The fields for a request of the kind "text" or "image". Throws Refusal if a value is out of range. */
export function settings(kind) {
  const found = {};
  for (const [name, use] of Object.entries(FIELDS)) {
    const field = $(name);
    if (use !== "both" && use !== kind) continue;
    if (!field.checkValidity()) $("settings").open = true;
    check(field);
    if (field.value !== "") found[name] = Number(field.value);
  }
  return found;
}
