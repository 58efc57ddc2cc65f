// What a run costs, while it goes on: speed, the wait for the first token, the size of the state, what was not read again.

import { number, seconds, size } from "./words.js";

const $ = (id) => document.getElementById(id);

const put = (id, value, note) => {
  $(id).textContent = value;
  if (note !== undefined) $(`${id}-note`).textContent = note;
};

/** Bytes of the state of a sequence. */
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

/** The clock of one run. */
export class Clock {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    showNothing();
  }

  /** Tell that something has come, with the number of new tokens so far. */
  tick(count, about = "") {
    const now = performance.now();
    if (this.first === null) {
      [this.first, this.already] = [now, count];
      put("first", seconds(now - this.begun));
    }
    const passed = (now - this.first) / 1e3;
    if (count > this.already && passed > 0.02) {
      const rate = (count - this.already) / passed; // those of the first block cost the wait for it
      put("rate", `${about}${number(rate < 10 ? Number(rate.toFixed(1)) : Math.round(rate))}`);
    }
  }

  /** Tell what the server has counted. */
  end(usage) {
    if (!usage) return;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    put("cached", `${number(cached)} of ${number(usage.prompt_tokens)}`, "tokens not read again");
  }
}
