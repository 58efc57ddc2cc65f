// The page: the model in use, the key, errors, and the view that is shown.

import { askJson, hasKey, Refusal, setKey } from "./api.js";
import { ChatView } from "./chat.js";
import { Images } from "./images.js";
import { setUpSettings } from "./settings.js";
import { TextView } from "./text.js";
import { number, size } from "./words.js";
import { Writing } from "./writing.js";

const $ = (id) => document.getElementById(id);
const LAST = "unrolled:last";
let models = [];
let retry = null;

/** Show an error in words; `act` repeats the action that failed. */
function fail(error, act = null) {
  retry = act;
  const known = error instanceof Refusal;
  const locked = known && error.status === 401;
  $("failure-text").textContent = known ? error.message : `Something went wrong: ${error.message}`;
  $("failure").hidden = locked;
  $("try-again").hidden = !act;
  $("key-form").hidden = !locked;
  $("loading").hidden = true;
  if (locked) {
    $("key-fault").textContent = hasKey() ? error.message : "";
    $("key").focus();
  }
  if (document.body.dataset.state === "loading") document.body.dataset.state = "failed";
  if (!known) console.error(error);
}

function clear() {
  for (const id of ["failure", "key-form"]) $(id).hidden = true;
  retry = null;
}

const writing = new Writing({ fail, clear });
const images = new Images({ fail, clear });
const views = { text: new TextView(), chat: new ChatView() };

function again() {
  const act = retry;
  clear();
  document.querySelector("main").focus(); // the element that had the focus is hidden now
  act?.();
}

$("try-again").addEventListener("click", again);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x20-\x7e]+$/.test(key)) {
    $("key-fault").textContent = "A key is made of printable ASCII characters."; // a browser can send no others
    return;
  }
  setKey(key);
  $("key").value = "";
  again();
});
$("model").addEventListener("change", () => use($("model").value));
for (const choice of document.querySelectorAll("input[name=view]")) choice.addEventListener("change", () => show(choice.value));

/** A description of a model, on one line. */
function describe(model) {
  const mechanisms = Array.from(new Set(model.mechanisms ?? [])).join(", ");
  const parts = [mechanisms, Number.isFinite(model.parameters) && `${number(model.parameters)} parameters`, model.weights && `weights in ${model.weights}`];
  parts.push(model.state_bytes_per_token ? `a state that grows by ${size(model.state_bytes_per_token)} per token` : `a state of ${size(model.state_bytes)} that never grows`);
  return parts.filter(Boolean).join(" · ");
}

function use(id) {
  clear();
  const model = models.find((each) => each.id === id) ?? models[0];
  $("model").value = model.id;
  $("about").textContent = describe(model);
  const image = model.kind === "image";
  $("writing").hidden = $("history").hidden = image;
  $("drawing").hidden = !image;
  for (const field of document.querySelectorAll("[data-for=text]")) field.hidden = image;
  $("views").hidden = !model.chat;
  const kept = remember();
  remember({ ...kept, model: model.id });
  if (image) return images.use(model);
  const view = model.chat && kept.view === "chat" ? "chat" : "text";
  document.querySelector(`input[name=view][value=${view}]`).checked = true;
  writing.use(model, open(view));
}

function show(view) {
  remember({ ...remember(), view });
  clear();
  writing.use(models.find((each) => each.id === $("model").value), open(view));
}

function open(name) {
  for (const view of Object.values(views)) view.panel.hidden = view.name !== name;
  return views[name];
}

/** Read or store the model and the view that were used last. */
function remember(value) {
  try {
    if (value) localStorage.setItem(LAST, JSON.stringify(value));
    else return JSON.parse(localStorage.getItem(LAST)) ?? {};
  } catch {
    // if the browser stores nothing, the page begins with the first model
  }
  return value ?? {};
}

async function start() {
  try {
    const { data } = await askJson("v1/models");
    models = data.filter((model) => model.unrolled).map(({ id, unrolled }) => ({ id, ...unrolled }));
    if (!models.length) throw new Refusal("The server has no model.");
  } catch (error) {
    return fail(error, start);
  }
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  $("loading").hidden = true;
  $("bench").hidden = $("choice").hidden = false;
  setUpSettings();
  use(remember().model);
}

start();
