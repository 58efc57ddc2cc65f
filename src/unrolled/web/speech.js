// The part of the page for models of speech: a microphone, a file, and the transcription of each model.

import { Failure } from "./files.js";
import { decode, LONGEST_RECORDING, record } from "./sound.js";

const $ = (id) => document.getElementById(id);

export class Speech {
  /** `setState` sets the state of the page; `fail` shows an error that the user cannot correct; `clear` hides an earlier one. */
  constructor({ setState, fail, clear }) {
    Object.assign(this, { setState, fail, clear, models: [] });
    $("record").addEventListener("click", ({ detail }) => {
      if (this.stop) detail < 2 && this.stop(); // not by the second click of a double click
      else if ($("record").getAttribute("aria-disabled") !== "true") this.listen(() => this.recorded());
    });
    $("sound").addEventListener("change", () => {
      const [file] = $("sound").files;
      if (file) this.listen(() => this.read(file));
    });
  }

  /** Show models of one vocabulary: entries of models.json with their engines. */
  show(models) {
    this.models = models.map(({ entry, engine }) => {
      const card = $("transcript-card").content.firstElementChild.cloneNode(true);
      card.classList.add(entry.side);
      card.querySelector("h2").textContent = entry.title;
      return { name: entry.name, engine, card };
    });
    $("transcripts").replaceChildren(...this.models.map((model) => model.card));
    this.say("");
    this.offer(true);
  }

  /** End a recording and forget the models, because other models will be shown. */
  leave() {
    this.models = [];
    this.stop?.();
    this.offer(false);
  }

  say(status, fault = "") {
    $("speech-status").textContent = status;
    $("speech-fault").textContent = fault;
  }

  /** Let the user begin, or only stop a recording. */
  offer(open) {
    $("record").textContent = this.stop ? "Stop" : "Record";
    $("record").setAttribute("aria-disabled", !open && !this.stop); // keeps the focus, unlike `disabled`
    $("sound").disabled = !open;
  }

  async recorded() {
    const { models } = this;
    const stopped = new Promise((resolve) => (this.stop = resolve));
    this.offer(false);
    this.say("Waiting for the microphone.");
    try {
      const started = () => this.say(`Listening, for ${LONGEST_RECORDING} seconds at most.`);
      return await record(this.models[0].engine.manifest.rate, stopped, started);
    } finally {
      this.stop = undefined;
      this.offer(models !== this.models && this.models.length > 0); // other models may be shown by now
    }
  }

  async read(file) {
    const { rate } = this.models[0].engine.manifest;
    const bytes = await file.arrayBuffer().catch((error) => {
      throw new Failure(`${file.name} cannot be read: ${error.message}`);
    });
    return decode(bytes, rate, file.name);
  }

  /** Get a sound from `read`, which returns nothing if the user stops it early, and let each model transcribe it. */
  async listen(read) {
    const { models } = this;
    const gone = () => models !== this.models; // other models are shown
    this.setState("running");
    this.clear();
    this.say("");
    this.offer(false);
    for (const { card } of models) this.write(card, "", "");
    try {
      const samples = await read();
      if (gone()) return;
      if (!samples) return this.say("Stopped.");
      this.say("Transcribing.");
      window.unrolled.sound = samples;
      for (const { name, engine, card } of models) {
        const { ids, text, ms } = await engine.transcribe(samples);
        if (gone()) return;
        window.unrolled.runs[name] = { ids, text };
        this.write(card, text || "No speech was recognised.", `${ms.toFixed(0)} ms`);
      }
      this.say(`Done: ${(samples.length / models[0].engine.manifest.rate).toFixed(1)} seconds of sound.`);
    } catch (error) {
      if (gone()) return;
      if (!(error instanceof Failure)) return this.fail(error);
      this.say("", error.message);
    } finally {
      if (!gone()) {
        $("sound").value = ""; // so that the same file can be chosen again
        this.offer(true);
        if (document.body.dataset.state === "running") this.setState("ready");
      }
    }
  }

  write(card, text, time) {
    card.querySelector(".said").textContent = text;
    card.querySelector(".took").textContent = time;
  }
}
