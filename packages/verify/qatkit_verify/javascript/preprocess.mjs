// From a picture's pixels to the model's input, as preprocess.json says and as training did it.
//
// Plain JavaScript without a package: pages and Node use the same. A canvas would scale pictures without antialiasing,
// or each browser in its own way; so they are resized here, by the definition of qatkit_verify/preprocess.py, operation
// by operation: what shrinks in bytes, with weights of 16 bits; what grows in float32.

const FILTERS = {
  bilinear: { support: 1, at: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: { support: 2, at: cubic },
};

/** Keys' cubic filter with a = -0.5, which antialiased resizing takes. */
function cubic(x) {
  const d = Math.abs(x);
  if (d < 1) return (1.5 * d - 2.5) * d * d + 1;
  return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
}

/**
 * The tensor that the file takes.
 * @param {{data: ArrayLike<number>, width: number, height: number, channels?: number}} picture 8-bit pixels, row by
 *   row, of 1 (grey), 3 (RGB) or 4 channels (RGBA, as a canvas gives them; the fourth is left out).
 * @param {object} how what preprocess.json holds.
 * @returns {{data: Float32Array|Uint8Array, dims: number[], type: string}} for `new ort.Tensor(type, data, dims)`.
 */
export function preprocess(picture, how) {
  const size = how.image_size;
  const planes = asChannels(picture, how.channels).map((plane) => {
    const scaled = resize(plane, picture.width, picture.height, how.resize, how.interpolation);
    return crop(scaled, size);
  });
  const bytes = how.input.dtype === "uint8";
  const data = new (bytes ? Uint8Array : Float32Array)(planes.length * size * size);
  planes.forEach((plane, c) => {
    const [mean, std] = [Math.fround(how.mean[c]), Math.fround(how.std[c])];
    const out = data.subarray(c * size * size, (c + 1) * size * size);
    for (let i = 0; i < out.length; i++) {
      const value = Math.fround(Math.fround(Math.fround(plane[i] / 255) - mean) / std);
      out[i] = bytes ? toByte(value, mean, std) : value;
    }
  });
  return { data, dims: [1, planes.length, size, size], type: how.input.dtype };
}

/** The pixel that a normalised value came from; one between two levels goes to the nearer. */
function toByte(value, mean, std) {
  const pixel = Math.fround(Math.fround(Math.fround(value * std) + mean) * 255);
  return Math.min(255, Math.max(0, roundHalfEven(pixel)));
}

/** One plane of bytes for each channel of the model; grey is repeated, colour turned grey where it is needed. */
function asChannels({ data, width, height, channels = 4 }, wanted) {
  const count = width * height;
  const plane = (c) => {
    const out = new Uint8Array(count);
    for (let i = 0; i < count; i++) out[i] = data[i * channels + c];
    return out;
  };
  if (channels === 1) return Array(wanted).fill(plane(0));
  const colours = [plane(0), plane(1), plane(2)];
  if (wanted === 3) return colours;
  const [r, g, b] = colours;
  // A canvas gives grey pictures as colours, whose grey would be a level darker.
  if (channels === 4 && r.every((value, i) => value === g[i] && value === b[i])) return [r];
  return [r.map((value, i) => Math.floor((2989 * value + 5870 * g[i] + 1140 * b[i]) / 10000))];
}

/** `plane` [height, width] with its shorter side brought to `shorter` pixels. */
function resize(plane, width, height, shorter, interpolation) {
  const least = Math.min(width, height);
  if (least === shorter) return { plane, width, height };
  const sides = [width, height].map((side) => (side === least ? shorter : Math.floor((shorter * side) / least)));
  const bytes = least > shorter && shorter > 1;
  const [outWidth, outHeight] = sides;
  const rows = along(plane, height, width, width, 1, outWidth, interpolation, bytes);
  const done = along(rows, outWidth, height, 1, outWidth, outHeight, interpolation, bytes);
  return { plane: transposed(done, outWidth, outHeight), width: outWidth, height: outHeight };
}

/** Each of `lines` lines (`stride` apart, their pixels `step` apart) brought from `from` to `to` pixels. */
function along(plane, lines, from, stride, step, to, interpolation, bytes) {
  const out = new (bytes ? Uint8Array : Float32Array)(lines * to);
  const taps = interpolation === "nearest" ? nearest(from, to) : antialiased(from, to, FILTERS[interpolation]);
  const precision = bytes ? asIntegers(taps) : asFloats(taps);
  const pixel = bytes ? inBytes : inFloats;
  for (let line = 0; line < lines; line++) {
    for (let i = 0; i < to; i++) {
      const { first, weights } = taps[i];
      out[line * to + i] = pixel(plane, line * stride + first * step, step, weights, precision);
    }
  }
  return out;
}

/** One pixel of a line in bytes: sums of whole weights, rounded. */
function inBytes(plane, start, step, weights, precision) {
  let sum = 2 ** (precision - 1);
  for (let j = 0; j < weights.length; j++) sum += plane[start + j * step] * weights[j];
  return Math.min(255, Math.max(0, sum >> precision));
}

/** One pixel of a line in float32: each product and each sum is rounded. */
function inFloats(plane, start, step, weights) {
  let sum = 0;
  for (let j = 0; j < weights.length; j++) sum = Math.fround(sum + Math.fround(plane[start + j * step] * weights[j]));
  return sum;
}

/** Of each output pixel the first input pixel and the weights of those from there on. */
function antialiased(from, to, filter) {
  const scale = from / to;
  const stretch = Math.max(scale, 1);
  const support = filter.support * stretch;
  return Array.from({ length: to }, (_, i) => {
    const centre = scale * (i + 0.5);
    const first = Math.max(0, Math.trunc(centre - support + 0.5));
    const last = Math.min(from, Math.trunc(centre + support + 0.5));
    const raw = Array.from({ length: last - first }, (__, j) => filter.at((first + j - centre + 0.5) * (1 / stretch)));
    const total = raw.reduce((a, b) => a + b, 0);
    return { first, weights: raw.map((w) => w / total) };
  });
}

function nearest(from, to) {
  const scale = Math.fround(from / to);
  return Array.from({ length: to }, (_, i) => {
    return { first: Math.min(Math.floor(Math.fround(i * scale)), from - 1), weights: [1] };
  });
}

/** Turns weights into 16-bit integers, in place; gives the number of bits behind their point. */
function asIntegers(taps) {
  const largest = taps.reduce((most, { weights }) => Math.max(most, ...weights), 0);
  let precision = 0;
  while (precision < 22 && Math.trunc(0.5 + largest * 2 ** (precision + 1)) < 2 ** 15) precision++;
  for (const tap of taps) {
    tap.weights = Int32Array.from(tap.weights, (w) => Math.trunc(w * 2 ** precision + (w < 0 ? -0.5 : 0.5)));
  }
  return precision;
}

/** Turns weights into float32, in place. */
function asFloats(taps) {
  for (const tap of taps) tap.weights = Float32Array.from(tap.weights);
}

function transposed(plane, rows, columns) {
  const out = new plane.constructor(plane.length);
  for (let y = 0; y < columns; y++) for (let x = 0; x < rows; x++) out[y * rows + x] = plane[x * columns + y];
  return out;
}

/** The centre of a plane, [size, size]. */
function crop({ plane, width, height }, size) {
  const top = roundHalfEven((height - size) / 2);
  const left = roundHalfEven((width - size) / 2);
  const out = new plane.constructor(size * size);
  for (let y = 0; y < size; y++) {
    const start = (top + y) * width + left;
    out.set(plane.subarray(start, start + size), y * size);
  }
  return out;
}

/** As Python rounds. */
function roundHalfEven(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 ? floor + 1 : floor;
}
