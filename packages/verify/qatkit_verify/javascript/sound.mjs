// Turns the samples of a recording into the model's input as described by preprocess.json, identically to training.
//
// These are the same operations as in qatkit_verify/sound.py, so each float32 is the same: integers in the DFT, sums in
// ascending order, and series for logarithms and cosines (Math.log and Math.cos differ between engines).

import { roundHalfEven } from "./preprocess.mjs";

const [LN2, ROOT_HALF] = [0.6931471805599453, 0.7071067811865476];
const [STEPS, WEIGHT_STEPS] = [2 ** 15, 2 ** 20];
const [LOG_TERMS, COS_TERMS] = [11, 14];

/**
 * Returns the file's input tensor.
 * @param {ArrayLike<number>} recording samples of one channel at the rate of `how`, in -1..1 (Web Audio's
 *   `AudioBuffer.getChannelData`); an Int16Array contains multiples of 2^-15.
 * @param {object} how the contents of preprocess.json.
 * @returns {{data: Float32Array, dims: number[], type: string}} for `new ort.Tensor(type, data, dims)`.
 */
export function prepareSound(recording, how) {
  const steps = wholeSteps(recording, how.samples);
  const dims = [1, ...soundShape(how)];
  if (how.features === "waveform") return { data: Float32Array.from(steps, (s) => s / STEPS), dims, type: "float32" };
  const [waves, bands] = [wavesOf(how.window), triangles(how)];
  const dct = how.features === "mfcc" ? cosines(how.mels, how.coefficients) : null;
  const [frames, width] = dims.slice(2);
  const data = new Float32Array(frames * width);
  for (let frame = 0; frame < frames; frame++) {
    const power = spectrum(steps, frame * how.hop, waves, how.window);
    const logs = bands.map(({ first, weights }) => {
      let sum = 0;
      weights.forEach((weight, tap) => { sum += power[first + tap] * weight; });
      return naturalLog(sum + how.log_offset);
    });
    const row = dct === null ? logs : dct.map((weights) => logs.reduce((sum, value, j) => sum + value * weights[j], 0));
    row.forEach((value, i) => { data[frame * width + i] = (value - how.mean) / how.std; });
  }
  return { data, dims, type: "float32" };
}

/** Returns the shape of the model's input for one recording. */
export function soundShape(how) {
  if (how.features === "waveform") return [how.samples];
  const frames = 1 + Math.floor((how.samples - how.window) / how.hop);
  return [1, frames, how.features === "mfcc" ? how.coefficients : how.mels];
}

/** Returns the samples as integer multiples of 2^-15, cut off or padded with zeros. */
function wholeSteps(recording, count) {
  const [steps, whole] = [new Float64Array(count), recording instanceof Int16Array];
  for (let i = 0; i < Math.min(count, recording.length); i++) {
    steps[i] = Math.min(STEPS - 1, Math.max(-STEPS, whole ? recording[i] : roundHalfEven(recording[i] * STEPS)));
  }
  return steps;
}

/** Returns the power of each bin of the window from `start`. */
function spectrum(steps, start, waves, window) {
  const [cosine, sine] = waves.map((wave) => wave.map((row) => {
    let sum = 0; // of integers: exact
    for (let n = 0; n < window; n++) sum += steps[start + n] * row[n];
    const found = sum * (1 / (STEPS * WEIGHT_STEPS));
    return found * found;
  }));
  return cosine.map((power, bin) => power + sine[bin]);
}

/** Returns windowed cosines and sines as integer multiples of 2^-20, one row per bin. */
function wavesOf(window) {
  const hann = Array.from({ length: window }, (_, n) => 0.5 - 0.5 * cosineOfTurns(n, window));
  const bins = Array.from({ length: Math.floor(window / 2) + 1 }, (_, bin) => bin);
  return [0, window].map((shift) => bins.map((bin) => hann.map((value, n) => (
    roundHalfEven(value * cosineOfTurns(n * bin * 4 - shift, 4 * window) * WEIGHT_STEPS)))));
}

/** Returns for each band its first bin and the weights from there on. */
function triangles({ rate, window, mels }) {
  const mel = (hertz) => naturalLog(1 + hertz / 700) * 1127;
  const bins = Math.floor(window / 2) + 1;
  const places = Array.from({ length: bins }, (_, bin) => mel(bin * (rate / window)));
  const step = mel(rate / 2) / (mels + 1);
  return Array.from({ length: mels }, (_, band) => {
    const edge = band * step;
    const all = places.map((place) => Math.max(0, Math.min((place - edge) / step, (edge + 2 * step - place) / step)));
    const first = Math.max(0, all.findIndex((weight) => weight > 0));
    return { first, weights: all.slice(first, all.findLastIndex((weight) => weight > 0) + 1) };
  });
}

/** Returns the orthonormal DCT-II, one row per coefficient. */
function cosines(mels, coefficients) {
  return Array.from({ length: coefficients }, (_, order) => {
    const scale = Math.sqrt((order ? 2 : 1) / mels);
    return Array.from({ length: mels }, (__, j) => cosineOfTurns((2 * j + 1) * order, 4 * mels) * scale);
  });
}

/** Returns cos(2 pi numerator / denominator) for integers, by its Taylor series. */
function cosineOfTurns(numerator, denominator) {
  const turned = ((numerator % denominator) + denominator) % denominator;
  const angle = Math.min(turned, denominator - turned) * ((2 * Math.PI) / denominator);
  const square = angle * angle;
  let total = 1;
  for (let term = COS_TERMS; term > 0; term--) total = 1 - (total * square) / ((2 * term - 1) * (2 * term));
  return total;
}

/** Returns ln x = e ln 2 + 2 (s + s^3/3 + ...), x = m 2^e and s = (m - 1) / (m + 1), for a positive normal number. */
function naturalLog(value) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  const high = view.getUint32(0);
  let exponent = (high >>> 20) - 1022;
  view.setUint32(0, (high & 0xfffff) | (1022 << 20));
  let part = view.getFloat64(0);
  if (part < ROOT_HALF) [part, exponent] = [part * 2, exponent - 1];
  const ratio = (part - 1) / (part + 1);
  const square = ratio * ratio;
  let total = 1 / (2 * LOG_TERMS + 1);
  for (let term = LOG_TERMS - 1; term >= 0; term--) total = total * square + 1 / (2 * term + 1);
  return exponent * LN2 + 2 * ratio * total;
}
