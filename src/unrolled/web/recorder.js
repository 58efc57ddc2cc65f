// Runs on the audio thread, and passes on the samples of the microphone, block by block.

registerProcessor("recorder", class extends AudioWorkletProcessor {
  process([[channel]]) {
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
});
