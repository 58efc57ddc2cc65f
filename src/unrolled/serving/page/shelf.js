// Where trees are kept between visits: localStorage, bounded in size.

import { Tree } from "./tree.js";

const MOST = 1.5e6; // characters of a tree; localStorage holds about 5 million in all

/** The tree that is kept at a place; an empty one where there is none. */
export function load(place) {
  try {
    return Tree.of(localStorage.getItem(place));
  } catch {
    return new Tree(); // a browser that keeps nothing
  }
}

/** Keep a tree. Returns what there is to say about it, or "". */
export function keep(place, tree) {
  const { json, dropped } = tree.save(MOST);
  try {
    if (json === null) throw new Error("too long");
    localStorage.setItem(place, json);
  } catch {
    return "This browser has no room to keep the history: it lasts until the page is closed.";
  }
  return dropped ? "The history has become too long to keep: its oldest ends have been let go." : "";
}
