// An exported model of speech: samples in, symbols out.

import { Graph } from "./engine.js";
import { Failure } from "./files.js";

const LONGEST = 60; // maximum length of a sound in seconds: time and memory of softmax and windows are quadratic in them

export class Transcriber extends Graph {
  static format = "unrolled-onnx-speech";

  /** Transcribe samples from -1 to 1, at the rate of the manifest. Returns ids, text and the time in ms. */
  async transcribe(samples) {
    const { shortest, rate } = this.manifest;
    const seconds = samples.length / rate;
    if (samples.length < shortest) throw new Failure(`The sound has ${samples.length} samples, but must have at least ${shortest}.`);
    if (seconds > LONGEST) throw new Failure(`The sound has ${(Math.ceil(10 * seconds) / 10).toFixed(1)} seconds, but must have at most ${LONGEST}.`);
    const began = performance.now();
    const outputs = await this.session.run({ samples: new this.ort.Tensor("float32", samples, [1, samples.length]) });
    const ms = performance.now() - began;
    const ids = bestPath(outputs.log_probs.data, this.manifest.vocab_size + 1);
    return { ids, text: this.text(ids), ms };
  }

  /** The text of ids; letters include blanks, phones and words do not. */
  text(ids) {
    const { units } = this.vocabulary;
    return ids.map((id) => units[id]).join(units.includes(" ") ? "" : " ");
  }
}

/** The ids of the likeliest path: `size` log-probabilities per frame, the blank last. Repeats are merged, then blanks removed. */
export function bestPath(logProbs, size) {
  const ids = [];
  let before;
  for (let start = 0; start < logProbs.length; start += size) {
    let best = 0;
    for (let i = 1; i < size; i++) if (logProbs[start + i] > logProbs[start + best]) best = i;
    if (best !== before && best !== size - 1) ids.push(best);
    before = best;
  }
  return ids;
}
