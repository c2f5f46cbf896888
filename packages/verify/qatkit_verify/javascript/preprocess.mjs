// Turns a picture's pixels into the model's input as described by preprocess.json, identically to training.
//
// This is plain JavaScript without packages, for pages and Node. A canvas would scale pictures without antialiasing, or
// differently in each browser, so they are resized here with the same operations as in qatkit_verify/preprocess.py:
// shrinking in bytes with 16-bit weights, growing in float32. Sizes are computed as in fitting.py.

const FILTERS = {
  bilinear: { support: 1, at: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: { support: 2, at: cubic },
};

/** Keys' cubic filter with a = -0.5, as in antialiased resizing. */
function cubic(x) {
  const d = Math.abs(x);
  if (d < 1) return (1.5 * d - 2.5) * d * d + 1;
  return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
}

/**
 * Returns the file's input tensor.
 * @param {{data: ArrayLike<number>, width: number, height: number, channels?: number}} picture 8-bit pixels, row by
 *   row, of 1 (grey), 3 (RGB) or 4 channels (RGBA, as from a canvas; the fourth is ignored).
 * @param {object} how the contents of preprocess.json.
 * @returns {{data: Float32Array|Uint8Array, dims: number[], type: string}} for `new ort.Tensor(type, data, dims)`.
 */
export function preprocess(picture, how) {
  const planes = asChannels(picture, how.channels).map((plane) => fitted(plane, picture, how));
  if (how.channel_order === "BGR") planes.reverse();
  const [bytes, levels] = [how.input.dtype === "uint8", how.pixels === "0..255"];
  const count = planes[0].length;
  const data = new (bytes ? Uint8Array : Float32Array)(planes.length * count);
  planes.forEach((plane, c) => {
    const [mean, std] = [Math.fround(how.mean[c]), Math.fround(how.std[c])];
    const unit = levels ? [Math.fround(how.mean[c] / 255), Math.fround(how.std[c] / 255)] : [mean, std];
    const [first, step] = how.layout === "NHWC" ? [c, planes.length] : [c * count, 1];
    for (let i = 0; i < count; i++) {
      const pixel = levels ? plane[i] : Math.fround(plane[i] / 255);
      const value = Math.fround(Math.fround(pixel - mean) / std);
      data[first + i * step] = bytes ? toByte(value, ...unit) : value;
    }
  });
  return { data, dims: [1, ...shapeOf(how)], type: how.input.dtype };
}

/** Returns the shape of the model's input for one image. */
export function shapeOf(how) {
  const size = bothSides(how.image_size);
  return how.layout === "NHWC" ? [...size, how.channels] : [how.channels, ...size];
}

/** Returns [height, width] of a size that may be one number. */
export function bothSides(size) {
  return Array.isArray(size) ? size : [size, size];
}

/** Returns the pixel from 0 to 255 from which a normalised value came, rounded to an integer. */
function toByte(value, mean, std) {
  const pixel = Math.fround(Math.fround(Math.fround(value * std) + mean) * 255);
  return Math.min(255, Math.max(0, roundHalfEven(pixel)));
}

/** Returns one plane of bytes per channel of the model; grey is repeated, and colour becomes grey where needed. */
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
  // A canvas gives grey pictures as colours, whose grey would come out smaller by 1.
  if (channels === 4 && r.every((value, i) => value === g[i] && value === b[i])) return [r];
  return [r.map((value, i) => Math.floor((2989 * value + 5870 * g[i] + 1140 * b[i]) / 10000))];
}

/** Fits `plane` of a picture to the input's height and width. */
function fitted(plane, { width, height }, how) {
  const size = bothSides(how.image_size);
  const { scaled, start, kept, place } = fitting(height, width, size, how);
  const part = cut(resize(plane, height, width, scaled, how.interpolation), scaled[1], start, kept);
  if (kept[0] === size[0] && kept[1] === size[1]) return part;
  const out = new Float32Array(size[0] * size[1]).fill(how.pad_value);
  for (let y = 0; y < kept[0]; y++) {
    out.set(part.subarray(y * kept[1], (y + 1) * kept[1]), (place[0] + y) * size[1] + place[1]);
  }
  return out;
}

/** Returns the [height, width] to scale a picture to, the part that is kept, and its position in the input. */
function fitting(height, width, size, how) {
  if (how.fit === "resize") return { scaled: size, start: [0, 0], kept: size };
  if (how.fit === "letterbox") {
    const scaled = within(height, width, size);
    const centred = scaled.map((side, i) => Math.floor((size[i] - side) / 2));
    return { scaled, start: [0, 0], kept: scaled, place: how.align === "top_left" ? [0, 0] : centred };
  }
  const scaled = covering(height, width, bothSides(how.resize));
  return { scaled, start: scaled.map((side, i) => roundHalfEven((side - size[i]) / 2)), kept: size };
}

/** Returns the size of a picture that just covers another. */
function covering(height, width, [high, wide]) {
  if (high * width >= wide * height) return [high, Math.floor((high * width) / height)];
  return [Math.floor((wide * height) / width), wide];
}

/** Returns the size of a picture that just fits into another. */
function within(height, width, [high, wide]) {
  const nearest = (side, of) => Math.max(1, Math.floor((2 * side + of) / (2 * of)));
  if (high * width <= wide * height) return [high, nearest(high * width, height)];
  return [nearest(wide * height, width), wide];
}

/** Resizes `plane` [height, width] to `scaled`. */
function resize(plane, height, width, [high, wide], interpolation) {
  if (high === height && wide === width) return plane;
  const bytes = height >= high && width >= wide && Math.min(high, wide) > 1;
  const rows = along(plane, height, width, width, 1, wide, interpolation, bytes);
  return transposed(along(rows, wide, height, 1, wide, high, interpolation, bytes), wide, high);
}

/** Resizes each of `lines` lines (`stride` apart, their pixels `step` apart) from `from` to `to` pixels. */
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

/** Returns one pixel of a line in bytes: a sum with integer weights, rounded. */
function inBytes(plane, start, step, weights, precision) {
  let sum = 2 ** (precision - 1);
  for (let j = 0; j < weights.length; j++) sum += plane[start + j * step] * weights[j];
  return Math.min(255, Math.max(0, sum >> precision));
}

/** Returns one pixel of a line in float32; each product and each sum is rounded. */
function inFloats(plane, start, step, weights) {
  let sum = 0;
  for (let j = 0; j < weights.length; j++) sum = Math.fround(sum + Math.fround(plane[start + j * step] * weights[j]));
  return sum;
}

/** Returns for each output pixel the first input pixel and the weights from there on. */
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

/** Turns weights into 16-bit integers, in place; returns their number of fractional bits. */
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

/** Returns the part [rows, columns] from [top, left] of a plane with rows of `width`. */
function cut(plane, width, [top, left], [rows, columns]) {
  const out = new plane.constructor(rows * columns);
  for (let y = 0; y < rows; y++) {
    const first = (top + y) * width + left;
    out.set(plane.subarray(first, first + columns), y * columns);
  }
  return out;
}

/** Rounds halves to even, as in Python. */
export function roundHalfEven(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 ? floor + 1 : floor;
}
