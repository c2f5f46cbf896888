// Runs a bundle's golden vectors in the ONNX Runtime of a page or of Node.
//
// Each answer is compared with both answers from the machine that made the bundle, without optimizations ("off") and with
// them ("on"), in steps of the output's quantization. With one of the two, all answers must agree within the bundle's
// tolerance.

import { preprocess, shapeOf } from "./preprocess.mjs";
import { prepareSound, soundShape } from "./sound.mjs";

const WARM = 3;

/**
 * Runs every golden image by itself.
 * @param {object} ort the package: onnxruntime-web or onnxruntime-node.
 * @param {object} session a session of the bundle's model.onnx.
 * @param {Object<string, {data: ArrayLike<number>, dims: number[], type: string}>} golden the arrays of golden.npz.
 * @param {?object} how the contents of preprocess.json; null for a model of arrays.
 * @returns {Promise<object>} images; off, on: the largest differences in steps; same: number of images with the same top-1
 *   as "on" in the first output; levels: the largest difference of a preprocessed pixel (0 to 255) or of a recording's
 *   feature, null for arrays; unit: the unit of `levels`; tolerance, passed; ms: the median time of a run.
 */
export async function runGolden(ort, session, golden, how) {
  const inputs = named(golden, "input:");
  const images = countImages(golden, inputs, how);
  const unit = how?.features ? "" : " of 255";
  const found = { images, off: 0, on: 0, same: 0, levels: null, unit, tolerance: golden.tolerance.data[0] };
  const times = [];
  for (let i = 0; i < images; i++) {
    const feeds = Object.fromEntries(Object.entries(inputs).map(([name, array]) => [name, row(array, i)]));
    const { answers, ms } = await run(ort, session, feeds, how?.input.shape[0], i ? 0 : WARM);
    times.push(ms);
    for (const way of ["off", "on"]) found[way] = Math.max(found[way], stepsOff(golden, way, i, answers));
    found.same += Number(how?.task === "detection" || decidesAlike(golden, i, answers)); // boxes are only compared in steps
    const pixels = golden[`pixels_${i}`];
    const sound = golden[`samples_${i}`];
    if (sound) found.levels = Math.max(found.levels ?? 0, featuresOff(sound, Object.values(feeds)[0].data, how));
    if (pixels) found.levels = Math.max(found.levels ?? 0, levelsOff(pixels, Object.values(feeds)[0].data, how));
  }
  found.ms = times.sort((a, b) => a - b)[times.length >> 1];
  const near = Math.min(found.off, found.on) <= found.tolerance;
  found.passed = near && found.same === images && (found.levels ?? 0) <= 1;
  return found;
}

/**
 * Runs a file for one image, after `warm` untimed runs.
 * @returns {Promise<{answers: Object<string, ArrayLike<number>>, ms: number}>} by the names of the outputs.
 */
export async function run(ort, session, tensors, batch, warm = 0) {
  const rows = Number.isInteger(batch) ? batch : 1; // a file with a fixed batch rejects a single image
  const feeds = {};
  for (const [name, { type, data, dims }] of Object.entries(tensors)) {
    const repeated = new data.constructor(rows * data.length);
    for (let i = 0; i < rows; i++) repeated.set(data, i * data.length);
    feeds[name] = new ort.Tensor(type, repeated, [rows, ...dims.slice(1)]);
  }
  for (let i = 0; i < warm; i++) await session.run(feeds);
  const start = performance.now();
  const outputs = await session.run(feeds);
  const ms = performance.now() - start;
  const first = ([name, { data }]) => [name, data.subarray(0, data.length / rows)];
  return { answers: Object.fromEntries(Object.entries(outputs).map(first)), ms };
}

/** Returns the indices of the `k` highest values, highest first; ties go to the lower index. */
export function best(values, k) {
  return Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b).slice(0, k);
}

/** Returns the scores of an answer: integers are dequantized as in preprocess.json, floats are unchanged. */
export function logits(answer, how) {
  const { scale, zero_point: zero } = how.output;
  return scale === undefined ? Array.from(answer) : Array.from(answer, (q) => (q - zero) * scale);
}

/** Returns the arrays whose names have this prefix, by the rest of their names. */
function named(golden, prefix) {
  const found = Object.entries(golden).filter(([name]) => name.startsWith(prefix));
  return Object.fromEntries(found.map(([name, array]) => [name.slice(prefix.length), array]));
}

/** Returns the `i`-th image of an array. */
function row({ data, dims, type }, i) {
  const size = data.length / dims[0];
  return { data: data.slice(i * size, (i + 1) * size), dims: [1, ...dims.slice(1)], type };
}

/** Returns the largest difference of the answers to image `i` from the golden ones, in steps of the output. */
function stepsOff(golden, way, i, answers) {
  const distances = Object.entries(named(golden, `${way}:`)).map(([name, array]) => {
    const wanted = row(array, i).data;
    if (answers[name]?.length !== wanted.length) throw new Error(`golden.npz: the output ${name} has another shape than its golden answers`);
    return wanted.reduce((most, value, j) => Math.max(most, apart(value, answers[name][j])), 0)
      / golden[`step:${name}`].data[0];
  });
  return Math.max(...distances);
}

function apart(a, b) {
  const distance = Math.abs(Number(a) - Number(b));
  return Number.isNaN(distance) ? Infinity : distance;
}

/** Returns whether the largest values along the first axis of the first output are at the same positions. */
function decidesAlike(golden, i, answers) {
  const [name, array] = Object.entries(named(golden, "on:"))[0];
  const wanted = row(array, i).data;
  const classes = array.dims[1] ?? 1;
  const places = wanted.length / classes;
  const highest = (values, place) => {
    let top = 0;
    for (let c = 1; c < classes; c++) if (values[c * places + place] > values[top * places + place]) top = c;
    return top;
  };
  return Array.from({ length: places }, (_, p) => highest(wanted, p) === highest(answers[name], p)).every(Boolean);
}

/** Returns the largest difference between these preprocessed pixels and the golden ones, on the scale from 0 to 255. */
function levelsOff(pixels, expected, how) {
  const [height, width, channels = 1] = pixels.dims;
  const { data } = preprocess({ data: pixels.data, width, height, channels }, how);
  const plane = data.length / how.channels;
  const channel = (i) => (how.layout === "NHWC" ? i % how.channels : Math.floor(i / plane));
  const range = how.pixels === "0..255" ? 1 : 255;
  const inLevels = (c) => (how.input.dtype === "uint8" ? 1 : range * how.std[c]);
  return data.reduce((most, value, i) => Math.max(most, apart(value, expected[i]) * inLevels(channel(i))), 0);
}

/** Returns the largest difference between a recording's features and the golden ones. */
function featuresOff(sound, expected, how) {
  const { data } = prepareSound(sound.data, how);
  return data.reduce((most, value, i) => Math.max(most, apart(value, expected[i])), 0);
}

/** Returns the number of images; throws if the arrays do not match. */
function countImages(golden, inputs, how) {
  const [first] = Object.values(inputs);
  if (!first || !golden.tolerance) throw new Error("golden.npz: inputs or tolerance are missing");
  const [images, ...shape] = first.dims;
  for (const way of ["off", "on"]) {
    const outputs = named(golden, `${way}:`);
    const fit = Object.entries(outputs).every(([name, { dims }]) => dims[0] === images && golden[`step:${name}`]);
    if (!Object.keys(outputs).length || !fit) throw new Error(`golden.npz: the answers "${way}" for ${images} images are missing`);
  }
  const wanted = how && (how.features ? soundShape(how) : shapeOf(how));
  if (how && shape.join() !== wanted.join()) {
    throw new Error(`golden.npz: the images are ${shape.join(" x ")}, but preprocess.json makes ${wanted.join(" x ")}`);
  }
  return images;
}
