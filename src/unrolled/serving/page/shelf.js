// Stores trees between visits in localStorage, up to a size, and text that was typed but not sent in sessionStorage.

import { Tree } from "./tree.js";

const MOST = 1.5e6; // maximum number of characters of a tree; localStorage holds about 5 million in total

const unkept = new Map(); // trees that could not be stored, by their places

/** The tree of a place, stored or not; an empty tree if there is none. */
export function load(place) {
  if (unkept.has(place)) return unkept.get(place);
  try {
    return Tree.of(localStorage.getItem(place));
  } catch {
    return new Tree(); // the browser stores nothing
  }
}

/** Store a tree. Returns a message for the user, or "". */
export function keep(place, tree) {
  const { json, pieces, dropped } = tree.save(MOST);
  try {
    if (json === null) throw new Error("too long");
    localStorage.setItem(place, json);
  } catch {
    unkept.set(place, tree);
    return "This browser has no room for the history, which is lost when the page is closed.";
  }
  unkept.delete(place);
  tree.pieces = pieces;
  return dropped ? "The history was too long to store, so its oldest ends outside the current path were removed." : "";
}

const DRAFT = "unrolled:draft";

/** Store what is typed after the piece that is shown, `[spot, text]`, until this tab opens the page again. */
export function keepDraft(draft) {
  try {
    sessionStorage.setItem(DRAFT, JSON.stringify(draft));
  } catch {
    // the browser stores nothing, or has no room
  }
}

/** Take what `keepDraft` stored, as `[[spot, text]]`; an empty array if there is nothing. */
export function takeDraft() {
  try {
    const draft = JSON.parse(sessionStorage.getItem(DRAFT));
    sessionStorage.removeItem(DRAFT);
    return draft ? [draft] : [];
  } catch {
    return [];
  }
}
