// Sounds from a file or the microphone, as samples from -1 to 1 in one channel, at the rate of a model.

import { Failure } from "./files.js";

export const LONGEST_RECORDING = 10; // seconds

/** Decode the bytes of a sound file, an ArrayBuffer; channels are averaged. */
export async function decode(bytes, rate, name) {
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, rate).decodeAudioData(bytes); // resamples to the rate of the context
  } catch {
    throw new Failure(`${name} cannot be read as a sound.`);
  }
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel++) {
    const values = sound.getChannelData(channel);
    for (let i = 0; i < samples.length; i++) samples[i] += values[i] / sound.numberOfChannels;
  }
  return samples;
}

/**
 * Record the microphone until the promise `stopped` resolves or the time is over; `started` is called once it records. Returns
 * nothing if it is stopped before the browser gives the microphone.
 */
export async function record(rate, stopped, started) {
  const asked = microphone();
  const stream = await Promise.race([asked, stopped]);
  if (!stream) {
    asked.then(release, () => {}); // the browser may still give it
    return undefined;
  }
  const context = new AudioContext();
  const pieces = [];
  let over = false;
  stopped.then(() => (over = true));
  try {
    await context.audioWorklet.addModule("recorder.js").catch(() => {
      throw new Failure("recorder.js could not be fetched, so nothing can be recorded.");
    });
    const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    const recorder = new AudioWorkletNode(context, "recorder", options);
    recorder.port.onmessage = ({ data }) => pieces.push(data);
    await context.resume();
    if (over) return undefined;
    started();
    context.createMediaStreamSource(stream).connect(recorder);
    await Promise.race([stopped, new Promise((resolve) => setTimeout(resolve, 1000 * LONGEST_RECORDING))]);
  } finally {
    release(stream);
    await context.close();
  }
  if (!pieces.length) throw new Failure("Nothing was recorded.");
  return decode(wave(pieces, context.sampleRate), rate, "The recording"); // resamples better than an audio node
}

function release(stream) {
  for (const track of stream.getTracks()) track.stop();
}

async function microphone() {
  if (!navigator.mediaDevices) throw new Failure("A browser gives a page the microphone only if it comes by https or from this device.");
  // Processing for telephony would change the sound for the model.
  const plain = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: plain });
  } catch (error) {
    throw new Failure(`The microphone cannot be used: ${error.message}.`);
  }
}

/** A WAV file of one channel in float32, as an ArrayBuffer. */
export function wave(pieces, rate) {
  const size = 4 * pieces.reduce((sum, piece) => sum + piece.length, 0);
  const file = new DataView(new ArrayBuffer(44 + size));
  const write = (at, text) => Array.from(text, (letter, i) => file.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  file.setUint32(4, 36 + size, true);
  write(8, "WAVEfmt ");
  file.setUint32(16, 16, true); // bytes of the format
  file.setUint16(20, 3, true); // IEEE float
  file.setUint16(22, 1, true); // channels
  file.setUint32(24, rate, true);
  file.setUint32(28, 4 * rate, true); // bytes per second
  file.setUint16(32, 4, true); // bytes per sample
  file.setUint16(34, 32, true); // bits per sample
  write(36, "data");
  file.setUint32(40, size, true);
  let at = 44;
  for (const piece of pieces) {
    for (const value of piece) {
      file.setFloat32(at, value, true);
      at += 4;
    }
  }
  return file.buffer;
}
