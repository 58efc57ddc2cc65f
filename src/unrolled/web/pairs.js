// Byte pairs: text to ids and back, by the merges of a tokenizer.json whose words are those of GPT-2.

const WORDS =
  /'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** The letters that stand for bytes: a printable byte is its own letter, and other bytes have letters from U+0100 on. */
function byteLetters() {
  const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let others = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : others++));
}

/** A heap of numbers, the smallest first. */
class Queue {
  heap = [];

  get length() {
    return this.heap.length;
  }

  push(x) {
    let i = this.heap.length;
    for (let above = (i - 1) >> 1; i && this.heap[above] > x; above = (i - 1) >> 1) {
      this.heap[i] = this.heap[above];
      i = above;
    }
    this.heap[i] = x;
  }

  pop() {
    const [first] = this.heap;
    const x = this.heap.pop();
    const size = this.heap.length;
    let i = 0;
    for (let below = 1; below < size; below = 2 * i + 1) {
      if (below + 1 < size && this.heap[below + 1] < this.heap[below]) below++;
      if (this.heap[below] >= x) break;
      this.heap[i] = this.heap[below];
      i = below;
    }
    if (size) this.heap[i] = x;
    return first;
  }
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

  /** Repeatedly join the pair that was learned first, the leftmost of equals. Changes `tokens`. */
  merged(tokens) {
    const size = tokens.length;
    const before = tokens.map((_, i) => i - 1);
    const after = tokens.map((_, i) => i + 1); // as tokens are joined, the places of the second ones are skipped
    const rank = (i) => (after[i] < size ? this.ranks.get(`${tokens[i]} ${tokens[after[i]]}`) : undefined);
    const queue = new Queue();
    const offer = (i) => rank(i) !== undefined && queue.push(rank(i) * size + i); // by rank, then by place
    for (let i = 0; i < size; i++) offer(i);
    while (queue.length) {
      const first = queue.pop();
      const i = first % size;
      if (tokens[i] === null || rank(i) * size + i !== first) continue; // one of the pair has been joined to another
      tokens[i] += tokens[after[i]];
      tokens[after[i]] = null;
      after[i] = after[after[i]];
      if (after[i] < size) before[after[i]] = i;
      if (i) offer(before[i]);
      offer(i);
    }
    return tokens.filter((token) => token !== null);
  }

  /** The bytes of a token; none for an id beyond the last one. */
  bytes(id) {
    return Uint8Array.from(this.contents[id] ?? []);
  }
}
