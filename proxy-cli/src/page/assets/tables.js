// The tables of Services and of reasons.

import { sparkline } from "./chart.js";
import { WAITING, arrange, bytes, el, plural, rate, say, set, whole } from "./dom.js";

const COLUMNS = [
  { name: "service", label: "Service", by: null },
  { name: "connections", label: "Conn/s", title: "New connections per second", by: (one) => one.rates.connections },
  { name: "packets", label: "Pkt/s", title: "Packets per second", by: (one) => one.rates.packets },
  { name: "bytes", label: "Bytes/s", title: "Bytes per second", by: (one) => one.rates.bytes },
  { name: "failures", label: "Fail/s", title: "Refusals and drops per second", by: (one) => one.rates.failures },
  { name: "ready", label: "Endpoints", title: "Endpoints that take new connections / all endpoints", by: (one) => one.ready },
];

export function serviceTable(place, open) {
  let sort = "connections";
  let last = null;
  const heads = COLUMNS.map((column) => {
    const button = el("button", { type: "button", title: column.title, onclick: () => choose(column.name) }, column.label);
    return el("th", { scope: "col", class: `${column.name}${column.by ? " number" : ""}` }, button);
  });
  const curve = el("th", { scope: "col", class: "curve" }, "Last minutes");
  const body = el("tbody");
  const table = el("table", { class: "services" }, el("caption", { class: "unseen" }, "Services with the rates of the last seconds"), el("thead", null, el("tr", null, ...heads, curve)), body);
  const empty = el("p", { class: "empty" });
  place.replaceChildren(el("div", { class: "scroll" }, table), empty);
  const rows = new Map();

  function choose(name) {
    sort = name;
    if (last) draw(...last);
  }

  function make(one) {
    const button = el("button", { type: "button", class: "link", onclick: () => open(one.key) });
    button.append(el("span", { class: "space" }, `${one.service.split("/")[0]}/`), one.service.split(/\/(.*)/s)[1] ?? "");
    const kinds = [one.protocol === "TCP" ? null : one.protocol, one.family === "IPv6" ? "IPv6" : null].filter(Boolean);
    const badges = kinds.map((kind) => el("span", { class: "badge" }, kind));
    const cells = COLUMNS.slice(1).map((column) => el("td", { class: `number ${column.name}` }));
    const spark = sparkline();
    const row = el("tr", null, el("th", { scope: "row" }, button, ...badges), ...cells, el("td", { class: "curve" }, spark.element));
    return { row, button, cells, spark };
  }

  function draw(picture, curves, opened) {
    last = [picture, curves, opened];
    const column = COLUMNS.find((one) => one.name === sort);
    const services = [...picture.services.values()];
    const byName = (a, b) => (a.service < b.service ? -1 : a.service > b.service ? 1 : a.key < b.key ? -1 : 1);
    services.sort((a, b) => (column.by ? column.by(b) - column.by(a) : 0) || byName(a, b));
    heads.forEach((head, at) => set(head, "aria-sort", COLUMNS[at].name === sort ? (COLUMNS[at].by ? "descending" : "ascending") : null));
    for (const key of rows.keys()) if (!picture.services.has(key)) rows.delete(key);
    for (const one of services) {
      const known = rows.get(one.key) ?? make(one);
      rows.set(one.key, known);
      const texts = [rate(one.rates.connections), rate(one.rates.packets), bytes(one.rates.bytes), rate(one.rates.failures), `${one.ready}/${one.count}`];
      texts.forEach((text, at) => say(known.cells[at], text));
      known.cells.forEach((cell, at) => cell.classList.toggle("zero", texts[at] === "0" || texts[at] === "0 B"));
      known.cells[3].classList.toggle("bad", one.rates.failures > 0);
      known.cells[4].classList.toggle("bad", one.ready < one.count || one.count === 0);
      known.row.classList.toggle("opened", one.key === opened);
      set(known.button, "aria-expanded", one.key === opened ? "true" : "false");
      known.spark.draw(curves.of(one.key));
    }
    arrange(body, services.map((one) => rows.get(one.key).row));
    table.hidden = services.length === 0;
    empty.hidden = services.length > 0;
    say(empty, picture.isWaiting ? WAITING : picture.all === 0 ? "There are no Services." : "No Service matches the search.");
  }

  const focus = (key) => rows.get(key)?.button.focus();
  return { draw, focus };
}

function example(line, isCluster) {
  const who = line.client ? `${line.client}${line.device ? ` (${line.device})` : ""}` : line.process ? `${line.process}[${line.pid}]` : line.pid ? `process ${line.pid}` : "";
  const parts = [
    el("time", { datetime: line.time ?? undefined }, (line.time ?? "").slice(11, 19)),
    isCluster ? el("span", { class: "badge" }, line.node) : null,
    who ? `${who} → ` : "",
    line.frontend ? `${line.frontend}/${line.protocol ?? "?"}` : "",
    line.service ? ` ${line.service}` : "",
    line.backend ? ` → ${line.backend}` : "",
  ];
  return el("li", null, ...parts.filter((part) => part !== "" && part !== null));
}

export function dropTable(place) {
  const body = el("tbody");
  const head = (label, kind) => el("th", { scope: "col", class: kind }, label);
  const table = el(
    "table",
    { class: "drops" },
    el("caption", { class: "unseen" }, "Reasons with their counts"),
    el("thead", null, el("tr", null, head("Reason"), head("Verdict", "verdict"), head("Per second", "number"), head("Total", "number total"), head("Last minutes", "curve"))),
    body,
  );
  const empty = el("p", { class: "empty" });
  place.replaceChildren(el("div", { class: "scroll" }, table), empty);
  const rows = new Map();

  function make(reason) {
    const id = `reason-${reason.reason}`;
    const more = el("tr", { id, class: "more", hidden: true });
    const button = el("button", { type: "button", class: "link", "aria-expanded": "false", "aria-controls": id });
    button.append(reason.reason);
    button.addEventListener("click", () => {
      more.hidden = !more.hidden;
      set(button, "aria-expanded", more.hidden ? "false" : "true");
    });
    const [per, total] = [el("td", { class: "number" }), el("td", { class: "number total" })];
    const spark = sparkline();
    const examples = el("ul", { class: "examples" });
    const none = el("p", { class: "hint" });
    const title = el("h3", null, "Last examples");
    more.append(el("td", { colspan: 5 }, el("p", null, reason.explanation), el("p", { class: "advice" }, reason.advice), title, none, examples));
    const row = el("tr", { class: reason.verdict }, el("th", { scope: "row" }, button), el("td", { class: "verdict" }, el("span", { class: `badge ${reason.verdict}` }, reason.verdict)), per, total, el("td", { class: "curve" }, spark.element));
    return { row, more, per, total, spark, examples, none, title };
  }

  function draw(picture, curves, filter) {
    const reasons = [...picture.reasons.values()];
    const order = (one) => (one.verdict === "pass" ? 1 : 0);
    reasons.sort((a, b) => order(a) - order(b) || b.rate - a.rate || b.total - a.total);
    for (const reason of reasons) {
      const known = rows.get(reason.reason) ?? make(reason);
      rows.set(reason.reason, known);
      say(known.per, rate(reason.rate));
      known.per.classList.toggle("bad", reason.rate > 0 && reason.verdict !== "pass");
      known.per.classList.toggle("zero", reason.rate === 0);
      say(known.total, whole(reason.total));
      known.spark.draw(curves.of(`reason ${reason.reason}`));
      const lines = picture.examples.get(reason.reason) ?? [];
      known.title.hidden = picture.shows !== "all";
      say(known.none, picture.shows !== "all" ? "Set --page all to see examples; they contain addresses." : lines.length === 0 ? "None since this page was opened." : "");
      const stamp = JSON.stringify(lines);
      if (known.stamp !== stamp) {
        known.stamp = stamp;
        known.examples.replaceChildren(...lines.map((line) => example(line, picture.nodes.length > 1)));
      }
    }
    const shown = reasons.filter((reason) => !filter || reason.reason.includes(filter) || reason.rate > 0);
    arrange(body, shown.flatMap((reason) => [rows.get(reason.reason).row, rows.get(reason.reason).more]));
    table.hidden = shown.length === 0;
    empty.hidden = shown.length > 0;
    say(empty, picture.isWaiting ? WAITING : "Nothing was refused or dropped since the maps were created.");
    return plural(reasons.filter((reason) => reason.rate > 0 && reason.verdict !== "pass").length, "reason");
  }
  return { draw };
}
