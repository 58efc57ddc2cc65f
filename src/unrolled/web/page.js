// The page: the chosen models, their runs, and what is shown.

import { Engine, nbytes, Runtimes } from "./engine.js";
import { Failure, fetchJson } from "./files.js";
import { Memory } from "./memory.js";
import { EXAMPLES, Pad } from "./pad.js";
import { colour, paintChart, paintImage } from "./pictures.js";
import { generate } from "./sampling.js";
import { Speech } from "./speech.js";
import { Transcriber } from "./transcriber.js";
import { Vocabulary } from "./vocabulary.js";

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const LONGEST = 20000; // maximum number of tokens to read or to write, so that a wrong input does not fill the memory
const WARM_UP = 8; // steps whose time does not count, because the browser is still compiling
const BLOCK = 20; // ms that are measured together, since the clock of a browser may only count whole milliseconds
const SIDES = ["linear", "third", "fourth", "fifth"]; // classes of models, each with its colour and its line in the charts
const groups = new Map(); // name of a group -> its entries of models.json
const loaded = new Map(); // name of a model -> a promise of its engine
let runtimes; // a promise, once the first group is loaded
let group; // the group that is shown: { kind, unit, models: [model, ...] }
let stop; // ends the run in progress
let running = Promise.resolve(); // a promise of the end of that run

// For scripts: the results by the name of the model, and the last sound. document.body.dataset.state is the state of the page.
window.unrolled = { runs: {} };

const setState = (state) => (document.body.dataset.state = state);
const speech = new Speech({ setState, fail, clear });

function fail(error) {
  $("failure").textContent = error instanceof Failure ? error.message : `Something went wrong: ${error.message}`;
  $("failure").hidden = false;
  $("loading").hidden = true;
  setState("failed");
  if (!(error instanceof Failure)) console.error(error);
}

/** Hide an earlier error, unless a model of the group is missing. */
function clear() {
  if (!group?.incomplete) $("failure").hidden = true;
}

const size = (bytes) => (bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${Number((bytes / 1e3).toPrecision(3))} kB` : `${Number((bytes / 1e6).toPrecision(3))} MB`);
const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)} ms`;

// --- loading ---------------------------------------------------------------------------------------------------------

async function start() {
  for (const entry of await fetchJson("models.json")) {
    groups.set(entry.group, [...(groups.get(entry.group) ?? []), entry]);
  }
  if (!groups.size) throw new Failure("models.json lists no model.");
  for (const entries of groups.values()) {
    const softmax = entries.find((entry) => entry.attention === "softmax"); // has a side of its own
    const rest = entries.filter((entry) => entry !== softmax);
    for (const entry of entries) entry.side = entry === softmax ? "softmax" : SIDES[rest.indexOf(entry) % SIDES.length];
  }
  for (const name of groups.keys()) {
    const label = document.createElement("label");
    const choice = Object.assign(document.createElement("input"), { type: "radio", name: "group", value: name });
    choice.addEventListener("change", () => show(name).catch((error) => (stay(name), fail(error))));
    label.append(choice, name);
    $("groups").append(label);
  }
  $("groups").hidden = groups.size < 2;
  const first = groups.keys().next().value;
  $("groups").querySelector("input").checked = true;
  await show(first);
}

function findRuntimes() {
  runtimes ??= Runtimes.find();
  runtimes.catch(() => (runtimes = undefined)); // choosing the group again tries again
  return runtimes;
}

function load(entry, onBytes) {
  if (!loaded.has(entry.name)) {
    const kind = entry.kind === "speech" ? Transcriber : Engine;
    const engine = findRuntimes().then((found) => kind.load(`models/${encodeURIComponent(entry.name)}`, found, onBytes));
    engine.catch(() => loaded.delete(entry.name));
    loaded.set(entry.name, engine);
  }
  return loaded.get(entry.name);
}

/** Choose the group again that is still shown, if any, since another one could not be loaded. */
function stay(name) {
  if (!group) return;
  const choices = Array.from($("groups").querySelectorAll("input"));
  if (!choices.find((choice) => choice.value === name).checked) return; // another one was chosen in the meantime
  choices.find((choice) => choice.value === group.name).checked = true;
  if (group.kind === "speech") speech.show(group.models);
}

/** Load the models of a group, if they are not loaded yet, and show them. */
async function show(name) {
  stop?.();
  speech.leave();
  setState("loading");
  const entries = groups.get(name);
  $("failure").hidden = true;
  $("loading").hidden = false;
  $("demo").hidden = !group;
  $("progress").value = 0;
  const missing = entries.filter((entry) => !loaded.has(entry.name));
  const expected = missing.reduce((sum, entry) => sum + entry.bytes, (await findRuntimes()).missing);
  let come = 0;
  const onBytes = (n) => ($("progress").value = Math.min(1, (come += n) / expected));
  const results = await Promise.allSettled(entries.map((entry) => load(entry, onBytes)));
  stop?.(); // a run that began while these models were loading
  await running; // a run ends with the group that it began with
  if ($("groups").querySelector(":checked").value !== name) return; // another group was chosen in the meantime
  const failed = results.filter((result) => result.status === "rejected").map((result) => result.reason);
  if (failed.length === results.length) throw failed[0];

  const { kind } = entries[0];
  group = { name, kind, models: [], incomplete: failed.length > 0 };
  results.forEach((result, i) => {
    if (result.status !== "fulfilled") return;
    const [entry, engine] = [entries[i], result.value];
    group.models.push(kind === "speech" ? { entry, engine } : makeModel(entry, engine));
  });
  const names = { webgpu: "WebGPU", wasm: "WebAssembly" };
  const providers = new Set(group.models.map((model) => names[model.engine.provider]));
  $("runtime").textContent = `${group.models[0].engine.runtime}, on ${Array.from(providers).join(" and ")}.`;
  if (kind === "speech") {
    speech.show(group.models);
    entitle("Speech to text", "");
  } else {
    introduce();
    prepare();
    $("models").replaceChildren(...group.models.map((model) => model.card));
  }
  for (const id of ["bench", "cost"]) $(id).hidden = kind === "speech";
  $("inside").hidden = kind === "speech" || !$("layer").length;
  $("speech").hidden = kind !== "speech";
  $("loading").hidden = true;
  $("demo").hidden = false;
  setState("ready");
  if (failed.length) fail(failed[0]); // the other models can still be used
  refresh();
}

function entitle(title, ...introduction) {
  $("title").textContent = title;
  document.title = `unrolled: ${title[0].toLowerCase()}${title.slice(1)}`;
  $("introduction").replaceChildren(...introduction);
}

/** Describe the models that are shown, and what each must store. */
function introduce() {
  const transformers = group.models.filter((model) => model.transformer);
  const constant = transformers.some((model) => !model.engine.grows);
  const rest = constant ? "that runs as an RNN" : "one token at a time";
  const title = transformers.length ? `A transformer${constant ? " " : ", "}${rest}` : "A recurrent network, one token at a time";
  const trained = transformers.length ? "A transformer is trained on whole sequences at once. Here it reads and writes one token at a time." : "";
  entitle(title, trained, ...group.models.flatMap((model) => {
    const name = Object.assign(document.createElement("strong"), { className: model.side, textContent: model.title });
    return [" ", name, model.engine.grows ? " keeps more in memory with every token." : " keeps what it has read in a state that never grows."];
  }));
}

function makeModel(entry, engine) {
  const card = $("model-card").content.firstElementChild.cloneNode(true);
  card.classList.add(entry.side);
  card.querySelector("h2").textContent = entry.title;
  const made = document.createElement(entry.kind === "image" ? "canvas" : "p");
  if (entry.kind === "text") { // a long text must scroll without a mouse too
    made.tabIndex = 0;
    made.setAttribute("role", "region");
    made.setAttribute("aria-label", `Text by ${entry.title}`);
  }
  card.querySelector(".made").append(made);
  return { ...entry, engine, card, made, vocabulary: new Vocabulary(engine.vocabulary), ids: [], last: null };
}

// --- the input -------------------------------------------------------------------------------------------------------

const pad = new Pad($("pad"), { changed: () => refresh(), say: (text) => ($("pad-said").textContent = text) });

for (const digit of Object.keys(EXAMPLES)) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
  button.setAttribute("aria-label", `Example ${digit}`);
  button.addEventListener("click", () => pad.example(digit));
  $("examples").append(button);
}
$("clear").addEventListener("click", () => pad.clear());
$("rows").addEventListener("input", () => {
  pad.rows = Number($("rows").value);
  showRows();
  pad.paint();
  refresh();
});
$("temperature").addEventListener("input", () => describeTemperature());
$("prompt").addEventListener("input", () => refresh());
for (const id of ["count", "seed"]) $(id).addEventListener("input", () => stop || check());
$("layer").addEventListener("change", () => paint(true));
$("run").addEventListener("click", ({ detail }) => {
  if (!stop) running = run().catch(fail);
  else if (detail < 2) stop(); // not by the second click of a double click
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paint(true));

function showRows() {
  $("rows-shown").textContent = `${pad.rows} of ${pad.height}`;
}

function describeTemperature() {
  const value = Number($("temperature").value);
  $("temperature-shown").textContent = value ? value.toFixed(2) : "0: always the likeliest token";
}

/** Set up the input for the group. */
function prepare() {
  const [{ engine, vocabulary }] = group.models;
  const image = group.kind === "image";
  group.unit = vocabulary.characters ? "character" : "token";
  $("charts").replaceChildren(...["Memory", "Time per token"].map((title) => {
    const figure = document.createElement("figure");
    const caption = Object.assign(document.createElement("figcaption"), { textContent: title });
    figure.append(caption, Object.assign(document.createElement("p"), { className: "key" }));
    return figure;
  }));
  $("memories").replaceChildren(...group.models.map((model) => (model.memory = new Memory(model)).figure));
  const layers = new Set(group.models.flatMap((model) => model.memory.layers));
  $("layer").replaceChildren(...Array.from(layers).sort((a, b) => a - b).map((i) => new Option(Number(i) + 1, i)));
  $("image-input").hidden = !image;
  $("text-input").hidden = image;
  $("run").textContent = image ? "Complete it" : "Write on";
  $("status").textContent = "";
  const { temperature } = engine.manifest.sampling;
  $("temperature").max = Math.max($("temperature").max, temperature);
  $("temperature").value = temperature;
  describeTemperature();
  if (image) {
    const [height, width, channels = 1] = engine.vocabulary.shape;
    if (pad.height !== height || pad.width !== width || pad.channels !== channels) {
      pad.resize(height, width, channels);
      pad.example(5);
    }
    $("rows").max = height - 1;
    $("rows").min = needsPrompt() ? 1 : 0;
    $("rows").value = pad.rows;
    pad.rows = Number($("rows").value); // within the limits of this group
    showRows();
    pad.paint();
  } else {
    $("prompt").value = vocabulary.opening();
    $("count-unit").textContent = `${group.unit[0].toUpperCase()}${group.unit.slice(1)}s`;
    const room = Math.min(...group.models.map((model) => model.engine.room(0)), LONGEST);
    $("count").max = room;
    $("count").value = Math.min($("count").defaultValue, room);
  }
}

/** Whether a model of the group cannot begin without a prompt. */
const needsPrompt = () => group.models.some(({ engine }) => engine.manifest.start_token === null);

/** The smallest maximum number of positions of a model of the group. */
const positions = () => Math.min(...group.models.map(({ engine }) => engine.manifest.max_positions ?? Infinity));

/** Return the ids for the models and the number of tokens to add, or throw a Failure with the reason. */
function order() {
  const [{ engine, vocabulary }] = group.models;
  if (group.kind === "image") {
    const prompt = pad.ids(engine.manifest.vocab_size);
    return { prompt, count: pad.ink.length - prompt.length };
  }
  const prompt = vocabulary.encode($("prompt").value);
  if (!prompt.length && needsPrompt()) throw new Failure("Type a few characters: a model here needs a prompt.");
  const wrong = prompt.find((id) => id >= engine.manifest.vocab_size);
  if (wrong !== undefined) throw new Failure(`The model has the token ids 0 to ${engine.manifest.vocab_size - 1}, not ${wrong}.`);
  if (prompt.length > LONGEST) throw new Failure(`The prompt is too long: ${prompt.length} ${group.unit}s, where this page reads ${LONGEST} at most.`);
  const room = Math.min(...group.models.map((model) => model.engine.room(prompt.length)));
  if (room < 1) throw new Failure(`The prompt is too long: a model here has at most ${positions()} positions.`);
  return { prompt, count: Math.min(Number($("count").value), room, LONGEST), room };
}

/** What is wrong with a number; a count that is too large is reduced, and is no fault. */
function fault(id) {
  const { labels, validity, validationMessage } = $(id);
  const fine = validity.valid || (id === "count" && validity.rangeOverflow);
  return fine ? "" : `${labels[0].textContent.trim()}: ${validationMessage}`;
}

/** Return the order if the input is valid; else say why it is not, and allow no run. */
function check() {
  let found;
  const faults = { prompt: "", count: group.kind === "image" ? "" : fault("count"), seed: fault("seed") };
  try {
    found = order();
  } catch (error) {
    faults.prompt = error.message;
  }
  for (const [id, message] of Object.entries(faults)) {
    $(`${id}-fault`).textContent = message;
    if (message) $(id).setAttribute("aria-invalid", "true");
    else $(id).removeAttribute("aria-invalid");
  }
  if (faults.count || faults.seed) found = undefined;
  $("run").disabled = !found;
  return found;
}

/** Show the given part, and the part that is not generated yet. Return whether the input is valid. */
function refresh() {
  if (!group || stop || group.kind === "speech") return false;
  const found = check();
  for (const model of group.models) Object.assign(model, { ids: [], points: [], times: [], last: null });
  group.order = found ?? { prompt: [], count: 1 };
  group.given = $("prompt").value;
  paint(true);
  return Boolean(found);
}

// --- the run ---------------------------------------------------------------------------------------------------------

/** Let the models generate in turn, one token each, until all are done or the user stops them. */
async function run() {
  if (!refresh()) return;
  clear();
  const { prompt, count, room } = group.order;
  const seed = Number($("seed").value);
  let stopped = false;
  let going = group.models.map((model) => {
    const settings = { ...model.engine.manifest.sampling, temperature: Number($("temperature").value) };
    model.read = model.vocabulary.reader();
    model.text = "";
    return { model, tokens: generate(model.engine, prompt, count, settings, seed, () => stopped) };
  });
  stop = () => (stopped = true);
  setState("running");
  const label = $("run").textContent;
  $("run").textContent = "Stop";
  $("status").textContent = "Running.";
  $("models").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "nearest" });
  let painted = performance.now();
  try {
    while (going.length && !stopped) {
      for (const { model, tokens } of [...going]) {
        const { done, value } = await tokens.next();
        if (done) going = going.filter((each) => each.model !== model);
        else take(model, value);
      }
      if (performance.now() - painted > (calm.matches || document.hidden ? 500 : 16)) {
        paint(false);
        await frame();
        painted = performance.now();
      }
    }
  } catch (error) {
    $("status").textContent = "";
    throw error;
  } finally {
    stop = undefined;
    $("run").textContent = label;
    check(); // the input may have changed during the run
    for (const model of group.models) window.unrolled.runs[model.name] = { prompt, ids: model.ids, bytes: model.bytes };
  }
  paint(true);
  const counts = group.models.map((model) => model.ids.length);
  const said = new Set(counts).size > 1 ? counts.join(" and ") : counts[0];
  const bound = Math.max(...counts) === room ? ` A model here has at most ${positions()} positions, and all of them are used.` : "";
  $("status").textContent = `${stopped ? "Stopped" : "Done"} after ${said} ${group.unit}${said === 1 ? "" : "s"}.${bound}`;
  if (document.body.dataset.state === "running") setState("ready"); // but not while another group is loading
}

function take(model, now) {
  model.ids.push(now.id);
  model.text += group.kind === "image" ? "" : model.read(now.id);
  model.bytes = nbytes(now.state);
  if (model.points.length === 0) model.points.push([0, nbytes(model.engine.initState())]);
  model.points.push([now.read, model.bytes]);
  // The first time is that of the whole prompt.
  if (model.ids.length > 1 + WARM_UP) model.times.push([now.read, now.ms]);
  model.last = now;
}

/** Wait for the next frame; a hidden page has no frames and slow timers, so it waits only for what else is due. */
function frame() {
  return new Promise((resolve) => {
    if (document.hidden) {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => (port1.close(), resolve());
      return port2.postMessage(null);
    }
    const timer = setTimeout(resolve, 100);
    requestAnimationFrame(() => {
      clearTimeout(timer);
      setTimeout(resolve);
    });
  });
}

/** Times per token, averaged over blocks of at least BLOCK ms; a shorter block counts only if it is the first one. */
function averaged(times) {
  const blocks = [];
  let [count, sum] = [0, 0];
  for (const [read, ms] of times) {
    count++;
    sum += ms;
    if (sum >= BLOCK) {
      blocks.push([read, sum / count]);
      [count, sum] = [0, 0];
    }
  }
  return blocks.length || !sum ? blocks : [[times.at(-1)[0], sum / count]];
}

/** The median of times. */
function median(times) {
  const sorted = times.map((point) => point[1]).sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

/** Medians of spans of times, since single ones vary too much. */
function smoothed(times) {
  const span = Math.max(1, Math.min(8, Math.ceil(times.length / 8)), Math.ceil(times.length / 40));
  const points = [];
  for (let i = 0; i + span <= times.length; i += span) {
    const part = times.slice(i, i + span);
    points.push([part.at(-1)[0], median(part)]);
  }
  return points;
}

// --- showing ---------------------------------------------------------------------------------------------------------

let chartsPainted = 0;

function paint(all) {
  if (!group?.order) return;
  const { prompt, count } = group.order;
  const total = prompt.length + count;
  for (const model of group.models) {
    if (group.kind === "image") {
      paintImage(model.made, model.engine.vocabulary.shape, model.engine.manifest.vocab_size, prompt, model.ids, colour(model.side));
      model.made.setAttribute("role", "img");
      model.made.setAttribute("aria-label", `Image by ${model.title}, ${model.ids.length} of ${count} pixels made`);
    } else {
      const given = Object.assign(document.createElement("span"), { className: "given", textContent: group.given });
      const atEnd = model.made.scrollHeight - model.made.scrollTop - model.made.clientHeight < 40;
      model.made.replaceChildren(given, model.ids.length ? model.text : "");
      if (atEnd) model.made.scrollTop = model.made.scrollHeight; // scroll along, unless the user has scrolled up
    }
    const show = (name, text) => (model.card.querySelector(name).textContent = text);
    show(".bytes", model.last ? size(model.bytes) : "–");
    show(".read", model.last ? String(model.last.read) : "–");
    show(".growth", model.engine.grows ? "growing" : "constant");
  }
  if (!all && performance.now() - chartsPainted < 120) return;
  chartsPainted = performance.now();
  const lines = (found) => group.models.map((model) => ({ className: model.side, name: model.title, ...found(model) }));
  const [memory, time] = $("charts").children;
  paintChart(memory, "Memory", lines(({ points, bytes }) => ({ points, value: bytes })), total, size);
  for (const model of group.models) {
    model.blocks = averaged(model.times);
    model.card.querySelector(".time").textContent = model.blocks.length ? milliseconds(median(model.blocks)) : "–";
    model.memory.paint($("layer").value, total, model.last);
  }
  paintChart(time, "Time per token", lines(({ blocks }) => ({ points: smoothed(blocks), value: median(blocks) })), total, milliseconds);
}

addEventListener("resize", () => paint(true));
start().catch(fail);
