// A figure of what one layer of a model remembers: S and phi(q) S of each head, or a cache that grows.

import { paintCache, paintState } from "./pictures.js";

export class Memory {
  constructor({ title, engine }) {
    Object.assign(this, { title, engine });
    this.figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.heads = Object.assign(document.createElement("div"), { className: "heads" });
    this.figure.append(this.caption, this.heads);
  }

  /** The numbers of the layers that have a part to show. */
  get layers() {
    const layers = this.engine.manifest.state.map((part) => /^layers\.(\d+)\./.exec(part.name)?.[1]);
    return layers.filter((layer) => layer !== undefined && this.part(layer));
  }

  /** The part of a layer's state that is shown: numbers [batch, heads, rows, columns]. */
  part(layer) {
    const parts = this.engine.manifest.state.filter((part) => part.name.startsWith(`layers.${layer}.`));
    return parts.find((part) => part.type === "float32" && part.shape.length === 4);
  }

  /** Show a layer after the last tokens read, `{ state, probes }`, or before any token. */
  paint(layer, capacity, last) {
    const part = this.part(layer);
    if (!part) {
      this.caption.textContent = `${this.title}: the state of this layer has no matrix to show.`;
      this.heads.replaceChildren();
      return;
    }
    const { state, probes } = last ?? { state: this.engine.initState(), probes: {} };
    if (part.growing_axis !== null) this.paintCaches(part, state[part.name], capacity);
    else this.paintStates(layer, part, state[part.name], probes[layer]);
  }

  paintStates(layer, part, { data, dims: [, groups, rows, columns] }, phi) {
    const heads = phi ? phi.dims[2] : groups;
    const canvases = this.canvases(heads, "state");
    const last = phi?.data.slice(-heads * rows); // of the last token read
    canvases.forEach((canvas, head) => {
      const own = Math.floor((head * groups) / heads) * rows * columns;
      paintState(canvas, last?.subarray(head * rows, (head + 1) * rows), data.subarray(own, own + rows * columns), rows, columns);
      canvas.setAttribute("aria-label", `Head ${head + 1}: ${rows} by ${columns} numbers`);
    });
    const phis = this.engine.manifest.probes?.some((probe) => probe.layer === Number(layer));
    this.caption.textContent = `${this.title}: ${phis ? "the state S of each head, with φ(q) of the last token on its left. Below S is φ(q)·S, the numerator of the head's output" : `the state ${part.name.split(".").at(-1)} of each head`}. Each state always has ${rows} × ${columns} numbers.`;
  }

  paintCaches(part, { data, dims }, capacity) {
    const time = part.growing_axis;
    const other = time === 1 ? 2 : 1;
    const [length, heads, width] = [dims[time], dims[other], dims[3]];
    const stride = { [time]: time === 1 ? heads * width : width, [other]: other === 1 ? length * width : width };
    this.canvases(heads, "cache").forEach((canvas, head) => {
      paintCache(canvas, width, length, capacity, (token, i) => data[token * stride[time] + head * stride[other] + i]);
      canvas.setAttribute("aria-label", `Head ${head + 1}: ${width} numbers for each of ${length} tokens`);
    });
    this.caption.textContent = `${this.title}: the keys of each head, with a column for each token. ${length} tokens are read so far. The values take as much memory as the keys.`;
  }

  canvases(count, className) {
    while (this.heads.children.length > count) this.heads.lastChild.remove();
    while (this.heads.children.length < count) {
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      this.heads.append(canvas);
    }
    this.heads.className = `heads ${className}`;
    return Array.from(this.heads.children);
  }
}
