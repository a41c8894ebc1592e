"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = document.getElementById("lanes").namespaceURI;
const hint = document.getElementById("hint");

function element(parent, kind, attributes, text) {
  const made = document.createElementNS(SVG, kind);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < 4) { count /= 1024; unit++; }
  return (unit && count < 100 ? count.toFixed(count < 10 ? 2 : 1) : Math.round(count)) + " " + units[unit];
}
function seconds(value) {
  const short = number => String(Number(number.toPrecision(3)));
  if (value >= 0.9995) return short(value) + " s";
  return value >= 1e-3 ? short(value * 1e3) + " ms" : short(value * 1e6) + " µs";
}
function ticks(from, to, most, base = 1) {
  const raw = (to - from) / most / base || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = base * [1, 2, 5, 10].map(f => f * power).find(size => size >= raw * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) found.push(i * step);
  return found;
}
function show(event, lines) {
  hint.replaceChildren(...lines.map(line => Object.assign(document.createElement("div"), {textContent: line})));
  hint.style.display = "block";
  hint.style.left = Math.min(event.clientX + 14, innerWidth - hint.offsetWidth - 8) + "px";
  hint.style.top = Math.min(event.clientY + 16, innerHeight - hint.offsetHeight - 8) + "px";
}
function hide() { hint.style.display = "none"; }

// --- lanes
const lanes = document.getElementById("lanes"), reset = document.getElementById("reset");
const LEFT = 104, GAP = 7, TOP = 22;
// Rows with names in them, or, of many at once, without.
const rowHeight = lane => lane.rows.length > 4 ? 9 : 20;
let view = [0, data.seconds];
function drawLanes() {
  const width = lanes.clientWidth || 1000, scale = (width - LEFT - 6) / (view[1] - view[0]);
  const height = data.lanes.reduce((sum, lane) => sum + Math.max(20, lane.rows.length * rowHeight(lane)) + GAP, TOP);
  lanes.replaceChildren();
  lanes.setAttribute("viewBox", `0 0 ${width} ${height}`);
  lanes.style.height = height + "px";
  for (const tick of ticks(view[0], view[1], Math.max(3, width / 130))) {
    const x = LEFT + (tick - view[0]) * scale;
    element(lanes, "line", {x1: x, x2: x, y1: TOP - 4, y2: height, class: "grid"});
    element(lanes, "text", {x, y: 12, "text-anchor": x > width - 40 ? "end" : "middle"}, tick ? seconds(tick) : "0");
  }
  let y = TOP;
  for (const lane of data.lanes) {
    element(lanes, "text", {x: 0, y: y + 14, class: "name"}, lane.lane);
    for (const row of lane.rows) {
      drawRow(lane, row, y, scale, width);
      y += rowHeight(lane);
    }
    y += GAP + Math.max(0, 20 - lane.rows.length * rowHeight(lane));
  }
}
function drawRow(lane, row, y, scale, width) {
  const height = rowHeight(lane) - (rowHeight(lane) > 9 ? 3 : 1.5);
  let last = -1;
  for (const span of row) {
    const [begin, duration, name, count] = span;
    if (begin + duration < view[0] || begin > view[1]) continue;
    const from = Math.max(LEFT, LEFT + (begin - view[0]) * scale);
    const to = Math.min(width - 6, LEFT + (begin + duration - view[0]) * scale);
    // What is narrower than a pixel is drawn once for each pixel.
    if (to - from < 0.5 && Math.floor(from) === last) continue;
    last = Math.floor(from);
    const box = element(lanes, "rect", {x: from, y, width: Math.max(0.6, to - from), height, rx: Math.min(2, height / 4),
      style: `fill: var(--${lane.style}); opacity: ${data.shades[name]}`});
    box.onmousemove = event => show(event, [data.names[name],
      `${seconds(duration)} from ${seconds(begin)}` + (count ? `, ${bytes(count)}` : "")]);
    box.onmouseleave = hide;
    const letters = Math.floor((to - from - 8) / 7), text = data.names[name];
    if (height > 9 && letters >= Math.min(18, text.length)) {
      // The middle is what names have in common.
      const half = Math.floor((letters - 1) / 2);
      element(lanes, "text", {x: from + 4, y: y + 12.5, class: "inside"},
        text.length > letters ? text.slice(0, half) + "…" + text.slice(-half) : text);
    }
  }
}
function timeAt(event) {
  const box = lanes.getBoundingClientRect();
  const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - 6);
  return view[0] + Math.min(1, Math.max(0, part)) * (view[1] - view[0]);
}
let dragFrom = null;
lanes.onpointerdown = event => { dragFrom = timeAt(event); lanes.setPointerCapture(event.pointerId); };
lanes.onpointermove = event => {
  if (dragFrom === null) return;
  document.getElementById("selection")?.remove();
  const at = time => LEFT + (time - view[0]) / (view[1] - view[0]) * (lanes.clientWidth - LEFT - 6);
  const [from, to] = [dragFrom, timeAt(event)].sort((a, b) => a - b);
  element(lanes, "rect", {id: "selection", x: at(from), y: 0, width: at(to) - at(from), height: lanes.clientHeight});
};
lanes.onpointerup = event => {
  const [from, to] = [dragFrom, timeAt(event)].sort((a, b) => a - b);
  dragFrom = null;
  if (to - from > (view[1] - view[0]) / 200) view = [from, to];
  reset.hidden = view[0] === 0 && view[1] === data.seconds;
  drawLanes();
};
reset.onclick = () => { view = [0, data.seconds]; reset.hidden = true; drawLanes(); };
