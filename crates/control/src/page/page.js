"use strict";

// Asks the API once a second and shows what it says.

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 5000;

// The most of a kind that is drawn or listed: a browser is slow with more.
const SHOWN = 256;

let chosen = null;

// How many refreshes have begun. What an earlier one hears is of no interest any more.
let generation = 0;

async function ask(path) {
  const away = () => {
    throw new Error("the controller cannot be reached");
  };
  const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS) }).catch(away);
  if (response.status === 404) {
    return null;
  }
  if (!response.ok) {
    throw new Error(`the controller answers ${response.status}`);
  }
  return JSON.parse(await response.text().catch(away));
}

function element(name, properties = {}, children = []) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function show(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

function empty(text) {
  return element("p", { className: "empty", textContent: text });
}

function scaled(value, units, step) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

const memory = (value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
const rate = (value) => (value === null || value === undefined ? "\u2013" : scaled(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000));
const bits = (value) => scaled(value, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"], 1000);
const count = (value) => (value === null || value === undefined ? "\u2013" : value.toLocaleString("en"));
const words = (state) => state.replaceAll("_", " ");

// Rows of cells: texts, numbers (right) or elements.
function table(titles, rows, chosenRow = -1) {
  const isNumber = (cell) => typeof cell === "object" && cell.number !== undefined;
  const head = titles.map((title, column) => {
    const numeric = rows.length > 0 && isNumber(rows[0][column]);
    return element("th", { textContent: title, scope: "col", className: numeric ? "number" : "" });
  });
  const body = rows.map((row, index) => {
    const cells = row.map((cell) =>
      isNumber(cell)
        ? element("td", { className: "number", textContent: cell.number })
        : element("td", {}, [cell]),
    );
    return element("tr", { ariaSelected: String(index === chosenRow) }, cells);
  });
  return element("table", {}, [
    element("thead", {}, [element("tr", {}, head)]),
    element("tbody", {}, body),
  ]);
}

const number = (text) => ({ number: text });

function showTotals(switches, groups) {
  const ready = groups.filter((group) => group.state === "communicator_ready").length;
  const sum = groups.reduce((sum, group) => sum + (group.payload_bytes_per_second ?? 0), 0);
  const ranks = groups.reduce((sum, group) => sum + group.joined, 0);
  const entries = [
    ["switches", count(switches.length)],
    ["groups ready", `${count(ready)} of ${count(groups.length)}`],
    ["ranks", count(ranks)],
    ["from hosts into trees", rate(sum)],
  ];
  const entry = ([name, value]) =>
    element("div", {}, [element("dt", { textContent: name }), element("dd", { textContent: value })]);
  show("totals", ...entries.map(entry));
}

function showGroups(groups) {
  if (groups.length === 0) {
    show("groups", empty("There are no groups. Hosts make one when they join."));
    return;
  }
  const shown = groups.slice(0, SHOWN);
  const row = (group) => [
    element("button", { type: "button", textContent: group.name }),
    words(group.state),
    number(`${count(group.joined)} of ${count(group.world)}`),
    number(count(group.nodes)),
    number(count(group.collectives)),
    number(rate(group.payload_bytes_per_second)),
    group.waits_for ?? "",
  ];
  const titles = ["name", "state", "ranks", "nodes", "collectives", "from hosts", "waits for"];
  const index = shown.findLastIndex((group) => group.name === chosen);
  const made = element("div", { id: "groups" }, [
    table(titles, shown.map(row), index),
    ...left({ groups: groups.length - shown.length }),
  ]);
  const here = document.getElementById("groups");
  const focused = here.contains(document.activeElement) ? document.activeElement : null;
  renew(here, made);
  if (focused !== null && !focused.isConnected) {
    const buttons = Array.from(here.querySelectorAll("button"));
    buttons.findLast((button) => button.textContent === focused.textContent)?.focus();
  }
}

// Makes an element like another one and keeps what is alike: the focus, and clicks that have begun, are there.
function renew(old, made) {
  if (old.isEqualNode(made)) {
    return;
  }
  if (old.nodeName !== made.nodeName || old.children.length === 0 || made.children.length === 0) {
    old.replaceWith(made);
    return;
  }
  old.ariaSelected = made.ariaSelected;
  const [olds, mades] = [Array.from(old.children), Array.from(made.children)];
  mades.forEach((child, index) => (index < olds.length ? renew(olds[index], child) : old.append(child)));
  olds.slice(mades.length).forEach((child) => child.remove());
}

// The edges of a tree, each once: as the node above has it.
function edgesBelow(group) {
  const nodes = group?.communicator?.nodes ?? [];
  return nodes.flatMap((node, index) =>
    node.edges.filter((edge) => !edge.up).map((edge) => ({ ...edge, above: index })),
  );
}

const peerName = (group, edge) =>
  edge.rank === null ? group.communicator.nodes[edge.node].switch : `rank ${edge.rank}`;

function rates(edge) {
  const up = edge.rates?.payload_bytes_received;
  const down = edge.rates?.payload_bytes_sent;
  return { up, down, most: Math.max(up ?? 0, down ?? 0) };
}

function hint(group, edge) {
  const { up, down } = rates(edge);
  const name = peerName(group, edge);
  const above = group.communicator.nodes[edge.above].switch;
  const pairs = `queue pair ${edge.my.qpn ?? "\u2013"} to ${edge.peer.qpn ?? "\u2013"}`;
  return `${name} to ${above}: ${rate(up)} up, ${rate(down)} down; ${pairs}`;
}

function nodeName(communicator, node, index) {
  const tree = communicator.trees > 1 ? `tree ${node.tree}, ` : "";
  return `${tree}${node.parent === null ? "root, " : ""}node ${index}`;
}

function showTree(group) {
  document.getElementById("tree-title").textContent =
    group === null ? "Tree" : `Tree of group ${group.name}`;
  const communicator = group?.communicator ?? null;
  if (communicator === null) {
    const why = group?.waits_for ? ` It waits for ${group.waits_for}.` : "";
    show("tree", empty(group === null ? "There is no group to draw." : `The group has no tree yet.${why}`));
    show("edges", empty("No edges."));
    return;
  }
  const all = edgesBelow(group);
  // Nodes first: without them the rest hangs in the air.
  const between = all.filter((edge) => edge.above < SHOWN && (edge.node ?? 0) < SHOWN);
  const below = between.toSorted((a, b) => (a.rank ?? -1) - (b.rank ?? -1)).slice(0, SHOWN);
  const most = Math.max(1, ...below.map((edge) => rates(edge).most));
  const address = new Map(group.members.map((member) => [member.rank, member.address]));
  const nodes = communicator.nodes.slice(0, SHOWN).map((node, index) => ({
    key: `node ${index}`,
    kind: "switch",
    title: node.switch,
    detail: node.state === "ready" ? nodeName(communicator, node, index) : words(node.state),
  }));
  const ranks = new Set();
  for (const edge of below.filter((edge) => edge.rank !== null)) {
    // Once, though it is below a node of each tree.
    if (ranks.has(edge.rank)) continue;
    ranks.add(edge.rank);
    const detail = address.get(edge.rank) ?? "";
    nodes.push({ key: `rank ${edge.rank}`, kind: "host", title: `rank ${edge.rank}`, detail });
  }
  const edges = below.map((edge) => {
    const { up, down, most: weight } = rates(edge);
    const label = edge.rates === null ? [] : [`\u2191 ${rate(up)}`, `\u2193 ${rate(down)}`];
    const lower = edge.rank === null ? `node ${edge.node}` : `rank ${edge.rank}`;
    const kind = weight > 0 ? "busy" : "";
    return { upper: `node ${edge.above}`, lower, kind, label, weight: weight / most, hint: hint(group, edge) };
  });
  const rest = left({
    nodes: communicator.nodes.length - SHOWN,
    edges: all.length - below.length,
  });
  show("tree", draw(nodes, edges, `The tree of group ${group.name}`), ...rest);
  showEdges(group, below, rest);
}

// What to say where not all is shown: by what it is, how many more there are.
function left(more) {
  const some = Object.entries(more).filter(([, number]) => number > 0);
  const texts = some.map(([what, number]) => `${count(number)} more ${what}`);
  return texts.length > 0 ? [empty(`Not shown: ${texts.join(", ")}.`)] : [];
}

function showEdges(group, edges, rest) {
  const row = (edge) => {
    const { up, down } = rates(edge);
    const { counters, my, peer } = edge;
    return [
      group.communicator.nodes[edge.above].switch,
      peerName(group, edge),
      number(`${my.qpn ?? "\u2013"} / ${peer.qpn ?? "\u2013"}`),
      number(rate(up)),
      number(rate(down)),
      number(counters === null ? "\u2013" : bytes(counters.payload_bytes_received)),
      number(counters === null ? "\u2013" : bytes(counters.payload_bytes_sent)),
      number(count(counters?.packets_received)),
      number(count(counters?.packets_sent)),
      number(count(counters?.retransmissions)),
    ];
  };
  const titles = ["switch", "below", "queue pairs", "up", "down", "bytes up", "bytes down", "packets up", "packets down", "repeated"];
  show("edges", table(titles, edges.map(row)), ...rest.map((note) => note.cloneNode(true)));
}

function showNetwork(topology, group) {
  if (topology.switches.length + topology.hosts.length === 0) {
    show("network", empty("No switch has registered yet."));
    return;
  }
  const ranks = Map.groupBy(group?.members ?? [], (member) => member.address);
  const used = new Set(edgesBelow(group).map((edge) => `${edge.my.ip} ${edge.peer.ip}`));
  const nodes = topology.switches.slice(0, SHOWN).map((it, index) => ({
    key: `switch ${index}`,
    kind: it.registered ? "switch" : "switch absent",
    level: 1,
    title: it.name ?? `switch ${it.id}`,
    detail: it.registered ? (it.addresses[0] ?? "") : "not registered",
  }));
  topology.hosts.slice(0, SHOWN).forEach((host, index) => {
    const members = host.addresses.flatMap((address) => ranks.get(address) ?? []);
    const name = host.id === null ? "host" : `host ${host.id}`;
    const list = members.map((member) => member.rank).join(", ");
    const title = members.length === 0 ? name : `${name}, ${members.length > 1 ? "ranks" : "rank"} ${list}`;
    nodes.push({ key: `host ${index}`, kind: "host", title, detail: host.addresses[0] ?? "" });
  });
  const isShown = (link) => link.upper < SHOWN && (link.lower_host ?? link.lower_switch) < SHOWN;
  const links = topology.links.filter(isShown).slice(0, SHOWN);
  const edges = links.map((link) => {
    const speed = link.rate_bits_per_second;
    return {
      upper: `switch ${link.upper}`,
      lower: link.lower_host === null ? `switch ${link.lower_switch}` : `host ${link.lower_host}`,
      kind: used.has(`${link.upper_address} ${link.lower_address}`) ? "used" : "",
      label: speed === null ? [] : [bits(speed)],
      weight: 0,
      hint: `${link.lower_address} to ${link.upper_address}`,
    };
  });
  const rest = left({
    switches: topology.switches.length - SHOWN,
    hosts: topology.hosts.length - SHOWN,
    links: topology.links.length - links.length,
  });
  show("network", draw(nodes, edges, "The network"), ...rest);
}

function showSwitches(switches) {
  if (switches.length === 0) {
    show("switches", empty("No switch has registered yet."));
    return;
  }
  const row = (it) => [
    it.name,
    it.address,
    number(count(it.communicators)),
    number(count(it.limits.communicators)),
    number(memory(it.limits.memory_bytes)),
  ];
  const titles = ["name", "address", "nodes", "nodes at most", "memory at most"];
  const rest = left({ switches: switches.length - SHOWN });
  show("switches", table(titles, switches.slice(0, SHOWN).map(row)), ...rest);
}

function showStatus(kind, text) {
  const status = document.getElementById("status");
  status.className = kind;
  status.textContent = text;
  document.body.classList.toggle("stale", kind === "lost");
}

async function refresh() {
  generation += 1;
  const mine = generation;
  try {
    const [topology, { switches }, { groups }] = await Promise.all([
      ask("api/v1/topology"),
      ask("api/v1/switches"),
      ask("api/v1/groups"),
    ]);
    if (mine !== generation) {
      return;
    }
    if (!groups.some((group) => group.name === chosen)) {
      chosen = groups.find((group) => group.communicator !== null)?.name ?? groups[0]?.name ?? null;
    }
    const group = chosen === null ? null : await ask(`api/v1/groups/${encodeURIComponent(chosen)}`);
    if (mine !== generation) {
      return;
    }
    showTotals(switches, groups);
    showGroups(groups);
    showTree(group);
    showNetwork(topology, group);
    showSwitches(switches);
    const nothing = switches.length === 0 && groups.length === 0;
    showStatus("live", nothing ? "live; nothing is here yet" : "live");
  } catch (error) {
    console.error(error);
    if (mine === generation) {
      showStatus("lost", error.message);
    }
  }
}

async function run() {
  for (;;) {
    await refresh();
    await new Promise((done) => setTimeout(done, INTERVAL_MS));
  }
}

document.getElementById("groups").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button !== null) {
    chosen = button.textContent;
    refresh();
  }
});

run();
