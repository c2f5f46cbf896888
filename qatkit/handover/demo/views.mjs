// Views of an answer, by the model's task: the likeliest classes, boxes, or the class of each pixel.

import { suppressed } from "./boxes.mjs";
import { best, logits } from "./golden.mjs";

const SHOWN = 5;
const DRAWN = { score: 0.3, overlap: 0.6, most: 100 }; // boxes on the page

/**
 * Returns what the page shows of an answer.
 * @param {string} task
 * @param {Object<string, ArrayLike<number>>} answers the outputs by name.
 * @param {string[]} names the names of the outputs, in the file's order.
 * @param {object} how the contents of preprocess.json.
 * @returns {{top: {label: number, share: number}[], draw: ?function(CanvasRenderingContext2D): void}} the rows of the
 *   list, and a function that paints over the picture; null for a classifier.
 */
export function view(task, answers, names, how) {
  if (task === "detection") return boxesOf(answers[names[0]], answers[names[1]]);
  const scores = logits(answers[names[0]], how);
  return task === "segmentation" ? mapOf(scores, how) : { top: likeliest(scores), draw: null };
}

function likeliest(scores) {
  const most = Math.max(...scores);
  const shares = scores.map((score) => Math.exp(score - most));
  const total = shares.reduce((a, b) => a + b, 0);
  return best(scores, Math.min(SHOWN, scores.length)).map((label) => ({ label, share: shares[label] / total }));
}

function boxesOf(corners, scores) {
  const boxes = suppressed(corners, scores, DRAWN);
  const draw = (context) => {
    context.lineWidth = Math.max(1, context.canvas.width / 200);
    for (const { corners: [x1, y1, x2, y2], label } of boxes) {
      context.strokeStyle = colour(label);
      context.strokeRect(x1, y1, x2 - x1, y2 - y1);
    }
  };
  return { top: boxes.map(({ label, score }) => ({ label, share: score })), draw };
}

function mapOf(scores, how) {
  const [height, width] = how.output.shape.slice(2);
  const places = height * width;
  const map = Uint8Array.from({ length: places }, (_, i) => {
    let top = 0;
    for (let c = 1; c < scores.length / places; c++) if (scores[c * places + i] > scores[top * places + i]) top = c;
    return top;
  });
  const counts = new Map();
  for (const label of map) counts.set(label, (counts.get(label) ?? 0) + 1);
  const top = [...counts].map(([label, count]) => ({ label, share: count / places })).sort((a, b) => b.share - a.share);
  const draw = (context) => {
    const step = Math.max(1, Math.round(context.canvas.width / width));
    context.globalAlpha = 0.6;
    for (let y = 0; y < height; y++) {
      for (let x = 0, end; x < width; x = end) {
        const label = map[y * width + x];
        for (end = x + 1; end < width && map[y * width + end] === label; ) end++;
        context.fillStyle = colour(label);
        context.fillRect(x * step, y * step, (end - x) * step, step);
      }
    }
    context.globalAlpha = 1;
  };
  return { top, draw };
}

/** Colours that are easy to tell apart: hues in steps of the golden angle. */
export function colour(label) {
  return `hsl(${(137.508 * label) % 360} 75% ${label % 2 ? 42 : 58}%)`;
}
