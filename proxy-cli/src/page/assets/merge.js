// Merges the data of all nodes into one picture. A single node is treated as a cluster of one.

function plus(sum, part) {
  for (const name of ["connections", "packets", "bytes", "failures"]) sum[name] += part[name];
}

const nothing = () => ({ connections: 0, packets: 0, bytes: 0, failures: 0 });

// If the nodes have different states of an endpoint, the worst one is shown.
const WORSE = { active: 0, terminating: 1, gone: 2 };

function addEndpoint(known, part, node) {
  const one = known.get(part.address);
  if (!one) {
    known.set(part.address, {
      ...part,
      share: null,
      onTrial: part.onTrial ? 1 : 0,
      ejected: part.ejectedSeconds === null ? [] : [node],
      local: part.local ? node : null,
    });
    return;
  }
  one.connections += part.connections;
  one.total += part.total;
  one.open = part.open === null ? one.open : (one.open ?? 0) + part.open;
  if ((WORSE[part.state] ?? 0) > (WORSE[one.state] ?? 0)) one.state = part.state;
  if (part.ejectedSeconds !== null) one.ejected.push(node);
  one.ejectedSeconds = Math.max(one.ejectedSeconds ?? 0, part.ejectedSeconds ?? 0) || null;
  if (part.onTrial) one.onTrial += 1;
  if (part.local) one.local = node;
  one.weight = Math.max(one.weight, part.weight);
}

function addService(services, row, node) {
  let one = services.get(row.key);
  if (!one) {
    one = {
      key: row.key,
      service: row.service,
      protocol: row.protocol,
      family: row.family,
      frontends: row.frontends,
      algorithm: row.algorithm,
      rates: nothing(),
      bySockets: null,
      connections: 0,
      failures: new Map(),
      count: 0,
      ready: 0,
      endpoints: new Map(),
      nodes: 0,
    };
    services.set(row.key, one);
  }
  plus(one.rates, row.rates);
  if (row.bySockets !== null) one.bySockets = (one.bySockets ?? 0) + row.bySockets;
  one.connections += row.connections;
  for (const [reason, value] of Object.entries(row.failures)) {
    one.failures.set(reason, (one.failures.get(reason) ?? 0) + value);
  }
  // All nodes have the same endpoints, except during a change, and because of policies.
  one.count = Math.max(one.count, row.count);
  one.ready = Math.max(one.ready, row.ready);
  for (const endpoint of row.endpoints) addEndpoint(one.endpoints, endpoint, node);
  one.nodes += 1;
}

function finish(one) {
  const endpoints = [...one.endpoints.values()];
  const all = endpoints.reduce((sum, endpoint) => sum + endpoint.connections, 0);
  for (const endpoint of endpoints) endpoint.share = all > 0 ? endpoint.connections / all : null;
  endpoints.sort((a, b) => b.connections - a.connections || (a.address < b.address ? -1 : 1));
  one.endpoints = endpoints;
}

// `frames`: the last event of each node, by node; `only`: the selected node, or "" for all.
export function merge(frames, only) {
  const picture = {
    nodes: [],
    nodeErrors: [],
    problems: [],
    total: nothing(),
    flows: 0,
    matching: 0,
    all: 0,
    seconds: 0,
    shows: "services",
    // No node has sent its counters yet.
    isWaiting: true,
    services: new Map(),
    reasons: new Map(),
    examples: new Map(),
    clients: new Map(),
  };
  for (const [node, frame] of frames) {
    if (only && only !== node) continue;
    picture.nodes.push(node);
    if (frame.failure) {
      picture.nodeErrors.push({ node, text: frame.failure });
      continue;
    }
    picture.isWaiting = false;
    if (frame.shows === "all") picture.shows = "all";
    for (const text of frame.problems) picture.problems.push({ node, text });
    if (frame.moreProblems > 0) picture.problems.push({ node, text: `${frame.moreProblems} more: see /status` });
    plus(picture.total, frame.total);
    picture.flows += frame.flows;
    picture.matching = Math.max(picture.matching, frame.matching);
    picture.all = Math.max(picture.all, frame.all);
    picture.seconds = Math.max(picture.seconds, frame.seconds);
    for (const row of frame.services) addService(picture.services, row, node);
    for (const row of frame.reasons) {
      const one = picture.reasons.get(row.reason);
      if (one) {
        one.rate += row.rate;
        one.total += row.total;
      } else picture.reasons.set(row.reason, { ...row });
    }
    for (const [reason, lines] of Object.entries(frame.examples)) {
      const known = picture.examples.get(reason) ?? [];
      known.push(...lines.map((line) => ({ ...line, node })));
      picture.examples.set(reason, known);
    }
    for (const edge of frame.clients) {
      const key = `${edge.client} ${edge.service}`;
      const one = picture.clients.get(key);
      if (one) {
        one.open += edge.open;
        one.begun += edge.begun;
      } else picture.clients.set(key, { ...edge });
    }
  }
  picture.services.forEach(finish);
  for (const lines of picture.examples.values()) {
    lines.sort((a, b) => ((a.time ?? "") < (b.time ?? "") ? 1 : -1));
    lines.length = Math.min(lines.length, 8);
  }
  return picture;
}
