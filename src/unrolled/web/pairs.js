// Byte pairs: text to ids and back, by the merges of a tokenizer.json whose words are those of GPT-2.

const WORDS =
  /'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** The letters that stand for bytes: a printable byte is its own letter, and other bytes have letters from U+0100 on. */
function byteLetters() {
  const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let others = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : others++));
}

export class BytePairs {
  constructor(json) {
    const { model, added_tokens: added } = JSON.parse(json);
    const pairs = model.merges.map((merge) => (typeof merge === "string" ? merge : merge.join(" ")));
    this.ranks = new Map(pairs.map((pair, rank) => [pair, rank]));
    this.ids = new Map(Object.entries(model.vocab));
    this.letters = byteLetters();
    const bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    const special = new Set(added.map((token) => token.id)); // special tokens have no text
    this.contents = [];
    for (const [token, id] of this.ids) {
      this.contents[id] = special.has(id) ? [] : Array.from(token, (letter) => bytes.get(letter));
    }
  }

  encode(text) {
    const utf8 = new TextEncoder();
    return (text.match(WORDS) ?? []).flatMap((word) => {
      const letters = Array.from(utf8.encode(word), (byte) => this.letters[byte]);
      return this.merged(letters).map((token) => this.ids.get(token));
    });
  }

  /** Repeatedly join the pair that was learned first. */
  merged(tokens) {
    for (;;) {
      let best = Infinity;
      let place;
      for (let i = 0; i + 1 < tokens.length; i++) {
        const rank = this.ranks.get(`${tokens[i]} ${tokens[i + 1]}`);
        if (rank < best) [best, place] = [rank, i];
      }
      if (place === undefined) return tokens;
      tokens.splice(place, 2, tokens[place] + tokens[place + 1]);
    }
  }

  /** The bytes of a token; none for an id beyond the last one. */
  bytes(id) {
    return Uint8Array.from(this.contents[id] ?? []);
  }
}
