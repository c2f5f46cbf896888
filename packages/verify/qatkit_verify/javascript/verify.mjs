#!/usr/bin/env node
// node verify.mjs BUNDLE [--json]: checks a bundle (folder or zip) in Node, with npm's onnxruntime-node.
//
// Compares every file with the manifest, then runs the golden vectors: pixels to tensor, tensor to answer, with ONNX
// Runtime's optimizations off and on. Exit status 0: all checks passed; 1: one failed; 2: the bundle could not be
// checked. The signature is checked by `qatkit-verify`.

import { createHash } from "node:crypto";
import { readFile, readdir, stat } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, relative, resolve, sep } from "node:path";
import { readNpz, unzip } from "./archive.mjs";
import { runGolden } from "./golden.mjs";

const PACKAGE = "onnxruntime-node";
const FORMAT = 1;
const UNLISTED = new Set(["manifest.json", "manifest.sig"]);

/** A user's mistake, or a bundle that cannot be read. */
class Unreadable extends Error {}

async function main(typed) {
  const paths = typed.filter((word) => word !== "--json");
  if (paths.length !== 1 || paths[0].startsWith("-")) throw new Unreadable("usage: node verify.mjs BUNDLE [--json]");
  const files = await bundle(paths[0]);
  const problems = againstManifest(files);
  const rows = problems.length ? [] : await answers(runtime(), files);
  const passed = !problems.length && rows.every((row) => row.passed);
  if (typed.includes("--json")) console.log(JSON.stringify({ passed, problems, runs: rows }, null, 1));
  else told(paths[0], files, problems, rows, passed);
  return passed ? 0 : 1;
}

/** Returns the npm package, from the current folder or from this file's folder. */
function runtime() {
  for (const from of [join(process.cwd(), "here.js"), import.meta.url]) {
    try {
      return createRequire(from)(PACKAGE);
    } catch (error) {
      if (error.code !== "MODULE_NOT_FOUND") throw new Unreadable(`${PACKAGE} does not load: ${error.message}`);
    }
  }
  throw new Unreadable(`${PACKAGE} is not installed here: npm install ${PACKAGE}`);
}

/** Returns every file of a folder or a zip, by name. */
async function bundle(path) {
  let isFolder;
  try {
    isFolder = (await stat(path)).isDirectory();
  } catch {
    throw new Unreadable(`${path}: no such file or folder`);
  }
  let found;
  try {
    found = isFolder ? await folder(path) : await unzip(await readFile(path));
  } catch (error) {
    throw new Unreadable(`${path}: ${error.message}`);
  }
  if (!found.has("manifest.json")) throw new Unreadable(`${path}: not a bundle, since it has no manifest.json`);
  return found;
}

async function folder(path) {
  const found = new Map();
  for (const entry of await readdir(path, { withFileTypes: true, recursive: true })) {
    const full = join(entry.parentPath ?? entry.path, entry.name);
    const name = relative(resolve(path), resolve(full)).split(sep).join("/");
    if (entry.isFile()) found.set(name, await readFile(full));
    else if (!entry.isDirectory()) throw new Error(`${name} is a link or another irregular file`);
  }
  return found;
}

/** Returns the differences from the manifest, one line each. */
function againstManifest(files) {
  const manifest = parsed(files, "manifest.json");
  if (manifest.format !== FORMAT) throw new Unreadable(`manifest.json: format ${manifest.format}, but this program reads format ${FORMAT}; use qatkit-verify`);
  const text = Buffer.from(files.get("manifest.json")).toString("utf8");
  const own = manifest.sha256; // of the text with zeros in its place
  if (typeof own !== "string" || createHash("sha256").update(text.replace(own, "0".repeat(64))).digest("hex") !== own)
    throw new Unreadable("manifest.json differs from its own digest");
  if (!Array.isArray(manifest.files)) throw new Unreadable("manifest.json has no list of files");
  const listed = new Map(manifest.files.map((file) => [file.name, file]));
  const changed = [...listed.values()].flatMap(({ name, sha256 }) => {
    if (!files.has(name)) return [`${name}: missing`];
    const digest = createHash("sha256").update(files.get(name)).digest("hex");
    return digest === sha256 ? [] : [`${name}: changed`];
  });
  const added = [...files.keys()].filter((name) => !listed.has(name) && !UNLISTED.has(name));
  return [...changed, ...added.map((name) => `${name}: not in the manifest`)];
}

/** Runs the golden vectors with ONNX Runtime's optimizations off and on. */
async function answers(ort, files) {
  const how = files.has("preprocess.json") ? parsed(files, "preprocess.json") : null; // null for a model of arrays
  let golden;
  try {
    golden = await readNpz(files.get("golden.npz") ?? new Uint8Array());
  } catch (error) {
    throw new Unreadable(`golden.npz: ${error.message}`);
  }
  const rows = [];
  const extra = sessionOptions(files);
  for (const [optimizations, level] of [["off", "disabled"], ["on", "all"]]) {
    try {
      const options = { graphOptimizationLevel: level, executionProviders: ["cpu"], extra };
      const session = await ort.InferenceSession.create(files.get("model.onnx"), options);
      rows.push({ runtime: PACKAGE, optimizations, ...(await runGolden(ort, session, golden, how)) });
    } catch (error) {
      throw new Unreadable(`model.onnx: ${error.message}`);
    }
  }
  return rows;
}

/** Returns ONNX Runtime's config entries under which the figures are valid; older bundles have them in the report. */
function sessionOptions(files) {
  const from = (name) => (files.has(name) ? parsed(files, name)?.session_options : null);
  return from("manifest.json") ?? from("report.json") ?? {};
}

function parsed(files, name) {
  try {
    return JSON.parse(new TextDecoder().decode(files.get(name)));
  } catch (error) {
    throw new Unreadable(`${name}: ${error.message}`);
  }
}

function told(path, files, problems, rows, passed) {
  for (const problem of problems) console.log(`REFUSED ${problem}`);
  if (rows.length) {
    console.log(`${files.size} files match the manifest; ${rows[0].images} golden samples in ${PACKAGE}:`);
    const head = ["optimizations", "steps from off", "steps from on", "same top-1", "input difference", "ms"];
    table([head, ...rows.map(cells)]);
  }
  const bound = rows.length ? `, tolerance ${rows[0].tolerance.toFixed(2)} steps` : "";
  console.log(`${passed ? "PASSED" : "FAILED"} ${path}${bound}`);
}

function cells({ optimizations, off, on, same, images, levels, unit, ms }) {
  const inputs = levels === null ? "-" : `${levels.toFixed(3)}${unit}`;
  return [optimizations, off.toFixed(4), on.toFixed(4), `${same} of ${images}`, inputs, ms.toFixed(2)];
}

/** Prints rows in columns: the first left-aligned, all others right-aligned. */
function table(rows) {
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  for (const row of rows) {
    console.log(`  ${row.map((cell, i) => (i ? cell.padStart(widths[i]) : cell.padEnd(widths[i]))).join("  ")}`);
  }
}

try {
  process.exitCode = await main(process.argv.slice(2));
} catch (error) {
  if (!(error instanceof Unreadable)) throw error;
  console.error(error.message);
  process.exitCode = 2;
}
