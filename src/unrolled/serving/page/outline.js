// The tree as an outline (role=tree) with arrow keys. Pieces that follow each other without a fork have the same level, so that
// a long text is not indented further and further; the branches of a fork are one level deeper.

import { firstWords, tokens } from "./words.js";

const DEEPEST = 8; // maximum number of levels of indentation, so that there is room for words

function span(className, text, hidden = false) {
  const made = Object.assign(document.createElement("span"), { className, textContent: text });
  if (hidden) made.setAttribute("aria-hidden", "true");
  return made;
}

export class Outline {
  /** `choose(id)` is called when the user chooses a piece. */
  constructor(list, choose) {
    Object.assign(this, { list, choose, folded: new Set(), rows: [], active: null, typed: "" });
    list.addEventListener("keydown", (event) => this.key(event));
    list.addEventListener("click", (event) => this.click(event));
  }

  /** Lay out the rows: { piece, level, parent (a row), branch, branches, forks, ends (nothing follows), lines (levels with a line). */
  layOut(tree) {
    const children = new Map();
    for (const piece of tree.pieces.values()) children.set(piece.parent, [...(children.get(piece.parent) ?? []), piece]);
    const rows = [];
    const beginnings = children.get(null) ?? [];
    const open = beginnings.map((piece, i) => ({ piece, level: 1, parent: null, lines: [], branch: i + 1, branches: beginnings.length })).reverse();
    while (open.length) { // no recursion, since a text may have thousands of pieces
      const row = open.pop();
      rows.push(row);
      const next = children.get(row.piece.id) ?? [];
      row.forks = next.length > 1;
      row.ends = !next.length || (row.forks && this.folded.has(row.piece.id));
      if (row.forks && this.folded.has(row.piece.id)) continue;
      const place = row.forks ? { level: row.level + 1, parent: row } : { level: row.level, parent: row.parent };
      const linesOf = (i) => (i < next.length - 1 ? [...row.lines, row.level] : row.lines); // to the branches below
      open.push(...next.map((piece, i) => ({ piece, ...place, lines: linesOf(i), branch: i + 1, branches: next.length })).reverse());
    }
    return rows;
  }

  show(tree) {
    this.tree = tree;
    const focused = this.list.contains(document.activeElement);
    const path = new Set(tree.path().map((piece) => piece.id));
    this.rows = this.layOut(tree);
    const places = new Map(); // from a parent to its rows
    this.rows.forEach((row, i) => {
      row.lit = new Set(); // the lines that lead to a branch of the current path further down
      if (!row.parent || row.branches < 2 || !path.has(row.piece.id)) return;
      while (this.rows[--i] !== row.parent) this.rows[i].lit.add(row.parent.level);
    });
    for (const row of this.rows) places.set(row.parent, [...(places.get(row.parent) ?? []), row]);
    if (!this.rows.some((row) => row.piece.id === this.active)) this.active = tree.current;
    if (!this.rows.some((row) => row.piece.id === this.active)) this.active = this.rows[0]?.piece.id ?? null;
    this.list.replaceChildren(...this.rows.map((row) => this.item(row, places.get(row.parent), path, tree)));
    if (focused) this.focus(this.active);
  }

  item(row, siblings, path, tree) {
    const { piece } = row;
    const item = document.createElement("li");
    item.dataset.id = piece.id;
    item.tabIndex = piece.id === this.active ? 0 : -1;
    item.style.setProperty("--level", Math.min(row.level, DEEPEST) - 1);
    const attributes = { role: "treeitem", "aria-level": row.level, "aria-posinset": siblings.indexOf(row) + 1, "aria-setsize": siblings.length };
    attributes["aria-selected"] = piece.id === tree.current;
    if (row.forks) attributes["aria-expanded"] = !this.folded.has(piece.id);
    for (const [name, value] of Object.entries(attributes)) item.setAttribute(name, value);
    item.classList.toggle("path", path.has(piece.id));
    const branch = row.branches > 1 && piece.parent !== null;
    item.append(...row.lines.filter((level) => level < DEEPEST).map((level) => this.line(row.lit.has(level) ? "line lit" : "line", level)));
    if (branch && row.level <= DEEPEST) item.append(this.line("elbow", row.level - 1));
    else if (piece.parent !== null) item.append(this.line("above", row.level));
    if (!row.ends) item.append(this.line(piece.id === tree.current ? "below last" : "below", row.level));
    item.append(this.line("knot", row.level));
    if (row.branches > 1) item.append(span("unseen", `${piece.parent === null ? "Text" : "Branch"} ${row.branch} of ${row.branches}: `));
    item.append(span("words", this.words(piece, row, tree)));
    if (piece.lost) item.append(span("mark", "state gone"));
    else if (!piece.state) item.append(span("mark", piece.finish === "broken" ? "broke off" : "stopped"));
    const many = row.forks ? span("fold", "", true) : "";
    item.append(" ", span("count", `${piece.state || piece.lost ? "" : "about "}${tokens(piece.tokens)}`), many);
    if (path.has(piece.id)) item.append(span("unseen", ", on the current path"));
    return item;
  }

  line(className, level) {
    const made = span(className, "", true);
    made.style.setProperty("--at", Math.min(level, DEEPEST) - 1);
    return made;
  }

  /** The words that distinguish a piece from its siblings: if they begin alike, what the model wrote. */
  words(piece, row, tree) {
    if (piece.file !== null) return `State from ${piece.file}`;
    if (!piece.typed.trim()) return firstWords(piece.written);
    const alike = row.branches > 1 && tree.children(piece.parent).some((other) => other !== piece && other.typed === piece.typed);
    return alike ? `… ${firstWords(piece.written)}` : firstWords(piece.typed + piece.written);
  }

  focus(id) {
    this.active = id;
    for (const item of this.list.children) {
      item.tabIndex = item.dataset.id === id ? 0 : -1;
      if (item.dataset.id === id) item.focus();
    }
  }

  fold(id, folded) {
    this.folded[folded ? "add" : "delete"](id);
    this.active = id;
    this.show(this.tree);
  }

  click(event) {
    const id = event.target.closest("[role=treeitem]")?.dataset.id;
    if (!id) return;
    this.active = id;
    if (event.target.className === "fold") this.fold(id, !this.folded.has(id));
    else this.choose(id);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.rows.findIndex((row) => row.piece.id === this.active);
    if (at < 0) return;
    const row = this.rows[at];
    const id = row.piece.id;
    const open = row.forks && !this.folded.has(id);
    let to = null;
    if (event.key === "ArrowDown") to = this.rows[at + 1];
    else if (event.key === "ArrowUp") to = this.rows[at - 1];
    else if (event.key === "Home") to = this.rows[0];
    else if (event.key === "End") to = this.rows.at(-1);
    else if (event.key === "ArrowRight" && open) to = this.rows[at + 1];
    else if (event.key === "ArrowRight" && row.forks) this.fold(id, false);
    else if (event.key === "ArrowLeft" && open) this.fold(id, true);
    else if (event.key === "ArrowLeft") to = row.parent;
    else if (event.key === "Enter" || event.key === " ") this.choose(id);
    else if (event.key.length === 1) to = this.find(event.key, at);
    else return;
    event.preventDefault();
    if (to) this.focus(to.piece.id);
  }

  /** The next row whose words begin with the letters that were just typed. */
  find(letter, at) {
    clearTimeout(this.pause);
    this.pause = setTimeout(() => (this.typed = ""), 700);
    this.typed += letter.toLowerCase();
    const first = this.typed.length === 1 ? at + 1 : at;
    const order = [...this.rows.slice(first), ...this.rows.slice(0, first)];
    const items = new Map(Array.from(this.list.children, (item) => [item.dataset.id, item.querySelector(".words").textContent.toLowerCase()]));
    return order.find((row) => items.get(row.piece.id).startsWith(this.typed)) ?? null;
  }
}
