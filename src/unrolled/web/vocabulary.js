// What token ids stand for: characters, bytes of UTF-8, byte pairs, or numbers.

import { Failure } from "./files.js";
import { BytePairs } from "./pairs.js";

const SHAKESPEARE = "KING:\nWhat ";

/** A character in quotes, with its code point if it cannot be seen on its own: white space, controls and combining marks. */
function named(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return `“${character}”${/[\p{C}\p{Z}\p{M}]/u.test(character) ? ` (U+${code})` : ""}`;
}

export class Vocabulary {
  constructor({ kind, characters, tokenizer, data }) {
    Object.assign(this, { kind, characters, data });
    this.ids = new Map(characters?.map((character, id) => [character, id]));
    if (kind === "tokenizer") this.pairs = new BytePairs(tokenizer);
  }

  /** A prompt to begin with; for a text that is not known, the start of a line, as in `unrolled generate`. */
  opening() {
    if (this.kind === "ids") return "0 1 2";
    const known = (text) => !this.characters || Array.from(text).every((character) => this.ids.has(character));
    if (this.data === "tiny-shakespeare" && known(SHAKESPEARE)) {
      return this.pairs ? SHAKESPEARE.trimEnd() : SHAKESPEARE; // in byte pairs, a blank belongs to the next word
    }
    return known("\n") ? "\n" : this.characters[0];
  }

  encode(text) {
    if (this.kind === "ids") {
      return text.split(/\s+/).filter(Boolean).map((word) => {
        if (!/^\d+$/.test(word)) throw new Failure(`“${word}” is no token id: this model reads numbers.`);
        return Number(word);
      });
    }
    if (this.pairs) return this.pairs.encode(text);
    if (!this.characters) return Array.from(new TextEncoder().encode(text));
    return Array.from(text, (character) => {
      const id = this.ids.get(character);
      if (id === undefined) throw new Failure(`The model never saw the character ${named(character)}.`);
      return id;
    });
  }

  /** Returns a function that decodes one id at a time; bytes appear once their character is complete. */
  reader() {
    if (this.kind === "ids") return (id) => ` ${id}`;
    if (this.characters) return (id) => this.characters[id];
    const utf8 = new TextDecoder("utf-8", { ignoreBOM: true }); // keeps U+FEFF, as Python does
    const bytes = (id) => (this.pairs ? this.pairs.bytes(id) : Uint8Array.of(id));
    return (id) => utf8.decode(bytes(id), { stream: true });
  }
}
