// The demo page: for a picture, it computes and shows the five likeliest classes, the boxes, or the class of each pixel.
//
// A page that is opened from a folder may not fetch files next to it, but it may load scripts. So everything it needs
// is in scripts below demo/: `demoParts[name]` is a gzipped file in base64. The imports are for the reader: the modules
// are in the page before this one.

import { readNpz, unpacked } from "./archive.mjs";
import { turned, withoutExif } from "./exif.mjs";
import { run, runGolden } from "./golden.mjs";
import { bothSides, preprocess } from "./preprocess.mjs";
import { colour, view } from "./views.mjs";

const facts = JSON.parse(document.getElementById("model-facts").textContent);
const element = (id) => document.getElementById(id);
const MOST_PIXELS = 89_000_000; // the limit of `qatkit.data`
const TIMED = { runs: 9, ms: 400 };
const WAYS = [
  { name: "int8", title: "INT8", how: facts.preprocess },
  ...(facts.float ? [{ name: "float", title: "Float", how: asFloat(facts.preprocess) }] : []),
];
const sessions = {};
let newest = 0; // number of the picture that was chosen last; answers to older ones are not shown

/** Returns the preprocessing of the float file, which reads and returns float32 even if the INT8 file does not. */
function asFloat(how) {
  return { ...how, input: { ...how.input, dtype: "float32" }, output: { shape: how.output.shape } };
}

/** Returns a file that is contained in a script; loads the script first if needed. */
async function part(name) {
  if (!(name in demoParts)) await loadScript(`demo/${name}.js`);
  const packed = Uint8Array.from(atob(demoParts[name]), (letter) => letter.charCodeAt(0));
  delete demoParts[name];
  return unpacked(packed, "gzip");
}

function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src });
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${src} is missing next to this page`));
    document.head.append(script);
  });
}

async function start() {
  if (typeof ort === "undefined") throw new Error("demo/onnxruntime.js is missing next to this page");
  const glue = new Blob([await part("glue")], { type: "text/javascript" });
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(glue) };
  ort.env.wasm.wasmBinary = await part("wasm");
  ort.env.wasm.numThreads = 1; // threads need headers that a folder can't send
  const golden = await readNpz(await part("golden"));
  await session("int8");
  showExamples(golden);
  element("check").onclick = () => check(golden);
  element("check").disabled = element("file").disabled = false;
  say("Ready: choose a picture.");
}

/** Returns the session of "int8" or "float", which is created on first use. */
function session(name) {
  const options = { executionProviders: ["wasm"], extra: { ...facts.session_options } }; // a copy: the runtime adds to it
  sessions[name] ??= part(name).then((bytes) => ort.InferenceSession.create(bytes, options));
  return sessions[name];
}

/** Shows the answer for a picture file, or why there is none. */
async function take(file) {
  const mine = ++newest;
  try {
    const picture = await decoded(file);
    if (mine === newest) await answer(picture, file.name || "the pasted picture", mine);
  } catch (error) {
    if (mine === newest) refuse(error.message);
  }
}

/** Returns the pixels of a picture file at its own size, turned by its EXIF data if training did so. */
async function decoded(file) {
  const { plain, orientation } = withoutExif(new Uint8Array(await file.arrayBuffer()));
  let bitmap;
  try {
    bitmap = await createImageBitmap(new Blob([plain]), { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new Error(`This browser cannot open ${file.name || "this"} as a picture. JPEG, PNG and WebP files work everywhere.`);
  }
  if (bitmap.width * bitmap.height > MOST_PIXELS) throw new Error(`${file.name} has ${bitmap.width} x ${bitmap.height} pixels, which is too large for this page.`);
  const { data, width, height } = turned(bitmap, facts.preprocess.upright ? orientation : 1);
  bitmap.close();
  return { data, width, height, channels: 4 };
}

/** Runs both models on a picture, one after the other, and shows each answer as it comes. */
async function answer(picture, name, mine) {
  element("problem").textContent = "";
  say("Computing …");
  showSeen(picture, name);
  element("answers").replaceChildren();
  const said = [];
  for (const way of WAYS) {
    if (way.name === "float" && !sessions.float) say("Loading the float model …");
    await painted();
    const loaded = await session(way.name);
    const found = await timed(loaded, preprocess(picture, way.how), way.how);
    if (mine !== newest) return;
    element("answers").append(drawn(way, found, picture));
    const [first] = found.top;
    said.push(`${way.title}: ${first ? `${label(first.label)}, ${percent(first.share)}` : "nothing found"}`);
  }
  say(`${said.join(". ")}.`);
}

/** Returns the view of an answer, and the median time of a run, in milliseconds. */
async function timed(loaded, tensor, how) {
  const times = [];
  const feeds = { [loaded.inputNames[0]]: tensor };
  let found = await run(ort, loaded, feeds, how.input.shape[0], 1);
  const end = performance.now() + TIMED.ms;
  do {
    found = await run(ort, loaded, feeds, how.input.shape[0]);
    times.push(found.ms);
  } while (times.length < TIMED.runs && performance.now() < end);
  const shown = view(facts.task, found.answers, loaded.outputNames, how);
  return { ...shown, ms: times.sort((a, b) => a - b)[times.length >> 1] };
}

/** Returns the name of a class; ImageNet's folder names become words. */
function label(i) {
  return (facts.labels[i] ?? `class ${i}`).replace(/^n\d{8}_/, "").replaceAll("_", " ");
}

function drawn({ name, title }, { top, draw, ms }, picture) {
  const box = make("div", `answer ${name}`);
  const head = box.appendChild(make("header"));
  head.append(make("b", "", title), make("span", "", `${ms < 10 ? ms.toFixed(2) : ms.toFixed(0)} ms, ${megabytes(facts[name].bytes)}`));
  if (draw) {
    const canvas = box.appendChild(make("canvas", "drawn"));
    canvas.role = "img";
    canvas.ariaLabel = `What ${title} finds in the picture`;
    paint(canvas, picture);
    if (canvas.width < 160) canvas.className += " coarse";
    draw(canvas.getContext("2d"));
  }
  const list = box.appendChild(make("ol"));
  for (const { label: number, share } of top) {
    const item = list.appendChild(make("li"));
    const bar = make("div", "bar");
    bar.ariaHidden = "true";
    const filled = bar.appendChild(make("i"));
    filled.style.width = `${100 * share}%`;
    if (draw) filled.style.background = colour(number);
    item.append(make("span", "label", label(number)), make("span", "share", percent(share)), bar);
  }
  if (!top.length) box.append(make("p", "soft", "Nothing found."));
  return box;
}

/** Shows the picture as the model sees it: resized, and cropped or padded. */
function showSeen(picture, name) {
  const canvas = element("seen");
  paint(canvas, picture);
  canvas.className = canvas.width < 160 ? "coarse" : "";
  const [height, width] = bothSides(facts.preprocess.image_size);
  element("caption").textContent = `${name}, ${picture.width} x ${picture.height}; the model sees these ${width} x ${height} pixels`;
  canvas.role = "img";
  canvas.ariaLabel = `What the model sees of ${name}`;
  element("shown").hidden = false;
}

/** Draws a picture after the model's preprocessing. */
function paint(canvas, picture) {
  const how = { ...facts.preprocess, input: { dtype: "uint8" }, channel_order: "RGB", layout: "NCHW" };
  const { data, dims } = preprocess(picture, how);
  const [, channels, height, width] = dims;
  Object.assign(canvas, { width, height });
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = data[(c % channels) * width * height + i];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** Shows a button for each golden picture. */
function showExamples(golden) {
  for (let i = 0; golden[`pixels_${i}`]; i++) {
    const { data, dims } = golden[`pixels_${i}`];
    const picture = { data, width: dims[1], height: dims[0], channels: dims[2] ?? 1 };
    const button = make("button");
    button.ariaLabel = `Picture ${i + 1}`;
    paint(button.appendChild(make("canvas")), picture);
    button.onclick = () => answer(picture, `Picture ${i + 1}`, ++newest).catch((error) => refuse(error.message));
    element("thumbnails").append(button);
    element("examples").hidden = false;
  }
}

/** Runs the golden pictures and shows how much their answers differ. */
async function check(golden) {
  const where = element("checked");
  where.textContent = "Running …";
  await painted();
  try {
    const found = await runGolden(ort, await session("int8"), golden, facts.preprocess);
    const passed = found.passed ? make("p", "good", "Yes") : make("p", "bad", "No");
    passed.append(`: ${found.same} of ${found.images} pictures have the same answer. The tolerance is ${found.tolerance.toFixed(2)} steps.`);
    const table = make("table");
    for (const [name, value] of [
      ["Largest difference from ONNX Runtime without optimizations, in steps", found.off.toFixed(3)],
      ["Largest difference from ONNX Runtime with optimizations, in steps", found.on.toFixed(3)],
      ...(found.levels === null ? [] : [["Largest difference of input pixels, in levels of 255", found.levels.toFixed(3)]]),
      ["Median time of a run, ms", found.ms.toFixed(2)],
    ]) {
      const row = table.insertRow();
      row.append(make("td", "", name), make("td", "", value));
    }
    where.replaceChildren(passed, table);
    where.dataset.found = JSON.stringify(found);
  } catch (error) {
    where.replaceChildren(make("p", "problem", error.message));
  }
}

function make(tag, kind = "", text = "") {
  return Object.assign(document.createElement(tag), { className: kind, textContent: text });
}

function percent(share) {
  return `${(100 * share).toFixed(1)}\u00a0%`;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

function say(text) {
  element("status").textContent = text;
}

function refuse(text) {
  element("problem").textContent = text;
  say("No answer.");
  element("answers").replaceChildren();
  element("shown").hidden = true;
}

/** Lets the browser repaint before a computation occupies the page's only thread. */
function painted() {
  return new Promise((resolve) => setTimeout(resolve, 30));
}

function firstFile(items) {
  return [...(items?.files ?? [])][0];
}

element("file").onchange = ({ target }) => {
  if (target.files[0]) take(target.files[0]);
  target.value = ""; // the same file may be chosen again
};
addEventListener("dragover", (event) => {
  event.preventDefault();
  element("drop").classList.add("over");
});
addEventListener("dragleave", () => element("drop").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  element("drop").classList.remove("over");
  const file = firstFile(event.dataTransfer);
  if (file && !element("file").disabled) take(file);
});
addEventListener("paste", (event) => {
  const file = firstFile(event.clipboardData);
  if (file && !element("file").disabled) take(file);
});
start().catch((error) => {
  say("The model could not be loaded.");
  element("problem").textContent = error.message;
});
