// One request that generates: its result so far, and how it ended.

import { stream } from "./api.js";
import { Clock } from "./figures.js";

let perToken = null; // letters per token in the last run, since blocks of tokens have no count

export class Run {
  /** `textOf(choice)` is the text in a choice of a chunk. */
  constructor(textOf) {
    Object.assign(this, { textOf, written: "", finish: "broken", state: null, usage: null, failure: null, chunks: 0 });
    this.control = new AbortController();
  }

  stop() {
    this.control.abort();
  }

  /** Send the request and follow its stream to the end; `changed()` is called for every chunk. Throws nothing. */
  async follow(path, request, changed) {
    this.clock = new Clock();
    try {
      for await (const chunk of stream(path, request, this.control.signal)) {
        this.take(chunk);
        changed();
      }
    } catch (error) {
      if (this.control.signal.aborted) this.finish = "stopped";
      else [this.failure, this.finish] = [error, "broken"];
    }
    this.clock.end(this.count, this.usage);
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices ?? [];
    this.state = choice?.state ?? chunk.state ?? this.state;
    this.finish = choice?.finish_reason ?? this.finish;
    const text = choice ? this.textOf(choice) : "";
    this.written += text;
    this.chunks += text ? 1 : 0;
    const counted = this.usage?.completion_tokens;
    if (counted && this.written) perToken = this.written.length / counted;
    if (text || counted) this.clock.tick(this.count, counted ? "" : "≈ ");
  }

  /** The number of tokens written: the count of the server, else an estimate from the letters. */
  get count() {
    return this.usage?.completion_tokens ?? Math.max(this.chunks, perToken ? Math.round(this.written.length / perToken) : 0);
  }
}
