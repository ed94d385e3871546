// The page: receives events, and draws their data.

import { METRICS, sparkline } from "./chart.js";
import { detail } from "./detail.js";
import { bytes, el, plural, rate, say, set, whole } from "./dom.js";
import { drawMap } from "./map.js";
import { merge } from "./merge.js";
import { dropTable, serviceTable } from "./tables.js";

const POINTS = 60;
const PERIOD = 2000;
const RETRY = 5000;
// Milliseconds without an event from a node, after which the page shows the node as silent.
const SILENT = 15000;

const by = (id) => document.getElementById(id);
const frames = new Map();
const heard = new Map();
let source = null;
let retry = 0;
let paused = false;
let opened = "";
let filter = "";
let totals = null;

// The last rates of totals, Services and reasons since the page was opened.
const curves = {
  known: new Map(),
  push(key, value) {
    const values = this.known.get(key) ?? [];
    if (values.length === 0 && value === 0) return;
    values.push(value);
    if (values.length > POINTS) values.shift();
    this.known.set(key, values);
  },
  of(key) {
    const values = this.known.get(key) ?? [];
    return values.length === 0 ? [] : [...new Array(POINTS - values.length).fill(0), ...values];
  },
};

// Colour theme.
const theme = by("theme");
function paint(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
}
try {
  theme.value = localStorage.getItem("ballast-colours") ?? "auto";
} catch {
  // Without local storage, the choice is lost when the page is closed.
}
if (!theme.value) theme.value = "auto";
paint(theme.value);
theme.addEventListener("change", () => {
  paint(theme.value);
  try {
    localStorage.setItem("ballast-colours", theme.value);
  } catch {
    // As above.
  }
});

// Figures.
const FIGURES = [
  { label: "Connections", unit: "/s", name: "connections", text: (picture) => rate(picture.total.connections) },
  { label: "Packets", unit: "/s", name: "packets", text: (picture) => rate(picture.total.packets) },
  { label: "Bytes", unit: "/s", name: "bytes", text: (picture) => bytes(picture.total.bytes) },
  { label: "Failures", unit: "/s", name: "failures", text: (picture) => rate(picture.total.failures) },
  { label: "Tracked flows", unit: "", name: "flows", text: (picture) => whole(picture.flows) },
].map((figure) => {
  const [value, spark] = [el("span", { class: "value" }), sparkline(160, 30)];
  const element = el("div", { class: `figure ${figure.name}` }, el("span", { class: "label" }, figure.label), el("span", null, value, el("span", { class: "unit" }, figure.unit)), spark.element);
  by("figures").append(element);
  return { ...figure, value, spark, element };
});

const services = serviceTable(by("service-table"), (key) => go(key === opened ? "" : key));
const drops = dropTable(by("drop-table"));
const panel = detail(by("detail"), () => go(""));

// Puts the shown Service into the URL, so that users can share the URL and go back.
function go(key) {
  history.pushState(null, "", key ? `#service=${encodeURIComponent(key)}` : location.pathname);
  follow();
}

function follow() {
  const [, key] = location.hash.match(/^#service=(.*)$/) ?? [];
  const wanted = key ? decodeURIComponent(key) : "";
  if (wanted === opened) return;
  const before = opened;
  opened = wanted;
  if (opened) {
    panel.open(opened);
    by("detail").scrollIntoView({ block: "start" });
    readHistory();
  } else {
    panel.hide();
  }
  listen();
  draw();
  if (!opened) services.focus(before);
}
window.addEventListener("hashchange", follow);
window.addEventListener("popstate", follow);

async function ask(service) {
  const answer = await fetch(`page/history?service=${encodeURIComponent(service)}`);
  if (!answer.ok) throw new Error((await answer.text()).trim() || `the server answered ${answer.status}`);
  return answer.json();
}

async function readHistory() {
  const asked = opened;
  try {
    if (asked) {
      const answer = await ask(asked);
      if (asked === opened) panel.history(answer);
    }
  } catch (error) {
    if (asked === opened) panel.noHistory(`No history: ${error.message}`);
  }
}

async function readTotals() {
  try {
    totals = await ask("");
  } catch {
    totals = null;
  }
}

// Events.
function tell(text, kind) {
  say(by("state"), text);
  set(by("state"), "class", kind);
}

function listen() {
  source?.close();
  clearTimeout(retry);
  if (paused || document.hidden) return;
  source = new EventSource(`page/events?filter=${encodeURIComponent(filter)}&service=${encodeURIComponent(opened)}`);
  source.onmessage = (event) => {
    const frame = JSON.parse(event.data);
    if (frame.gone) frames.delete(frame.node);
    else frames.set(frame.node, frame);
    heard.set(frame.node, Date.now());
    tell("Live", "live");
    draw();
  };
  source.onerror = () => {
    if (source.readyState !== EventSource.CLOSED) {
      tell("No connection; retrying", "lost");
      return;
    }
    // The server refused the request: the browser does not retry by itself, unlike after an interruption.
    tell("Refused: too many pages are open, or the agent is restarting; retrying", "lost");
    retry = setTimeout(listen, RETRY);
  };
}

let typing = 0;
by("search").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    filter = event.target.value.trim();
    frames.clear();
    listen();
  }, 250);
});
document.addEventListener("keydown", (event) => {
  const isText = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "/" && !isText && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    by("search").focus();
  }
});
by("pause").addEventListener("click", () => {
  paused = !paused;
  set(by("pause"), "aria-pressed", String(paused));
  say(by("pause"), paused ? "Resume" : "Pause");
  if (paused) tell("Paused", "paused");
  else tell("Connecting", "");
  listen();
});
// A hidden page receives no events.
document.addEventListener("visibilitychange", listen);
by("node").addEventListener("change", () => {
  curves.known.clear();
  draw();
});

function drawNodes() {
  const choice = by("node");
  const nodes = [...frames.keys()].sort();
  const known = [...choice.options].slice(1).map((option) => option.value);
  if (nodes.length > 1 || known.length > 1) by("node-choice").hidden = false;
  for (const node of nodes) if (!known.includes(node)) choice.append(el("option", { value: node }, node));
  for (const option of [...choice.options].slice(1)) if (!frames.has(option.value) && !option.selected) option.remove();
}

function drawProblems(picture) {
  const place = by("problems");
  const isCluster = frames.size > 1;
  const now = Date.now();
  const silent = paused ? [] : picture.nodes.filter((node) => now - (heard.get(node) ?? now) > SILENT).map((node) => ({ node, text: "has sent no data for a while" }));
  const all = [...picture.nodeErrors, ...silent, ...picture.problems];
  const stamp = JSON.stringify(all);
  if (place.dataset.stamp === stamp) return;
  place.dataset.stamp = stamp;
  place.hidden = all.length === 0;
  place.replaceChildren(el("h2", null, plural(all.length, "problem")), el("ul", null, ...all.map((one) => el("li", null, isCluster ? el("span", { class: "badge" }, one.node) : null, one.text))));
}

// A URL may have the displayed name of a Service: the first one with this name is opened.
function resolve(picture) {
  if (!opened || picture.services.has(opened)) return;
  const found = [...picture.services.values()].find((one) => one.service === opened);
  if (!found) return;
  opened = found.key;
  history.replaceState(null, "", `#service=${encodeURIComponent(opened)}`);
  panel.open(opened);
  readHistory();
  listen();
}

function draw() {
  const picture = merge(frames, by("node").value);
  resolve(picture);
  drawNodes();
  drawProblems(picture);
  const place = frames.size > 1 ? plural(frames.size, "node") : [...frames.keys()].join("");
  say(by("place"), place);
  document.title = place ? `Ballast · ${place}` : "Ballast";
  for (const figure of FIGURES) {
    say(figure.value, picture.isWaiting ? "–" : figure.text(picture));
    const metric = METRICS.find((one) => one.name === figure.name);
    const isLong = metric && totals && !by("node").value && totals.points.length > POINTS;
    figure.spark.draw(isLong ? totals.points.map((point) => point[metric.at]) : curves.of(`total ${figure.name}`));
  }
  by("figures").querySelector(".failures").classList.toggle("bad", picture.total.failures > 0);
  by("map-section").hidden = picture.shows !== "all" && frames.size > 0;
  if (!by("map-section").hidden) drawMap(by("map"), picture, go);
  services.draw(picture, curves, opened);
  const more = picture.matching - Math.min(picture.matching, picture.services.size);
  say(by("services-hint"), more > 0 ? `The busiest ${picture.services.size} of ${whole(picture.matching)}; use the search to find others.` : filter ? `${whole(picture.matching)} of ${plural(picture.all, "Service port")} match.` : "");
  const failing = drops.draw(picture, curves, filter);
  say(by("drops-hint"), picture.isWaiting ? "" : `${failing} in the last seconds. Open a reason to see its meaning, advice and the last examples.`);
  if (opened) panel.draw(picture.services.get(opened), picture);
}

// Adds a point to every curve.
setInterval(() => {
  if (paused || document.hidden || frames.size === 0) return;
  const picture = merge(frames, by("node").value);
  if (picture.seconds === 0) return;
  for (const figure of FIGURES) curves.push(`total ${figure.name}`, figure.name === "flows" ? picture.flows : picture.total[figure.name]);
  for (const one of picture.services.values()) curves.push(one.key, one.rates.connections);
  for (const reason of picture.reasons.values()) curves.push(`reason ${reason.reason}`, reason.rate);
}, PERIOD);
setInterval(() => {
  if (paused || document.hidden) return;
  readTotals();
  readHistory();
}, 5 * PERIOD);
new ResizeObserver(() => draw()).observe(by("map-section"));

readTotals();
listen();
follow();
