// The text so far, in an editable area. Text added at the end is read after the state there; a change further up begins a
// branch after the last piece that it does not change.

import { Refusal } from "./api.js";
import { shown, textOf } from "./tree.js";
import { firstWords, number } from "./words.js";

const $ = (id) => document.getElementById(id);
const characters = (text) => {
  const count = Array.from(text).length;
  return `${number(count)} character${count === 1 ? "" : "s"}`;
};

export class TextView {
  name = "text";
  panel = $("text-view");
  field = $("text");
  path = "v1/completions";
  words = { title: "Text", go: "Continue", again: "Write it again", fresh: "New text" };

  constructor() {
    this.field.addEventListener("input", () => this.changed());
  }

  /** Show the text of a tree, or one that is being changed. */
  show(tree, text = tree.text()) {
    this.tree = tree;
    this.field.value = text;
    this.changed();
  }

  /** Paint the tint behind the letters, and say what Continue will do. */
  changed() {
    const { base, typed } = this.draft();
    this.paint([...this.spansOf(base), ["typed", typed]]);
    const reread = this.tree.source(base).text;
    const again = base && this.tree.children(base.id).length > 0;
    const read = typed ? ` It reads ${characters(typed)} first.` : "";
    let hint;
    if (!base) hint = this.tree.current ? "Nothing of the earlier text is left: this begins a new text." : "Type a beginning, or leave the field empty if the model can begin by itself.";
    else if (base.id !== this.tree.current) hint = `The text is changed: this makes a branch after “${firstWords(textOf(base), 30)}”.${read}`;
    else if (again) hint = `This piece has been continued before: another branch begins here.${read}`;
    else if (reread) hint = `The server kept no state here: the model reads ${characters(reread + typed)} again.`;
    else hint = `The model goes on from its state at the end of ${typed ? `the last piece.${read}` : "this text."}`;
    this.told?.(hint, Boolean(again || (base && base.id !== this.tree.current)));
  }

  spansOf(piece) {
    return this.tree.path(piece?.id ?? null).flatMap(({ typed, written }) => [["typed", typed], ["written", written]]);
  }

  paint(spans) {
    const filled = spans.filter(([, text]) => text);
    const texts = shown(filled.map(([, text]) => text));
    $("backing").replaceChildren(...filled.map(([className], i) => Object.assign(document.createElement("span"), { className, textContent: texts[i] })), "\u200b");
  }

  draft() {
    return this.tree.split(this.field.value);
  }

  /** The piece of a path whose state is needed: the last one that has a state. */
  needs(path) {
    return path.findLast((piece) => piece.state) ?? null;
  }

  /** The request that continues a piece, with a state and the text after it; also returns the piece of this state. */
  order(tree, base, typed) {
    const { owner, text } = tree.source(base);
    return { owner, body: { prompt: text + typed, ...(owner && { state: owner.state }) } };
  }

  /** The request that reads the text up to a piece again. */
  orderAgain(tree, piece) {
    const [beginning] = tree.path(piece.id);
    if (beginning.file !== null && (beginning.lost || beginning === piece)) throw new Refusal("The text of this state is not known. Open its file again.");
    const body = { prompt: tree.text(piece.id), max_tokens: 0, keep: true };
    return beginning.file === null ? body : { ...body, state: beginning.state };
  }

  begin(base, typed) {
    this.field.readOnly = true;
    this.spans = [...this.spansOf(base), ["typed", typed]];
    this.before = this.tree.text(base?.id ?? null) + typed;
  }

  write(written) {
    const box = $("editor");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.field.value = this.before + written;
    this.paint([...this.spans, ["written", written]]);
    if (atEnd) box.scrollTop = box.scrollHeight; // scroll along, unless the user has scrolled up
  }

  end() {
    this.field.readOnly = false;
  }

  /** Show typed text after a piece. */
  restore(base, typed) {
    this.field.value = this.tree.text(base?.id ?? null) + typed;
    this.changed();
  }

  piece(choice) {
    return choice.text ?? "";
  }

  /** Put the caret after the text. */
  rest() {
    this.field.setSelectionRange(this.field.value.length, this.field.value.length);
    $("editor").scrollTop = $("editor").scrollHeight;
  }
}
