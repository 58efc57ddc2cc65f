// The history: a tree of pieces of text. This file does not use the page.
//
// A piece is { id, parent, typed, written, tokens, length, state, lost, finish, file, made }:
//   typed, written  the text of the user, and the text of the model after it
//   tokens, length  the number of tokens of this piece, and of the whole text up to its end
//   state, lost     the id of the state at its end, or null if there is none; whether the server has dropped the state
//   finish          "stop", "length", "stopped" or "broken"
//   file            the name of the file that a piece without a text came from, or null
//   made            when the piece was made

const makeId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const textOf = (piece) => piece.typed + piece.written;

/** Texts that follow each other, with the line ends of a text area, which knows only \n. */
export const shown = (texts) => texts.map((text, i) => (texts[i - 1]?.endsWith("\r") ? text.replace(/^\n/, "") : text).replace(/\r\n?/g, "\n"));

export class Tree {
  constructor() {
    this.pieces = new Map(); // in the order in which they were made
    this.current = null; // the id of the piece that is shown, or null for a new text
  }

  get now() {
    return this.pieces.get(this.current) ?? null;
  }

  /** Add a piece, make it the current piece and return it. If its parent no longer exists, it begins a text. */
  add(piece) {
    const whole = { typed: "", written: "", tokens: 0, length: 0, state: null, lost: false, finish: "stop", file: null, made: Date.now(), ...piece, id: makeId() };
    if (!this.pieces.has(whole.parent)) whole.parent = null;
    this.pieces.set(whole.id, whole);
    this.current = whole.id;
    return whole;
  }

  children(id) {
    return Array.from(this.pieces.values()).filter((piece) => piece.parent === id);
  }

  /** The pieces from the beginning of the text to a piece. */
  path(id = this.current) {
    const found = [];
    for (let piece = this.pieces.get(id); piece; piece = this.pieces.get(piece.parent)) found.unshift(piece);
    return found;
  }

  text(id = this.current) {
    return this.path(id).map(textOf).join("");
  }

  /** The text of the current path, as a text area has it. */
  get shown() {
    return shown(this.path().map(textOf)).join("");
  }

  /** The last piece of the current path that `text`, from a text area, still contains to its end, and the text after it. */
  split(text) {
    const path = this.path();
    const texts = shown(path.map(textOf));
    const whole = texts.join("");
    let same = 0;
    while (same < whole.length && whole[same] === text[same]) same++;
    let base = null;
    let end = 0;
    for (const [i, piece] of path.entries()) {
      const next = end + texts[i].length;
      if (next > same) break;
      [base, end] = [piece, next];
    }
    return { base, typed: text.slice(end) };
  }

  /** How to continue after a piece: the nearest state before, and the text in between. The text of a file is unknown. */
  source(piece) {
    const path = this.path(piece?.id ?? null);
    let from = path.length - 1;
    while (from >= 0 && (!path[from].state || (path[from].lost && path[from].file === null))) from--;
    return { owner: path[from] ?? null, text: path.slice(from + 1).map(textOf).join("") };
  }

  /** Remove a piece and all pieces after it; if the current piece is removed, the parent becomes current. */
  remove(id) {
    const parent = this.pieces.get(id)?.parent ?? null;
    const gone = [id];
    for (const each of gone) gone.push(...this.children(each).map((piece) => piece.id));
    for (const each of gone) this.pieces.delete(each);
    if (gone.includes(this.current)) this.current = parent;
    return gone.length;
  }

  /**
   * Return the tree as JSON of at most `most` characters, or null if this is too few, and the pieces in it: the oldest leaves
   * outside the current path are dropped first. The tree itself keeps all of them.
   */
  save(most) {
    const pieces = new Map(this.pieces);
    const write = () => JSON.stringify({ version: 1, current: this.current, pieces: Array.from(pieces.values()) });
    let dropped = 0;
    for (let json = write(); ; json = write()) {
      if (json.length <= most) return { json, pieces, dropped };
      const kept = new Set(this.path().map((piece) => piece.id));
      const parents = new Set(Array.from(pieces.values(), (piece) => piece.parent));
      const old = Array.from(pieces.keys()).find((id) => !kept.has(id) && !parents.has(id));
      if (old === undefined) return { json: null, pieces, dropped };
      pieces.delete(old);
      dropped += 1;
    }
  }

  /** The tree that `save` wrote; an empty tree for anything else. */
  static of(json) {
    const tree = new Tree();
    try {
      const { version, current, pieces } = JSON.parse(json);
      if (version !== 1) return tree;
      for (const piece of pieces) tree.pieces.set(piece.id, piece);
      tree.current = tree.pieces.has(current) ? current : null;
    } catch {
      return new Tree(); // nothing stored, or not by this page
    }
    return tree;
  }
}
