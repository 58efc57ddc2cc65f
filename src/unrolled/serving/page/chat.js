// A conversation in turns. Each request has all turns; the server finds the state after those that it has read already, so
// it reads only the new turn.

import { Refusal } from "./api.js";

const $ = (id) => document.getElementById(id);

export class ChatView {
  name = "chat";
  panel = $("chat-view");
  field = $("message");
  path = "v1/chat/completions";
  words = { title: "Conversation", go: "Send", again: "Answer again", fresh: "New conversation" };

  show(tree) {
    this.tree = tree;
    $("turns").replaceChildren(...tree.path().flatMap((piece) => [this.turn("user", piece.typed), this.turn("assistant", piece.written)]));
    $("no-turns").hidden = tree.current !== null;
    const again = tree.now !== null && tree.children(tree.current).length > 0;
    this.told?.(again ? "This turn has been answered before: another branch begins here." : "", again);
    this.rest();
  }

  turn(role, text) {
    const turn = Object.assign(document.createElement("li"), { className: role });
    turn.append(
      Object.assign(document.createElement("span"), { className: "who", textContent: role === "user" ? "You" : "Model" }),
      Object.assign(document.createElement("p"), { textContent: text.trimStart() }),
    );
    return turn;
  }

  draft() {
    return { base: this.tree.now, typed: this.field.value };
  }

  order(tree, base, typed) {
    if (!typed.trim()) throw new Refusal("Type a message first.");
    const earlier = tree.path(base?.id ?? null).flatMap((piece) => [
      { role: "user", content: piece.typed },
      { role: "assistant", content: piece.written },
    ]);
    return { owner: null, body: { messages: [...earlier, { role: "user", content: typed }] } };
  }

  begin(base, typed) {
    const turns = this.tree.path(base?.id ?? null).flatMap((piece) => [this.turn("user", piece.typed), this.turn("assistant", piece.written)]);
    this.answer = this.turn("assistant", "");
    this.answer.classList.add("writing");
    $("turns").replaceChildren(...turns, this.turn("user", typed), this.answer);
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
