// The costs of a run, while it runs: speed, time to the first token, size of the state, tokens that were not read again.

import { number, seconds, size } from "./words.js";

const $ = (id) => document.getElementById(id);

const put = (id, value, note) => {
  $(id).textContent = value;
  if (note !== undefined) $(`${id}-note`).textContent = note;
};

/** The number of bytes of the state of a sequence. */
export const stateBytes = (model, length) => model.state_bytes + model.state_bytes_per_token * length;

export function showSize(model, length, about = "") {
  put("tokens", `${about}${number(length)}`, model.max_model_len ? `of ${number(model.max_model_len)}` : "no limit");
  const grows = model.state_bytes_per_token > 0;
  put("bytes", size(stateBytes(model, length)), grows ? `${size(model.state_bytes_per_token)} more per token` : "constant: never grows");
}

export function showNothing() {
  put("rate", "–");
  put("first", "–");
  put("cached", "–", "");
}

const SHORT = 5; // milliseconds, too few to measure a speed in

/** The clock of one run. */
export class Clock {
  constructor() {
    this.begun = performance.now();
    this.first = null; // when the first tokens came
    this.shown = false;
    showNothing();
  }

  /** Note that a chunk has arrived, with the number of new tokens so far. */
  tick(count, about = "") {
    this.last = performance.now();
    if (this.first === null) {
      [this.first, this.already] = [this.last, count];
      put("first", seconds(this.first - this.begun));
    }
    this.show(count - this.already, this.last - this.first, about); // the tokens of the first block belong to the time before it
  }

  show(count, passed, about = "") {
    if (passed < SHORT || count < 1) return;
    this.shown = true;
    put("rate", `${about}${number(Number(((1e3 * count) / passed).toPrecision(3)))}`);
  }

  /** Note the final number of tokens, and the counts of the server. */
  end(count, usage) {
    if (!this.shown && this.first !== null) this.show(count, this.last - this.begun); // all tokens came at once
    if (!usage) return;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    put("cached", `${number(cached)} of ${number(usage.prompt_tokens)}`, "tokens not read again");
  }
}
