// Reads the zip archives and NumPy arrays of a bundle, in pages and in Node.

// JavaScript's arrays and ONNX Runtime's names for NumPy's types.
const DTYPES = {
  "|b1": [Uint8Array, "bool"],
  "|u1": [Uint8Array, "uint8"],
  "|i1": [Int8Array, "int8"],
  "<i4": [Int32Array, "int32"],
  "<i8": [BigInt64Array, "int64"],
  "<f4": [Float32Array, "float32"],
  "<f8": [Float64Array, "float64"],
};
const END_OF_DIRECTORY = 0x06054b50;
const LONGEST_COMMENT = 0xffff;
const LARGEST = 2 ** 31; // bytes of one member: a file that claims more is not unpacked

/**
 * Returns the members of a zip archive.
 * @param {Uint8Array} bytes the archive.
 * @returns {Promise<Map<string, Uint8Array>>} by name.
 * @throws {Error} if the bytes are not an archive, or a member is damaged.
 */
export async function unzip(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  const lowest = Math.max(0, end - LONGEST_COMMENT);
  while (end >= lowest && view.getUint32(end, true) !== END_OF_DIRECTORY) end--;
  if (end < lowest) throw new Error("not a zip archive");
  const members = new Map();
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left--) {
    const [nameLength, extraLength, commentLength] = [28, 30, 32].map((o) => view.getUint16(at + o, true));
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
    if (!name.endsWith("/")) members.set(name, await member(bytes, view, at, name)); // else a folder
    at += 46 + nameLength + extraLength + commentLength;
  }
  return members;
}

/** Returns the bytes of the member whose entry in the directory is at `entry`. */
async function member(bytes, view, entry, name) {
  const method = view.getUint16(entry + 10, true);
  const [packed, size] = [20, 24].map((o) => view.getUint32(entry + o, true));
  if (size > LARGEST) throw new Error(`${name}: ${size} bytes, more than ${LARGEST}`);
  const header = view.getUint32(entry + 42, true);
  const start = header + 30 + view.getUint16(header + 26, true) + view.getUint16(header + 28, true);
  const data = bytes.subarray(start, start + packed);
  if (data.length !== packed) throw new Error(`${name}: cut off`);
  if (method !== 0 && method !== 8) throw new Error(`${name}: compression method ${method} is not supported`);
  const found = method === 0 ? data : await unpacked(data, "deflate-raw");
  if (found.length !== size) throw new Error(`${name}: ${found.length} bytes, not ${size}`);
  return found;
}

/** Unpacks bytes with the platform's own decompression; `format` is one of DecompressionStream's formats. */
export async function unpacked(data, format) {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream(format));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Returns the arrays of an .npz file.
 * @param {Uint8Array} bytes the file.
 * @returns {Promise<Object<string, {data: ArrayLike<number>, dims: number[], type: string}>>} by name, without ".npy".
 */
export async function readNpz(bytes) {
  const arrays = {};
  for (const [name, data] of await unzip(bytes)) arrays[name.replace(/\.npy$/, "")] = readNpy(data, name);
  return arrays;
}

/** Returns one array, in C order, of a type in `DTYPES`. */
function readNpy(bytes, name) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length < 12 || view.getUint32(0) !== 0x934e554d) throw new Error(`${name}: not a NumPy array`);
  const wide = bytes[6] > 1;
  const start = wide ? 12 : 10;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const header = new TextDecoder().decode(bytes.subarray(start, start + length));
  const [, descr] = /'descr': *'([^']+)'/.exec(header) ?? [];
  const [, shape] = /'shape': *\(([^)]*)\)/.exec(header) ?? [];
  const [Type, type] = DTYPES[descr] ?? [];
  if (!Type || shape === undefined || !/'fortran_order': *False/.test(header)) {
    throw new Error(`${name}: this kind of array is not supported (${header.trim()})`);
  }
  const dims = shape.split(",").filter((part) => part.trim()).map(Number);
  const count = dims.reduce((a, b) => a * b, 1);
  const at = start + length;
  const body = new Uint8Array(bytes.subarray(at, at + count * Type.BYTES_PER_ELEMENT)); // aligned
  if (body.length !== count * Type.BYTES_PER_ELEMENT) throw new Error(`${name}: cut off`);
  return { data: new Type(body.buffer), dims, type };
}
