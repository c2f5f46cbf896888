// Pictures without what says how they are to be turned: createImageBitmap turns them by their EXIF data, whatever it is
// asked for (the HTML standard has "from-image" and "flipY" alone; "none" is no more). Where training took pictures as
// they are stored, those data are taken out first.

/** The bytes of a JPEG, PNG or WebP file without EXIF data; of any other file as they are. */
export function asStored(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const starts = (at, ...letters) => letters.every((one, i) => bytes[at + i] === one);
  const text = (at, word) => starts(at, ...[...word].map((letter) => letter.charCodeAt(0)));
  if (starts(0, 0xff, 0xd8)) return without(bytes, jpegExif(bytes, view, text));
  if (starts(0, 0x89) && text(1, "PNG")) return without(bytes, pngExif(bytes, view, text));
  if (text(0, "RIFF") && text(8, "WEBP")) return blanked(bytes, webpExif(bytes, view, text));
  return bytes;
}

/** Segments APP1 of a JPEG file that hold EXIF data, as [start, end]. */
function jpegExif(bytes, view, text) {
  const found = [];
  for (let at = 2; at + 4 <= bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda; ) {
    if (bytes[at + 1] === 0xff) {
      at += 1; // fills up
      continue;
    }
    const end = at + 2 + view.getUint16(at + 2);
    if (bytes[at + 1] === 0xe1 && text(at + 4, "Exif")) found.push([at, end]);
    at = end;
  }
  return found;
}

/** Chunks eXIf of a PNG file. */
function pngExif(bytes, view, text) {
  const found = [];
  for (let at = 8; at + 12 <= bytes.length; ) {
    const end = at + 12 + view.getUint32(at);
    if (text(at + 4, "eXIf")) found.push([at, end]);
    at = end;
  }
  return found;
}

/** What chunks EXIF of a WebP file hold. */
function webpExif(bytes, view, text) {
  const found = [];
  for (let at = 12; at + 8 <= bytes.length; ) {
    const size = view.getUint32(at + 4, true);
    if (text(at, "EXIF")) found.push([at + 8, at + 8 + size]);
    at += 8 + size + (size % 2);
  }
  return found;
}

function without(bytes, parts) {
  const kept = [];
  let from = 0;
  for (const [start, end] of parts) {
    kept.push(bytes.subarray(from, start));
    from = end;
  }
  kept.push(bytes.subarray(from));
  const whole = new Uint8Array(kept.reduce((sum, one) => sum + one.length, 0));
  kept.reduce((at, one) => (whole.set(one, at), at + one.length), 0);
  return whole;
}

/** Zeros in place of the parts, since the container tells how long it is. */
function blanked(bytes, parts) {
  const copy = bytes.slice();
  for (const [start, end] of parts) copy.fill(0, start, end);
  return copy;
}
