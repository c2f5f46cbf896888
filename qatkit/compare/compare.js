"use strict";
// Draws the rows that are shown, and applies filters and order. Without JavaScript, the page shows only the table.
const rows = JSON.parse(document.getElementById("rows").textContent);
const selects = [...document.querySelectorAll("select[data-filter]")];
const body = document.querySelector(".runs tbody");
const lines = [...body.rows];
const recipes = [...new Set(rows.map((row) => row.recipe))].filter(Boolean);
const colour = (row) => `hsl(${(212 + recipes.indexOf(row.recipe) * 137.5) % 360} 65% 50%)`;

const stands = (row) => row.state === "all bounds met" && row.acc !== null && row.ms !== null && row.mb !== null;
function beats(a, b) {
  const worse = a.cost > b.cost || a.ms > b.ms || a.mb > b.mb;
  return !worse && (a.cost < b.cost || a.ms < b.ms || a.mb < b.mb);
}

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// Round numbers between two ends, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9))];
}

function ends(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
  return [low - pad, high + pad];
}

function draw(svg, shown) {
  svg.replaceChildren();
  const key = svg.dataset.x, width = svg.clientWidth, height = svg.clientHeight;
  const points = shown.filter((row) => row.acc !== null && row[key] !== null);
  if (!points.length || !width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [left, right, top, bottom] = [46, 12, 8, 26];
  const [x0, x1] = ends(points.map((row) => row[key])), [y0, y1] = ends(points.map((row) => row.acc));
  const x = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  const [across, xDigits] = ticks(x0, x1, Math.max(2, width / 90)), [up, yDigits] = ticks(y0, y1, 6);
  for (const v of up) {
    element("line", { x1: left, x2: width - right, y1: y(v), y2: y(v) }, svg);
    element("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, svg).textContent = v.toFixed(yDigits);
  }
  for (const v of across) {
    element("line", { x1: x(v), x2: x(v), y1: top, y2: height - bottom }, svg);
    element("text", { x: x(v), y: height - 8, "text-anchor": "middle" }, svg).textContent = v.toFixed(xDigits);
  }
  // The front is drawn last, on top.
  for (const row of [...points].sort((a, b) => a.front - b.front)) mark(svg, row, x(row[key]), y(row.acc));
}

function mark(svg, row, x, y) {
  const short = row.state === "falls short";
  const link = element("a", { href: row.href, class: short ? "short" : row.front ? "front" : "beaten" }, svg);
  link.style.setProperty("--c", colour(row));
  element("circle", { cx: x, cy: y, r: 11, fill: "transparent" }, link); // for touch screens
  if (short) element("path", { class: "mark", d: `M${x - 4} ${y - 4} l8 8 m-8 0 l8 -8` }, link);
  else element("circle", { class: "mark", cx: x, cy: y, r: row.front ? 5.5 : 4 }, link);
  const figures = `${row.acc.toFixed(2)} ${row.unit}`.trimEnd() + (row.ms === null ? "" : `, ${row.ms.toFixed(2)} ms`) +
    (row.mb === null ? "" : `, ${row.mb.toFixed(2)} MB`);
  element("title", {}, link).textContent = `${row.recipe} (${row.backend}): ${figures}\n${row.state}\n${row.folder}`;
}

function show() {
  const wanted = Object.fromEntries(selects.map((one) => [one.dataset.filter, one.value]));
  const shown = rows.filter((row) => Object.entries(wanted).every(([key, value]) => !value || row[key] === value));
  for (const row of rows) row.front = false;
  for (const row of shown)
    row.front = stands(row) && !shown.some((other) => other.on === row.on && stands(other) && beats(other, row));
  lines.forEach((line, i) => {
    line.hidden = !shown.includes(rows[i]);
    line.className = rows[i].front ? "front" : "";
  });
  document.querySelectorAll("svg.scatter").forEach((svg) => draw(svg, shown));
  const output = document.querySelector(".filters output");
  if (output) output.textContent = `${shown.length} of ${rows.length} shown`;
  legend(shown);
}

function legend(shown) {
  const place = document.getElementById("legend");
  if (!place) return;
  place.replaceChildren();
  for (const recipe of recipes.filter((one) => shown.some((row) => row.recipe === one && row.acc !== null))) {
    const item = document.createElement("span"), key = document.createElement("i");
    key.className = "key";
    key.style.setProperty("--c", colour({ recipe }));
    item.append(key, recipe);
    place.append(item);
  }
}

// Rows without a figure stay at the end in both orders.
function sort(column, down) {
  const value = (line) => {
    const cell = line.cells[column];
    return "v" in cell.dataset ? (cell.dataset.v === "" ? null : Number(cell.dataset.v)) : cell.textContent;
  };
  const order = [...lines].sort((a, b) => {
    const [first, second] = [value(a), value(b)];
    if (first === null || second === null) return (first === null) - (second === null);
    const compared = typeof first === "number" ? first - second : first.localeCompare(second);
    return down ? -compared : compared;
  });
  body.append(...order);
}

document.querySelectorAll(".runs th").forEach((head, column, all) => {
  head.querySelector("button").addEventListener("click", () => {
    const down = head.ariaSort ? head.ariaSort === "ascending" : "v" in (lines[0]?.cells[column].dataset ?? {});
    all.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    sort(column, down);
  });
});

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const one of selects) {
    one.value = asked.get(one.dataset.filter) ?? "";
    if (one.selectedIndex < 0) one.value = "";
  }
  show();
}

for (const one of selects)
  one.addEventListener("change", () => {
    const asked = new URLSearchParams(selects.filter((each) => each.value).map((each) => [each.dataset.filter, each.value]));
    history.replaceState(null, "", `#${asked}`);
    show();
  });
window.addEventListener("hashchange", fromAddress);
window.addEventListener("resize", show);
fromAddress();
