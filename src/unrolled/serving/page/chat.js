// A conversation in turns. Each request has all turns; the server finds the state after those that it has read already, so
// it reads only the new turn. A conversation may begin with the state from a file.

import { Refusal } from "./api.js";

const $ = (id) => document.getElementById(id);

/** The messages of the pieces of a path; a piece from a file has none. */
const saidIn = (path) => path.filter((piece) => piece.file === null).flatMap(({ typed, written }) => [
  { role: "user", content: typed },
  { role: "assistant", content: written },
]);

export class ChatView {
  name = "chat";
  panel = $("chat-view");
  field = $("message");
  path = "v1/chat/completions";
  words = { title: "Conversation", go: "Send", again: "Answer again", fresh: "New conversation", cut: "The answer was cut off at the limit of new tokens." };

  show(tree) {
    this.tree = tree;
    const said = saidIn(tree.path());
    $("turns").replaceChildren(...said.map((message) => this.turn(message)));
    $("no-turns").hidden = said.length > 0;
    const again = tree.now !== null && tree.children(tree.current).length > 0;
    this.told?.(again ? "This turn has been answered before: another branch begins here." : "", again);
    this.rest();
  }

  turn({ role, content }) {
    const turn = Object.assign(document.createElement("li"), { className: role });
    turn.append(
      Object.assign(document.createElement("span"), { className: "who", textContent: role === "user" ? "You" : "Model" }),
      Object.assign(document.createElement("p"), { textContent: content.trimStart() }),
    );
    return turn;
  }

  draft() {
    return { base: this.tree.now, typed: this.field.value };
  }

  order(tree, base, typed) {
    if (!typed.trim()) throw new Refusal("Type a message first.");
    const path = tree.path(base?.id ?? null);
    const owner = this.needs(path);
    return { owner, body: { messages: [...saidIn(path), { role: "user", content: typed }], ...(owner && { state: owner.state }) } };
  }

  /** The piece of a path whose state is needed: that of a file, whose messages are unknown. */
  needs(path) {
    return path.find((piece) => piece.file !== null) ?? null;
  }

  begin(base, typed) {
    const turns = saidIn([...this.tree.path(base?.id ?? null), { typed, written: "", file: null }]).map((message) => this.turn(message));
    this.answer = turns.at(-1);
    this.answer.classList.add("writing");
    $("turns").replaceChildren(...turns);
    $("no-turns").hidden = true;
    this.field.value = "";
    this.field.readOnly = true;
    this.rest();
  }

  write(written) {
    const box = $("talk");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.answer.querySelector("p").textContent = written.trimStart();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  end() {
    this.field.readOnly = false;
  }

  /** Put a message that got no answer back into the field. */
  restore(base, typed) {
    this.field.value = typed;
  }

  piece(choice) {
    return choice.delta?.content ?? "";
  }

  rest() {
    $("talk").scrollTop = $("talk").scrollHeight;
  }
}
