"use strict";

// Draws a graph that was laid out. Texts become text nodes, never markup: names are whatever somebody chose.

function svgElement(name, attributes, children = []) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, String(value));
  }
  element.append(...children);
  return element;
}

function shortened(text, length) {
  const characters = Array.from(text);
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}\u2026` : text;
}

// A node has `key`, `kind` (classes), `title`, `detail`; an edge `upper`, `lower`, `kind`, `label` (lines),
// `weight` (0 to 1) and `hint`.
function draw(nodes, edges, label) {
  const sized = nodes.map((node) => {
    const title = shortened(node.title, 22);
    const length = Math.max(title.length * 7.4, node.detail.length * 6.2);
    return { ...node, title, full: node.title, width: Math.max(84, Math.round(length) + 22) };
  });
  const { places, width, height } = layOut(sized, edges);
  const drawn = edges.filter(({ upper, lower }) => places.has(upper) && places.has(lower));
  const lines = drawn.map((edge) => drawEdge(edge, places));
  // Above all lines, so that none runs through them.
  const before = new Map();
  const labels = drawn.flatMap((edge) => {
    const index = before.get(edge.lower) ?? 0;
    before.set(edge.lower, index + 1);
    return drawLabel(edge, places, index);
  });
  const boxes = sized.map((node) => drawNode(node, places.get(node.key)));
  const attributes = { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label };
  // What would become too small to read is scrolled instead.
  attributes.class = width > 1400 ? "wide" : "";
  return svgElement("svg", attributes, [...lines, ...boxes, ...labels]);
}

function ends(edge, places) {
  const [upper, lower] = [places.get(edge.upper), places.get(edge.lower)];
  return {
    from: { x: upper.x + upper.width / 2, y: upper.y + upper.height },
    to: { x: lower.x + lower.width / 2, y: lower.y },
  };
}

function drawEdge(edge, places) {
  const { from, to } = ends(edge, places);
  const middle = (from.y + to.y) / 2;
  const path = svgElement("path", {
    d: `M ${from.x} ${from.y} C ${from.x} ${middle}, ${to.x} ${middle}, ${to.x} ${to.y}`,
    // An attribute: the server allows no styles but those of its own file.
    "stroke-width": 1.5 + 4.5 * edge.weight,
  });
  const hint = svgElement("title", {}, [edge.hint]);
  return svgElement("g", { class: `edge ${edge.kind}` }, [path, hint]);
}

// Next to the lower end, where edges are apart. Of several edges to one node, of which this is the one with
// `index`, each has its label further up.
function drawLabel(edge, places, index) {
  const { from, to } = ends(edge, places);
  const at = Math.min(0.9, 0.3 + 0.26 * index);
  const x = to.x + (from.x - to.x) * (at * at * (3 - 2 * at));
  const y = to.y + (from.y - to.y) * at;
  const line = (text, index) => {
    const place = { class: "rate", x, y: y + 4 + (index - (edge.label.length - 1) / 2) * 14, "text-anchor": "middle" };
    return svgElement("text", place, [text]);
  };
  if (edge.label.length === 0) {
    return [];
  }
  const width = Math.max(...edge.label.map((text) => text.length)) * 6.3 + 12;
  const height = edge.label.length * 14 + 6;
  const ground = svgElement("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 6 });
  return [svgElement("g", { class: `label ${edge.kind}` }, [ground, ...edge.label.map(line)])];
}

function drawNode(node, place) {
  const middle = place.x + place.width / 2;
  const box = { x: place.x, y: place.y, width: place.width, height: place.height, rx: 7 };
  const text = (content, y, kind) =>
    svgElement("text", { x: middle, y: place.y + y, "text-anchor": "middle", class: kind }, [content]);
  return svgElement("g", { class: node.kind }, [
    svgElement("rect", box),
    svgElement("title", {}, [node.full]),
    text(node.title, 18, "title"),
    text(node.detail, 33, "detail"),
  ]);
}
