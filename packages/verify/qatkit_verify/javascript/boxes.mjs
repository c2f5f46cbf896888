// Non-maximum suppression of a detector's boxes, as in model.nms.onnx.

/**
 * Returns the boxes of one picture that are kept, best first.
 * @param {ArrayLike<number>} corners x1, y1, x2, y2 of each box, one after the other.
 * @param {ArrayLike<number>} scores of each class, box after box.
 * @param {{score: number, overlap: number, most: number}} limits the score that a box must exceed, the overlap above
 *   which a better box of the same class suppresses a box, and the maximum number of boxes per class.
 * @returns {{corners: number[], score: number, label: number}[]}
 */
export function suppressed(corners, scores, { score: least, overlap: most, most: count }) {
  const boxes = corners.length / 4;
  const classes = scores.length / boxes;
  const kept = [];
  for (let label = 0; label < classes; label++) {
    const own = [];
    const places = Array.from({ length: boxes }, (_, i) => i).filter((i) => scores[i * classes + label] > least);
    places.sort((a, b) => scores[b * classes + label] - scores[a * classes + label] || a - b);
    for (const i of places) {
      const box = Array.from({ length: 4 }, (_, j) => corners[4 * i + j]);
      if (own.length < count && own.every((better) => overlap(better.corners, box) <= most)) {
        own.push({ corners: box, score: scores[i * classes + label], label });
      }
    }
    kept.push(...own);
  }
  return kept.sort((a, b) => b.score - a.score);
}

/** Returns the intersection over union of two boxes. */
function overlap(a, b) {
  const width = Math.min(a[2], b[2]) - Math.max(a[0], b[0]);
  const height = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
  if (width <= 0 || height <= 0) return 0;
  const area = ([x1, y1, x2, y2]) => (x2 - x1) * (y2 - y1);
  return (width * height) / (area(a) + area(b) - width * height);
}
