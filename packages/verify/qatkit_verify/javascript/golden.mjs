// A bundle's golden vectors, run in whatever ONNX Runtime is at hand: a page's or Node's.
//
// An answer is held against both that the maker's ONNX Runtime gave, without optimizations ("off") and with them
// ("on"), in steps of the output's quantization; it has to be within the bundle's tolerance of one of the two.

import { preprocess } from "./preprocess.mjs";

const WARM = 3;

/**
 * Runs every golden image by itself.
 * @param {object} ort the package: onnxruntime-web or onnxruntime-node.
 * @param {object} session of the bundle's model.onnx.
 * @param {Object<string, {data: ArrayLike<number>, dims: number[]}>} golden the arrays of golden.npz.
 * @param {object} how what preprocess.json holds.
 * @returns {Promise<object>} images; off, on: the largest distance in steps; same: images with the same top-1 as
 *   "on"; levels: the largest distance of a preprocessed pixel, in levels of 255, null without pixels; tolerance,
 *   passed; ms: the median time of a run.
 */
export async function runGolden(ort, session, golden, how) {
  checkShapes(golden, how);
  const [images, ...shape] = golden.input.dims;
  const size = shape.reduce((a, b) => a * b, 1);
  const classes = golden.on.data.length / images;
  const found = { images, off: 0, on: 0, same: 0, levels: null, tolerance: golden.tolerance.data[0] };
  const times = [];
  for (let i = 0; i < images; i++) {
    const data = golden.input.data.slice(i * size, (i + 1) * size);
    const tensor = { type: how.input.dtype, data, dims: [1, ...shape] };
    const { answer, ms } = await run(ort, session, tensor, how.input.shape[0], i ? 0 : WARM);
    times.push(ms);
    for (const way of ["off", "on"]) {
      const wanted = golden[way].data.subarray(i * classes, (i + 1) * classes);
      found[way] = Math.max(found[way], furthest(answer, wanted) / golden.step.data[0]);
      if (way === "on") found.same += Number(best(answer, 1)[0] === best(wanted, 1)[0]);
    }
    const pixels = golden[`pixels_${i}`];
    if (pixels) found.levels = Math.max(found.levels ?? 0, levelsOff(pixels, data, how));
  }
  found.ms = times.sort((a, b) => a - b)[times.length >> 1];
  const near = Math.min(found.off, found.on) <= found.tolerance;
  found.passed = near && found.same === images && (found.levels ?? 0) <= 1;
  return found;
}

/** One run of a file for one image: its answer and the time, in milliseconds, behind `warm` untimed runs. */
export async function run(ort, session, { type, data, dims }, batch, warm = 0) {
  const rows = Number.isInteger(batch) ? batch : 1; // a file of a fixed batch takes no single image
  const repeated = new data.constructor(rows * data.length);
  for (let i = 0; i < rows; i++) repeated.set(data, i * data.length);
  const feeds = { [session.inputNames[0]]: new ort.Tensor(type, repeated, [rows, ...dims.slice(1)]) };
  for (let i = 0; i < warm; i++) await session.run(feeds);
  const start = performance.now();
  const { data: answers } = (await session.run(feeds))[session.outputNames[0]];
  return { answer: answers.subarray(0, answers.length / rows), ms: performance.now() - start };
}

/** Places of the `k` highest values, the highest first. */
export function best(values, k) {
  return Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b).slice(0, k);
}

/** Logits of an answer: integers as preprocess.json says what they mean, floats as they are. */
export function logits(answer, how) {
  const { scale, zero_point: zero } = how.output;
  return scale === undefined ? Array.from(answer) : Array.from(answer, (q) => (q - zero) * scale);
}

function furthest(a, b) {
  let most = 0;
  for (let i = 0; i < a.length; i++) most = Math.max(most, Math.abs(a[i] - b[i]) || (a[i] === b[i] ? 0 : Infinity));
  return most;
}

/** How far this preprocessing is from the maker's, in levels of 255. */
function levelsOff(pixels, expected, how) {
  const [height, width, channels = 1] = pixels.dims;
  const { data } = preprocess({ data: pixels.data, width, height, channels }, how);
  const plane = how.image_size ** 2;
  const inLevels = (c) => (how.input.dtype === "uint8" ? 1 : 255 * how.std[c]);
  return data.reduce(
    (most, value, i) => Math.max(most, Math.abs(value - expected[i]) * inLevels(Math.floor(i / plane))),
    0,
  );
}

function checkShapes(golden, how) {
  const missing = ["input", "off", "on", "step", "tolerance"].filter((name) => !golden[name]);
  if (missing.length) throw new Error(`golden.npz: no ${missing.join(", ")} (a file of one input and one output has them)`);
  const wanted = [how.channels, how.image_size, how.image_size];
  if (golden.input.dims.slice(1).join() !== wanted.join()) {
    throw new Error(`golden.npz: images of ${golden.input.dims.slice(1)}, but preprocess.json makes ${wanted}`);
  }
}
