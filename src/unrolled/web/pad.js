// The grid to draw on, by pointer, touch or keyboard.

// Strokes in the box that a digit fills: x to the right, y down.
const ring = Array.from({ length: 25 }, (_, i) => [0.5 + 0.36 * Math.sin((i * Math.PI) / 12), 0.5 - 0.5 * Math.cos((i * Math.PI) / 12)]);
export const EXAMPLES = {
  0: ring,
  3: [[0.16, 0.1], [0.42, 0], [0.72, 0.07], [0.74, 0.26], [0.6, 0.4], [0.44, 0.46], [0.68, 0.53], [0.82, 0.72], [0.64, 0.95], [0.36, 1], [0.12, 0.9]],
  5: [[0.84, 0.02], [0.3, 0.03], [0.22, 0.43], [0.54, 0.38], [0.82, 0.55], [0.8, 0.82], [0.5, 1], [0.15, 0.92]],
  7: [[0.1, 0.05], [0.86, 0.05], [0.6, 0.5], [0.42, 1]],
  8: [[0.74, 0.14], [0.48, 0], [0.22, 0.14], [0.3, 0.36], [0.7, 0.6], [0.8, 0.82], [0.5, 1], [0.22, 0.82], [0.3, 0.6], [0.72, 0.36], [0.74, 0.14]],
};

/**
 * A pad with an image of intensities in [0, 1], one or three for each pixel; the user draws in white. Calls `changed()` when
 * the image has changed, and `say(text)` for a screen reader.
 */
export class Pad {
  constructor(canvas, { changed, say }) {
    Object.assign(this, { canvas, changed, say, cursor: null, last: null, pointer: null });
    this.resize(1, 1);
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) canvas.addEventListener(end, (event) => this.release(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.paint());
    canvas.addEventListener("blur", () => this.paint());
  }

  resize(height, width, channels = 1) {
    Object.assign(this, { height, width, channels, rows: Math.round(0.6 * height), ink: new Float32Array(height * width * channels) });
    this.canvas.width = this.canvas.height = 560;
    this.canvas.height = Math.round((560 * height) / width);
    this.canvas.setAttribute("aria-label", `Drawing grid, ${height} rows of ${width} pixels`);
    this.cursor = { x: width >> 1, y: Math.min(2, height - 1) };
    this.paint();
  }

  clear() {
    this.ink.fill(0);
    this.paint();
    this.changed();
  }

  example(digit) {
    this.ink.fill(0);
    // The data sets centre their digits: MNIST in a box of 20 of 28 pixels, smaller ones up to the edge.
    const share = this.height > 16 ? 20 / 28 : 0.86;
    const place = ([x, y]) => ({
      x: (0.5 + (x - 0.5) * share) * this.width - 0.5,
      y: (0.5 + (y - 0.5) * share) * this.height - 0.5,
    });
    const points = smooth(EXAMPLES[digit]).map(place);
    for (let i = 1; i < points.length; i++) this.stroke(points[i - 1], points[i]);
    this.paint();
    this.changed();
  }

  /** The number of levels above the line. */
  get given() {
    return this.rows * this.width * this.channels;
  }

  /** Levels of the rows above the line, as token ids. */
  ids(levels) {
    return Array.from(this.ink.subarray(0, this.given), (ink) => Math.round(ink * (levels - 1)));
  }

  /** The intensities of a pixel. */
  pixel(x, y) {
    const at = (y * this.width + x) * this.channels;
    return this.ink.subarray(at, at + this.channels);
  }

  stroke(from, to) {
    const radius = Math.max(0.45, this.width * 0.03);
    const soft = Math.min(0.8, radius);
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const length = dx * dx + dy * dy;
    for (let y = 0; y < this.height; y++) {
      for (let x = 0; x < this.width; x++) {
        const along = length ? Math.min(1, Math.max(0, ((x - from.x) * dx + (y - from.y) * dy) / length)) : 0;
        const distance = Math.hypot(x - from.x - along * dx, y - from.y - along * dy);
        const ink = Math.min(1, Math.max(0, (radius + soft - distance) / soft));
        const pixel = this.pixel(x, y);
        pixel.forEach((level, i) => (pixel[i] = Math.max(level, ink)));
      }
    }
  }

  spot(event) {
    const box = this.canvas.getBoundingClientRect();
    return {
      x: ((event.clientX - box.left) / box.width) * this.width - 0.5,
      y: ((event.clientY - box.top) / box.height) * this.height - 0.5,
    };
  }

  press(event) {
    if (event.button !== 0 || this.pointer !== null) return; // a second finger draws nothing
    this.canvas.setPointerCapture(event.pointerId);
    this.pointer = event.pointerId;
    this.last = this.spot(event);
    this.stroke(this.last, this.last);
    this.paint();
    this.changed();
  }

  move(event) {
    if (event.pointerId !== this.pointer) return;
    const passed = event.getCoalescedEvents?.() ?? [];
    for (const each of passed.length ? passed : [event]) {
      const spot = this.spot(each);
      this.stroke(this.last, spot);
      this.last = spot;
    }
    this.paint();
    this.changed();
  }

  release(event) {
    if (event.pointerId === this.pointer) this.pointer = null;
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return; // a command of the browser
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const from = { ...this.cursor };
    let drew = false;
    if (event.key in steps) {
      const [dx, dy] = steps[event.key];
      this.cursor.x = Math.min(this.width - 1, Math.max(0, from.x + dx));
      this.cursor.y = Math.min(this.height - 1, Math.max(0, from.y + dy));
      if (event.shiftKey) {
        this.stroke(from, this.cursor);
        drew = true;
      }
    } else if (event.key === " ") {
      this.stroke(from, from);
      drew = true;
    } else if (event.key === "Delete" || event.key === "Backspace") {
      this.pixel(from.x, from.y).fill(0);
      drew = true;
    } else return;
    event.preventDefault();
    this.paint();
    if (drew) this.changed();
    clearTimeout(this.saying); // once the movement has stopped, not at every step
    this.saying = setTimeout(() => {
      const { x, y } = this.cursor;
      const ink = Math.max(...this.pixel(x, y));
      this.say(`Row ${y + 1}, column ${x + 1}, ${ink > 0.6 ? "painted" : ink > 0 ? "edge of the stroke" : "empty"}`);
    }, 500);
  }

  paint() {
    const { canvas, width, height } = this;
    const context = canvas.getContext("2d");
    const size = canvas.width / width;
    const line = this.rows * size;
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const levels = Array.from(this.pixel(x, y), (ink) => Math.round(255 * ink * (y < this.rows ? 1 : 0.3)));
        if (!levels.some(Boolean)) continue;
        context.fillStyle = `rgb(${(levels.length === 3 ? levels : Array(3).fill(levels[0])).join(" ")})`;
        context.fillRect(x * size, y * size, size + 0.5, size + 0.5);
      }
    }
    context.fillStyle = "rgb(128 140 150 / 28%)"; // what the models do not see
    context.fillRect(0, line, canvas.width, canvas.height - line);
    context.fillStyle = "#fff";
    for (let x = 0; x < canvas.width; x += 20) context.fillRect(x, line - 1.5, 11, 3);
    if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
      context.strokeStyle = "#ffd33d";
      context.lineWidth = 4;
      context.strokeRect(this.cursor.x * size + 2, this.cursor.y * size + 2, size - 4, size - 4);
    }
  }
}

/** Points along a smooth curve through the given ones (Catmull-Rom). */
function smooth(points) {
  const at = (i) => points[Math.min(points.length - 1, Math.max(0, i))];
  const curve = [];
  for (let i = 0; i + 1 < points.length; i++) {
    const [a, b, c, d] = [at(i - 1), at(i), at(i + 1), at(i + 2)];
    for (let t = 0; t < 1; t += 0.125) {
      curve.push([0, 1].map((k) => 0.5 * (2 * b[k] + (c[k] - a[k]) * t + (2 * a[k] - 5 * b[k] + 4 * c[k] - d[k]) * t * t + (3 * b[k] - a[k] - 3 * c[k] + d[k]) * t ** 3)));
    }
  }
  return [...curve, points.at(-1)];
}
