// What token ids stand for: characters, bytes of UTF-8, or numbers.

import { Failure } from "./files.js";

export class Vocabulary {
  constructor({ kind, characters }) {
    Object.assign(this, { kind, characters });
    this.ids = new Map(characters?.map((character, id) => [character, id]));
  }

  /** Something to begin with. */
  opening() {
    if (this.kind === "ids") return "0 1 2";
    const known = Array.from("KING:\nWhat ").filter((character) => !this.characters || this.ids.has(character));
    return known.join("") || this.characters[0];
  }

  encode(text) {
    if (this.kind === "ids") {
      return text.split(/\s+/).filter(Boolean).map((word) => {
        if (!/^\d+$/.test(word)) throw new Failure(`“${word}” is no token id: this model reads numbers.`);
        return Number(word);
      });
    }
    if (!this.characters) return Array.from(new TextEncoder().encode(text));
    return Array.from(text, (character) => {
      const id = this.ids.get(character);
      if (id === undefined) throw new Failure(`The model never saw the character “${character}”.`);
      return id;
    });
  }

  /** A function from one id after another to text; bytes appear once a character is complete. */
  reader() {
    if (this.kind === "ids") return (id) => ` ${id}`;
    if (this.characters) return (id) => this.characters[id];
    const utf8 = new TextDecoder();
    return (id) => utf8.decode(Uint8Array.of(id), { stream: true });
  }
}
