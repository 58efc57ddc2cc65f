// Writing with a model, as text or as a conversation: the view of the text, the outline of its history, and the runs.

import { askJson, Refusal } from "./api.js";
import { showNothing, showSize } from "./figures.js";
import { Outline } from "./outline.js";
import { Run } from "./run.js";
import { settings } from "./settings.js";
import { keep, keepDraft, load, takeDraft } from "./shelf.js";
import { download, upload } from "./states.js";
import { Tree } from "./tree.js";
import { tokens } from "./words.js";

const $ = (id) => document.getElementById(id);
const ENDS = { stop: "The model ended the text.", length: "", stopped: "Stopped.", broken: "The text so far is kept." };

export class Writing {
  /** `fail(error, again)` shows an error; `again` repeats the action that failed. */
  constructor({ fail, clear }) {
    Object.assign(this, { fail, clear, stop: null, rescue: null, shown: null, drafts: new Map(takeDraft()) });
    this.outline = new Outline($("tree"), (id) => this.choose(id));
    const buttons = { go: () => this.go(), again: () => this.again(), back: () => this.back(), fresh: () => this.choose(null), remove: () => this.remove(), download: () => this.download(), reread: () => this.reread(), open: () => $("file").click() };
    for (const [id, act] of Object.entries(buttons)) {
      $(id).addEventListener("click", ({ detail }) => {
        const second = detail > 1 && (this.stop || id === "download"); // of a double click, whose first click began the work
        if ($(id).getAttribute("aria-disabled") !== "true" && !second) this.guard(act);
      });
    }
    $("file").addEventListener("change", () => {
      const [file] = $("file").files;
      $("file").value = ""; // so that the same file can be chosen again
      if (file) this.guard(() => this.open(file));
    });
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("storage", (event) => event.key === this.place && !$("writing").hidden && this.follow());
    addEventListener("pagehide", (event) => this.leave(event.persisted));
  }

  /** Store what is typed if the page is left, and the result so far of a run, which goes on if the browser keeps the page. */
  leave(persisted) {
    if (!this.rescue) return this.shown && keepDraft([this.shown, this.view.field.value]);
    const tree = persisted ? Tree.of(this.tree.save(Infinity).json) : this.tree;
    if (this.rescue(tree)) keep(this.place, tree);
    if (!persisted) this.rescue = null;
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
    this.putAside();
    Object.assign(this, { model, view, resume: null, place: `unrolled:${model.digest}:${view.name}` });
    view.told = (hint, forks) => {
      $("hint").textContent = hint;
      $("go-label").textContent = forks ? "Fork here" : view.words.go;
    };
    $("writing-title").textContent = view.words.title;
    $("again").textContent = view.words.again;
    $("fresh").textContent = view.words.fresh;
    showNothing();
    this.tree = load(this.place);
    const draft = this.drafts.get(this.spot);
    this.show(draft);
    this.view.field.value ||= draft ?? ""; // a conversation does not change its field when it is shown
    this.view.rest();
  }

  /** The piece whose text is shown, among the pieces of all models and views. */
  get spot() {
    return `${this.place}:${this.tree.current}`;
  }

  /** Remember the text in the field, for when its piece is chosen again. */
  putAside() {
    if (this.shown) this.drafts.set(this.shown, this.view.field.value);
  }

  /** Show what another tab has stored, but keep the place and the text of this one. */
  follow() {
    const path = this.tree.path();
    this.tree = load(this.place);
    this.tree.current = path.findLast((piece) => this.tree.pieces.has(piece.id))?.id ?? null;
    if (!this.stop) this.refresh();
  }

  keep() {
    $("kept").textContent = keep(this.place, this.tree);
  }

  /** Show everything again, but keep the text in the field. */
  refresh() {
    this.show(this.view.field.value);
  }

  show(text) {
    const { tree, model, view } = this;
    const { now } = tree;
    this.shown = this.spot;
    this.outline.show(tree);
    view.show(tree, text);
    this.showBeginning();
    showSize(model, now?.length ?? 0, now && !now.state && !now.lost ? "≈ " : "");
    this.showLost();
    $("tree").hidden = tree.pieces.size === 0;
    $("no-tree").hidden = tree.pieces.size > 0;
    this.enable();
  }

  /** Say so if the text begins with the state from a file. */
  showBeginning() {
    const [beginning] = this.tree.path();
    const file = beginning?.file ?? null;
    $("beginning").hidden = file === null;
    if (file !== null) $("beginning").textContent = `Begins with a state from ${file}: ${tokens(beginning.length)} whose text is unknown.`;
  }

  /** Say so if the server has dropped the state that is needed next. */
  showLost() {
    const needed = this.view.needs(this.tree.path());
    this.missing = needed?.lost ? needed : null;
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
    this.putAside();
    if (`${this.place}:${id}` === this.shown) this.drafts.delete(this.shown); // choosing it again restores its text
    this.tree.current = id;
    this.resume = null;
    this.keep();
    showNothing();
    this.show(this.drafts.get(this.spot));
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
    this.drafts.delete(this.shown);
    this.show(this.drafts.get(this.spot));
    this.say(`Removed ${count} piece${count === 1 ? "" : "s"}.`);
  }

  // --- runs ------------------------------------------------------------------------------------------------------------

  go() {
    if (this.stop) return this.stop();
    const { base, typed } = this.view.draft();
    return this.run(base, typed);
  }

  /** Let the model write the current piece again, after the same typed text. What is typed after the piece stays. */
  again() {
    const { now, pieces } = this.tree;
    const { base, typed } = this.view.draft();
    const changed = base !== now;
    if (changed && !this.tree.shown.startsWith(this.view.field.value)) throw new Refusal("The text is changed further up. Continue from it, or choose this piece in the history to write it again.");
    return this.run(pieces.get(now.parent) ?? null, now.typed, changed ? "" : typed);
  }

  /** Continue after a piece and typed text; `draft` is text for the field after a run that writes a piece again. */
  async run(base, typed, draft = null) {
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
    this.rescue = (tree) => run.written && this.add(tree, base, typed, run, "stopped");
    this.drafts.delete(this.shown);
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
    const kept = run.written !== "" || (run.state !== null && (typed !== "" || run.finish === "length"));
    if (kept) this.outline.active = this.add(this.tree, base, typed, run, run.finish).id;
    this.keep();
    this.finish(run, kept, base, typed, draft);
  }

  add(tree, base, typed, { written, state, usage, count }, finish) {
    const before = base?.length ?? 0;
    const length = usage ? usage.prompt_tokens + usage.completion_tokens : before + count;
    return tree.add({ parent: base?.id ?? null, typed, written, state, finish, length, tokens: length - before });
  }

  /** Show the result of a run, and how it ended. */
  finish({ finish, state, count, failure }, kept, base, typed, draft) {
    this.show();
    if (draft !== null) this.view.restore(this.tree.now, draft);
    else if (!kept) this.view.restore(base, typed);
    this.view.rest();
    const end = (finish === "length" && this.view.words.cut) || (ENDS[finish] ?? "");
    const unkept = kept && !state ? " No state was kept: the next piece reads this one again." : "";
    this.say(failure ? (kept ? ENDS.broken : "") : `${end} ${tokens(count)} written.${unkept}`.trim());
    if (!failure) return;
    if (failure.code !== "unknown_state" || !this.missing) throw failure;
    const { value } = this.view.field; // an action on a text that was changed since is not repeated
    this.resume = () => this.view.field.value === value && this.run(base, typed, draft);
  }

  // --- states ----------------------------------------------------------------------------------------------------------

  /** Let the model read a text again whose state is lost, and then repeat the action that needed the state. */
  async reread() {
    const piece = this.missing;
    const body = { model: this.model.id, ...this.view.orderAgain(this.tree, piece) };
    const done = await this.wait("Reading the text again.", async (signal) => {
      const answer = await askJson(this.view.path, { method: "POST", json: body, signal }).catch((error) => {
        if (error.code === "unknown_state") this.tree.path(piece.id)[0].lost = true; // the text began with a file
        throw error;
      });
      const state = answer.state ?? answer.choices?.[0]?.state;
      if (!state) throw new Refusal("The server read the text, but kept no state.");
      return Object.assign(piece, { state, lost: false, length: answer.usage?.prompt_tokens ?? piece.length });
    });
    if (!done) return;
    this.say(`Read ${tokens(piece.length)} again.`);
    this.view.field.focus(); // the button has disappeared
    const { resume } = this;
    this.resume = null;
    if (resume) await resume();
  }

  /** Wait for a request, `act(signal)`, that the user can stop; then the result is null. What is typed stays. */
  async wait(doing, act) {
    const control = new AbortController();
    this.stop = () => control.abort();
    this.say(doing);
    this.enable();
    try {
      return await act(control.signal);
    } catch (error) {
      this.say(control.signal.aborted ? "Stopped." : "");
      if (!control.signal.aborted) throw error;
      return null;
    } finally {
      this.stop = null;
      this.keep();
      this.refresh();
    }
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
      this.refresh();
    }
  }

  async open(file) {
    const state = await this.wait(`Opening ${file.name}.`, (signal) => upload(file, this.model, signal));
    if (!state) return;
    const known = Array.from(this.tree.pieces.values()).find((piece) => piece.state === state.id);
    if (known) {
      known.lost = false;
      if (this.tree.path().includes(known)) {
        this.keep();
        this.refresh(); // what is typed stays, and so does the place in a conversation
      } else this.choose(known.id);
    } else {
      this.tree.add({ parent: null, file: file.name, state: state.id, length: state.length, tokens: state.length });
      this.choose(this.tree.current);
    }
    this.say(`${file.name} is open: a state of ${tokens(state.length)}.`);
  }
}
