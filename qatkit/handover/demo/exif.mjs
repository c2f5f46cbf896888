// Reads a picture's orientation from its EXIF data and removes the data. Browsers rotate pictures themselves, whatever
// option createImageBitmap gets (the HTML standard has only "from-image" and "flipY"; "none" was removed). Chromium 156
// does so for JPEG and PNG files, but not for WebP. Without the data, the page can rotate pictures as training did.

// By orientation: the matrix that moves the stored pixels, in units of the stored width and height.
const TURNS = {
  2: [-1, 0, 0, 1, "width", 0],
  3: [-1, 0, 0, -1, "width", "height"],
  4: [1, 0, 0, -1, 0, "height"],
  5: [0, 1, 1, 0, 0, 0],
  6: [0, 1, -1, 0, "height", 0],
  7: [0, -1, -1, 0, "height", "width"],
  8: [0, -1, 1, 0, 0, "width"],
};

/**
 * Returns the bytes of a JPEG, PNG or WebP file without EXIF data, and its orientation: 1 to 8, where 1 is upright.
 * The bytes of any other file are unchanged.
 */
export function withoutExif(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const word = (at, text) => [...text].every((letter, i) => bytes[at + i] === letter.charCodeAt(0));
  let parts = [];
  if (bytes[0] === 0xff && bytes[1] === 0xd8) parts = jpegParts(bytes, view, word);
  if (word(1, "PNG")) parts = pngParts(bytes, view, word);
  if (word(0, "RIFF") && word(8, "WEBP")) parts = webpParts(bytes, view, word);
  const told = parts.map(({ data, end }) => orientation(bytes.slice(data + (word(data, "Exif") ? 6 : 0), end)));
  const plain = bytes.slice();
  for (const { start, end } of parts.filter((one) => one.blank)) plain.fill(0, start, end);
  return { plain: without(plain, parts.filter((one) => !one.blank)), orientation: told[0] ?? 1 };
}

/** Returns a bitmap's pixels [height, width, 4], turned by an orientation. */
export function turned(bitmap, orientation) {
  const swapped = orientation >= 5;
  const width = swapped ? bitmap.height : bitmap.width;
  const height = swapped ? bitmap.width : bitmap.height;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = false;
  if (TURNS[orientation]) context.setTransform(...TURNS[orientation].map((one) => bitmap[one] ?? one));
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, width, height);
}

/** Finds APP1 segments with EXIF data. */
function jpegParts(bytes, view, word) {
  const found = [];
  for (let at = 2; at + 4 <= bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda; ) {
    if (bytes[at + 1] === 0xff) {
      at += 1; // a fill byte
      continue;
    }
    const end = at + 2 + view.getUint16(at + 2);
    if (bytes[at + 1] === 0xe1 && word(at + 4, "Exif")) found.push({ start: at, end, data: at + 4 });
    at = end;
  }
  return found;
}

/** Finds eXIf chunks. */
function pngParts(bytes, view, word) {
  const found = [];
  for (let at = 8; at + 12 <= bytes.length; ) {
    const end = at + 12 + view.getUint32(at);
    if (word(at + 4, "eXIf")) found.push({ start: at, end, data: at + 8 });
    at = end;
  }
  return found;
}

/** Finds the contents of EXIF chunks; they are blanked, since the container states their length. */
function webpParts(bytes, view, word) {
  const found = [];
  for (let at = 12; at + 8 <= bytes.length; ) {
    const size = view.getUint32(at + 4, true);
    if (word(at, "EXIF")) found.push({ start: at + 8, end: at + 8 + size, data: at + 8, blank: true });
    at += 8 + size + (size % 2);
  }
  return found;
}

/** Returns the orientation in EXIF data, a TIFF file whose first directory may have the tag 0x0112. */
function orientation(tiff) {
  const view = new DataView(tiff.buffer);
  try {
    const little = view.getUint16(0) === 0x4949;
    const directory = view.getUint32(4, little);
    for (let i = 0; i < view.getUint16(directory, little); i += 1) {
      const entry = new DataView(tiff.buffer, directory + 2 + 12 * i, 12);
      if (entry.getUint16(0, little) === 0x0112) return entry.getUint16(8, little);
    }
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // the data end too early to tell the orientation
  }
  return 1;
}

function without(bytes, parts) {
  const edges = [0, ...parts.flatMap(({ start, end }) => [start, end]), bytes.length];
  const kept = [];
  for (let i = 0; i < edges.length; i += 2) kept.push(bytes.subarray(edges[i], edges[i + 1]));
  const whole = new Uint8Array(kept.reduce((sum, one) => sum + one.length, 0));
  kept.reduce((at, one) => (whole.set(one, at), at + one.length), 0);
  return whole;
}
