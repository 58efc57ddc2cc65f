// Writing with a model, as text or as a conversation: the view of the text, the outline of its history, and the runs.

import { askJson, Refusal } from "./api.js";
import { showNothing, showSize } from "./figures.js";
import { Outline } from "./outline.js";
import { Run } from "./run.js";
import { settings } from "./settings.js";
import { keep, load } from "./shelf.js";
import { download, upload } from "./states.js";
import { tokens } from "./words.js";

const $ = (id) => document.getElementById(id);
const ENDS = { stop: "The model ended the text.", length: "", stopped: "Stopped.", broken: "The text so far is kept." };

export class Writing {
  /** `fail(error, again)` shows an error; `again` repeats the action that failed. */
  constructor({ fail, clear }) {
    Object.assign(this, { fail, clear, stop: null, rescue: null });
    this.outline = new Outline($("tree"), (id) => this.choose(id));
    const buttons = { go: () => this.go(), again: () => this.again(), back: () => this.back(), fresh: () => this.choose(null), remove: () => this.remove(), download: () => this.download(), reread: () => this.reread(), open: () => $("file").click() };
    for (const [id, act] of Object.entries(buttons)) {
      $(id).addEventListener("click", () => $(id).getAttribute("aria-disabled") !== "true" && this.guard(act));
    }
    $("file").addEventListener("change", () => this.guard(() => this.open()));
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("storage", (event) => event.key === this.place && this.follow());
    addEventListener("pagehide", (event) => event.persisted || this.leave());
  }

  /** Store the result so far if the page is closed during a run. */
  leave() {
    this.rescue?.();
    this.rescue = null;
  }

  /** Run an action; an error is shown, with a button that repeats the action. */
  async guard(act) {
    this.clear();
    try {
      await act();
    } catch (error) {
      this.fail(error, () => this.guard(act));
    }
  }

  key(event) {
    if (event.key === "Escape" && this.stop) this.stop();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.stop && $("writing").contains(event.target)) this.guard(() => this.go());
    else return;
    event.preventDefault();
  }

  // --- what is shown ---------------------------------------------------------------------------------------------------

  use(model, view) {
    Object.assign(this, { model, view, resume: null, place: `unrolled:${model.digest}:${view.name}` });
    view.told = (hint, forks) => {
      $("hint").textContent = hint;
      $("go-label").textContent = forks ? "Fork here" : view.words.go;
    };
    $("writing-title").textContent = view.words.title;
    $("again").textContent = view.words.again;
    $("fresh").textContent = view.words.fresh;
    showNothing();
    this.reload();
    this.view.rest();
  }

  reload() {
    const before = this.tree?.current;
    this.tree = load(this.place);
    if (this.tree.pieces.has(before)) this.tree.current = before; // changed by another tab: stay at the piece of this tab
    if (!this.stop) this.show();
  }

  /** Show what another tab has stored, and keep what is typed in this one. */
  follow() {
    const { base, typed } = this.view.draft();
    this.reload();
    if (!this.stop) this.view.restore(base, typed);
  }

  keep() {
    $("kept").textContent = keep(this.place, this.tree);
  }

  show() {
    const { tree, model, view } = this;
    const { now } = tree;
    this.outline.show(tree);
    view.show(tree);
    showSize(model, now?.length ?? 0, now && !now.state && !now.lost ? "≈ " : "");
    this.showLost();
    $("tree").hidden = tree.pieces.size === 0;
    $("no-tree").hidden = tree.pieces.size > 0;
    this.enable();
  }

  /** Say so if the server has dropped the state that is needed next. */
  showLost() {
    const nearest = this.view.name === "text" ? this.tree.path().findLast((piece) => piece.state) : null;
    this.missing = nearest?.lost ? nearest : null;
    $("lost").hidden = !this.missing;
    if (!this.missing) return;
    const { file } = this.missing;
    $("lost-text").textContent = file !== null
      ? `The server no longer has the state from ${file}. Open the file again to go on.`
      : "The server no longer has the state at the end of this text. The text is still here: the model can read it again.";
    $("reread").hidden = file !== null;
  }

  enable() {
    const now = this.tree.now;
    const busy = this.stop !== null;
    const off = { again: busy || !now?.written, back: busy || !now, fresh: busy, remove: busy || !now, download: busy || !now?.state, open: busy, reread: busy };
    for (const [id, disabled] of Object.entries(off)) $(id).setAttribute("aria-disabled", disabled); // keeps the focus, unlike `disabled`
    for (const id of ["model", "views"]) $(id).disabled = busy;
    if (busy) $("go-label").textContent = "Stop";
    $("go-key").textContent = busy ? "Esc" : "Ctrl + Enter";
    $("go").classList.toggle("stop", busy);
    document.body.dataset.state = busy ? "running" : "ready";
  }

  say(text) {
    $("status").textContent = text;
  }

  // --- moving in the tree ----------------------------------------------------------------------------------------------

  choose(id) {
    if (this.stop) return;
    this.clear();
    this.tree.current = id;
    this.resume = null;
    this.keep();
    showNothing();
    this.show();
    this.view.rest();
    const { now } = this.tree;
    this.say(now ? `Going on from here, after ${tokens(now.length)}.` : `${this.view.words.fresh}.`);
    if (!now) this.view.field.focus();
  }

  back() {
    this.choose(this.tree.now.parent);
  }

  remove() {
    const { now } = this.tree;
    if (!confirm("Remove this piece and all that follows it from the history?")) return;
    const count = this.tree.remove(now.id);
    this.keep();
    this.show();
    this.say(`Removed ${count} piece${count === 1 ? "" : "s"}.`);
  }

  // --- runs ------------------------------------------------------------------------------------------------------------

  go() {
    if (this.stop) return this.stop();
    const { base, typed } = this.view.draft();
    return this.run(base, typed);
  }

  /** Let the model write the current piece again, after the same typed text. */
  again() {
    const { now, pieces } = this.tree;
    return this.run(pieces.get(now.parent) ?? null, now.typed);
  }

  async run(base, typed) {
    const { view, model } = this;
    const { owner, body } = view.order(this.tree, base, typed);
    const request = { model: model.id, ...body, ...settings("text"), keep: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const run = new Run(view.piece);
    const before = base?.length ?? 0;
    let frame = 0;
    const paint = () => {
      frame = 0;
      view.write(run.written);
      showSize(model, before + run.count, "≈ ");
    };
    this.stop = () => run.stop();
    this.rescue = () => run.written && this.add(base, typed, run, "stopped");
    view.begin(base, typed);
    this.enable();
    this.say("Writing.");
    await run.follow(view.path, request, () => (frame ||= requestAnimationFrame(paint)));
    cancelAnimationFrame(frame);
    if (!this.rescue) return; // the page was closed, and the result so far is stored
    this.rescue = this.stop = null;
    view.end();
    const forgotten = run.failure?.code === "unknown_state" ? this.tree.pieces.get(owner?.id) : null;
    if (forgotten) forgotten.lost = true;
    const kept = run.written !== "" || (run.state !== null && typed !== "");
    if (kept) this.add(base, typed, run, run.finish);
    this.keep();
    this.finish(run, base, typed, kept);
  }

  add(base, typed, { written, state, usage, count }, finish) {
    const before = base?.length ?? 0;
    const length = usage ? usage.prompt_tokens + usage.completion_tokens : before + count;
    this.tree.add({ parent: base?.id ?? null, typed, written, state, finish, length, tokens: length - before });
    this.outline.active = this.tree.current;
    this.keep();
  }

  /** Show the result of a run, and how it ended. */
  finish({ finish, state, count, failure }, base, typed, kept) {
    this.show();
    if (!kept) this.view.restore(base, typed);
    this.view.rest();
    const end = ENDS[finish] ?? "";
    const unkept = kept && !state ? " No state was kept: the next piece reads this one again." : "";
    this.say(failure ? (kept ? ENDS.broken : "") : `${end} ${tokens(count)} written.${unkept}`.trim());
    if (!failure) return;
    if (failure.code !== "unknown_state" || !this.missing) throw failure;
    this.resume = () => this.run(base, typed);
  }

  // --- states ----------------------------------------------------------------------------------------------------------

  /** Let the model read a text again whose state is lost, and then repeat the action that needed the state. */
  async reread() {
    const piece = this.missing;
    const control = new AbortController();
    const { base, typed } = this.view.draft();
    const body = { model: this.model.id, ...this.view.orderAgain(this.tree, piece) };
    this.stop = () => control.abort();
    this.say("Reading the text again.");
    this.enable();
    try {
      const answer = await askJson(this.view.path, { method: "POST", json: body, signal: control.signal });
      const state = answer.state ?? answer.choices?.[0]?.state;
      if (!state) throw new Refusal("The server read the text, but kept no state.");
      Object.assign(piece, { state, lost: false, length: answer.usage?.prompt_tokens ?? piece.length });
      this.say(`Read ${tokens(piece.length)} again.`);
      this.view.field.focus(); // the button disappears
    } catch (error) {
      if (control.signal.aborted) return this.say("Stopped.");
      if (error.code === "unknown_state") this.tree.path(piece.id)[0].lost = true; // the text began with a file
      throw error;
    } finally {
      this.stop = null;
      this.keep();
      this.show();
      this.view.restore(base, typed);
    }
    const { resume } = this;
    this.resume = null;
    if (resume) await resume();
  }

  async download() {
    const { now } = this.tree;
    try {
      await download(now.state, `${this.model.id.replace(/[^\w.-]+/g, "-")}-${now.length}-tokens.safetensors`);
      this.say("The state is saved as a file.");
    } catch (error) {
      if (error.code !== "unknown_state" || this.view.name !== "text") throw error;
      now.lost = true;
      this.keep();
      this.show();
    }
  }

  async open() {
    const [file] = $("file").files;
    $("file").value = ""; // so that the same file can be chosen again
    if (!file) return;
    this.say(`Opening ${file.name}.`);
    const state = await upload(file, this.model);
    const known = Array.from(this.tree.pieces.values()).find((piece) => piece.state === state.id);
    if (known) {
      known.lost = false;
      this.choose(known.id);
    } else {
      this.tree.add({ parent: null, file: file.name, state: state.id, length: state.length, tokens: state.length });
      this.choose(this.tree.current);
    }
    this.say(`${file.name} is open: a state of ${tokens(state.length)}.`);
  }
}
