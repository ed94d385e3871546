// Charts: sparklines beside numbers, and the history of a Service.

import { bytes, el, rate, say, set, svg } from "./dom.js";

// Returns the SVG paths of an area and of its upper edge, in a box of this size.
function paths(values, width, height, most) {
  const step = values.length > 1 ? width / (values.length - 1) : 0;
  const y = (value) => (most > 0 ? height - (value / most) * (height - 2) - 1 : height - 1);
  const line = values.map((value, at) => `${(at * step).toFixed(1)},${y(value).toFixed(1)}`).join("L");
  return { line: `M${line}`, area: `M0,${height}L${line}L${width},${height}Z` };
}

// Creates a sparkline, which draw(values) redraws. It is hidden from screen readers, which read the number beside it.
export function sparkline(width = 96, height = 24) {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true", focusable: "false" },
    area,
    line,
  );
  const draw = (values) => {
    const most = Math.max(0, ...values);
    const shown = values.length > 1 && most > 0 ? paths(values, width, height, most) : { line: `M0,${height - 1}L${width},${height - 1}`, area: "" };
    set(area, "d", shown.area);
    set(line, "d", shown.line);
  };
  draw([]);
  return { element, draw };
}

// Rounds up to a round number, for the top of a scale.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999) ?? 10 * power;
}

export const METRICS = [
  { name: "connections", label: "Connections", unit: "new connections per second", at: 0, text: rate },
  { name: "packets", label: "Packets", unit: "packets per second", at: 1, text: rate },
  { name: "bytes", label: "Bytes", unit: "bytes per second", at: 2, text: bytes },
  { name: "failures", label: "Failures", unit: "refusals and drops per second", at: 3, text: rate },
];

const WIDTH = 720;
const HEIGHT = 180;
const POINTS = 240;

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${(seconds / 3600).toFixed(1)} h ago`;
}

// Creates the chart of an answer of page/history. A slider shows its single points: by mouse, touch or arrow keys.
export function historyChart() {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  const grid = [0, 0.5, 1].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: 1 + (HEIGHT - 2) * part, y2: 1 + (HEIGHT - 2) * part }));
  const picture = svg(
    "svg",
    { class: "history", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": "History" },
    ...grid,
    area,
    line,
    cursor,
  );
  const [top, middle] = [el("span", { class: "top" }), el("span", { class: "middle" })];
  const [oldest, half] = [el("span"), el("span")];
  const slider = el("input", { type: "range", min: 0, max: POINTS - 1, value: POINTS - 1, step: 1, "aria-label": "Time" });
  const readout = el("output", { class: "readout" });
  const note = el("p", { class: "hint" });
  const element = el(
    "div",
    { class: "chart" },
    el("div", { class: "plot" }, picture, el("div", { class: "scale", "aria-hidden": "true" }, top, middle)),
    slider,
    el("div", { class: "times", "aria-hidden": "true" }, oldest, half, el("span", null, "now")),
    readout,
    note,
  );
  let shown = { values: [], interval: 15, metric: METRICS[0] };
  const read = () => {
    const at = Number(slider.value) - (POINTS - shown.values.length);
    const value = shown.values[at];
    const seconds = (POINTS - 1 - Number(slider.value)) * shown.interval;
    const when = seconds === 0 ? "now" : ago(seconds);
    const text = value === undefined ? `${when}: no data` : `${when}: ${shown.metric.text(value)} ${shown.metric.unit}`;
    say(readout, text);
    set(slider, "aria-valuetext", text);
    const x = (Number(slider.value) / (POINTS - 1)) * WIDTH;
    set(cursor, "x1", x);
    set(cursor, "x2", x);
    set(cursor, "visibility", seconds === 0 ? "hidden" : "visible");
  };
  slider.addEventListener("input", read);
  const draw = (answer, metric) => {
    const values = answer.points.slice(-POINTS).map((point) => point[metric.at]);
    shown = { values, interval: answer.interval || 15, metric };
    const most = ceiling(Math.max(0, ...values));
    const span = shown.interval * (POINTS - 1);
    if (values.length > 1) {
      const width = (WIDTH * (values.length - 1)) / (POINTS - 1);
      const drawn = paths(values, width, HEIGHT, most);
      const shift = `translate(${(WIDTH - width).toFixed(1)} 0)`;
      for (const path of [area, line]) set(path, "transform", shift);
      set(area, "d", drawn.area);
      set(line, "d", drawn.line);
    } else for (const path of [area, line]) set(path, "d", "");
    say(top, metric.text(most));
    say(middle, metric.text(most / 2));
    say(oldest, ago(span));
    say(half, ago(span / 2));
    const peak = Math.max(0, ...values);
    set(picture, "aria-label", `History of ${metric.unit}: ${values.length} points, at most ${metric.text(peak)}, now ${metric.text(values.at(-1) ?? 0)}`);
    say(note, values.length > 1 ? "" : "No history yet. It starts with the first traffic of the Service.");
    read();
  };
  const fail = (text) => {
    draw({ points: [], interval: 15 }, shown.metric);
    say(note, text);
  };
  return { element, draw, fail };
}
