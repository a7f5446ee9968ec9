"use strict";
// Draws the timelines in #data on one canvas that stays in view while #view scrolls over the ranks.
// A bar is [start, stop, kind, chunk, stage, owner, action, device bytes, host bytes].

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const view = element("view"), canvas = element("canvas"), tooltip = element("tooltip");
const context = canvas.getContext("2d");
const AXIS = 30, THIN = 7, GAP = 14, LEFT = 104, TINY = 0.7;
const LIGHTER = { forward: 0.5, recompute: 0.8, rebuild: 0.8 };
const FONT = '12px system-ui, "DejaVu Sans", sans-serif';

let panel, from, to, lit = null, hovered = null, frame = 0, colours = {}, looks = new Map();
let cells = 30, memory = 44;  // heights of a rank's rows

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
  const names = ["paper", "ink", "faint", "line", "lane", "device", "host", "limit", "activation",
    "gradient", "collective", "copy"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  looks = new Map();
}

function mix(colour, share) {
  const part = (text, i) => parseInt(text.slice(i, i + 2), 16);
  const mixed = [1, 3, 5].map((i) => part(colour, i) * (1 - share) + part(colours.paper, i) * share);
  return `rgb(${mixed.map(Math.round).join(" ")})`;
}

function look(kind, owner) {
  const key = `${kind} ${owner}`;
  if (!looks.has(key)) looks.set(key, makeLook(kind, owner));
  return looks.get(key);
}

function makeLook(kind, owner) {
  if (kind in colours) return colours[kind];
  const colour = panel.owners[owner].colour;
  const plain = mix(colour, LIGHTER[kind] ?? 0);
  return kind === "recompute" || kind === "rebuild" ? hatch(plain, colour, kind) : plain;
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

// --- places --------------------------------------------------------------------------------------

const width = () => canvas.clientWidth;
const right = () => (panel.highest ? 118 : 18);
const scale = () => (width() - LEFT - right()) / (to - from);
const toX = (time) => LEFT + (time - from) * scale();
const toTime = (x) => from + (x - LEFT) / scale();
const laneHeight = () => cells + THIN * (panel.tracks.length - 1);
const rowHeight = () => laneHeight() + (panel.highest ? memory + 4 : 0) + GAP;
const rowTop = (index) => AXIS + index * rowHeight() - view.scrollTop;

function stretchRows(height) {
  // few ranks share the height that there is
  const fixed = THIN * (panel.tracks.length - 1) + GAP + (panel.highest ? 4 : 0);
  const room = (height - AXIS - 8) / panel.ranks.length - fixed;
  const stretch = Math.min(Math.max(room / (panel.highest ? 74 : 30), 1), 2);
  [cells, memory] = [30 * stretch, 44 * stretch].map(Math.round);
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
  if (inside >= laneHeight() + 4 && inside < laneHeight() + 4 + memory && panel.highest)
    return { rank, time };
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
    if (panel.highest) drawMemory(rank, top + laneHeight() + 4);
    context.restore();
  });
  drawTicks();
}

function drawName(rank, top) {
  const lines = rank.name.split("\n");
  context.textAlign = "right";
  lines.forEach((line, i) => {
    context.fillStyle = i ? colours.faint : colours.ink;
    context.fillText(line, LEFT - 10, top + cells / 2 + (i - (lines.length - 1) / 2) * 14);
  });
  if (!panel.highest) return;
  context.textAlign = "left";
  const words = [[`peak ${formatBytes(rank.peak)}`, colours.device]];
  if (panel.hasHost) words.push([`host ${formatBytes(rank.hostPeak)}`, colours.host]);
  if (rank.limit) words.push([`limit ${formatBytes(rank.limit)}`, colours.limit]);
  words.forEach(([text, colour], i) => {
    context.fillStyle = colour;
    context.fillText(text, width() - right() + 10, top + laneHeight() + 12 + 15 * i);
  });
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
    context.globalAlpha = lit === null || bar[5] === lit ? 1 : 0.18;
    context.fillStyle = look(bar[2], bar[5]);
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
  const letter = { forward: "F", recompute: "R", rebuild: "K", backward: "B" }[bar[2]];
  const text = letter + bar[3] + (panel.labelsStages ? `.${bar[4]}` : "");
  const size = context.measureText(text).width;
  if (size + 6 > stop - x) return;
  context.textAlign = "center";
  const middle = (x + stop) / 2;
  if (bar[2] in LIGHTER && bar[2] !== "forward") {
    context.fillStyle = colours.paper;
    context.fillRect(middle - size / 2 - 2, y + cells / 2 - 8, size + 4, 16);
  }
  context.fillStyle = bar[2] === "backward" ? "#ffffff" : colours.ink;
  context.fillText(text, middle, y + cells / 2 + 0.5);
}

function drawMemory(rank, top) {
  const bottom = top + memory, toY = (bytes) => bottom - (bytes / panel.highest) * memory;
  context.fillStyle = colours.line;
  context.fillRect(LEFT, bottom - 0.5, width(), 1);
  drawCurve(rank.device, toY, bottom, colours.device, true);
  if (panel.hasHost) drawCurve(rank.host, toY, bottom, colours.host, false);
  if (!rank.limit) return;
  context.save();
  context.beginPath();
  context.rect(0, top, width(), toY(rank.limit) - top);
  context.clip();
  drawCurve(rank.device, toY, bottom, colours.limit, true);
  context.restore();
  context.strokeStyle = colours.limit;
  context.lineWidth = 1.2;
  context.setLineDash([7, 4]);
  context.beginPath();
  context.moveTo(LEFT, toY(rank.limit));
  context.lineTo(width(), toY(rank.limit));
  context.stroke();
  context.setLineDash([]);
}

function drawCurve(points, toY, bottom, colour, filled) {
  if (!points.length) return;
  const first = Math.max(0, lastAt(points, from)), stop = Math.min(toX(panel.duration), width());
  context.beginPath();
  context.moveTo(Math.max(toX(points[first][0]), 0), toY(points[first][1]));
  let pixel = -1, highest = 0, before = points[first][1];
  for (let i = first + 1; i < points.length && points[i][0] <= to; i++) {
    // of the points within a pixel the highest is drawn, then the last
    const x = toX(points[i][0]), column = Math.floor(x);
    if (column !== pixel) {
      context.lineTo(x, toY(before));
      highest = 0;
    }
    highest = Math.max(highest, points[i][1]);
    context.lineTo(x, toY(highest));
    context.lineTo(x, toY(points[i][1]));
    pixel = column;
    before = points[i][1];
  }
  context.lineTo(stop, toY(before));
  context.strokeStyle = colour;
  context.lineWidth = 1.4;
  context.stroke();
  if (!filled) return;
  context.lineTo(stop, bottom);
  context.lineTo(Math.max(toX(points[first][0]), 0), bottom);
  context.globalAlpha = colour === colours.limit ? 0.55 : 0.22;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

function lastAt(points, time) {
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= time) low = middle + 1; else high = middle;
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
