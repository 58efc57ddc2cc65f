// Formats numbers and texts for people.

const count = new Intl.NumberFormat("en");

export const number = (x) => count.format(x);
export const tokens = (x) => `${number(x)} token${x === 1 ? "" : "s"}`;

export function size(bytes) {
  if (bytes < 1e3) return `${bytes} B`;
  const power = Math.min(3, Math.floor(Math.log10(bytes) / 3));
  return `${Number((bytes / 1e3 ** power).toPrecision(3))} ${["", "kB", "MB", "GB"][power]}`;
}

export const seconds = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1e3).toFixed(1)} s`);

/** The first words of a text, on one line. */
export function firstWords(text, most = 60) {
  const whole = Array.from(text.slice(0, 8 * most)).slice(0, 4 * most); // no character is cut in two
  const line = Array.from(whole.join("").replace(/\s+/g, " ").trim());
  if (!line.length) return text ? "(white space)" : "(nothing)";
  return line.length > most ? `${line.slice(0, most).join("")}…` : line.join("");
}
