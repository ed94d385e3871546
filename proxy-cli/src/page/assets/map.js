// The map: clients, Services, endpoints, and the rates of new connections between them.

import { el, percent, plural, rate, svg } from "./dom.js";

const BOX = 44;
const GAP = 10;
const MARGIN = 4;
// Approximate width of a letter at a font size of 12 px, in px.
const LETTER = 6.7;

function cut(text, width) {
  const most = Math.max(4, Math.floor((width - 14) / LETTER));
  return text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}`;
}

const weight = (edge) => edge.rate + edge.open * 1e-6;

// Returns the boxes of the three columns, with the data of the edges between them.
export function plan(picture, isNarrow) {
  const [mostServices, mostClients, mostEndpoints] = isNarrow ? [5, 6, 2] : [8, 9, 3];
  const busy = (one) => one.rates.connections + one.rates.failures;
  const edges = [...picture.clients.values()];
  const open = new Map();
  for (const edge of edges) open.set(edge.service, (open.get(edge.service) ?? 0) + edge.open);
  const services = [...picture.services.values()]
    .filter((one) => busy(one) > 0 || open.get(one.key) > 0)
    .sort((a, b) => busy(b) - busy(a) || (open.get(b.key) ?? 0) - (open.get(a.key) ?? 0))
    .slice(0, mostServices);
  const keys = new Set(services.map((one) => one.key));

  // The busiest clients have a box each; all others share one.
  const clients = new Map();
  for (const edge of edges.filter((one) => keys.has(one.service))) {
    const one = clients.get(edge.client) ?? { name: edge.client, rate: 0, open: 0, to: [] };
    one.rate += edge.begun;
    one.open += edge.open;
    one.to.push({ service: edge.service, rate: edge.begun, open: edge.open });
    clients.set(edge.client, one);
  }
  const sorted = [...clients.values()].sort((a, b) => weight(b) - weight(a));
  const shown = sorted.slice(0, mostClients).map((one) => ({ ...one, key: `client ${one.name}` }));
  const rest = sorted.slice(mostClients);
  if (rest.length > 0) {
    const to = new Map();
    for (const edge of rest.flatMap((one) => one.to)) {
      const sum = to.get(edge.service) ?? { service: edge.service, rate: 0, open: 0 };
      sum.rate += edge.rate;
      sum.open += edge.open;
      to.set(edge.service, sum);
    }
    const sum = (name) => rest.reduce((all, one) => all + one[name], 0);
    shown.push({ key: "others", name: `${rest.length} other clients`, rate: sum("rate"), open: sum("open"), to: [...to.values()] });
  }
  const sockets = services.filter((one) => one.bySockets > 0);
  if (sockets.length > 0) {
    const name = picture.nodes.length > 1 ? "sockets of nodes and pods" : "sockets of this node";
    const to = sockets.map((one) => ({ service: one.key, rate: one.bySockets, open: 0 }));
    shown.unshift({ key: "sockets", name, rate: to.reduce((sum, edge) => sum + edge.rate, 0), open: 0, to });
  }

  const endpoints = [];
  for (const one of services) {
    const listed = one.endpoints.slice(0, mostEndpoints);
    for (const endpoint of listed) {
      endpoints.push({ key: `${one.key} ${endpoint.address}`, service: one.key, name: endpoint.address, rate: endpoint.connections, share: endpoint.share, state: endpoint.ejected.length > 0 ? "ejected" : endpoint.state });
    }
    const more = one.count - listed.length;
    if (more > 0) {
      const others = one.endpoints.slice(mostEndpoints).reduce((sum, endpoint) => sum + endpoint.connections, 0);
      endpoints.push({ key: `${one.key} more`, service: one.key, name: `${more} more`, rate: others, share: null, state: "active" });
    }
  }
  return { clients: shown, services, endpoints };
}

// Draws the map into `place`; calls `open(key)` when the user selects a Service.
export function drawMap(place, picture, open) {
  const width = Math.max(280, place.clientWidth);
  const isNarrow = width < 620;
  const { clients, services, endpoints } = plan(picture, isNarrow);
  const active = document.activeElement;
  const focused = place.contains(active) ? active.getAttribute("data-key") : null;
  const remembered = focused ?? place.getAttribute("data-key");
  if (services.length === 0) {
    place.replaceChildren(el("p", { class: "empty" }, "No new connections."));
    return;
  }
  const gutter = isNarrow ? 18 : Math.min(150, width * 0.14);
  const box = (width - 2 * gutter - 2 * MARGIN) / 3;
  const column = (number) => MARGIN + number * (box + gutter);
  const places = new Map();
  // Places a Service beside the middle of its endpoints, and a client beside the middle of its Services, if there is room.
  const stack = (list, x, middle) => {
    let free = MARGIN;
    for (const one of list) {
      const y = Math.max(free, middle(one) ?? free);
      places.set(one.key, { x, y });
      free = y + BOX + GAP;
    }
  };
  const mean = (keys) => {
    const found = keys.map((key) => places.get(key)).filter(Boolean);
    return found.length > 0 ? found.reduce((sum, place) => sum + place.y, 0) / found.length : null;
  };
  stack(endpoints, column(2), () => null);
  stack(services, column(1), (one) => mean(endpoints.filter((endpoint) => endpoint.service === one.key).map((endpoint) => endpoint.key)));
  const aim = new Map(clients.map((one) => [one.key, mean(one.to.map((edge) => edge.service)) ?? 0]));
  clients.sort((a, b) => aim.get(a.key) - aim.get(b.key));
  stack(clients, column(0), (one) => aim.get(one.key));
  const height = Math.max(...[...places.values()].map((place) => place.y)) + BOX + MARGIN;

  const edges = [
    ...clients.flatMap((one) => one.to.map((edge) => ({ from: one.key, to: edge.service, rate: edge.rate, open: edge.open }))),
    ...endpoints.map((one) => ({ from: one.service, to: one.key, rate: one.rate, open: 0 })),
  ];
  const most = Math.max(0.001, ...edges.map((edge) => edge.rate));
  const lines = edges.map((edge) => {
    const [a, b] = [places.get(edge.from), places.get(edge.to)];
    const [x1, y1, x2, y2] = [a.x + box, a.y + BOX / 2, b.x, b.y + BOX / 2];
    const half = (x1 + x2) / 2;
    return svg("path", {
      class: edge.rate > 0 ? "edge" : "edge quiet",
      d: `M${x1},${y1}C${half},${y1} ${half},${y2} ${x2},${y2}`,
      "stroke-width": (edge.rate > 0 ? 1.5 + 9 * Math.sqrt(edge.rate / most) : 1.2).toFixed(1),
      "data-from": edge.from,
      "data-to": edge.to,
    });
  });

  const element = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "map", role: "group", "aria-labelledby": "map-title", "aria-describedby": "map-hint" });
  const mark = (key, isOn) => {
    for (const line of lines) {
      const touches = line.getAttribute("data-from") === key || line.getAttribute("data-to") === key;
      line.classList.toggle("marked", isOn && touches);
    }
    element.classList.toggle("marking", isOn);
  };
  const node = (key, title, under, label, kind, more = {}) => {
    const { x, y } = places.get(key);
    const group = svg(
      "g",
      {
        class: `box ${kind}`,
        role: kind === "service" || kind === "service failing" ? "button" : "img",
        tabindex: -1,
        "aria-label": label,
        "data-key": key,
        transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
        onfocus: () => mark(key, true),
        onblur: () => mark(key, false),
        onpointerenter: () => mark(key, true),
        onpointerleave: () => mark(key, false),
        ...more,
      },
      svg("title", null, label),
      svg("rect", { width: box.toFixed(1), height: BOX, rx: 6 }),
      svg("text", { x: 8, y: 18, class: "name" }, cut(title, box)),
      svg("text", { x: 8, y: 35, class: "under" }, cut(under, box)),
    );
    return group;
  };
  const a = (value) => `${rate(value)}/s`;
  const boxes = [
    ...clients.map((one) => {
      const under = one.open > 0 && !isNarrow ? `${a(one.rate)}, ${rate(one.open)} open` : a(one.rate);
      return node(one.key, one.name, under, `Client ${one.name}: ${a(one.rate)}, ${plural(one.open, "open connection")}, to ${plural(one.to.length, "Service")}`, "client");
    }),
    ...services.map((one) => {
      const [space, name] = one.service.split(/\/(.*)/s);
      const failing = one.rates.failures > 0 ? `, ${rate(one.rates.failures)} failures` : "";
      const label = `Service ${one.service}, ${one.protocol} ${one.family}: ${a(one.rates.connections)}${failing ? `${failing} per second` : ""}, ${one.ready} of ${plural(one.count, "endpoint")} ready`;
      const under = isNarrow ? `${a(one.rates.connections)}${failing ? " !" : ""}` : `${a(one.rates.connections)}${failing} · ${space}`;
      const show = () => open(one.key);
      return node(one.key, name ?? space, under, label, failing ? "service failing" : "service", { onclick: show });
    }),
    ...endpoints.map((one) => {
      const part = one.share === null ? "" : `, ${percent(one.share)}`;
      const state = one.state === "active" ? "" : ` ${one.state}`;
      const [, address, port] = one.name.match(/^(.*):(\d+)$/) ?? [];
      const title = isNarrow && address ? address : one.name;
      const under = isNarrow && address ? `:${port} ${a(one.rate)}${state}` : `${a(one.rate)}${part}${state}`;
      return node(one.key, title, under, `Endpoint ${one.name}: ${a(one.rate)}${part}${state}`, one.state === "active" ? "endpoint" : "endpoint failing");
    }),
  ];
  element.append(...lines, ...boxes);

  // The map is one tab stop; the arrow keys move the focus inside it.
  const columns = [clients, services, endpoints].map((list) => list.map((one) => one.key));
  const byKey = new Map(boxes.map((one) => [one.getAttribute("data-key"), one]));
  let current = byKey.get(remembered) ?? byKey.get(services[0].key);
  current.setAttribute("tabindex", 0);
  const go = (key) => {
    const next = byKey.get(key);
    if (!next) return;
    current.setAttribute("tabindex", -1);
    current = next;
    current.setAttribute("tabindex", 0);
    place.setAttribute("data-key", key);
    current.focus();
  };
  element.addEventListener("keydown", (event) => {
    const key = current.getAttribute("data-key");
    const at = columns.findIndex((list) => list.includes(key));
    const row = columns[at].indexOf(key);
    const beside = (number) => {
      const list = columns[number];
      if (!list || list.length === 0) return undefined;
      const linked = edges.find((edge) => (edge.from === key && list.includes(edge.to)) || (edge.to === key && list.includes(edge.from)));
      return linked ? (linked.from === key ? linked.to : linked.from) : list[Math.min(row, list.length - 1)];
    };
    const target = { ArrowUp: columns[at][row - 1], ArrowDown: columns[at][row + 1], Home: columns[at][0], End: columns[at].at(-1), ArrowLeft: beside(at - 1), ArrowRight: beside(at + 1) };
    if (event.key in target) {
      event.preventDefault();
      go(target[event.key]);
    } else if ((event.key === "Enter" || event.key === " ") && at === 1) {
      event.preventDefault();
      open(key);
    }
  });
  place.replaceChildren(element);
  if (focused && byKey.has(focused)) byKey.get(focused).focus({ preventScroll: true });
}
