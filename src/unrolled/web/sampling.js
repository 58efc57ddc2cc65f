// Draws the next token: the filters of `unrolled.generation` in its order, then a draw or, at temperature 0, the best token.

import { Failure } from "./files.js";

/** Random numbers in [0, 1) that depend only on the seed (sfc32, seeded by splitmix32). */
export function makeRandom(seed) {
  let mixed = seed >>> 0;
  const split = () => {
    mixed = (mixed + 0x9e3779b9) | 0;
    let x = Math.imul(mixed ^ (mixed >>> 16), 0x21f0aaad);
    x = Math.imul(x ^ (x >>> 15), 0x735a2d97);
    return x ^ (x >>> 15);
  };
  let [a, b, c, d] = [split(), split(), split(), split()];
  return () => {
    const sum = (((a + b) | 0) + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + sum) | 0;
    return (sum >>> 0) / 2 ** 32;
  };
}

/** Draw a token id from logits. `seen` is the set of earlier ids. */
export function draw(logits, settings, random, seen) {
  const { temperature, top_k: topK, top_p: topP, min_p: minP, repetition_penalty: penalty } = settings;
  const scores = Float64Array.from(logits);
  if (penalty !== 1) for (const id of seen) scores[id] = scores[id] > 0 ? scores[id] / penalty : scores[id] * penalty;
  let best = 0;
  for (let id = 1; id < scores.length; id++) if (scores[id] > scores[best]) best = id;
  if (!Number.isFinite(scores[best]) || scores.some(Number.isNaN)) {
    throw new Failure("The model returned a value that is no number, so no token can be drawn.");
  }
  if (temperature === 0) return best;

  const top = scores[best];
  const mass = scores.map((score) => Math.exp((score - top) / temperature)); // 1 for the best
  const nucleus = topP !== null && topP < 1; // at 1, rounding may reach the sum before the last token
  const order = topK === null && !nucleus ? [] : Array.from(mass.keys()).sort((i, j) => mass[j] - mass[i] || i - j);
  if (topK !== null) for (const id of order.slice(topK)) mass[id] = 0;
  if (nucleus) {
    const total = mass.reduce((a, b) => a + b);
    let above = 0;
    for (const id of order) {
      const own = mass[id];
      if (above >= topP * total) mass[id] = 0;
      above += own;
    }
  }
  if (minP !== null) mass.forEach((own, id) => own < minP && (mass[id] = 0));

  let left = random() * mass.reduce((a, b) => a + b);
  for (let id = 0; id < mass.length; id++) {
    left -= mass[id];
    if (left < 0) return id;
  }
  return best; // because of rounding, no token was reached
}

/**
 * Continue a prompt token by token, up to the end of a document or until `stopped()`. Yields `{ id, ms, read, state, probes }`;
 * the first `ms` is the time of the prompt.
 */
export async function* generate(engine, prompt, count, settings, seed, stopped) {
  const { start_token: start } = engine.manifest;
  const random = makeRandom(seed);
  const seen = new Set(prompt);
  let ids = start === null ? prompt : [start, ...prompt];
  let state = engine.initState();
  for (let read = 0, drawn = 0; drawn < count; drawn++) {
    const now = await engine.read(ids, state, stopped);
    if (!now) return;
    state = now.state;
    read += ids.length;
    const id = draw(now.logits, settings, random, seen);
    seen.add(id);
    yield { id, ms: now.ms, read, state, probes: now.probes };
    if (id === engine.vocabulary.end) return;
    ids = [id];
  }
}
