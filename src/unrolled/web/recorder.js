// Runs beside the page, on the thread of sound: hands on what the microphone gives, block by block.

registerProcessor("recorder", class extends AudioWorkletProcessor {
  process([[channel]]) {
    if (channel) this.port.postMessage(channel.slice());
    return true;
  }
});
