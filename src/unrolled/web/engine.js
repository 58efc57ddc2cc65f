// An exported model: reads tokens after a state, and returns logits and the next state. States are never changed in place.

import { Failure, fetchChecked, fetchJson, parseJson } from "./files.js";

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, bool: Uint8Array };
// Tokens of a prompt read at once. Time and memory of a call are quadratic in them, but calls of WebGPU begin slowly.
const CHUNK = { wasm: 32, webgpu: 256 };
const BETWEEN_PAUSES = 256; // tokens of a prompt after which the page may respond
const FILLS = { Infinity: Infinity, "-Infinity": -Infinity, NaN: NaN };

/** The builds of ONNX Runtime that can be used, the preferred one first; each is loaded when it is first needed. */
export class Runtimes {
  /** WebGPU, if the folder has it and the browser finds an adapter; then wasm. */
  static async find() {
    if (typeof WebAssembly === "undefined") {
      throw new Failure("The models run in WebAssembly, but this browser has no WebAssembly, or it is switched off.");
    }
    const record = await fetchJson("runtime/runtime.json");
    const adapter = record.builds.webgpu && (await navigator.gpu?.requestAdapter().catch(() => null));
    return new Runtimes(record, adapter ? ["webgpu", "wasm"] : ["wasm"]);
  }

  constructor(record, providers) {
    Object.assign(this, { record, providers, name: `ONNX Runtime ${record.version}`, builds: {} });
  }

  /** The number of bytes that must still be fetched before a graph can run, at most. */
  get missing() {
    return Object.keys(this.builds).length ? 0 : this.record.bytes;
  }

  get(provider, onBytes) {
    const build = (this.builds[provider] ??= this.load(this.record.builds[provider], onBytes));
    build.catch(() => delete this.builds[provider]); // the next call tries again
    return build;
  }

  async load({ module, binary }, onBytes) {
    const content = await fetchChecked(`runtime/${binary}`, this.record.files[binary], onBytes);
    await fetchChecked(`runtime/${module}`, this.record.files[module]); // the import below finds it in the cache
    let ort;
    try {
      ort = await import(`./runtime/${module}`);
    } catch (error) {
      throw new Failure(`runtime/${module} could not be run: ${error.message}`);
    }
    ort.env.wasm.wasmBinary = content.buffer;
    ort.env.wasm.numThreads = 1; // threads need headers that plain servers do not send, and they slow down small models
    return ort;
  }
}

/** Start a graph on the first runtime that can run it: WebGPU cannot run every graph. */
async function begin(name, graph, runtimes, onBytes) {
  let reason;
  for (const provider of runtimes.providers) {
    const ort = await runtimes.get(provider, onBytes);
    try {
      return { ort, provider, session: await ort.InferenceSession.create(graph, { executionProviders: [provider] }) };
    } catch (error) {
      reason = error.message;
    }
  }
  throw new Failure(`${name} cannot be run: ${reason}`);
}

/** An exported model of any kind: its manifest, its vocabulary and its graph in a runtime. */
export class Graph {
  /** Load the model in a folder: its manifest, then the files, which are checked against the manifest. */
  static async load(folder, runtimes, onBytes) {
    const manifest = await fetchJson(`${folder}/manifest.json`);
    if (manifest.format !== this.format || manifest.version !== 1) {
      throw new Failure(`${folder}/manifest.json is of the format ${manifest.format} ${manifest.version}; this page reads ${this.format} 1.`);
    }
    const words = `${folder}/vocabulary.json`;
    const vocabulary = parseJson(words, await fetchChecked(words, manifest.files["vocabulary.json"]));
    const { file, ...expected } = manifest.graphs.plain;
    const graph = await fetchChecked(`${folder}/${file}`, expected, onBytes);
    const { ort, session, provider } = await begin(`${folder}/${file}`, graph, runtimes, onBytes);
    const same = (found, wanted) => found.length === wanted.length && wanted.every((name) => found.includes(name));
    if (!same(session.inputNames, manifest.inputs) || !same(session.outputNames, manifest.outputs)) {
      throw new Failure(`${folder}/${file} has other inputs or outputs than its manifest: the two files belong to different models.`);
    }
    return new this(ort, session, provider, runtimes.name, manifest, vocabulary);
  }

  constructor(ort, session, provider, runtime, manifest, vocabulary) {
    Object.assign(this, { ort, session, provider, runtime, manifest, vocabulary });
  }
}

/** A model that reads tokens after a state. */
export class Engine extends Graph {
  static format = "unrolled-onnx";

  /** The state before the first token: an object of tensors by name. */
  initState() {
    const state = {};
    for (const { name, type, shape, growing_axis: growing, fill } of this.manifest.state) {
      const dims = shape.map((size, axis) => (size === "batch" ? 1 : axis === growing ? 0 : size));
      const array = new ARRAYS[type](dims.reduce((a, b) => a * b, 1));
      array.fill(type === "int64" ? BigInt(fill) : Number(FILLS[fill] ?? fill));
      state[name] = new this.ort.Tensor(type, array, dims);
    }
    return state;
  }

  /**
   * Read token ids after `state`. Returns the logits after the last id, the new state, the probes and the time in ms; nothing
   * once `stopped()`.
   */
  async read(ids, state, stopped) {
    let last;
    let ms = 0;
    const stride = this.manifest.length === 1 ? 1 : CHUNK[this.provider];
    for (let i = 0; i < ids.length; i += stride) {
      if (i && i % BETWEEN_PAUSES === 0) await new Promise((resolve) => setTimeout(resolve));
      if (stopped()) return undefined;
      last = await this.call(ids.slice(i, i + stride), state);
      state = last.state;
      ms += last.ms;
    }
    return { ...last, ms };
  }

  async call(ids, state) {
    const tokens = new this.ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    const began = performance.now();
    const outputs = await this.session.run({ tokens, ...state });
    const ms = performance.now() - began;
    const next = {};
    for (const name of Object.keys(state)) next[name] = outputs[`next.${name}`];
    const probes = {};
    for (const { name, layer } of this.manifest.probes ?? []) probes[layer] = outputs[name];
    const logits = outputs.logits.data.slice(-this.manifest.vocab_size);
    return { logits, state: next, probes, ms };
  }

  /** The maximum number of tokens that can follow a prompt; the last one is drawn but not read. */
  room(promptLength) {
    const positions = this.manifest.max_positions;
    const read = promptLength + (this.manifest.start_token === null ? 0 : 1);
    return positions === null ? Infinity : Math.max(positions - read + 1, 0);
  }

  /** Whether a part of the state grows with every token. */
  get grows() {
    return this.manifest.state.some((part) => part.growing_axis !== null);
  }
}

/** The number of bytes of all tensors of a state. */
export function nbytes(state) {
  return Object.values(state).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
}
