// Images: the user draws the upper rows, and several completions arrive row by row.

import { stream } from "./api.js";
import { Clock, showNothing, showSize } from "./figures.js";
import { EXAMPLES, Pad } from "./pad.js";
import { colour, paintImage } from "./pictures.js";
import { check, settings } from "./settings.js";
import { number } from "./words.js";

const $ = (id) => document.getElementById(id);

export class Images {
  constructor({ fail, clear }) {
    Object.assign(this, { fail, clear, stop: null, made: [], drawings: new Map() });
    this.pad = new Pad($("pad"), { changed: () => this.changed(), say: (text) => ($("pad-said").textContent = text) });
    for (const digit of Object.keys(EXAMPLES)) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
      button.setAttribute("aria-label", `Example ${digit}`);
      button.addEventListener("click", () => this.pad.example(digit));
      $("examples").append(button);
    }
    $("clear").addEventListener("click", () => this.pad.clear());
    $("rows").addEventListener("input", () => {
      this.pad.rows = Number($("rows").value);
      this.pad.paint();
      this.changed();
    });
    $("draw").addEventListener("click", ({ detail }) => (this.stop && detail > 1) || this.guard()); // no double click stops
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.stop) this.stop();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.stop && $("drawing").contains(event.target)) this.guard();
      else return;
      event.preventDefault();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  async guard() {
    if (this.stop) return this.stop();
    this.clear();
    try {
      await this.run();
    } catch (error) {
      this.fail(error, () => this.guard());
    }
  }

  use(model) {
    if (this.model) this.drawings.set(this.model.digest, { ink: this.pad.ink, rows: this.pad.rows });
    this.model = model;
    const [height, width, channels] = model.shape;
    this.pad.resize(height, width, channels);
    const kept = this.drawings.get(model.digest);
    if (kept) Object.assign(this.pad, kept).paint();
    else this.pad.example(5);
    this.made = []; // those of another model have other sizes and levels
    $("made").replaceChildren();
    $("no-made").hidden = false;
    $("draw-status").textContent = "";
    Object.assign($("rows"), { max: height - 1, min: 0, value: this.pad.rows });
    showNothing();
    this.changed();
    this.enable();
  }

  changed() {
    $("rows-shown").textContent = `${this.pad.rows} of ${this.pad.height}`;
    if (this.model && !this.stop) showSize(this.model, this.pad.given);
  }

  enable() {
    const busy = this.stop !== null;
    $("draw-label").textContent = busy ? "Stop" : "Complete it";
    $("draw-key").textContent = busy ? "Esc" : "Ctrl + Enter";
    $("model").disabled = busy;
    document.body.dataset.state = busy ? "running" : "ready";
  }

  async run() {
    const { model, pad } = this;
    const given = pad.ids(model.levels);
    check($("count"));
    const n = Number($("count").value);
    const body = { model: model.id, pixels: given, n, ...settings("image") };
    if ($("made").contains(document.activeElement)) $("draw").focus(); // the button that has the focus disappears
    this.made = Array.from({ length: n }, (_, i) => this.figure(i, given));
    $("made").replaceChildren(...this.made.map(({ figure }) => figure));
    $("no-made").hidden = true;
    this.paint();
    const control = new AbortController();
    this.stop = () => control.abort();
    this.enable();
    const clock = new Clock();
    let failure = null;
    let usage = null;
    let count = 0;
    let frame = 0;
    const paint = () => {
      frame = 0;
      this.paint();
      showSize(model, Math.min(pad.ink.length, given.length + Math.max(...this.made.map(({ pixels }) => pixels.length))));
    };
    $("draw-status").textContent = "Drawing.";
    try {
      for await (const chunk of stream("v1/images/completions", body, control.signal)) {
        usage = chunk.usage ?? usage;
        for (const { index, pixels } of chunk.data ?? []) {
          this.made[index]?.pixels.push(...pixels);
          count += pixels.length;
        }
        clock.tick(count);
        frame ||= requestAnimationFrame(paint);
      }
    } catch (error) {
      if (!control.signal.aborted) failure = error;
    }
    cancelAnimationFrame(frame);
    this.stop = null;
    paint();
    clock.end(count, usage);
    this.enable();
    const done = this.made.filter(({ pixels }) => given.length + pixels.length >= pad.ink.length).length;
    $("draw-status").textContent = `${control.signal.aborted ? "Stopped. " : ""}${done} of ${n} images are complete, ${number(count)} pixels drawn.`;
    if (failure) throw failure;
  }

  figure(i, given) {
    const figure = document.createElement("figure");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Draw on" });
    button.setAttribute("aria-label", `Draw on from completion ${i + 1}`);
    const made = { figure, canvas, given, pixels: [] };
    button.addEventListener("click", () => this.take(made));
    figure.append(canvas, button);
    return made;
  }

  /** Put a completion on the pad, so that its upper rows can be completed in another way. */
  take({ given, pixels }) {
    const image = [...given, ...pixels];
    this.pad.ink = Float32Array.from({ length: this.pad.ink.length }, (_, i) => (image[i] ?? 0) / (this.model.levels - 1));
    this.pad.paint();
    this.changed();
    $("pad").focus();
  }

  paint() {
    this.made.forEach(({ canvas, given, pixels }, i) => {
      paintImage(canvas, this.model.shape, this.model.levels, given, pixels, colour("linear"));
      const share = Math.round((100 * (given.length + pixels.length)) / this.pad.ink.length);
      canvas.setAttribute("aria-label", `Completion ${i + 1}, ${share} % drawn`);
    });
  }
}
