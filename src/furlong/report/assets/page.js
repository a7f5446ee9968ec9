"use strict";
// Draws the timelines in #data on one canvas that stays in view while #view scrolls over the ranks.
// A bar is [start, stop, kind, chunk, stage, label, action, device bytes, host bytes].

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const view = element("view"), canvas = element("canvas"), tooltip = element("tooltip");
const context = canvas.getContext("2d");
const AXIS = 30, THIN = 7, GAP = 18, LEFT = 104, TINY = 0.7;
const LIGHTER = { forward: 0.5, recompute: 0.8, rebuild: 0.8 };
const FONT = '12px system-ui, "DejaVu Sans", sans-serif';

let panel, from, to, lit = null, hovered = null, frame = 0, colours = {}, looks = new Map();
let cells = 30, heights = [44, 0];  // of a rank's cells; of its device's memory and of that below

// --- words ---------------------------------------------------------------------------------------

function formatBytes(bytes) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]])
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return `${bytes} B`;
}

function timeUnit(value) {
  if (panel.unit !== "s") return [panel.unit, 1];
  return value >= 1 || value === 0 ? ["s", 1] : value >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
}

function formatTime(value) {
  const [unit, size] = timeUnit(value);
  return `${Number((value / size).toPrecision(5))} ${unit}`;
}

// As fine as steps of `step`, in the unit that suits `largest`.
function formatStep(value, step, largest, named = true) {
  const [unit, size] = timeUnit(largest);
  const digits = Math.min(12, Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9)));
  return Number((value / size).toFixed(digits)).toString() + (named ? ` ${unit}` : "");
}

function describe([, , kind, chunk, stage, , action]) {
  const cell = `chunk ${chunk}` + (panel.numStages > 1 ? `, stage ${stage}` : "");
  const peer = / (to|from) \d+$/.exec(action);
  const words = action.split(" ");
  const keeps = { all: "its graph", attention: "its input, K,V and attention outputs",
    kv: "its input and K,V", input: "its input" };
  switch (kind) {
    case "forward": return `Forward of ${cell}; keeps ${keeps[words[1]]}`;
    case "recompute": return `Recompute of ${cell}`;
    case "rebuild": return `Rebuild of the K,V of ${cell}`;
    case "backward": return `Backward of ${cell}`;
    case "copy": return `Copies between tiers for ${cell}`;
    case "activation": case "gradient":
      return `${words[0] === "send" ? "Send" : "Receive"} the ${kind} of ${cell} ` +
        peer[0].trim().replace(/(\d+)$/, "rank $1");
  }
  const verbs = { unshard: "Gather the parameters", reshard: "Free the gathered parameters",
    reduce: "Reduce the gradients" };
  return `${verbs[words[0]]} of stage ${stage}`;
}

// --- colours -------------------------------------------------------------------------------------

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "faint", "line", "lane", "limit", "activation", "gradient",
    "collective", "copy"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  looks = new Map();
}

const parts = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

function mix(colour, share) {
  const paper = parts(colours.paper);
  const mixed = parts(colour).map((part, i) => Math.round(part * (1 - share) + paper[i] * share));
  return "#" + mixed.map((part) => part.toString(16).padStart(2, "0")).join("");
}

function inkOn(colour) {
  const [red, green, blue] = parts(colour);
  return 0.3 * red + 0.59 * green + 0.11 * blue < 140 ? "#ffffff" : "#1d2530";
}

// The fill of a kind of action in the colour of its chunk, and the ink that can be read on it.
function look(kind, colour) {
  const key = `${kind} ${colour}`;
  if (!looks.has(key)) {
    const plain = kind in colours ? colours[kind] : mix(colour, LIGHTER[kind] ?? 0);
    const hatched = kind === "recompute" || kind === "rebuild";
    looks.set(key, { plain, fill: hatched ? hatch(plain, colour, kind) : plain, ink: inkOn(plain) });
  }
  return looks.get(key);
}

function hatch(plain, colour, kind) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = plain;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = pen.fillStyle = mix(colour, 0.25);
  if (kind === "rebuild") pen.fillRect(2, 2, 3, 3);
  else for (const x of [-8, 0, 8]) { pen.moveTo(x - 1, 9); pen.lineTo(x + 9, -1); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

const colourOf = (bar) => (bar[3] < 0 ? colours.ink : panel.chunks[bar[3]].colour);

// --- places --------------------------------------------------------------------------------------

const width = () => canvas.clientWidth;
const right = () => (panel.highest[0] ? 118 : 18);
const scale = () => (width() - LEFT - right()) / (to - from);
const toX = (time) => LEFT + (time - from) * scale();
const toTime = (x) => from + (x - LEFT) / scale();
const laneHeight = () => cells + THIN * (panel.tracks.length - 1);
const memoryHeight = () => heights.reduce((sum, height) => sum + (height && height + 4), 0);
const rowHeight = () => laneHeight() + memoryHeight() + GAP;
const rowTop = (index) => AXIS + index * rowHeight() - view.scrollTop;

// Few ranks share the height that there is, most of it for their memory.
function stretchRows(height) {
  const fixed = THIN * (panel.tracks.length - 1) + GAP + 8;
  const room = (height - AXIS - 8) / panel.ranks.length - fixed;
  const shares = panel.highest.map((bytes, i) => (bytes ? [1, 0.4][i] : 0));
  const share = shares[0] + shares[1];
  cells = Math.round(Math.min(Math.max(share ? 0.25 * room : room, 30), 90));
  heights = shares.map((own) => own && Math.round(Math.max((own / share) * (room - cells), 44 * own)));
}

function firstEndingAfter(bars, time) {
  // bars of a track start in order and hardly overlap: a few places of slack cover the rest
  let low = 0, high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle][0] <= time) low = middle + 1; else high = middle;
  }
  low = Math.max(0, low - 8);
  while (low < bars.length && bars[low][1] < time) low++;
  return low;
}

function lookUp(x, y) {
  const index = Math.floor((y - AXIS + view.scrollTop) / rowHeight());
  const rank = panel.ranks[index];
  if (!rank || y < AXIS || x < LEFT || x > width() - right()) return null;
  const inside = y - rowTop(index), time = toTime(x), slack = 2 / scale();
  if (inside >= laneHeight() + 4 && inside < laneHeight() + memoryHeight()) return { rank, time };
  const number = inside < cells ? 0 : 1 + Math.floor((inside - cells) / THIN);
  const bars = rank.tracks[panel.tracks[number]] ?? [];
  let best = null;
  for (let i = firstEndingAfter(bars, time - slack); i < bars.length; i++) {
    if (bars[i][0] > time + slack) break;
    const apart = Math.max(bars[i][0] - time, time - bars[i][1], 0);
    if (!best || apart < best.apart) best = { bar: bars[i], apart, rank };
  }
  return best;
}

// --- drawing -------------------------------------------------------------------------------------

function redraw() {
  if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); });
}

function draw() {
  const ratio = window.devicePixelRatio || 1, height = view.clientHeight;
  canvas.style.width = `${view.clientWidth}px`;
  canvas.style.height = `${height}px`;
  const size = [Math.round(view.clientWidth * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  stretchRows(height);
  element("spacer").style.height = `${AXIS + panel.ranks.length * rowHeight() + 4}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width(), height);
  context.font = FONT;
  context.textBaseline = "middle";
  drawGrid(Math.min(height, rowTop(panel.ranks.length) - GAP));
  panel.ranks.forEach((rank, index) => {
    const top = rowTop(index);
    if (top > height || top + rowHeight() < AXIS) return;
    drawName(rank, top);
    context.save();
    context.beginPath();
    context.rect(LEFT, AXIS, width() - LEFT - right(), height - AXIS);
    context.clip();
    drawLane(rank, top);
    ["device", "lower"].forEach((level, i) => { if (heights[i]) drawMemory(rank, level, i, memoryTop(top, i)); });
    context.restore();
  });
  drawTicks();
}

const memoryTop = (top, i) => top + laneHeight() + 4 + (i && heights[0] + 4);

function drawName(rank, top) {
  const lines = rank.name.split("\n");
  context.textAlign = "right";
  lines.forEach((line, i) => {
    context.fillStyle = i ? colours.faint : colours.ink;
    context.fillText(line, LEFT - 10, top + cells / 2 + (i - (lines.length - 1) / 2) * 14);
  });
  const peaks = Object.entries(rank.lower.parts).map(([part, bytes]) =>
    [`${part} ${formatBytes(Math.max(...bytes))}`, colours.ink]);
  const words = [[`peak ${formatBytes(rank.device.peak)}`, colours.ink]];
  if (rank.limit) words.push([`limit ${formatBytes(rank.limit)}`, colours.limit]);
  [words, peaks].forEach((texts, i) => heights[i] && texts.forEach(([text, colour], line) => {
    context.textAlign = "left";
    context.fillStyle = colour;
    context.fillText(text, width() - right() + 10, memoryTop(top, i) + 8 + 15 * line);
  }));
  if (heights[0] < 100) return;
  context.textAlign = "right";
  context.fillStyle = colours.faint;
  for (const bytes of byteTicks()) context.fillText(formatBytes(bytes), LEFT - 10, toY(bytes, 0, memoryTop(top, 0)));
}

function drawLane(rank, top) {
  context.fillStyle = colours.lane;
  const start = Math.max(LEFT, toX(0)), stop = Math.min(width() - right(), toX(panel.duration));
  context.fillRect(start, top, stop - start, cells);
  panel.tracks.forEach((track, number) => {
    const y = number ? top + cells + THIN * (number - 1) + 1.5 : top;
    drawTrack(rank.tracks[track] ?? [], y, number ? THIN - 2 : cells, number === 0);
  });
}

function drawTrack(bars, y, height, labelled) {
  let end = -Infinity;
  for (let i = firstEndingAfter(bars, from); i < bars.length && bars[i][0] < to; i++) {
    const bar = bars[i], x = toX(bar[0]), wide = toX(bar[1]) - x;
    if (bar[1] === bar[0] || (wide < TINY && x < end)) continue;
    context.globalAlpha = lit === null || lit.has(bar[3]) ? 1 : 0.18;
    context.fillStyle = look(bar[2], colourOf(bar)).fill;
    context.fillRect(x, y, Math.max(wide - (wide > 4 ? 1 : 0), TINY), height);
    end = x + TINY;
    if (labelled && wide > 16) drawLabel(bar, Math.max(x, LEFT), Math.min(x + wide, width()), y);
    if (hovered && hovered[3] === bar[3] && bar[3] >= 0 && wide > 1.5) {
      context.strokeStyle = colours.ink;
      context.lineWidth = hovered === bar ? 2 : 1;
      context.strokeRect(x + 0.5, y + 0.5, wide - 1.5, height - 1);
    }
  }
  context.globalAlpha = 1;
}

function drawLabel(bar, x, stop, y) {
  const size = context.measureText(bar[5]).width, { plain, ink } = look(bar[2], colourOf(bar));
  if (size + 6 > stop - x) return;
  context.textAlign = "center";
  const middle = (x + stop) / 2;
  if (bar[2] === "recompute" || bar[2] === "rebuild") {
    context.fillStyle = plain;
    context.fillRect(middle - size / 2 - 2, y + cells / 2 - 8, size + 4, 16);
  }
  context.fillStyle = ink;
  context.fillText(bar[5], middle, y + cells / 2 + 0.5);
}

const toY = (bytes, i, top) => top + heights[i] * (1 - bytes / (1.04 * panel.highest[i]));

function byteTicks() {
  const step = 2 ** Math.ceil(Math.log2(panel.highest[0] / 6));
  return Array.from({ length: Math.floor(panel.highest[0] / step) }, (_, i) => (i + 1) * step);
}

function drawMemory(rank, level, i, top) {
  const bottom = top + heights[i];
  context.fillStyle = colours.line;
  context.fillRect(LEFT, bottom - 0.5, width(), 1);
  if (!i && heights[0] >= 100)
    for (const bytes of byteTicks()) context.fillRect(LEFT, toY(bytes, i, top), width(), 0.5);
  const names = Object.keys(rank[level].parts), columns = sampled(rank[level]);
  // from the highest part to the lowest, each down to the ground
  for (let part = names.length - 1; part >= 0; part--)
    fillSteps(columns.map(([x, sums]) => [x, toY(sums[part], i, top)]), bottom, panel.parts[names[part]][1]);
  if (i || !rank.limit || !names.length) return;
  const limit = toY(rank.limit, i, top);
  fillSteps(columns.map(([x, sums]) => [x, Math.min(limit, toY(sums.at(-1), i, top))]), limit, colours.limit);
  context.strokeStyle = colours.limit;
  context.lineWidth = 1.2;
  context.setLineDash([7, 4]);
  context.beginPath();
  context.moveTo(LEFT, limit);
  context.lineTo(width(), limit);
  context.stroke();
  context.setLineDash([]);
}

// [x, sums of the parts from the ground up] wherever something changes; of the steps within one
// pixel the highest, then the last.
function sampled({ times, parts: bytes }) {
  const columns = [];
  let last = null;
  const settle = () => {
    const shown = columns.at(-1);
    if (shown && shown[1] !== last) columns.push([Math.floor(shown[0]) + 1, last]);
  };
  for (let at = Math.max(0, lastAt(times, from)); at < times.length && times[at] <= to; at++) {
    let sum = 0;
    const sums = Object.values(bytes).map((values) => (sum += values[at]));
    const x = Math.max(LEFT, toX(times[at])), shown = columns.at(-1);
    if (!shown || Math.floor(x) > Math.floor(shown[0])) {
      settle();
      columns.push([x, sums]);
    } else if (sum > shown[1].at(-1)) shown[1] = sums;
    last = sums;
  }
  settle();
  return columns;
}

function fillSteps(points, bottom, colour) {
  context.beginPath();
  context.moveTo(points[0]?.[0] ?? LEFT, bottom);
  points.forEach(([x, y], i) => {
    context.lineTo(x, y);
    context.lineTo(points[i + 1]?.[0] ?? Math.min(toX(panel.duration), width()), y);
  });
  context.lineTo(Math.min(toX(panel.duration), width()), bottom);
  context.fillStyle = colour;
  context.fill();
}

function lastAt(times, time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function ticks() {
  const rough = ((to - from) * 110) / (width() - LEFT - right());
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const times = [];
  for (let i = Math.ceil(from / step); i * step <= to * (1 + 1e-12); i++) times.push(i * step);
  return { step, times };
}

function drawGrid(bottom) {
  context.fillStyle = colours.line;
  context.globalAlpha = 0.6;
  for (const time of ticks().times) context.fillRect(toX(time) - 0.5, AXIS - 8, 1, bottom - AXIS + 8);
  context.globalAlpha = 1;
}

function drawTicks() {
  // rows that are scrolled out of the way vanish under the axis
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, width(), AXIS - 8);
  context.textAlign = "center";
  context.fillStyle = colours.faint;
  const { step, times } = ticks();
  for (const time of times) context.fillText(formatStep(time, step, to, panel.unit === "s"), toX(time), 11);
}
