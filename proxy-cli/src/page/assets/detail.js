// The details of one Service: history, endpoints and failures.

import { METRICS, historyChart } from "./chart.js";
import { WAITING, arrange, el, percent, plural, rate, say, set, whole } from "./dom.js";

export function detail(place, close) {
  let metric = METRICS[0];
  let answer = { points: [], interval: 15 };
  const title = el("h2", { id: "detail-title", tabindex: -1 });
  const about = el("p", { class: "hint" });
  const button = el("button", { type: "button", class: "close", onclick: close }, "Close");
  const chart = historyChart();
  const choices = METRICS.map((one) => {
    const input = el("input", { type: "radio", name: "metric", value: one.name, id: `metric-${one.name}` });
    input.checked = one === metric;
    input.addEventListener("change", () => {
      metric = one;
      chart.draw(answer, metric);
    });
    return el("label", { for: `metric-${one.name}` }, input, one.label);
  });
  const body = el("tbody");
  const head = (label, kind) => el("th", { scope: "col", class: kind }, label);
  const heads = [head("Endpoint"), head("State"), head("Weight", "number weight"), head("Conn/s", "number"), head("Share", "share"), head("Open", "number open"), head("Total", "number total")];
  const table = el("table", { class: "endpoints" }, el("caption", { class: "unseen" }, "Endpoints"), el("thead", null, el("tr", null, ...heads)), body);
  const note = el("p", { class: "hint" });
  const failures = el("p", { class: "failures" });
  place.replaceChildren(
    el("div", { class: "title" }, title, button),
    about,
    failures,
    el("fieldset", { class: "metrics" }, el("legend", null, "The last hour"), ...choices),
    chart.element,
    el("h3", null, "Endpoints"),
    note,
    el("div", { class: "scroll" }, table),
  );
  place.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  const rows = new Map();

  function make(endpoint) {
    const cells = ["state", "number weight", "number", "share", "number open", "number total"].map((kind) => el("td", { class: kind }));
    const bar = el("span", { class: "bar" }, el("span"));
    const part = el("span", { class: "part" });
    cells[3].append(bar, part);
    return { row: el("tr", null, el("th", { scope: "row", class: "address" }, endpoint.address), ...cells), cells, bar: bar.firstChild, part };
  }

  function state(endpoint, nodes) {
    if (endpoint.ejected.length > 0) {
      const where = nodes > 1 ? ` on ${plural(endpoint.ejected.length, "node")}` : "";
      return `ejected${where}, ${endpoint.ejectedSeconds} s`;
    }
    return endpoint.onTrial > 0 ? "on trial" : endpoint.state;
  }

  function draw(one, picture) {
    if (!one) {
      say(about, picture.isWaiting ? WAITING : "This Service is not programmed.");
      return;
    }
    const frontends = one.frontends.length > 0 ? `${one.frontends.join(", ")} · ` : "";
    const where = picture.nodes.length > 1 ? ` · on ${plural(one.nodes, "node")}` : "";
    say(about, `${frontends}${one.protocol} ${one.family} · ${one.algorithm} · ${whole(one.connections)} connections in total${where}`);
    const why = [...one.failures].sort((a, b) => b[1] - a[1]).map(([reason, value]) => `${reason} ${rate(value)}/s`);
    say(failures, why.length > 0 ? `Failures: ${why.join(", ")}` : "");
    failures.hidden = why.length === 0;
    for (const endpoint of one.endpoints) {
      const known = rows.get(endpoint.address) ?? make(endpoint);
      rows.set(endpoint.address, known);
      const words = state(endpoint, picture.nodes.length);
      const texts = [words, String(endpoint.weight), rate(endpoint.connections), null, endpoint.open === null ? "–" : whole(endpoint.open), whole(endpoint.total)];
      texts.forEach((text, at) => text !== null && say(known.cells[at], text));
      known.cells[0].classList.toggle("bad", words !== "active");
      say(known.part, endpoint.share === null ? "–" : percent(endpoint.share));
      known.bar.style.width = `${Math.round((endpoint.share ?? 0) * 100)}%`;
    }
    arrange(body, one.endpoints.map((endpoint) => rows.get(endpoint.address).row));
    table.hidden = one.endpoints.length === 0;
    const hidden = one.count - one.endpoints.length;
    if (picture.shows !== "all") say(note, `${one.ready} of ${plural(one.count, "endpoint")} ready. Set --page all to show their addresses.`);
    else if (one.count === 0) say(note, "The Service has no endpoints: connections to it are refused or dropped.");
    else say(note, hidden > 0 ? `The busiest ${one.endpoints.length} of ${one.count} endpoints.` : "");
  }

  return {
    draw,
    open(key) {
      const [, name] = key.match(/^(.*)\/[^/]*\/[^/]*$/s) ?? [null, key];
      say(title, name);
      rows.clear();
      body.replaceChildren();
      answer = { points: [], interval: 15 };
      chart.draw(answer, metric);
      place.hidden = false;
      title.focus();
    },
    hide() {
      place.hidden = true;
    },
    history(got) {
      answer = got;
      chart.draw(answer, metric);
      const span = got.interval * 240;
      const legend = place.querySelector("legend");
      say(legend, span === 3600 ? "The last hour" : span > 7000 ? `The last ${Math.round(span / 3600)} hours` : `The last ${Math.round(span / 60)} minutes`);
    },
    noHistory(text) {
      chart.fail(text);
    },
    set,
  };
}
