// Draws images, states and costs with the colours of the style sheet.

/** A colour of the style sheet as [red, green, blue]. */
export function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
}

const mix = (a, b, share) => a.map((x, i) => x + (b[i] - x) * share);

/** Show an image of the `given` levels and then the `made` levels; made levels are tinted, unless the image has colours. */
export function paintImage(canvas, [height, width, channels = 1], levels, given, made, tint) {
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const bright = mix(tint, [255, 255, 255], 0.85);
  const at = (i) => (i < given.length ? given[i] : made[i - given.length] ?? -1) / (levels - 1);
  for (let i = 0; i < height * width; i++) {
    const own = i >= given.length;
    const level = at(channels * i + channels - 1);
    const rgb = level < 0 ? [38, 44, 50]
      : channels === 3 ? [0, 1, 2].map((c) => 255 * at(3 * i + c))
      : !own ? [255, 255, 255].map((x) => x * level)
      : level < 0.6 ? mix([0, 0, 0], tint, level / 0.6) : mix(tint, bright, (level - 0.6) / 0.4);
    image.data.set([...rgb, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

/** Paint a matrix, given as `value(row, column)`, into a part of an image; from red over the background colour to green. */
function paintMatrix(image, left, top, rows, columns, value, [negative, ground, positive]) {
  let largest = 0;
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) largest = Math.max(largest, Math.abs(value(i, j)));
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const x = value(i, j);
      const rgb = mix(ground, x < 0 ? negative : positive, largest && Math.sqrt(Math.abs(x) / largest));
      image.data.set([...rgb, 255], 4 * ((top + i) * image.width + left + j));
    }
  }
  return largest;
}

/** phi(q) beside S, and phi(q) S below it, for one head. `phi` has R numbers, `state` R rows of M. */
export function paintState(canvas, phi, state, rows, columns) {
  const thick = phi ? Math.max(1, Math.round(rows / 10)) : 0;
  const edge = phi ? thick + 1 : 0;
  Object.assign(canvas, { width: edge + columns, height: rows + edge });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const colours = ["negative", "zero", "positive"].map(colour);
  paintMatrix(image, edge, 0, rows, columns, (i, j) => state[i * columns + j], colours);
  if (phi) {
    const product = new Float64Array(columns);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) product[j] += phi[i] * state[i * columns + j];
    paintMatrix(image, 0, 0, rows, thick, (i) => phi[i], colours);
    paintMatrix(image, edge, rows + 1, thick, columns, (_, j) => product[j], colours);
  }
  context.putImageData(image, 0, 0);
}

const WIDEST = 2048; // maximum number of columns of a picture: browsers refuse canvases of about ten thousand

/** A cache of one head, with a column for one or several tokens; columns up to `capacity` that are not in use are blank. */
export function paintCache(canvas, width, length, capacity, value) {
  const every = Math.ceil(Math.max(capacity, length, 1) / WIDEST);
  const columns = Math.ceil(length / every);
  Object.assign(canvas, { width: Math.ceil(Math.max(capacity, length, 1) / every), height: width });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  paintMatrix(image, 0, 0, width, columns, (i, j) => value(j * every, i), ["negative", "zero", "positive"].map(colour));
  context.putImageData(image, 0, 0);
}

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** The largest number up to `x` that is 1, 2, 2.5 or 5 times a power of ten. */
function roundStep(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [5, 2.5, 2, 1].find((digit) => digit * power <= x) * power;
}

/** A line chart over the tokens read; `lines` are `{ className, name, points: [[x, y], ...], value }`. */
export function paintChart(figure, title, lines, xMax, format) {
  const [height, left, right, top, bottom] = [210, 2, 8, 20, 24];
  const width = Math.max(200, figure.clientWidth); // the width on the page, so that letters keep their size
  const yMax = lines.flatMap((line) => line.points).reduce((most, point) => Math.max(most, point[1]), 0) || 1;
  const step = roundStep(yMax / 2);
  const x = (value) => left + ((width - left - right) * value) / xMax;
  const y = (value) => height - bottom - ((height - top - bottom) * value) / yMax;
  const told = (line) => (line.points.length ? format(line.value) : "–");
  const said = lines.map((line) => `${line.name} ${told(line)}`).join(", ");
  const chart = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} over the tokens read: ${said}.` });
  for (let value = 0; value <= yMax; value += step) {
    chart.append(element("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
  }
  for (const { className, points } of lines) {
    const path = points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    chart.append(element("polyline", { class: className, points: path }));
    if (points.length) chart.append(element("circle", { class: className, cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 4 }));
  }
  for (let value = step; value <= yMax; value += step) chart.append(element("text", { x: left, y: y(value) - 4 }, format(value))); // above the lines
  chart.append(element("text", { x: left, y: height - 8 }, "0"));
  chart.append(element("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `${xMax} tokens read`));
  figure.querySelector("svg")?.remove();
  figure.append(chart);
  figure.querySelector(".key").replaceChildren(...lines.map((line) => {
    const item = document.createElement("span");
    item.className = line.className;
    item.textContent = `${line.name} ${told(line)}`;
    return item;
  }));
}
